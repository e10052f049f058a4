"""RMS norm (Zhang and Sennrich, 2019), fused with the addition that stands before it: one read and one write of a row.

Sums are float32; the sum of both inputs is rounded to the rows' dtype before it is squared, as it would be unfused.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _rms_norm(rows, added, weight, out, stride, stride_added, eps, width, ADDS: tl.constexpr, BLOCK: tl.constexpr):
    """Program (row)."""
    row = tl.program_id(0).to(tl.int64)
    offsets = tl.arange(0, BLOCK)
    inside = offsets < width
    dtype = rows.dtype.element_ty
    x = tl.load(rows + row * stride + offsets, mask=inside, other=0.0).to(tl.float32)
    if ADDS:
        x += tl.load(added + row * stride_added + offsets, mask=inside, other=0.0).to(tl.float32)
        rounded = x.to(dtype)
        tl.store(rows + row * stride + offsets, rounded, mask=inside)
        x = rounded.to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(x * x, 0) / width + eps)
    w = tl.load(weight + offsets, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * width + offsets, (x * scale * w).to(dtype), mask=inside)


def rms_norm(rows: Tensor, weight: Tensor, eps: float, added: Tensor | None = None) -> Tensor:
    """Norms rows, after adding to them.

    Args:
        rows: [rows, width], the last dimension contiguous; with `added`, changed in place to the sum.
        weight: [width].
        eps: Added to the mean square.
        added: Like `rows`; None: nothing.

    Returns:
        [rows, width], contiguous.
    """
    count, width = rows.shape
    out = torch.empty((count, width), dtype=rows.dtype, device=rows.device)
    other = rows if added is None else added
    block = triton.next_power_of_2(width)
    _rms_norm[(count,)](
        rows, other, weight, out, rows.stride(0), other.stride(0), eps, width,
        ADDS=added is not None, BLOCK=block, num_warps=min(max(block // 512, 1), 16), num_stages=1, enable_fp_fusion=True,
    )  # fmt: skip
    return out


def rms_norm_reference(rows: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The norm of rows, in float64."""
    x = rows.double()
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight.double()
