"""Matrix product with 4-bit weights as AWQ checkpoints hold them (Lin et al., 2023), unpacked on the way to the matrix units.

An int32 holds eight neighbouring outputs of one input, in the order 0 2 4 6 1 3 5 7 from its lowest four bits on. A weight is
``(code - zero) * scale``; zeros, packed the same way, and scales belong to a group of neighbouring inputs and one output.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from agentrt.kernels.matmul_shape import matmul_shape
from torch import Tensor


@triton.jit
def _eightfold(words):
    """Each word eight times, side by side: one read serves its eight outputs."""
    twice = tl.interleave(words, words)
    fourfold = tl.interleave(twice, twice)
    return tl.interleave(fourfold, fourfold)


@triton.jit
def _awq_matmul(
    x, codes, zeros, scales, bias, out, rows, outputs, inputs, stride_x, stride_out,
    GROUP: tl.constexpr, BIAS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Program (block of outputs, block of rows); BLOCK_K divides GROUP, so a step has one zero and one scale an output."""
    offsets_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    offsets_m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    offsets_k = tl.arange(0, BLOCK_K)
    in_m, in_n = offsets_m < rows, offsets_n < outputs
    place = offsets_n % 8
    shift = (place % 2 * 4 + place // 2) * 4
    words = outputs // 8
    offsets_w = tl.program_id(0) * (BLOCK_N // 8) + tl.arange(0, BLOCK_N // 8)
    in_w = offsets_w < words
    at_x = x + offsets_m.to(tl.int64)[:, None] * stride_x + offsets_k[None, :]
    at_codes = codes + offsets_k.to(tl.int64)[:, None] * words + offsets_w[None, :]
    dtype = x.dtype.element_ty
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for first in range(0, inputs, BLOCK_K):
        in_k = offsets_k < inputs - first
        group = first // GROUP
        packed = _eightfold(tl.load(at_codes + first * words, mask=in_w[None, :] & in_k[:, None], other=0))
        packed_zeros = _eightfold(tl.load(zeros + group * words + offsets_w, mask=in_w, other=0))
        zero = (packed_zeros >> shift) & 0xF
        scale = tl.load(scales + group * outputs + offsets_n, mask=in_n, other=0.0).to(tl.float32)
        code = (packed >> shift[None, :]) & 0xF
        weight = ((code - zero[None, :]).to(tl.float32) * scale[None, :]).to(dtype)
        a = tl.load(at_x + first, mask=in_m[:, None] & in_k[None, :], other=0.0)
        acc = tl.dot(a, weight, acc, input_precision="ieee")
    if BIAS:
        acc += tl.load(bias + offsets_n, mask=in_n, other=0.0).to(tl.float32)[None, :]
    at = out + offsets_m.to(tl.int64)[:, None] * stride_out + offsets_n[None, :]
    tl.store(at, acc.to(out.dtype.element_ty), mask=in_m[:, None] & in_n[None, :])


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
    rows, outputs = x.shape[0], scales.shape[1]
    group = x.shape[1] // scales.shape[0]
    out = torch.empty((rows, outputs), dtype=x.dtype, device=x.device)
    shape = matmul_shape(rows, most_depth=group & -group)
    _awq_matmul[(triton.cdiv(outputs, shape.outputs), triton.cdiv(rows, shape.rows))](
        x, codes, zeros, scales, scales if bias is None else bias, out, rows, outputs, x.shape[1], x.stride(0), out.stride(0),
        GROUP=group, BIAS=bias is not None, BLOCK_M=shape.rows, BLOCK_N=shape.outputs, BLOCK_K=shape.depth,
        num_warps=shape.warps, num_stages=shape.stages,
    )  # fmt: skip
    return out


def awq_weight(codes: Tensor, zeros: Tensor, scales: Tensor) -> Tensor:
    """The weight that those stand for, float64 [in, out]."""
    order = torch.tensor([0, 4, 1, 5, 2, 6, 3, 7], device=codes.device)  # where output i of eight lies

    def unpack(packed: Tensor) -> Tensor:
        return ((packed[..., None] >> (4 * order).int()) & 0xF).flatten(1)

    group = codes.shape[0] // zeros.shape[0]
    zero = unpack(zeros).repeat_interleave(group, 0)
    return (unpack(codes) - zero).double() * scales.double().repeat_interleave(group, 0)
