"""8-bit integer matrix product: activations quantised row by row, weights output by output, sums in int32.

Each row has a scale of its own, so that an answer never depends on what else is in the batch (LLM.int8(), Dettmers et al.,
2022, without the outliers). A row of zeros stays zero.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from agentrt.kernels.scaled_matmul import scaled_matmul
from torch import Tensor


@triton.jit
def _quantize(rows, quantized, scales, stride, width, BLOCK: tl.constexpr):
    """Program (row)."""
    row = tl.program_id(0).to(tl.int64)
    offsets = tl.arange(0, BLOCK)
    inside = offsets < width
    x = tl.load(rows + row * stride + offsets, mask=inside, other=0.0).to(tl.float32)
    scale = tl.max(tl.abs(x), 0) / 127.0
    scaled = x / tl.where(scale > 0, scale, 1.0)
    # To the nearest: floor(x + 1/2); conversion alone would cut.
    tl.store(quantized + row * width + offsets, tl.floor(scaled + 0.5).to(tl.int8), mask=inside)
    tl.store(scales + row, scale)


@triton.jit
def _int8_matmul(
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
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.int32)
    for first in range(0, inputs, BLOCK_K):
        in_k = offsets_k < inputs - first
        a = tl.load(at_x + first, mask=in_m[:, None] & in_k[None, :], other=0)
        b = tl.load(at_w + first, mask=in_n[None, :] & in_k[:, None], other=0)
        acc = tl.dot(a, b, acc, out_dtype=tl.int32)
    row_scale = tl.load(x_scales + offsets_m, mask=in_m, other=0.0)
    output_scale = tl.load(w_scales + offsets_n, mask=in_n, other=0.0)
    result = acc.to(tl.float32) * row_scale[:, None] * output_scale[None, :]
    if BIAS:
        result += tl.load(bias + offsets_n, mask=in_n, other=0.0).to(tl.float32)[None, :]
    at = out + offsets_m.to(tl.int64)[:, None] * stride_out + offsets_n[None, :]
    tl.store(at, result.to(out.dtype.element_ty), mask=in_m[:, None] & in_n[None, :])


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Rows [rows, width] as int8 and float32 scales [rows]."""
    rows, width = x.shape
    quantized = torch.empty((rows, width), dtype=torch.int8, device=x.device)
    scales = torch.empty(rows, dtype=torch.float32, device=x.device)
    block = triton.next_power_of_2(width)
    warps = min(max(block // 512, 1), 16)
    _quantize[(rows,)](x, quantized, scales, x.stride(0), width, BLOCK=block, num_warps=warps, num_stages=1)
    return quantized, scales


def int8_matmul(x: Tensor, weight: Tensor, weight_scales: Tensor, bias: Tensor | None = None) -> Tensor:
    """X times the weight, x being quantised on the way.

    Args:
        x: [rows, in], the last dimension contiguous.
        weight: int8 [out, in], contiguous.
        weight_scales: float32 [out].
        bias: [out] or None.

    Returns:
        [rows, out], in x's dtype.
    """
    quantized, scales = quantize_rows(x)
    return scaled_matmul(_int8_matmul, quantized, scales, weight, weight_scales, bias, x.dtype)


def quantize_reference(x: Tensor) -> tuple[Tensor, Tensor]:
    """The same quantisation in torch: int8 and float32 scales."""
    scales = x.float().abs().amax(-1) / 127.0
    divisors = scales.where(scales > 0, torch.ones_like(scales))
    return (x.float() / divisors[:, None] + 0.5).floor().to(torch.int8), scales


def int8_matmul_reference(x: Tensor, weight: Tensor, weight_scales: Tensor) -> Tensor:
    """The same product in float64."""
    quantized, scales = quantize_reference(x)
    return quantized.double() @ weight.double().T * scales.double()[:, None] * weight_scales.double()
