"""Calls of every kernel with shapes of real models, by name: what is compiled ahead of time, and timed on a GPU.

Only shapes and dtypes matter here; nothing is computed where the launches are caught.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from agentrt.kernels import (
    awq_matmul,
    gate_up,
    merge_parts,
    paged_attention,
    q4_matmul,
    q8_matmul,
    rms_norm,
    rotary_kv,
    sample,
    scaled_matmul,
    token_mask,
)


@dataclass(frozen=True, slots=True)
class Launch:
    """A call, and the GPUs that can run it."""

    call: Callable[[], object]
    capabilities: tuple[int, ...] = (80, 90)


def _attention(head_dim: int, heads: int, kv_heads: int, *, wide: bool, page: int = 16, window: int | None = None, cap: float | None = None) -> Launch:
    def call() -> None:
        q = torch.empty(64, heads, head_dim, dtype=torch.bfloat16)
        keys = torch.empty(256, kv_heads, head_dim, dtype=torch.bfloat16)
        shape = (paged_attention.wide_shape if wide else paged_attention.narrow_shape)(head_dim, heads // kv_heads)
        ints = torch.zeros(64, dtype=torch.int32)
        paged_attention.attend_tiles(
            q, paged_attention.PagedKV(keys, keys, ints, page), ints, ints, torch.zeros(8, 6, dtype=torch.int32),
            paged_attention.Scores(head_dim**-0.5, window, cap), shape, q, torch.empty(64, heads, head_dim), torch.empty(64, heads),
        )  # fmt: skip

    return Launch(call)


def _merge(head_dim: int) -> Launch:
    ints = torch.zeros(65, dtype=torch.int32)
    out = torch.empty(64, 32, head_dim, dtype=torch.bfloat16)
    return Launch(lambda: merge_parts.merge_parts(torch.empty(64, 32, head_dim), torch.empty(64, 32), ints[:64], ints, ints, out))


def _rotary(head_dim: int) -> Launch:
    qkv, angle = torch.empty(64, 48, head_dim, dtype=torch.bfloat16), torch.empty(64, 1, head_dim, dtype=torch.bfloat16)
    keys, slots = torch.empty(256, 8, head_dim, dtype=torch.bfloat16), torch.zeros(64, dtype=torch.int64)

    def call() -> None:
        rotary_kv.rotate_and_write(qkv, angle, angle, slots, keys, keys, 32)
        rotary_kv.write_kv(qkv[:, 32:40], qkv[:, 40:], slots, keys, keys)

    return Launch(call)


def _norm(width: int) -> Launch:
    rows, weight = torch.empty(64, width, dtype=torch.bfloat16), torch.empty(width, dtype=torch.bfloat16)

    def call() -> None:
        rms_norm.rms_norm(rows, weight, 1e-5, rows.clone())
        rms_norm.rms_norm(rows, weight, 1e-5)

    return Launch(call)


def _gate_up(activation: str) -> Launch:
    return Launch(lambda: gate_up.gate_up(torch.empty(64, 2 * 8192, dtype=torch.bfloat16), activation))


_BIAS = torch.empty(2048, dtype=torch.bfloat16)


def _int8(rows: int, inputs: int = 2048) -> Launch:
    x, w = torch.empty(rows, inputs, dtype=torch.bfloat16), torch.empty(2048, inputs, dtype=torch.int8)
    return Launch(lambda: scaled_matmul.scaled_matmul(x, w, torch.empty(2048), _BIAS))


def _fp8(rows: int) -> Launch:
    x, w = torch.empty(rows, 2048, dtype=torch.bfloat16), torch.empty(2048, 2048, dtype=torch.float8_e4m3fn)
    return Launch(lambda: scaled_matmul.scaled_matmul(x, w, torch.empty(2048), _BIAS), (89, 90))


def _q4(rows: int) -> Launch:
    x, codes = torch.empty(rows, 2048, dtype=torch.bfloat16), torch.empty(2048, 1024, dtype=torch.uint8)
    scales = torch.empty(64, 2048, dtype=torch.float16)  # as they are loaded
    return Launch(lambda: q4_matmul.q4_matmul(x, codes, scales, scales, _BIAS))


def _q8(rows: int) -> Launch:
    x, codes = torch.empty(rows, 2048, dtype=torch.bfloat16), torch.empty(2048, 2048, dtype=torch.int8)
    return Launch(lambda: q8_matmul.q8_matmul(x, codes, torch.empty(64, 2048, dtype=torch.float16), _BIAS))


def _awq(rows: int) -> Launch:
    x, codes = torch.empty(rows, 2048, dtype=torch.bfloat16), torch.empty(2048, 256, dtype=torch.int32)
    zeros, scales = torch.empty(16, 256, dtype=torch.int32), torch.empty(16, 2048, dtype=torch.float16)
    return Launch(lambda: awq_matmul.awq_matmul(x, codes, zeros, scales, _BIAS))


def _sample() -> None:
    sample.sample(torch.empty(64, 128256), torch.empty(5, 64, dtype=torch.float64))


def _mask() -> None:
    token_mask.mask_tokens(torch.empty(64, 128256), torch.empty(64, 4008, dtype=torch.int32), torch.empty(64, dtype=torch.int32))


LAUNCHES: dict[str, Launch] = {
    **{
        f"attention {'wide' if wide else 'narrow'} {head_dim}": _attention(head_dim, 32, 8, wide=wide)
        for head_dim in (64, 80, 96, 128, 256)
        for wide in (False, True)
    },
    **{
        f"attention {'wide' if wide else 'narrow'} {head_dim} window softcap": _attention(head_dim, 16, 8, wide=wide, window=4096, cap=50.0)
        for head_dim in (128, 256)
        for wide in (False, True)
    },
    "attention narrow group 7": _attention(64, 14, 2, wide=False),
    "attention wide group 3": _attention(64, 9, 3, wide=True),
    "attention narrow one kv head": _attention(64, 71, 1, wide=False),
    "attention wide one kv head": _attention(64, 71, 1, wide=True),
    "attention narrow one kv head of 128": _attention(128, 48, 1, wide=False),
    "attention wide one kv head of 128": _attention(128, 48, 1, wide=True),
    "attention narrow page 1": _attention(64, 32, 8, wide=False, page=1),
    "attention wide page 1": _attention(128, 32, 8, wide=True, page=1),
    **{f"merge {head_dim}": _merge(head_dim) for head_dim in (64, 80, 256)},
    **{f"rotary {head_dim}": _rotary(head_dim) for head_dim in (64, 80, 128, 256)},
    **{f"norm {width}": _norm(width) for width in (576, 2048, 8192)},
    **{f"gate_up {activation}": _gate_up(activation) for activation in ("silu", "gelu", "gelu_tanh")},
    **{f"int8 {rows}": _int8(rows) for rows in (8, 64, 512)},
    "int8 of many inputs": _int8(8, 28672),
    **{f"fp8 {rows}": _fp8(rows) for rows in (8, 64, 512)},
    **{f"q4 {rows}": _q4(rows) for rows in (8, 64, 512)},
    **{f"q8 {rows}": _q8(rows) for rows in (8, 64, 512)},
    **{f"awq {rows}": _awq(rows) for rows in (8, 64, 512)},
    "sample": Launch(_sample),
    "mask": Launch(_mask),
}
