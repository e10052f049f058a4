"""What a layer does to each row by itself, between matrices and attention: norms, and the gated activation.

Three ways to do it, by the device: torch's operators, which run anywhere, and kernels that read and write each row once, Triton's on
a GPU and native ones on a CPU (`agentrt.models.native_rows`).
The decoder knows neither. No row ever sees another.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from agentrt.models.config import Activation

_ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": partial(functional.gelu, approximate="tanh"),
}


class RowOps(Protocol):
    """Operations on rows [rows, width]."""

    def norm(self, rows: Tensor, weight: Tensor, eps: float) -> Tensor:
        """RMS norm (Zhang and Sennrich, 2019) times the weight [width]; `rows` may have more dimensions."""
        ...

    def add_and_norm(self, rows: Tensor, added: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Adds to `rows` in place, and norms the sum."""
        ...

    def gate(self, fused: Tensor, activation: Activation) -> Tensor:
        """Activation of the first half of each row [rows, 2 width], times the second half."""
        ...


class TorchRows:
    """In torch's operators."""

    def norm(self, rows: Tensor, weight: Tensor, eps: float) -> Tensor:
        """RMS norm."""
        return functional.rms_norm(rows, weight.shape, weight, eps)

    def add_and_norm(self, rows: Tensor, added: Tensor, weight: Tensor, eps: float) -> Tensor:
        """RMS norm of a sum."""
        return functional.rms_norm(rows.add_(added), weight.shape, weight, eps)

    def gate(self, fused: Tensor, activation: Activation) -> Tensor:
        """Gated activation."""
        gate, up = fused.chunk(2, -1)
        return _ACTIVATIONS[activation](gate).mul_(up)


class TritonRows(TorchRows):
    """In Triton's kernels, but for norms of more dimensions, such as those of single heads."""

    def norm(self, rows: Tensor, weight: Tensor, eps: float) -> Tensor:
        """RMS norm."""
        from agentrt.kernels.rms_norm import rms_norm

        return rms_norm(rows, weight, eps) if rows.dim() == 2 else super().norm(rows, weight, eps)

    def add_and_norm(self, rows: Tensor, added: Tensor, weight: Tensor, eps: float) -> Tensor:
        """RMS norm of a sum."""
        from agentrt.kernels.rms_norm import rms_norm

        return rms_norm(rows, weight, eps, added)

    def gate(self, fused: Tensor, activation: Activation) -> Tensor:
        """Gated activation."""
        from agentrt.kernels.gate_up import gate_up

        return gate_up(fused, activation)


def row_ops(device: torch.device) -> RowOps:
    """What suits a device: native kernels on a CPU and Triton's on a GPU, where they can be had."""
    if device.type == "cpu":
        from agentrt.models.native_rows import native_rows

        return native_rows()
    return TritonRows() if device.type == "cuda" and find_spec("triton") is not None else TorchRows()


@dataclass(frozen=True, slots=True)
class Norm:
    """One norm of a model, ready to call.

    Attributes:
        weight: [width].
        eps: Added to the mean square.
        ops: How.
    """

    weight: Tensor
    eps: float
    ops: RowOps

    def __call__(self, rows: Tensor) -> Tensor:
        """Norms rows."""
        return self.ops.norm(rows, self.weight, self.eps)

    def after_adding(self, rows: Tensor, added: Tensor) -> Tensor:
        """Adds to rows in place, and norms the sum."""
        return self.ops.add_and_norm(rows, added, self.weight, self.eps)
