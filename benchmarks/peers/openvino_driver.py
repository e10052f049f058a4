"""OpenVINO GenAI for `compare.py`: its continuous batching, with its prefix cache on, reading the GGUF itself."""

from __future__ import annotations

import json

import numpy as np
import openvino
import openvino_genai
from driver import Ask, CannotError, Setting, Told, serve


class OpenVINO:
    def __init__(self, setting: Setting) -> None:
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.enable_prefix_caching = True
        scheduler.cache_size = max(1, setting.kv_bytes >> 30)
        scheduler.max_num_seqs = 64
        scheduler.max_num_batched_tokens = 2048
        properties = {"INFERENCE_NUM_THREADS": setting.threads, "PERFORMANCE_HINT": "THROUGHPUT", "NUM_STREAMS": 1}
        self._pipeline = openvino_genai.ContinuousBatchingPipeline(setting.gguf, scheduler, "CPU", properties)
        self._asked = 0
        self.about = f"OpenVINO GenAI {openvino_genai.get_version().split('-')[0]}, the GGUF's own weights"

    def answer(self, ask: Ask) -> Told:
        handles = [self._begin(ids, _config(ask, number)) for number, ids in enumerate(ask.prompts)]
        passes = 0
        while self._pipeline.has_non_finished_requests():
            self._pipeline.step()
            passes += 1
        return Told([list(handle.read_all()[0].generated_ids) for handle in handles], passes=passes)

    def _begin(self, ids: list[int], config: openvino_genai.GenerationConfig):
        self._asked += 1
        try:
            return self._pipeline.add_request(self._asked, openvino.Tensor(np.array([ids], dtype=np.int64)), config)
        except RuntimeError as error:
            raise CannotError(f"it refuses a request: {str(error).strip().splitlines()[-1]}") from error


def _config(ask: Ask, number: int) -> openvino_genai.GenerationConfig:
    config = openvino_genai.GenerationConfig()
    config.max_new_tokens = ask.max_tokens
    config.do_sample = False
    if ask.schemas:
        config.structured_output_config = openvino_genai.StructuredOutputConfig(json_schema=json.dumps(ask.schemas[number]))
    else:
        config.ignore_eos = True
    return config


if __name__ == "__main__":
    serve(OpenVINO)
