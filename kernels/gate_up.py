"""The gated activation of an MLP: activation(gate) * up, read from one fused matrix product and written once.

The kernel computes in float32. Which of the three activations it is, is fixed when it is compiled.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

#: Columns that one program takes.
_BLOCK = 1024

_SILU, _GELU, _GELU_TANH = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
_KINDS = {"silu": 0, "gelu": 1, "gelu_tanh": 2}


@triton.jit
def _gate_up(fused, out, stride, width, KIND: tl.constexpr, BLOCK: tl.constexpr):
    """Program (row, block of columns)."""
    row = tl.program_id(0).to(tl.int64)
    offsets = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < width
    gate = tl.load(fused + row * stride + offsets, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(fused + row * stride + width + offsets, mask=inside, other=0.0).to(tl.float32)
    if KIND == _SILU:
        active = gate * tl.sigmoid(gate)
    elif KIND == _GELU:
        active = 0.5 * gate * (1.0 + tl.erf(gate * 0.7071067811865476))
    else:  # 1 + tanh(x) = 2 sigmoid(2 x)
        active = gate * tl.sigmoid(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate))
    tl.store(out + row * width + offsets, (active * up).to(out.dtype.element_ty), mask=inside)


def gate_up(fused: Tensor, activation: str) -> Tensor:
    """Activation of the first half of each row, times the second half.

    Args:
        fused: [rows, 2 * width], the last dimension contiguous.
        activation: "silu", "gelu" or "gelu_tanh".

    Returns:
        [rows, width], contiguous.
    """
    rows, width = fused.shape[0], fused.shape[1] // 2
    out = torch.empty((rows, width), dtype=fused.dtype, device=fused.device)
    _gate_up[(rows, triton.cdiv(width, _BLOCK))](
        fused, out, fused.stride(0), width, KIND=_KINDS[activation], BLOCK=_BLOCK, num_warps=4, num_stages=1, enable_fp_fusion=True
    )
    return out


def gate_up_reference(fused: Tensor, activation: str) -> Tensor:
    """The same, in float64."""
    gate, up = fused.double().chunk(2, -1)
    if activation == "silu":
        return functional.silu(gate) * up
    return functional.gelu(gate, approximate="tanh" if activation == "gelu_tanh" else "none") * up
