"""Rotary embedding fused with the write of new keys and values to their slots: one read of q, k and v, one write of each.

Rotation is of a head's two halves against each other (Su et al., RoFormer, 2021, in NeoX's order), by cosines and sines that
the model gives for each token. A token whose slot is negative is computed and not written: so a step may be padded.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

#: Heads that one program takes.
_HEADS = 8


@triton.jit
def _rotate_and_write(
    qkv, cos, sin, slots, q_out, keys, values,
    stride_token, stride_head, stride_angle, stride_slot, stride_slot_head,
    ALL_HEADS: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HALF: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_HALF: tl.constexpr,
):  # fmt: skip
    """Program (token, block of heads); heads of q, then of k, then of v."""
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    offsets = tl.arange(0, BLOCK_HALF)
    inside = (heads < ALL_HEADS)[:, None] & (offsets < HALF)[None, :]
    at = qkv + token * stride_token + heads[:, None] * stride_head + offsets[None, :]
    first = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(at + HALF, mask=inside, other=0.0).to(tl.float32)

    angle = token * stride_angle + offsets
    first_cos = tl.load(cos + angle, mask=offsets < HALF, other=0.0).to(tl.float32)[None, :]
    second_cos = tl.load(cos + angle + HALF, mask=offsets < HALF, other=0.0).to(tl.float32)[None, :]
    first_sin = tl.load(sin + angle, mask=offsets < HALF, other=0.0).to(tl.float32)[None, :]
    second_sin = tl.load(sin + angle + HALF, mask=offsets < HALF, other=0.0).to(tl.float32)[None, :]
    turns = (heads < HEADS + KV_HEADS)[:, None]
    new_first = tl.where(turns, first * first_cos + second * first_sin, first)
    new_second = tl.where(turns, second * second_cos + first * second_sin, second)

    dtype = qkv.dtype.element_ty
    is_q = inside & (heads < HEADS)[:, None]
    to_q = q_out + (token * HEADS + heads[:, None]) * (2 * HALF) + offsets[None, :]
    tl.store(to_q, new_first.to(dtype), mask=is_q)
    tl.store(to_q + HALF, new_second.to(dtype), mask=is_q)

    slot = tl.load(slots + token)
    stored = inside & (heads < tl.where(slot >= 0, ALL_HEADS, 0))[:, None]
    is_k = stored & (heads >= HEADS)[:, None] & turns
    to_k = keys + slot * stride_slot + (heads[:, None] - HEADS) * stride_slot_head + offsets[None, :]
    tl.store(to_k, new_first.to(dtype), mask=is_k)
    tl.store(to_k + HALF, new_second.to(dtype), mask=is_k)
    is_v = stored & (heads >= HEADS + KV_HEADS)[:, None]
    to_v = values + slot * stride_slot + (heads[:, None] - HEADS - KV_HEADS) * stride_slot_head + offsets[None, :]
    tl.store(to_v, new_first.to(dtype), mask=is_v)
    tl.store(to_v + HALF, new_second.to(dtype), mask=is_v)


@triton.jit
def _write(
    k, v, slots, keys, values, stride_k, stride_k_head, stride_v, stride_v_head, stride_slot, stride_slot_head,
    KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Program (token)."""
    token = tl.program_id(0).to(tl.int64)
    heads, offsets = tl.arange(0, BLOCK_H), tl.arange(0, BLOCK_D)
    slot = tl.load(slots + token)
    inside = (heads < tl.where(slot >= 0, KV_HEADS, 0))[:, None] & (offsets < HEAD_DIM)[None, :]
    target = slot * stride_slot + heads[:, None] * stride_slot_head + offsets[None, :]
    key = tl.load(k + token * stride_k + heads[:, None] * stride_k_head + offsets[None, :], mask=inside)
    tl.store(keys + target, key, mask=inside)
    value = tl.load(v + token * stride_v + heads[:, None] * stride_v_head + offsets[None, :], mask=inside)
    tl.store(values + target, value, mask=inside)


def rotate_and_write(qkv: Tensor, cos: Tensor, sin: Tensor, slots: Tensor, keys: Tensor, values: Tensor, heads: int) -> Tensor:
    """Rotates q and k, writes k and v to the store, and returns q.

    Args:
        qkv: [tokens, heads + 2 * kv_heads, head_dim]: heads of q, of k, of v; the last dimension contiguous.
        cos: [tokens, 1, head_dim], contiguous.
        sin: Like `cos`, its first half negated.
        slots: int64 [tokens]; a negative one is not written.
        keys, values: [slots, kv_heads, head_dim], of one layout, the last dimension contiguous; written in place.
        heads: Of q.

    Returns:
        [tokens, heads, head_dim], contiguous.
    """
    tokens, all_heads, head_dim = qkv.shape
    q = torch.empty((tokens, heads, head_dim), dtype=qkv.dtype, device=qkv.device)
    _rotate_and_write[(tokens, triton.cdiv(all_heads, _HEADS))](
        qkv, cos, sin, slots, q, keys, values,
        qkv.stride(0), qkv.stride(1), cos.stride(0), keys.stride(0), keys.stride(1),
        ALL_HEADS=all_heads, HEADS=heads, KV_HEADS=keys.shape[1], HALF=head_dim // 2,
        BLOCK_H=_HEADS, BLOCK_HALF=triton.next_power_of_2(head_dim // 2), num_warps=2, num_stages=1, enable_fp_fusion=True,
    )  # fmt: skip
    return q


def write_kv(k: Tensor, v: Tensor, slots: Tensor, keys: Tensor, values: Tensor) -> None:
    """Writes new keys and values to their slots.

    Args:
        k, v: [tokens, kv_heads, head_dim], the last dimension contiguous.
        slots: int64 [tokens]; a negative one is not written.
        keys, values: [slots, kv_heads, head_dim], of one layout; written in place.
    """
    tokens, kv_heads, head_dim = k.shape
    _write[(tokens,)](
        k, v, slots, keys, values,
        k.stride(0), k.stride(1), v.stride(0), v.stride(1), keys.stride(0), keys.stride(1),
        KV_HEADS=kv_heads, HEAD_DIM=head_dim, BLOCK_H=triton.next_power_of_2(kv_heads),
        BLOCK_D=triton.next_power_of_2(head_dim), num_warps=4, num_stages=1, enable_fp_fusion=True,
    )  # fmt: skip


def rotate_reference(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Heads [tokens, heads, head_dim] rotated, in float64."""
    swapped = heads.double().roll(heads.shape[-1] // 2, -1)
    return heads.double() * cos.double() + swapped * sin.double()
