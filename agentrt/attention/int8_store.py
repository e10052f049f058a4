"""Keys and values in 8 bits, as they lie in a store of torch.int8: what `kernels/cpu/attention_int8.cpp` writes and reads, in torch operators.

A head of a slot is its `head_dim` numbers from -127 to 127 and then the four bytes of a float32, the scale, by which they are
multiplied. The largest magnitude of a head becomes 127. Invariant: a head's bytes depend on the head alone.
"""

from __future__ import annotations

import torch
from torch import Tensor

SCALE_BYTES = 4
MOST = 127.0


def stored_dim(head_dim: int, dtype: torch.dtype) -> int:
    """Elements of a head in a store of that dtype."""
    return head_dim + SCALE_BYTES if dtype == torch.int8 else head_dim


def quantized(heads: Tensor) -> Tensor:
    """Heads as they are stored.

    Args:
        heads: [..., head_dim], floating.

    Returns:
        int8 [..., head_dim + 4]. Where something is not finite, neither is the scale.
    """
    heads = heads.float()
    largest = heads.abs().amax(-1, keepdim=True)
    factor = MOST / largest
    usable = largest.isfinite() & factor.isfinite()
    numbers = torch.where(usable, (heads * factor).round(), 0.0).to(torch.int8)
    scales = (largest / MOST).flatten().view(torch.int8)
    return torch.cat((numbers, scales.view(*heads.shape[:-1], SCALE_BYTES)), -1)


def dequantized(stored: Tensor, dtype: torch.dtype) -> Tensor:
    """What was stored, rounded.

    Args:
        stored: int8 [..., head_dim + 4].
        dtype: Wanted.

    Returns:
        [..., head_dim].
    """
    scales = stored[..., -SCALE_BYTES:].flatten().view(torch.float32)
    return (stored[..., :-SCALE_BYTES] * scales.view(*stored.shape[:-1], 1)).to(dtype)
