"""Norms and gated activations by the native kernels of `kernels/cpu/fused.cpp`: each reads and writes a row once.

What the kernels do not know (float16, GELU by the error function, norms of single heads) goes to torch's operators.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from agentrt.kernels.cpu.build import load
from agentrt.models.config import Activation
from agentrt.models.row_ops import TorchRows

KINDS: dict[Activation, int] = {"silu": 0, "gelu_tanh": 1}  #: As the kernel numbers them.
_DTYPES = (torch.float32, torch.bfloat16)
_POINTER, _LONG, _INT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int


class NativeRows(TorchRows):
    """In native kernels, on a CPU; see `agentrt.models.row_ops.RowOps`."""

    def __init__(self, library: ctypes.CDLL) -> None:
        """Makes one.

        Args:
            library: Of `fused.cpp`.
        """
        self._norm, self._gate = library.agentrt_rms_norm, library.agentrt_gate
        self._norm.argtypes = (*[_POINTER] * 4, *[_LONG] * 4, ctypes.c_float, _INT, _INT)
        self._gate.argtypes = (_POINTER, _POINTER, *[_LONG] * 3, *[_INT] * 3)
        self._norm.restype = self._gate.restype = None

    def norm(self, rows: Tensor, weight: Tensor, eps: float) -> Tensor:
        """RMS norm."""
        return self._normed(rows, None, weight, eps) if _known(rows, weight) else super().norm(rows, weight, eps)

    def add_and_norm(self, rows: Tensor, added: Tensor, weight: Tensor, eps: float) -> Tensor:
        """RMS norm of a sum."""
        if _known(rows, weight) and _known(added, weight):
            return self._normed(rows, added, weight, eps)
        return super().add_and_norm(rows, added, weight, eps)

    def gate(self, fused: Tensor, activation: Activation) -> Tensor:
        """Gated activation."""
        kind = KINDS.get(activation)
        if kind is None or not _known(fused, fused):
            return super().gate(fused, activation)
        count, width = fused.shape[0], fused.shape[1] // 2
        out = torch.empty((count, width), dtype=fused.dtype)
        self._gate(
            fused.data_ptr(), out.data_ptr(), count, width, fused.stride(0), kind, fused.dtype == torch.bfloat16, torch.get_num_threads()
        )
        return out

    def _normed(self, rows: Tensor, added: Tensor | None, weight: Tensor, eps: float) -> Tensor:
        count, width = rows.shape
        out = torch.empty((count, width), dtype=rows.dtype)
        self._norm(
            rows.data_ptr(),
            None if added is None else added.data_ptr(),
            weight.data_ptr(),
            out.data_ptr(),
            count,
            width,
            rows.stride(0),
            0 if added is None else added.stride(0),
            eps,
            rows.dtype == torch.bfloat16,
            torch.get_num_threads(),
        )
        return out


def native_rows() -> TorchRows:
    """Native where the kernels can be had, else torch's operators."""
    library = load("fused")
    return TorchRows() if library is None else NativeRows(library)


def _known(rows: Tensor, weight: Tensor) -> bool:
    return rows.dim() == 2 and rows.stride(1) == 1 and rows.dtype in _DTYPES and rows.dtype == weight.dtype
