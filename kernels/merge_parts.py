"""Puts partial attention results together by their log-sum-exps: what split decoding and shared prefixes end with.

A softmax over a whole is the softmaxes over its parts, each weighted by its share of the sum (Dao et al., FlashAttention,
2022; the split of long decodes is Flash-Decoding's, 2023). Parts of a token lie anywhere in the list of partial rows.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _merge(
    parts, part_lse, tokens, starts, members, out, stride_out_token,
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Program (merged token, head)."""
    place, head = tl.program_id(0), tl.program_id(1)
    first, last = tl.load(starts + place), tl.load(starts + place + 1)
    offsets = tl.arange(0, BLOCK_D)
    inside = offsets < HEAD_DIM
    peak = float("-inf")
    total = 0.0
    acc = tl.zeros([BLOCK_D], tl.float32)
    for index in range(first, last):
        at = tl.load(members + index).to(tl.int64) * HEADS + head
        lse = tl.load(part_lse + at)
        new_peak = tl.maximum(peak, lse)
        shift = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        weight, decay = tl.exp(lse - shift), tl.exp(peak - shift)
        acc = acc * decay + weight * tl.load(parts + at * HEAD_DIM + offsets, mask=inside, other=0.0)
        total = total * decay + weight
        peak = new_peak
    token = tl.load(tokens + place).to(tl.int64)
    result = acc / tl.where(total > 0, total, 1.0)
    at = out + token * stride_out_token + head * HEAD_DIM + offsets
    tl.store(at, result.to(out.dtype.element_ty), mask=offsets < tl.where(last > first, HEAD_DIM, 0))


def merge_parts(parts: Tensor, part_lse: Tensor, tokens: Tensor, starts: Tensor, members: Tensor, out: Tensor) -> None:
    """Merges each token's parts into its row of `out`.

    Args:
        parts: float32 [n, heads, head_dim].
        part_lse: float32 [n, heads], natural logarithms.
        tokens: int32 [m]: rows of `out`.
        starts: int32 [m + 1]: token i's parts are ``members[starts[i]:starts[i + 1]]``; with none, nothing is written.
        members: int32: rows of `parts`.
        out: [tokens, heads, head_dim], contiguous.
    """
    heads, head_dim = out.shape[1:]
    if tokens.shape[0] == 0:
        return
    _merge[(tokens.shape[0], heads)](
        parts, part_lse, tokens, starts, members, out, out.stride(0),
        HEADS=heads, HEAD_DIM=head_dim, BLOCK_D=triton.next_power_of_2(head_dim), num_warps=1, num_stages=1, enable_fp_fusion=True,
    )  # fmt: skip


def merge_reference(parts: Tensor, part_lse: Tensor) -> Tensor:
    """The parts of one token, [n, heads, head_dim] with log-sum-exps [n, heads], as one: [heads, head_dim]."""
    return (torch.softmax(part_lse.double(), 0)[..., None] * parts.double()).sum(0)
