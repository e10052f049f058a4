"""What the matrix products share: which block of the output a program makes, how a block ends, and the launch over all blocks.

What is between, reading a weight and multiplying, is each layout's own; a weight is [out, in] to its caller. Invariant: nothing is read or
written outside the rows and outputs that there are, and no row depends on another.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from agentrt.kernels.matmul_shape import matmul_shape
from torch import Tensor


@triton.jit
def block_of(rows, outputs, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Of program (block of outputs, block of rows): its rows, its outputs, and which of both there are."""
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    return m, n, m < rows, n < outputs


@triton.jit
def starts(base, places, stride):
    """Where rows of a matrix begin, which may be more than 2^31 numbers away."""
    return base + places.to(tl.int64) * stride


@triton.jit
def finish(result, bias, out, m, n, in_m, in_n, stride_out, BIAS: tl.constexpr):
    """Adds the bias to a block and writes it; `m` to `in_n` are what `block_of` gave."""
    if BIAS:
        result += tl.load(bias + n, mask=in_n, other=0.0).to(tl.float32)[None, :]
    at = starts(out, m, stride_out)[:, None] + n[None, :]
    tl.store(at, result.to(out.dtype.element_ty), mask=in_m[:, None] & in_n[None, :])


def multiply(
    kernel: Any,
    x: Tensor,
    operands: tuple[Tensor, ...],
    bias: Tensor | None,
    outputs: int,
    *,
    dtype: torch.dtype | None = None,
    most_depth: int = 128,
    **constants: int,
) -> Tensor:
    """Runs a product's kernel over all blocks of the output.

    Args:
        kernel: Takes x, operands, bias, out, rows, outputs, inputs, strides of x and out, and constants BIAS, BLOCK_M, BLOCK_N and BLOCK_K.
        x: [rows, in], the last dimension contiguous.
        operands: What the weight is in, and whatever else the kernel takes.
        bias: [out] or None.
        outputs: How many there are.
        dtype: Of the result; None: x's.
        most_depth: At most so many inputs at a time.
        constants: Others of the kernel's.

    Returns:
        [rows, out].
    """
    rows, inputs = x.shape
    out = torch.empty((rows, outputs), dtype=dtype or x.dtype, device=x.device)
    shape = matmul_shape(rows, most_depth)
    kernel[(triton.cdiv(outputs, shape.outputs), triton.cdiv(rows, shape.rows))](
        x, *operands, operands[0] if bias is None else bias, out, rows, outputs, inputs, x.stride(0), out.stride(0),
        BIAS=bias is not None, BLOCK_M=shape.rows, BLOCK_N=shape.outputs, BLOCK_K=shape.depth, **constants,
        num_warps=shape.warps, num_stages=shape.stages, enable_fp_fusion=True,
    )  # fmt: skip
    return out
