"""Matrix product with 8-bit weights in groups of 32 inputs with a scale each, put into floats on the way to the matrix units.

What GGUF's Q8_0 means, and what `agentrt.kernels.quantized_linear` calls 8 bits. Activations stay as they are, so this is for weights that
must lose nothing more; `agentrt.kernels.scaled_matmul` multiplies 8 bits by 8 bits, with one scale an output.
"""

from __future__ import annotations

import triton
import triton.language as tl
from agentrt.kernels.matmul_block import block_of, finish, multiply, starts
from torch import Tensor

GROUP = 32


@triton.jit(do_not_specialize=["rows"])
def _q8_matmul(
    x, codes, scales, bias, out, rows, outputs, inputs, stride_x, stride_out,
    BIAS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Program (block of outputs, block of rows); BLOCK_K inputs at a time."""
    m, n, in_m, in_n = block_of(rows, outputs, BLOCK_M, BLOCK_N)
    k, group = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_K // 32)
    at_x = starts(x, m, stride_x)[:, None] + k[None, :]
    at_codes = starts(codes, n, inputs)[None, :] + k[:, None]
    at_scales = starts(scales, group, outputs)[:, None] + n[None, :]
    dtype = x.dtype.element_ty
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for first in range(0, inputs, BLOCK_K):
        in_k, in_g = k < inputs - first, group * 32 < inputs - first
        scale = tl.load(at_scales + first // 32 * outputs, mask=in_g[:, None] & in_n[None, :], other=0.0)
        code = tl.load(at_codes + first, mask=in_k[:, None] & in_n[None, :], other=0)
        groups = code.to(tl.float32).reshape(BLOCK_K // 32, 32, BLOCK_N)  # so that a scale is read once for all of its group
        weight = (groups * scale.to(tl.float32)[:, None, :]).to(dtype).reshape(BLOCK_K, BLOCK_N)
        a = tl.load(at_x + first, mask=in_m[:, None] & in_k[None, :], other=0.0)
        acc = tl.dot(a, weight, acc, input_precision="ieee")
    finish(acc, bias, out, m, n, in_m, in_n, stride_out, BIAS)


def q8_matmul(x: Tensor, codes: Tensor, scales: Tensor, bias: Tensor | None = None) -> Tensor:
    """X times the weight.

    Args:
        x: [rows, in], the last dimension contiguous.
        codes: int8 [out, in], contiguous; `in` a multiple of 32.
        scales: [in / 32, out], contiguous.
        bias: [out] or None.

    Returns:
        [rows, out], in x's dtype.
    """
    return multiply(_q8_matmul, x, (codes, scales), bias, codes.shape[0], most_depth=64)


def q8_weight(codes: Tensor, scales: Tensor) -> Tensor:
    """The weight that those stand for, float64 [out, in]."""
    return codes.double() * scales.double().T.repeat_interleave(GROUP, 1)
