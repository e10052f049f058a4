"""Grammar bitmasks on logits: what a constraint forbids becomes minus infinity, in place, in one pass.

A mask is int32 words, bit i of word w standing for token 32 w + i, as llguidance makes them. Tokens beyond a mask's last word
are forbidden. Rows without a mask are not touched.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

#: Logits that one program takes.
_BLOCK = 4096


@triton.jit
def _mask(logits, masks, rows, stride, vocab, words, BLOCK: tl.constexpr):
    """Program (mask, block of tokens)."""
    row = tl.load(rows + tl.program_id(0)).to(tl.int64)
    tokens = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    word = tokens // 32
    at = masks + tl.program_id(0).to(tl.int64) * words + word
    allowed = (tl.load(at, mask=word < words, other=0) >> (tokens % 32)) & 1
    tl.store(logits + row * stride + tokens, float("-inf"), mask=(tokens < vocab) & (allowed == 0))


def mask_tokens(logits: Tensor, masks: Tensor, rows: Tensor) -> None:
    """Forbids tokens.

    Args:
        logits: float32 [rows, vocab], the last dimension contiguous; changed in place.
        masks: int32 [masks, words], contiguous.
        rows: int32 [masks]: which row each mask is for.
    """
    vocab = logits.shape[1]
    if masks.shape[0] == 0:
        return
    _mask[(masks.shape[0], triton.cdiv(vocab, _BLOCK))](
        logits, masks, rows, logits.stride(0), vocab, masks.shape[1], BLOCK=_BLOCK, num_warps=4, num_stages=1, enable_fp_fusion=True
    )


def mask_reference(logits: Tensor, mask: Tensor) -> Tensor:
    """One row of logits [vocab] under one mask [words]."""
    bits = (mask[:, None] >> torch.arange(32, device=mask.device, dtype=torch.int32)) & 1
    allowed = torch.zeros(len(logits), dtype=torch.bool, device=logits.device)
    known = min(len(logits), bits.numel())
    allowed[:known] = bits.flatten()[:known].bool()
    return logits.masked_fill(~allowed, -torch.inf)
