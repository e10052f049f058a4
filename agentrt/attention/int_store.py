"""Keys and values in whole numbers, as they lie in a store of bytes (torch.int8): what `kernels/cpu/attention_int.cpp` writes and reads, in torch operators.

A head of a slot is its numbers and then the four bytes of a float32, the scale, by which they are multiplied. Keys have 16 bits, from
-4095 to 4095, values 8, from -127 to 127; the largest magnitude of a head becomes the most. Keys get more, since some models have
a few dimensions of them that are much larger than the others. Invariant: a head's bytes depend on the head alone.
"""

from __future__ import annotations

import torch
from torch import Tensor

SCALE_BYTES = 4
KEY_MOST, VALUE_MOST = 4095.0, 127.0


def key_bytes(head_dim: int) -> int:
    """Of a key's head."""
    return 2 * head_dim + SCALE_BYTES


def value_bytes(head_dim: int) -> int:
    """Of a value's head."""
    return head_dim + SCALE_BYTES


def quantized(heads: Tensor, store: Tensor) -> Tensor:
    """Heads as a store of bytes holds them.

    Args:
        heads: [..., head_dim], floating.
        store: Of keys or of values, [slots, kv_heads, bytes].

    Returns:
        int8 [..., bytes]. Where something is not finite, the scale is not either.
    """
    heads = heads.float()
    numbers, most = (torch.int16, KEY_MOST) if store.shape[-1] == key_bytes(heads.shape[-1]) else (torch.int8, VALUE_MOST)
    largest = heads.abs().amax(-1, keepdim=True)
    factor = most / largest
    usable = largest.isfinite() & factor.isfinite()
    q = torch.where(usable, (heads * factor).round(), 0.0).to(numbers)
    return torch.cat((_as_bytes(q), _as_bytes(largest / most)), -1)


def dequantized(stored: Tensor, head_dim: int, dtype: torch.dtype) -> Tensor:
    """What was stored, rounded.

    Args:
        stored: int8 [..., bytes], of keys or of values.
        head_dim: Of a head.
        dtype: Wanted.

    Returns:
        [..., head_dim].
    """
    numbers = torch.int16 if stored.shape[-1] == key_bytes(head_dim) else torch.int8
    q = stored[..., :-SCALE_BYTES].flatten().view(numbers)
    scale = stored[..., -SCALE_BYTES:].flatten().view(torch.float32)
    return (q.view(*stored.shape[:-1], head_dim) * scale.view(*stored.shape[:-1], 1)).to(dtype)


def _as_bytes(numbers: Tensor) -> Tensor:
    return numbers.flatten().view(torch.int8).view(*numbers.shape[:-1], numbers.shape[-1] * numbers.itemsize)
