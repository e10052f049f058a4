"""The launch that products of row-scaled operands share: int8 and fp8 differ in their kernel alone."""

from __future__ import annotations

from typing import Any

import torch
import triton
from agentrt.kernels.matmul_shape import matmul_shape
from torch import Tensor


def scaled_matmul(
    kernel: Any, quantized: Tensor, scales: Tensor, weight: Tensor, weight_scales: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """Runs the kernel over all blocks of the output.

    Args:
        kernel: Of the operands' type.
        quantized: [rows, in].
        scales: float32 [rows].
        weight: [out, in], contiguous.
        weight_scales: float32 [out].
        bias: [out] or None.
        dtype: Of the output.

    Returns:
        [rows, out].
    """
    rows, outputs = quantized.shape[0], weight.shape[0]
    out = torch.empty((rows, outputs), dtype=dtype, device=quantized.device)
    shape = matmul_shape(rows)
    kernel[(triton.cdiv(outputs, shape.outputs), triton.cdiv(rows, shape.rows))](
        quantized, weight, scales, weight_scales, weight_scales if bias is None else bias, out,
        rows, outputs, quantized.shape[1], quantized.stride(0), weight.stride(0), out.stride(0),
        BIAS=bias is not None, BLOCK_M=shape.rows, BLOCK_N=shape.outputs, BLOCK_K=shape.depth,
        num_warps=shape.warps, num_stages=shape.stages,
    )  # fmt: skip
    return out
