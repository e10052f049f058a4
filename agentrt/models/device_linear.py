"""Matrices in few bits on a GPU: which of Triton's products multiplies a weight, one class a layout, chosen in `DeviceLinears` alone.

What a checkpoint holds in a layout that a kernel multiplies stays in it: AWQ's words, fp8 and int8 with a scale an output. Everything else goes
through groups of 32 (`agentrt.kernels.quantized_linear`), as on a CPU: GGUF's blocks, GPTQ, and what is quantised at load. Activations keep their
dtype, but for fp8 and int8 with a scale an output, which are made for products of 8 bits on both sides. Imports Triton; whoever wants
this looks first whether it is there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from agentrt.kernels.awq_matmul import awq_matmul
from agentrt.kernels.q4_matmul import GROUP, q4_matmul
from agentrt.kernels.q8_matmul import q8_matmul
from agentrt.kernels.quantized_linear import QuantizedWeight, compact
from agentrt.kernels.scaled_matmul import scaled_matmul
from agentrt.models.linear import Linear, Quantized, StoredWeights
from agentrt.models.quantized_checkpoint import AwqWeight, RowScaled

#: The weight's name -> its parts in the checkpoint's own layout, rows in order; empty: there is none that a kernel multiplies.
PackedWeights = Callable[[str], Sequence[AwqWeight] | Sequence[RowScaled]]

#: Compute capability from which the matrix units multiply fp8.
_FP8_FROM = (8, 9)


class Q4Linear:
    """4 bits with a scale and a minimum for each 32 inputs, two to a byte."""

    def __init__(self, weight: QuantizedWeight, bias: Tensor | None, device: torch.device) -> None:
        """Packs the weight, and sends it to the device."""
        assert weight.minimum is not None  # 4 bits have one
        scale, minimum = compact(weight.scale.float(), weight.minimum.float())
        self._codes = (weight.q[..., : GROUP // 2] | weight.q[..., GROUP // 2 :] << 4).flatten(1).to(device)
        self._scale, self._minimum = (part.T.contiguous().to(device) for part in (scale, minimum))
        self._bias = bias
        self._missing = -weight.inputs % GROUP

    def __call__(self, x: Tensor) -> Tensor:
        """[rows, in] -> [rows, out]."""
        return q4_matmul(_padded(x, self._missing), self._codes, self._scale, self._minimum, self._bias)


class Q8Linear:
    """8 bits with a scale for each 32 inputs."""

    def __init__(self, weight: QuantizedWeight, bias: Tensor | None, device: torch.device) -> None:
        """Sends the weight to the device."""
        (scale,) = compact(weight.scale.float())
        self._codes, self._scale = weight.q.flatten(1).contiguous().to(device), scale.T.contiguous().to(device)
        self._bias = bias
        self._missing = -weight.inputs % GROUP

    def __call__(self, x: Tensor) -> Tensor:
        """[rows, in] -> [rows, out]."""
        return q8_matmul(_padded(x, self._missing), self._codes, self._scale, self._bias)


class AwqLinear:
    """4 bits as AWQ packs them."""

    def __init__(self, parts: Sequence[AwqWeight], bias: Tensor | None, device: torch.device) -> None:
        """Puts parts side by side, on the device."""
        self._codes, self._zeros, self._scales = (
            torch.cat([getattr(part, name) for part in parts], 1).contiguous().to(device) for name in ("codes", "zeros", "scales")
        )
        self._bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        """[rows, in] -> [rows, out]."""
        return awq_matmul(x, self._codes, self._zeros, self._scales, self._bias)


class RowScaledLinear:
    """fp8 or int8 with a scale an output; activations are put into the same 8 bits, with a scale a row."""

    def __init__(self, parts: Sequence[RowScaled], bias: Tensor | None, device: torch.device) -> None:
        """Puts parts one below the other, on the device."""
        dtype = parts[0].q.dtype
        self._codes = torch.cat([part.q.view(torch.uint8) for part in parts]).view(dtype).to(device)
        self._scales = torch.cat([part.scale for part in parts]).to(device)
        self._bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        """[rows, in] -> [rows, out]."""
        return scaled_matmul(x, self._codes, self._scales, self._bias)


class DeviceLinears:
    """The factory: as `agentrt.models.linear.Quantized` says what has how many bits, on a GPU's products."""

    def __init__(self, bits: int, stored: StoredWeights, packed: PackedWeights, device: torch.device) -> None:
        """A factory.

        Args:
            bits: 4 or 8.
            stored: What the checkpoint has in groups.
            packed: What it has in a layout of its own.
            device: Where the products are; on a CPU, in Triton's interpreter.
        """
        self._bits = bits
        self._packed = packed
        self._device = device
        self._in_groups = Quantized(bits, stored, self._grouped, held=(4, 8))

    def __call__(self, name: str, weight: Tensor, bias: Tensor | None) -> Linear:
        """Holds one matrix."""
        parts = [part for part in self._packed(f"{name}.weight") if part.bits == self._bits]
        awq = [part for part in parts if isinstance(part, AwqWeight)]
        scaled = [part for part in parts if isinstance(part, RowScaled)]
        if awq:
            return AwqLinear(awq, bias, self._device)
        if scaled and self._multiplies(scaled[0].q.dtype):
            return RowScaledLinear(scaled, bias, self._device)
        return self._in_groups(name, weight.cpu(), bias)

    def _grouped(self, weight: QuantizedWeight, bias: Tensor | None) -> Linear:
        return (Q4Linear if weight.bits == 4 else Q8Linear)(weight, bias, self._device)

    def _multiplies(self, dtype: torch.dtype) -> bool:
        """Whether the device's matrix units take this dtype on both sides."""
        return dtype == torch.int8 or self._device.type != "cuda" or torch.cuda.get_device_capability(self._device) >= _FP8_FROM


def _padded(x: Tensor, missing: int) -> Tensor:
    """Zeros behind each row, as its weights have, where inputs are no multiple of a group."""
    return pad(x, (0, missing)) if missing else x
