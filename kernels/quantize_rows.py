"""Puts activations into 8 bits, row by row, for products whose weights have 8 bits too.

Each row has a scale of its own, so that an answer never depends on what else is in the batch (LLM.int8(), Dettmers et al., 2022, without the
outliers); it is what makes the row's largest number the format's. fp8 is e4m3 of "FP8 Formats for Deep Learning" (Micikevicius et al., 2022).
Invariant: a row of zeros stays zero, and one with a number that is not finite has a scale that is not, so that its products are not either.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

#: The largest number of each format.
LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}


@triton.jit
def _quantize(rows, quantized, scales, stride, width, LARGEST: tl.constexpr, BLOCK: tl.constexpr):
    """Program (row)."""
    row = tl.program_id(0).to(tl.int64)
    offsets = tl.arange(0, BLOCK)
    inside = offsets < width
    x = tl.load(rows + row * stride + offsets, mask=inside, other=0.0).to(tl.float32)
    # As integers, where what is no number is the largest, and not passed over.
    peak = tl.max(tl.abs(x).to(tl.int32, bitcast=True), 0).to(tl.float32, bitcast=True)
    scale = peak / LARGEST
    divides = (scale > 0) & (scale < float("inf"))
    scaled = tl.where(divides, x, 0.0) / tl.where(divides, scale, 1.0)
    if quantized.dtype.element_ty == tl.int8:
        scaled = tl.floor(scaled + 0.5)  # to the nearest; conversion alone would cut
    tl.store(quantized + row * width + offsets, scaled.to(quantized.dtype.element_ty), mask=inside)
    tl.store(scales + row, scale)


def quantize_rows(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Quantises.

    Args:
        x: [rows, width], the last dimension contiguous.
        dtype: int8 or float8_e4m3fn.

    Returns:
        [rows, width] in that dtype, and float32 scales [rows].
    """
    rows, width = x.shape
    quantized = torch.empty((rows, width), dtype=dtype, device=x.device)
    scales = torch.empty(rows, dtype=torch.float32, device=x.device)
    block = triton.next_power_of_2(width)
    warps = min(max(block // 512, 1), 16)
    _quantize[(rows,)](x, quantized, scales, x.stride(0), width, LARGEST=LARGEST[dtype], BLOCK=block, num_warps=warps, num_stages=1, enable_fp_fusion=True)
    return quantized, scales


def quantize_rows_reference(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The same in torch."""
    scales = x.float().abs().amax(-1) / LARGEST[dtype]
    divides = ((scales > 0) & scales.isfinite())[:, None]
    scaled = x.float().where(divides, 0) / scales[:, None].where(divides, 1)
    return ((scaled + 0.5).floor() if dtype == torch.int8 else scaled).to(dtype), scales
