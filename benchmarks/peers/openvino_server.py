"""OpenVINO GenAI behind as much of OpenAI's API as programs need; runs in an environment of its own, with nothing of agentrt.

    python openvino_server.py MODEL.gguf PORT

Requests that are there at the same time are one batch, with its prefix cache on: its best, as far as its makers document it.
"""

from __future__ import annotations

import json
import queue
import sys
import threading

import openvino_genai
from endpoint import Answer, serve


class Engine(threading.Thread):
    """The one thread that steps the pipeline."""

    def __init__(self, model: str) -> None:
        super().__init__(daemon=True)
        config = openvino_genai.SchedulerConfig()
        config.enable_prefix_caching = True
        config.cache_size = 2
        config.max_num_seqs = 64
        self.pipeline = openvino_genai.ContinuousBatchingPipeline(model, config, "CPU")
        self.tokenizer = self.pipeline.get_tokenizer()
        self._arrived: queue.SimpleQueue = queue.SimpleQueue()
        self._number = 0

    def ask(self, prompt: str, config: openvino_genai.GenerationConfig) -> list:
        """Returns the outputs of a request, one a sample, when they are complete."""
        done: queue.SimpleQueue = queue.SimpleQueue()
        self._arrived.put((prompt, config, done))
        outputs = done.get()
        if isinstance(outputs, Exception):
            raise outputs
        return outputs

    def run(self) -> None:
        under_way: list = []
        while True:
            while not under_way or not self._arrived.empty():
                under_way += self._begin(*self._arrived.get())
            self.pipeline.step()
            running = []
            for handle, done in under_way:
                if handle.get_status() == openvino_genai.GenerationStatus.RUNNING:
                    running.append((handle, done))
                else:
                    done.put(handle.read_all())
            under_way = running

    def _begin(self, prompt, config, done) -> list:
        self._number += 1
        try:
            return [(self.pipeline.add_request(self._number, prompt, config), done)]
        except Exception as error:
            done.put(error)
            return []


def config_of(body: dict) -> openvino_genai.GenerationConfig:
    config = openvino_genai.GenerationConfig()
    config.max_new_tokens = body.get("max_tokens") or body.get("max_completion_tokens") or 512
    config.do_sample = body.get("temperature", 1) > 0
    if config.do_sample:
        config.temperature = float(body["temperature"]) if "temperature" in body else 1.0
        config.rng_seed = int(body.get("seed") or 0) % (1 << 31)
    stops = body.get("stop") or []
    config.stop_strings = {stops} if isinstance(stops, str) else set(stops)
    form = body.get("response_format") or {}
    if form.get("type") == "json_schema":
        structured = openvino_genai.StructuredOutputConfig()
        structured.json_schema = json.dumps(form["json_schema"]["schema"])
        config.structured_output_config = structured
    return config


def main(model: str, port: int) -> None:
    engine = Engine(model)
    engine.start()

    def answer(body: dict) -> Answer:
        chat = "messages" in body
        prompt = engine.tokenizer.apply_chat_template(body["messages"], add_generation_prompt=True) if chat else body["prompt"]
        config = config_of(body)
        ids = list(engine.ask(prompt, config)[0].generated_ids)
        asked = engine.tokenizer.encode(prompt).input_ids.shape[1]
        return Answer(engine.tokenizer.decode(ids), asked, len(ids), len(ids) >= config.max_new_tokens)

    serve(port, answer)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
