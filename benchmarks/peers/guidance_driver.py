"""guidance on llama.cpp for `compare.py`: constrained answers, one at a time, skipping through the model what its grammar forces.

llama.cpp keeps the KV of the last text, and guidance goes on from the longest beginning that the next one shares with it.
"""

from __future__ import annotations

import guidance
import llama_cpp
from driver import Ask, CannotError, Setting, Told, serve


class Guidance:
    def __init__(self, setting: Setting) -> None:
        self._computed = self._passes = 0
        self._count_passes()
        self._start = guidance.models.LlamaCpp(
            setting.gguf, n_ctx=setting.context, n_threads=setting.threads, n_threads_batch=setting.threads, echo=False, verbose=False
        )
        self.about = f"guidance {guidance.__version__} on llama.cpp (llama-cpp-python {llama_cpp.__version__}), the GGUF's own weights"

    def _count_passes(self) -> None:
        decode = llama_cpp.llama_decode

        def counted(context, batch):
            self._passes += 1
            self._computed += batch.n_tokens
            return decode(context, batch)

        llama_cpp.llama_decode = counted
        llama_cpp.llama_cpp.llama_decode = counted

    def answer(self, ask: Ask) -> Told:
        if not ask.schemas:
            raise CannotError("guidance adds nothing to llama.cpp without a constraint")
        computed, passes = self._computed, self._passes
        texts = []
        for prompt, schema in zip(ask.texts, ask.schemas, strict=True):
            try:
                document = guidance.json(name="answer", schema=schema, max_tokens=ask.max_tokens, temperature=0.0)
                texts.append((self._start + prompt + document)["answer"])
            except ValueError as error:
                raise CannotError(f"guidance refuses a schema: {error}") from error
        return Told(None, texts, self._computed - computed, self._passes - passes)


if __name__ == "__main__":
    serve(Guidance)
