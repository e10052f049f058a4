"""A linear layer whose weights have 4, 5, 6 or 8 bits and whose activations have 8: the format, its reference, and the native kernel.

Weights and activations are quantised in groups of 32 along the input. A weight is ``scale * q + minimum`` (4 and 5 bits),
``scale * factor * (q - 32)`` with a factor for each half of a group (6 bits), or ``scale * q`` (8 bits); an activation is ``scale * q`` with a scale of its own row and group. The reference puts the
activations on that grid and multiplies in float32; the kernel (`cpu/linear.cpp`) sums each group in integers. Invariant:
they agree to rounding at every number of rows, and with the kernel a row's result is the same, bit for bit, in any
company. The idea of blocks with a scale is llama.cpp's; the layout is ours.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from agentrt.kernels.cpu.build import load
from agentrt.kernels.packed_memory import packed_memory
from torch import Tensor
from torch.nn.functional import linear, pad

GROUP = 32
_POINTER, _LONG, _INT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """A matrix in few bits.

    Attributes:
        inputs: Columns; the last group may be padded.
        bits: Of a weight: 4, 5, 6 or 8.
        q: [out, groups, 32]: uint8 below 2 ** bits, or int8.
        scale: [out, groups], float16 or float32.
        minimum: The same at 4 and 5 bits.
        factors: int8 [out, groups, 2] at 6 bits.
    """

    inputs: int
    bits: int
    q: Tensor
    scale: Tensor
    minimum: Tensor | None = None
    factors: Tensor | None = None

    def dequantize(self) -> Tensor:
        """The matrix in float32, [out, in]."""
        if self.factors is not None:
            scales = self.scale.float().unsqueeze(-1) * self.factors.float()
            return (self.q.float() - _middle(self.bits)).mul_(scales.repeat_interleave(GROUP // 2, -1)).flatten(1)[:, : self.inputs]
        values = self.q.float().mul_(self.scale.float().unsqueeze(-1))
        if self.minimum is not None:
            values.add_(self.minimum.float().unsqueeze(-1))
        return values.flatten(1)[:, : self.inputs]

    def in_8_bits(self, values: Tensor) -> QuantizedWeight:
        """The matrix in 8 bits: the same numbers, if the middle one of q means 0 in all groups, else rounded anew.

        Args:
            values: [out, in], what the matrix means.
        """
        if self.bits == 8:
            return self
        if _centred(self):
            return QuantizedWeight(self.inputs, 8, self.q.to(torch.int8) - _middle(self.bits), self.scale)
        return QuantizedWeight.of(values, 8)

    @classmethod
    def of(cls, weight: Tensor, bits: int) -> QuantizedWeight:
        """Quantises a matrix: at 4 bits from each group's smallest value to its largest, at 8 bits symmetrically.

        Args:
            weight: [out, in].
            bits: 4 or 8.
        """
        groups = _grouped(weight.float())
        low = groups.amin(-1)
        high = groups.amax(-1)
        if bits == 8:
            (scale,) = compact(torch.maximum(high, -low) / 127)
            q = _divided(groups, scale).round_().clamp_(-127, 127).to(torch.int8)
            return cls(weight.shape[1], 8, q, scale)
        scale, minimum = compact((high - low) / 15, low)
        q = _divided(groups - minimum.float().unsqueeze(-1), scale).round_().clamp_(0, 15).to(torch.uint8)
        return cls(weight.shape[1], 4, q, scale, minimum)


def on_grid(x: Tensor) -> Tensor:
    """Activations as the kernel sees them: each group of a row on a grid of 255 values around 0.

    Args:
        x: [rows, in].

    Returns:
        float32 [rows, in]; NaN in groups where something is not finite.
    """
    groups = _grouped(x.float())
    largest = groups.abs().amax(-1, keepdim=True)
    inverse = torch.full_like(largest, 127).div_(largest)  # 127 / largest is its reciprocal times 127, rounded twice
    q = torch.where(inverse.isfinite(), groups * inverse, 0.0).round()
    scale = torch.where(largest.isfinite(), largest / 127, torch.nan)
    return q.mul_(scale).flatten(1)[:, : x.shape[1]]


def reference(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """What the kernel computes, in torch.

    Args:
        x: [rows, in].
        weight: float32 [out, in], dequantised.
        bias: [out] or None.

    Returns:
        [rows, out] in the dtype of x.
    """
    return linear(on_grid(x), weight, None if bias is None else bias.float()).to(x.dtype)


def quantized_linear(weight: QuantizedWeight, bias: Tensor | None) -> Callable[[Tensor], Tensor]:
    """The layer: on the native kernel where there is one, else on the reference, which holds the weights in float32.

    Returns:
        [rows, in] -> [rows, out], in the dtype that came in.
    """
    native = _native() if weight.q.device.type == "cpu" else None
    if native is None:
        return functools.partial(reference, weight=weight.dequantize(), bias=bias)
    return NativeLinear(native, pack(native, weight), bias)


def packed_linear(weight: PackedWeight, bias: Tensor | None) -> NativeLinear:
    """The layer on the native kernel, which must be there, of a weight that lies as it wants it."""
    native = _native()
    if native is None:
        raise ValueError("there is no native kernel for a packed weight")
    return NativeLinear(native, weight, bias)


def isa() -> str | None:
    """The instructions that the native kernel was compiled for; weights are packed to suit them. None: there is no kernel."""
    library = _native()
    if library is None:
        return None
    name: bytes = library.linear_isa()
    return name.decode()


def is_fast() -> bool:
    """Whether there is a kernel in this processor's vector instructions, so that fewer bits mean less time."""
    return isa() not in (None, "plain C")


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """A matrix in the native kernel's own layout.

    Attributes:
        inputs, outputs: Columns and rows.
        bits: Of a weight: 4, 5, 6 or 8.
        half: Whether scales are float16, not float32.
        minima: Whether it has minima; without, they are -8 times their scales at 4 bits, -16 times at 5.
        packed: uint8, begins at a cache line.
    """

    inputs: int
    outputs: int
    bits: int
    half: bool
    minima: bool
    packed: Tensor


