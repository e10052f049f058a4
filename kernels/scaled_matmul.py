"""Matrix product of 8 bits by 8 bits, int8 or fp8 (e4m3, from compute capability 8.9 on): rows and outputs with scales of their own.

Activations are put into the weight's format on the way (`agentrt.kernels.quantize_rows`). Sums are int32 or float32.
"""

from __future__ import annotations

import triton
import triton.language as tl
from agentrt.kernels.matmul_block import block_of, finish, multiply, starts
from agentrt.kernels.quantize_rows import quantize_rows
from torch import Tensor


@triton.jit(do_not_specialize=["rows"])
def _scaled_matmul(
    x, w, x_scales, w_scales, bias, out, rows, outputs, inputs, stride_x, stride_out,
    BIAS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Program (block of outputs, block of rows); BLOCK_K inputs at a time."""
    m, n, in_m, in_n = block_of(rows, outputs, BLOCK_M, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    at_x = starts(x, m, stride_x)[:, None] + k[None, :]
    at_w = starts(w, n, inputs)[None, :] + k[:, None]
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.int32 if x.dtype.element_ty == tl.int8 else tl.float32)
    for first in range(0, inputs, BLOCK_K):
        in_k = k < inputs - first
        a = tl.load(at_x + first, mask=in_m[:, None] & in_k[None, :], other=0.0)
        b = tl.load(at_w + first, mask=in_n[None, :] & in_k[:, None], other=0.0)
        acc = tl.dot(a, b, acc, out_dtype=acc.dtype)
    row_scale = tl.load(x_scales + m, mask=in_m, other=0.0)
    output_scale = tl.load(w_scales + n, mask=in_n, other=0.0)
    result = acc.to(tl.float32) * row_scale[:, None] * output_scale[None, :]
    finish(result, bias, out, m, n, in_m, in_n, stride_out, BIAS)


def scaled_matmul(x: Tensor, weight: Tensor, weight_scales: Tensor, bias: Tensor | None = None) -> Tensor:
    """X times the weight, x being quantised on the way.

    Args:
        x: [rows, in], the last dimension contiguous.
        weight: int8 or float8_e4m3fn [out, in], contiguous.
        weight_scales: float32 [out].
        bias: [out] or None.

    Returns:
        [rows, out], in x's dtype.
    """
    quantized, scales = quantize_rows(x, weight.dtype)
    return multiply(_scaled_matmul, quantized, (weight, scales, weight_scales), bias, weight.shape[0], dtype=x.dtype)


def scaled_matmul_reference(quantized: Tensor, scales: Tensor, weight: Tensor, weight_scales: Tensor) -> Tensor:
    """The product of quantised rows [rows, in] and weights [out, in], in float64."""
    return quantized.double() @ weight.double().T * scales.double()[:, None] * weight_scales.double()
