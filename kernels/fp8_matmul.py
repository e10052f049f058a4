"""8-bit float matrix product (e4m3, from compute capability 8.9 on): rows and outputs with scales of their own.

As in `agentrt.kernels.int8_matmul` no scale is shared between rows, so an answer never depends on its neighbours. The format is
"FP8 Formats for Deep Learning"'s (Micikevicius et al., 2022); its largest number is 448.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from agentrt.kernels.scaled_matmul import scaled_matmul
from torch import Tensor

LARGEST = 448.0


@triton.jit
def _quantize(rows, quantized, scales, stride, width, LARGEST: tl.constexpr, BLOCK: tl.constexpr):
    """Program (row)."""
    row = tl.program_id(0).to(tl.int64)
    offsets = tl.arange(0, BLOCK)
    inside = offsets < width
    x = tl.load(rows + row * stride + offsets, mask=inside, other=0.0).to(tl.float32)
    scale = tl.max(tl.abs(x), 0) / LARGEST
    scaled = x / tl.where(scale > 0, scale, 1.0)
    tl.store(quantized + row * width + offsets, scaled.to(tl.float8e4nv), mask=inside)
    tl.store(scales + row, scale)


@triton.jit
def _fp8_matmul(
    x, w, x_scales, w_scales, bias, out, rows, outputs, inputs, stride_x, stride_w, stride_out,
    BIAS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Program (block of outputs, block of rows)."""
    offsets_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    offsets_m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    offsets_k = tl.arange(0, BLOCK_K)
    in_m, in_n = offsets_m < rows, offsets_n < outputs
    at_x = x + offsets_m.to(tl.int64)[:, None] * stride_x + offsets_k[None, :]
    at_w = w + offsets_n.to(tl.int64)[None, :] * stride_w + offsets_k[:, None]
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for first in range(0, inputs, BLOCK_K):
        in_k = offsets_k < inputs - first
        a = tl.load(at_x + first, mask=in_m[:, None] & in_k[None, :], other=0.0)
        b = tl.load(at_w + first, mask=in_n[None, :] & in_k[:, None], other=0.0)
        acc = tl.dot(a, b, acc)
    row_scale = tl.load(x_scales + offsets_m, mask=in_m, other=0.0)
    output_scale = tl.load(w_scales + offsets_n, mask=in_n, other=0.0)
    result = acc * row_scale[:, None] * output_scale[None, :]
    if BIAS:
        result += tl.load(bias + offsets_n, mask=in_n, other=0.0).to(tl.float32)[None, :]
    at = out + offsets_m.to(tl.int64)[:, None] * stride_out + offsets_n[None, :]
    tl.store(at, result.to(out.dtype.element_ty), mask=in_m[:, None] & in_n[None, :])


def quantize_rows_fp8(x: Tensor) -> tuple[Tensor, Tensor]:
    """Rows [rows, width] as float8_e4m3fn and float32 scales [rows]."""
    rows, width = x.shape
    quantized = torch.empty((rows, width), dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty(rows, dtype=torch.float32, device=x.device)
    block = triton.next_power_of_2(width)
    warps = min(max(block // 512, 1), 16)
    _quantize[(rows,)](x, quantized, scales, x.stride(0), width, LARGEST=LARGEST, BLOCK=block, num_warps=warps, num_stages=1)
    return quantized, scales


def fp8_matmul(x: Tensor, weight: Tensor, weight_scales: Tensor, bias: Tensor | None = None) -> Tensor:
    """X times the weight, x being quantised on the way.

    Args:
        x: [rows, in], the last dimension contiguous.
        weight: float8_e4m3fn [out, in], contiguous.
        weight_scales: float32 [out].
        bias: [out] or None.

    Returns:
        [rows, out], in x's dtype.
    """
    quantized, scales = quantize_rows_fp8(x)
    return scaled_matmul(_fp8_matmul, quantized, scales, weight, weight_scales, bias, x.dtype)


def fp8_matmul_reference(quantized: Tensor, scales: Tensor, weight: Tensor, weight_scales: Tensor) -> Tensor:
    """The product of quantised rows [rows, in] and weights [out, in], in float64."""
    return quantized.double() @ weight.double().T * scales.double()[:, None] * weight_scales.double()