def pack(library: ctypes.CDLL, weight: QuantizedWeight) -> PackedWeight:
    """Packs a weight, in memory that is its own."""
    outputs, groups, _ = weight.q.shape
    half = weight.scale.dtype == torch.float16
    minimum = None if weight.minimum is None or _centred(weight) else weight.minimum.contiguous()
    packed = packed_memory.take(library.linear_packed_bytes(outputs, groups, weight.bits, half, minimum is not None))
    q, scale = weight.q.contiguous(), weight.scale.contiguous()
    factors = None if weight.factors is None else weight.factors.contiguous()
    library.linear_pack(
        *(q.data_ptr(), scale.data_ptr(), _address(minimum), _address(factors)),
        *(outputs, groups, weight.bits, half, packed.data_ptr(), torch.get_num_threads()),
    )
    return PackedWeight(weight.inputs, outputs, weight.bits, half, minimum is not None, packed)


class NativeLinear:
    """The layer on the native kernel.

    Attributes:
        weight: What it multiplies by.
    """

    def __init__(self, library: ctypes.CDLL, weight: PackedWeight, bias: Tensor | None) -> None:
        """Takes the weight as it is."""
        self.weight = weight
        self._run = library.linear_run
        self._inputs, self._outputs = weight.inputs, weight.outputs
        self._bits, self._half, self._minima = weight.bits, int(weight.half), int(weight.minima)
        self._bias = None if bias is None else bias.float().contiguous()
        # Tensors never move, so their addresses are asked once.
        self._addresses = (weight.packed.data_ptr(), _address(self._bias))

    @property
    def held(self) -> tuple[int, int | None, int, int, int, int, int]:
        """For native callers of `linear_run`: addresses of the packed weights and the bias, inputs, outputs, bits, half, minima."""
        return (*self._addresses, self._inputs, self._outputs, self._bits, self._half, self._minima)

    def __call__(self, x: Tensor) -> Tensor:
        """[rows, in] -> [rows, out], in the dtype that came in."""
        rows = x.shape[0]
        values = x if x.dtype == torch.float32 else x.float()
        if values.stride(1) != 1:
            values = values.contiguous()
        y = torch.empty(rows, self._outputs)
        packed, bias = self._addresses
        self._run(
            values.data_ptr(),
            values.stride(0),
            rows,
            self._inputs,
            packed,
            self._bits,
            self._half,
            self._minima,
            bias,
            y.data_ptr(),
            self._outputs,
            self._outputs,
            torch.get_num_threads(),
        )
        return y if x.dtype == torch.float32 else y.to(x.dtype)


def _native() -> ctypes.CDLL | None:
    """The library with its functions' types, or None; `load` remembers it."""
    library = load("linear")
    if library is not None:
        library.linear_isa.restype = ctypes.c_char_p
        library.linear_packed_bytes.argtypes = (_LONG, _LONG, _INT, _INT, _INT)
        library.linear_packed_bytes.restype = _LONG
        library.linear_pack.argtypes = (_POINTER, _POINTER, _POINTER, _POINTER, _LONG, _LONG, _INT, _INT, _POINTER, _INT)
        library.linear_pack.restype = None
        library.linear_run.argtypes = (
            *(_POINTER, _LONG, _LONG, _LONG),  # x, its stride, rows, inputs
            *(_POINTER, _INT, _INT, _INT, _POINTER),  # packed, bits, half, minima, bias
            *(_POINTER, _LONG, _LONG, _INT),  # y, its stride, outputs, threads
        )
        library.linear_run.restype = None
    return library


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _middle(bits: int) -> int:
    """Of q that have no sign."""
    return 1 << (bits - 1)


def _centred(weight: QuantizedWeight) -> bool:
    """Whether the middle one of q means 0 in all groups, so that the kernel needs not be told minima."""
    return weight.minimum is not None and torch.equal(weight.minimum, weight.scale * -_middle(weight.bits))


def _grouped(x: Tensor) -> Tensor:
    """[rows, in] to [rows, groups, 32], padded with zeros."""
    missing = -x.shape[1] % GROUP
    return (pad(x, (0, missing)) if missing else x).unflatten(1, (-1, GROUP))


def compact(*parts: Tensor) -> tuple[Tensor, ...]:
    """Float16 where that loses no more than its 11 bits, else float32; all parts alike."""
    smallest, largest = torch.finfo(torch.float16).tiny, torch.finfo(torch.float16).max
    fits = all(bool(((part == 0) | ((part.abs() >= smallest) & (part.abs() <= largest))).all()) for part in parts)
    return tuple(part.half() for part in parts) if fits else parts


def _divided(groups: Tensor, scale: Tensor) -> Tensor:
    """Groups by their scales; 0 where the scale is."""
    inverse = 1 / scale.float().unsqueeze(-1)
    return groups * torch.where(inverse.isfinite(), inverse, 0.0)
