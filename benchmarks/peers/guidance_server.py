"""guidance with llama.cpp behind as much of OpenAI's API as programs need; runs in an environment of its own, with nothing of agentrt.

    python guidance_server.py MODEL.gguf PORT

One request at a time, since that is what it can do; llama.cpp keeps the last prompt's KV, and guidance skips what its grammar forces.
"""

from __future__ import annotations

import os
import sys
import threading

import guidance
from endpoint import Answer, serve


def main(model: str, port: int) -> None:
    threads = os.cpu_count()  # llama-cpp-python's own choice is half of them
    start = guidance.models.LlamaCpp(model, n_ctx=8192, n_threads=threads, n_threads_batch=threads, echo=False, verbose=False)
    from llama_cpp import Llama

    counter = Llama(model, vocab_only=True, verbose=False)
    one_at_a_time = threading.Lock()

    def tokens(text: str) -> int:
        return len(counter.tokenize(text.encode(), add_bos=False, special=True))

    def answer(body: dict) -> Answer:
        prompt = _chat(body["messages"]) if "messages" in body else body["prompt"]
        form = body.get("response_format") or {}
        limit = body.get("max_tokens") or 512
        options = {"max_tokens": limit, "temperature": float(body.get("temperature", 1.0))}
        if form.get("type") == "json_schema":
            asked = guidance.json(name="answer", schema=form["json_schema"]["schema"], **options)
        else:
            asked = guidance.gen(name="answer", stop=body.get("stop") or None, **options)
        with one_at_a_time:
            text = (start + prompt + asked)["answer"]
        made = tokens(text)
        return Answer(text, tokens(prompt), made, made >= limit)

    serve(port, answer)


def _chat(messages: list[dict]) -> str:
    """Both models of the benchmark speak ChatML."""
    said = "".join(f"<|im_start|>{message['role']}\n{message['content']}<|im_end|>\n" for message in messages)
    return said + "<|im_start|>assistant\n"


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
