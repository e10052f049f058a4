"""Matrix product with 4-bit weights in the layouts of GGUF's Q4_0 and Q4_1, unpacked on the way to the matrix units.

A block of 32 neighbouring inputs of one output is 16 bytes: byte j holds input j in its low and input j + 16 in its high four
bits. A weight is ``code * scale + low``, both of its block; for Q4_0, ``low`` is -8 scales (ggml's formats, by name). Bytes are
read in blocks and stand there twice, once for each half, so that inputs are in their own order.
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
    """Program (block of outputs, block of rows); BLOCK_K inputs at a time."""
    m, n, in_m, in_n = block_of(rows, outputs, BLOCK_M, BLOCK_N)
    k, group, byte = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_K // 32), tl.arange(0, 16)
    shift = (tl.arange(0, 2) * 4).to(tl.uint8)
    at_x = starts(x, m, stride_x)[:, None] + k[None, :]
    at_codes = starts(codes, n, tl.multiple_of(inputs // 2, 16))[None, None, :] + (group * 16)[:, None, None] + byte[None, :, None]
    at_scales = starts(scales, group, outputs)[:, None] + n[None, :]
    at_lows = starts(lows, group, outputs)[:, None] + n[None, :]
    dtype = x.dtype.element_ty
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for first in range(0, inputs, BLOCK_K):
        in_k, in_g = k < inputs - first, group * 32 < inputs - first
        packed = tl.load(at_codes + first // 2, mask=in_g[:, None, None] & in_n[None, None, :], other=0)
        scale = tl.load(at_scales + first // 32 * outputs, mask=in_g[:, None] & in_n[None, :], other=0.0).to(tl.float32)
        low = tl.load(at_lows + first // 32 * outputs, mask=in_g[:, None] & in_n[None, :], other=0.0).to(tl.float32)
        code = ((packed[:, None, :, :] >> shift[None, :, None, None]) & 0xF).to(tl.float32)  # [group, half, byte, output]
        weight = (code * scale[:, None, None, :] + low[:, None, None, :]).to(dtype).reshape(BLOCK_K, BLOCK_N)
        a = tl.load(at_x + first, mask=in_m[:, None] & in_k[None, :], other=0.0)
        acc = tl.dot(a, weight, acc, input_precision="ieee")
    finish(acc, bias, out, m, n, in_m, in_n, stride_out, BIAS)


def q4_matmul(x: Tensor, codes: Tensor, scales: Tensor, lows: Tensor, bias: Tensor | None = None) -> Tensor:
    """X times the weight.

    Args:
        x: [rows, in], the last dimension contiguous.
        codes: uint8 [out, in / 2], contiguous, as the module says; `in` a multiple of 32.
        scales: [in / 32, out], contiguous.
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
    return (unpacked * scales.double().T[..., None] + lows.double().T[..., None]).flatten(1)
