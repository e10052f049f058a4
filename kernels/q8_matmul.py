"""Matrix product with 8-bit weights in groups of 32 inputs with a scale each, put into floats on the way to the matrix units.

What GGUF's Q8_0 means, and what `agentrt.kernels.quantized_linear` calls 8 bits. Activations stay as they are, so this is for weights that
must lose nothing more; `agentrt.kernels.int8_matmul` multiplies integers, with one scale an output.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from agentrt.kernels.matmul_shape import matmul_shape
from torch import Tensor

GROUP = 32


@triton.jit
def _q8_matmul(
    x, codes, scales, bias, out, rows, outputs, inputs, stride_x, stride_out,
    BIAS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Program (block of outputs, block of rows); BLOCK_K inputs at a time."""
    offsets_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    offsets_m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    offsets_k = tl.arange(0, BLOCK_K)
    in_m, in_n = offsets_m < rows, offsets_n < outputs
    at_x = x + offsets_m.to(tl.int64)[:, None] * stride_x + offsets_k[None, :]
    at_codes = codes + offsets_n.to(tl.int64)[None, :] * inputs + offsets_k[:, None]
    at_scales = scales + offsets_n.to(tl.int64)[None, :] * (inputs // 32) + (offsets_k // 32)[:, None]
    dtype = x.dtype.element_ty
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for first in range(0, inputs, BLOCK_K):
        in_k = offsets_k < inputs - first
        in_w = in_n[None, :] & in_k[:, None]
        scale = tl.load(at_scales + first // 32, mask=in_w, other=0.0).to(tl.float32)
        weight = (tl.load(at_codes + first, mask=in_w, other=0).to(tl.float32) * scale).to(dtype)
        a = tl.load(at_x + first, mask=in_m[:, None] & in_k[None, :], other=0.0)
        acc = tl.dot(a, weight, acc, input_precision="ieee")
    if BIAS:
        acc += tl.load(bias + offsets_n, mask=in_n, other=0.0).to(tl.float32)[None, :]
    at = out + offsets_m.to(tl.int64)[:, None] * stride_out + offsets_n[None, :]
    tl.store(at, acc.to(out.dtype.element_ty), mask=in_m[:, None] & in_n[None, :])


def q8_matmul(x: Tensor, codes: Tensor, scales: Tensor, bias: Tensor | None = None) -> Tensor:
    """X times the weight.

    Args:
        x: [rows, in], the last dimension contiguous.
        codes: int8 [out, in], contiguous; `in` a multiple of 32.
        scales: [out, in / 32], contiguous.
        bias: [out] or None.

    Returns:
        [rows, out], in x's dtype.
    """
    rows, outputs = x.shape[0], codes.shape[0]
    out = torch.empty((rows, outputs), dtype=x.dtype, device=x.device)
    shape = matmul_shape(rows, most_depth=64)
    _q8_matmul[(triton.cdiv(outputs, shape.outputs), triton.cdiv(rows, shape.rows))](
        x, codes, scales, scales if bias is None else bias, out, rows, outputs, x.shape[1], x.stride(0), out.stride(0),
        BIAS=bias is not None, BLOCK_M=shape.rows, BLOCK_N=shape.outputs, BLOCK_K=shape.depth,
        num_warps=shape.warps, num_stages=shape.stages,
    )  # fmt: skip
    return out


def q8_weight(codes: Tensor, scales: Tensor) -> Tensor:
    """The weight that those stand for, float64 [out, in]."""
    return codes.double() * scales.double().repeat_interleave(GROUP, 1)
