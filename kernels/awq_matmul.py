"""Matrix product with 4-bit weights as AWQ checkpoints hold them (Lin et al., 2023), unpacked on the way to the matrix units.

An int32 holds eight neighbouring outputs of one input, in the order 0 2 4 6 1 3 5 7 from its lowest four bits on. A weight is
``(code - zero) * scale``; zeros, packed the same way, and scales belong to a group of neighbouring inputs and one output.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from agentrt.kernels.matmul_block import block_of, finish, multiply, starts
from torch import Tensor


@triton.jit
def _eightfold(words):
    """Each word eight times, side by side: one read serves its eight outputs."""
    twice = tl.interleave(words, words)
    fourfold = tl.interleave(twice, twice)
    return tl.interleave(fourfold, fourfold)


@triton.jit(do_not_specialize=["rows"])
def _awq_matmul(
    x, codes, zeros, scales, bias, out, rows, outputs, inputs, stride_x, stride_out,
    GROUP: tl.constexpr, BIAS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Program (block of outputs, block of rows); BLOCK_K divides GROUP, so a step has one zero and one scale an output."""
    m, n, in_m, in_n = block_of(rows, outputs, BLOCK_M, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    place = n % 8
    shift = (place % 2 * 4 + place // 2) * 4
    words = outputs // 8
    word = tl.program_id(0) * (BLOCK_N // 8) + tl.arange(0, BLOCK_N // 8)
    in_w = word < words
    at_x = starts(x, m, stride_x)[:, None] + k[None, :]
    at_codes = starts(codes, k, words)[:, None] + word[None, :]
    dtype = x.dtype.element_ty
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for first in range(0, inputs, BLOCK_K):
        in_k = k < inputs - first
        group = first // GROUP
        packed = _eightfold(tl.load(at_codes + first * words, mask=in_w[None, :] & in_k[:, None], other=0))
        packed_zeros = _eightfold(tl.load(zeros + group * words + word, mask=in_w, other=0))
        zero = (packed_zeros >> shift) & 0xF
        scale = tl.load(scales + group * outputs + n, mask=in_n, other=0.0).to(tl.float32)
        code = (packed >> shift[None, :]) & 0xF
        weight = ((code - zero[None, :]).to(tl.float32) * scale[None, :]).to(dtype)
        a = tl.load(at_x + first, mask=in_m[:, None] & in_k[None, :], other=0.0)
        acc = tl.dot(a, weight, acc, input_precision="ieee")
    finish(acc, bias, out, m, n, in_m, in_n, stride_out, BIAS)


def awq_matmul(x: Tensor, codes: Tensor, zeros: Tensor, scales: Tensor, bias: Tensor | None = None) -> Tensor:
    """X times the weight.

    Args:
        x: [rows, in], the last dimension contiguous.
        codes: int32 [in, out / 8], contiguous.
        zeros: int32 [groups, out / 8], contiguous.
        scales: [groups, out], contiguous; groups of a multiple of 32 inputs.
        bias: [out] or None.

    Returns:
        [rows, out], in x's dtype.
    """
    group = x.shape[1] // scales.shape[0]
    return multiply(_awq_matmul, x, (codes, zeros, scales), bias, scales.shape[1], most_depth=group & -group, GROUP=group)


def awq_weight(codes: Tensor, zeros: Tensor, scales: Tensor) -> Tensor:
    """The weight that those stand for, float64 [in, out]."""
    order = torch.tensor([0, 4, 1, 5, 2, 6, 3, 7], device=codes.device)  # where output i of eight lies

    def unpack(packed: Tensor) -> Tensor:
        return ((packed[..., None] >> (4 * order).int()) & 0xF).flatten(1)

    group = codes.shape[0] // zeros.shape[0]
    zero = unpack(zeros).repeat_interleave(group, 0)
    return (unpack(codes) - zero).double() * scales.double().repeat_interleave(group, 0)
