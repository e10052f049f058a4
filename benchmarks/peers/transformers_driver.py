"""transformers for `compare.py`: `generate` on a batch padded at the left. It keeps nothing between calls and knows no constraints."""

from __future__ import annotations

import torch
import transformers
from driver import Ask, CannotError, Setting, Told, natively_bfloat16, serve


class Transformers:
    def __init__(self, setting: Setting) -> None:
        torch.set_num_threads(setting.threads)
        dtype = torch.bfloat16 if natively_bfloat16() else torch.float32
        self._model = transformers.AutoModelForCausalLM.from_pretrained(setting.folder, dtype=dtype).eval()
        self.about = f"transformers {transformers.__version__}, {str(dtype).removeprefix('torch.')}"
        self._passes = 0
        self._model.register_forward_hook(self._count)

    def _count(self, *given: object) -> None:
        self._passes += 1

    def answer(self, ask: Ask) -> Told:
        if ask.schemas:
            raise CannotError("transformers knows no JSON Schemas")
        before, longest = self._passes, max(map(len, ask.prompts))
        ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in ask.prompts])
        mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in ask.prompts])
        with torch.inference_mode():
            made = self._model.generate(
                ids, attention_mask=mask, max_new_tokens=ask.max_tokens, min_new_tokens=ask.max_tokens, do_sample=False, pad_token_id=0
            )
        passes = self._passes - before
        return Told(made[:, longest:].tolist(), computed=ids.numel() + len(ask.prompts) * (passes - 1), passes=passes)


if __name__ == "__main__":
    serve(Transformers)
