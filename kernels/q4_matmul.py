"""Matrix product with 4-bit weights in the layouts of GGUF's Q4_0 and Q4_1, unpacked on the way to the matrix units.

A block of 32 neighbouring inputs of one output is 16 bytes: byte j holds input j in its low and input j + 16 in its high four
bits. A weight is ``code * scale + low``, both of its block; for Q4_0, ``low`` is -8 scales (ggml's formats, by name). So a
product needs two dots: low halves against the inputs j of each block, high halves against the inputs j + 16.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from agentrt.kernels.matmul_block import block_of, finish, multiply, starts
from torch import Tensor

GROUP = 32


@triton.jit(do_not_specialize=["rows"])
def _q4_matmul(
    x, codes, scales, lows, bias, out, rows, outputs, inputs, stride_x, stride_out,
    BIAS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Program (block of outputs, block of rows); BLOCK_K inputs, half as many bytes, at a time."""
    m, n, in_m, in_n = block_of(rows, outputs, BLOCK_M, BLOCK_N)
    byte = tl.arange(0, BLOCK_K // 2)
    group, inside_group = byte // 16, byte % 16
    at_x = starts(x, m, stride_x)[:, None] + (group * 32 + inside_group)[None, :]
    at_codes = starts(codes, n, inputs // 2)[None, :] + byte[:, None]
    at_scales = starts(scales, n, inputs // 32)[None, :] + group[:, None]
    at_lows = starts(lows, n, inputs // 32)[None, :] + group[:, None]
    dtype = x.dtype.element_ty
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for first in range(0, inputs, BLOCK_K):
        in_k = group * 32 + first < inputs
        in_x, in_w = in_m[:, None] & in_k[None, :], in_n[None, :] & in_k[:, None]
        packed = tl.load(at_codes + first // 2, mask=in_w, other=0)
        scale = tl.load(at_scales + first // 32, mask=in_w, other=0.0).to(tl.float32)
        low = tl.load(at_lows + first // 32, mask=in_w, other=0.0).to(tl.float32)
        near = ((packed & 0xF).to(tl.float32) * scale + low).to(dtype)
        far = ((packed >> 4).to(tl.float32) * scale + low).to(dtype)
        acc = tl.dot(tl.load(at_x + first, mask=in_x, other=0.0), near, acc, input_precision="ieee")
        acc = tl.dot(tl.load(at_x + first + 16, mask=in_x, other=0.0), far, acc, input_precision="ieee")
    finish(acc, bias, out, m, n, in_m, in_n, stride_out, BIAS)


def q4_matmul(x: Tensor, codes: Tensor, scales: Tensor, lows: Tensor, bias: Tensor | None = None) -> Tensor:
    """X times the weight.

    Args:
        x: [rows, in], the last dimension contiguous.
        codes: uint8 [out, in / 2], contiguous, as the module says.
        scales: [out, in / 32], contiguous.
        lows: Like `scales`.
        bias: [out] or None.

    Returns:
        [rows, out], in x's dtype.
    """
    return multiply(_q4_matmul, x, (codes, scales, lows), bias, codes.shape[0])


def q4_weight(codes: Tensor, scales: Tensor, lows: Tensor) -> Tensor:
    """The weight that those stand for, float64 [out, in]."""
    blocks = codes.view(codes.shape[0], -1, GROUP // 2)
    unpacked = torch.cat((blocks & 0xF, blocks >> 4), -1).double()
    return (unpacked * scales.double()[..., None] + lows.double()[..., None]).flatten(1)
