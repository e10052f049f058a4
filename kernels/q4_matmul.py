"""Matrix product with 4-bit weights in the layouts of GGUF's Q4_0 and Q4_1, unpacked on the way to the matrix units.

A block of 32 neighbouring inputs of one output is 16 bytes: byte j holds input j in its low and input j + 16 in its high four
bits. A weight is ``code * scale + low``, both of its block; for Q4_0, ``low`` is -8 scales (ggml's formats, by name). So a
product needs two dots: low halves against the inputs j of each block, high halves against the inputs j + 16.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from agentrt.kernels.matmul_shape import matmul_shape
from torch import Tensor

GROUP = 32


@triton.jit
def _q4_matmul(
    x, codes, scales, lows, bias, out, rows, outputs, inputs, stride_x, stride_out,
    BIAS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Program (block of outputs, block of rows); BLOCK_K inputs, half as many bytes, at a time."""
    offsets_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    offsets_m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    offsets_b = tl.arange(0, BLOCK_K // 2)
    in_m, in_n = offsets_m < rows, offsets_n < outputs
    block, inside_block = offsets_b // 16, offsets_b % 16
    at_x = x + offsets_m.to(tl.int64)[:, None] * stride_x + (block * 32 + inside_block)[None, :]
    at_codes = codes + offsets_n.to(tl.int64)[None, :] * (inputs // 2) + offsets_b[:, None]
    at_scales = offsets_n.to(tl.int64)[None, :] * (inputs // 32) + block[:, None]
    dtype = x.dtype.element_ty
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for first in range(0, inputs, BLOCK_K):
        in_k = block * 32 + first < inputs
        in_x, in_w = in_m[:, None] & in_k[None, :], in_n[None, :] & in_k[:, None]
        packed = tl.load(at_codes + first // 2, mask=in_w, other=0)
        scale = tl.load(scales + at_scales + first // 32, mask=in_w, other=0.0).to(tl.float32)
        low = tl.load(lows + at_scales + first // 32, mask=in_w, other=0.0).to(tl.float32)
        near = ((packed & 0xF).to(tl.float32) * scale + low).to(dtype)
        far = ((packed >> 4).to(tl.float32) * scale + low).to(dtype)
        acc = tl.dot(tl.load(at_x + first, mask=in_x, other=0.0), near, acc, input_precision="ieee")
        acc = tl.dot(tl.load(at_x + first + 16, mask=in_x, other=0.0), far, acc, input_precision="ieee")
    if BIAS:
        acc += tl.load(bias + offsets_n, mask=in_n, other=0.0).to(tl.float32)[None, :]
    at = out + offsets_m.to(tl.int64)[:, None] * stride_out + offsets_n[None, :]
    tl.store(at, acc.to(out.dtype.element_ty), mask=in_m[:, None] & in_n[None, :])


def q4_matmul(x: Tensor, codes: Tensor, scales: Tensor, lows: Tensor, bias: Tensor | None = None) -> Tensor:
    """X times the weight.

    Args:
        x: [rows, in], the last dimension contiguous.
        codes: uint8 [out, in / 2], contiguous, as the module says.
        scales: [out, in / 32], contiguous.
        lows: Like `scales`.
        bias: [out] or None.

    Returns:
        [rows, out], in x's dtype.
    """
    rows, outputs = x.shape[0], codes.shape[0]
    out = torch.empty((rows, outputs), dtype=x.dtype, device=x.device)
    shape = matmul_shape(rows)
    _q4_matmul[(triton.cdiv(outputs, shape.outputs), triton.cdiv(rows, shape.rows))](
        x, codes, scales, lows, scales if bias is None else bias, out, rows, outputs, x.shape[1], x.stride(0), out.stride(0),
        BIAS=bias is not None, BLOCK_M=shape.rows, BLOCK_N=shape.outputs, BLOCK_K=shape.depth,
        num_warps=shape.warps, num_stages=shape.stages,
    )  # fmt: skip
    return out


def q4_weight(codes: Tensor, scales: Tensor, lows: Tensor) -> Tensor:
    """The weight that those stand for, float64 [out, in]."""
    blocks = codes.view(codes.shape[0], -1, GROUP // 2)
    unpacked = torch.cat((blocks & 0xF, blocks >> 4), -1).double()
    return (unpacked * scales.double()[..., None] + lows.double()[..., None]).flatten(1)
