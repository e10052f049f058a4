"""Checkpoints that others have quantised (GPTQ, AWQ, fp8), under the names and shapes of float ones.

Each `x.weight` is dequantised exactly to float32 when it is read, and is at hand in the kernels' format where it fits
that. GPTQ (Frantar et al., 2022) and AWQ (Lin et al., 2023) pack eight 4-bit values into an int32: GPTQ along the input,
with a zero that AutoGPTQ stores less one; AWQ along the output, in an order that suits its GPU kernel. fp8 has a scale a
tensor, a row or a square block. Invariant: what `quantized` returns dequantises to what `read` returns, but for weights
whose groups do not lie along 32 neighbouring inputs, which come in 8 bits.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from agentrt.errors import ModelError
from agentrt.kernels.quantized_linear import GROUP, QuantizedWeight

_AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)  #: At which of an int32's nibbles, from the lowest, each output lies.
_SCALE_NAMES = ("weight_scale_inv", "weight_scale")
_OF_ACTIVATIONS = ("input_scale", "k_scale", "v_scale", "q_scale")  #: For arithmetic in fp8, which is not done here.
_SCALED_KINDS = ("float-quantized", "int-quantized", "naive-quantized")


@dataclass(frozen=True, slots=True)
class AwqWeight:
    """A matrix as AWQ packs it; see `agentrt.kernels.awq_matmul`.

    Attributes:
        codes: int32 [in, out / 8].
        zeros: int32 [groups, out / 8].
        scales: float16 [groups, out].
    """

    codes: Tensor
    zeros: Tensor
    scales: Tensor

    @property
    def bits(self) -> int:
        """Of a weight."""
        return 4


@dataclass(frozen=True, slots=True)
class RowScaled:
    """A matrix of 8 bits with one scale an output.

    Attributes:
        q: float8_e4m3fn or int8 [out, in].
        scale: float32 [out].
    """

    q: Tensor
    scale: Tensor

    @property
    def bits(self) -> int:
        """Of a weight."""
        return 8


class Files(Protocol):
    """Tensors by name."""

    folder: Path

    def __contains__(self, name: object) -> bool: ...

    def __iter__(self) -> Iterator[str]: ...

    def read(self, name: str) -> Tensor:
        """The tensor of that name."""
        ...


class QuantizedFiles:
    """A quantised checkpoint's tensors as those of a float one."""

    def __init__(self, files: Files, config: Mapping[str, Any]) -> None:
        """Wraps the files.

        Args:
            files: As they are stored.
            config: `quantization_config` of config.json.

        Raises:
            ModelError: It is a kind that agentrt does not read.
        """
        self.folder = files.folder
        self._files = files
        self._packing = _Packing.read(files.folder, config)
        self._packed = {name.removesuffix("qweight") + "weight" for name in files if name.endswith(".qweight")}

    def __contains__(self, name: object) -> bool:
        return name in self._packed or name in self._files

    def __iter__(self) -> Iterator[str]:
        parts = ("qweight", "qzeros", "scales", "g_idx", *_SCALE_NAMES, *_OF_ACTIVATIONS)
        yield from self._packed
        yield from (name for name in self._files if name.rpartition(".")[2] not in parts)

    def read(self, name: str) -> Tensor:
        """The tensor of that name, dequantised.

        Raises:
            ModelError: If it is not there.
        """
        if name in self._packed:
            return self._parts(name).dequantize()
        return self._scaled(name, self._files.read(name))

    def quantized(self, name: str) -> QuantizedWeight | None:
        """The tensor of that name in the kernels' format; None if the checkpoint has it in float or fp8."""
        return self._parts(name).compact() if name in self._packed else None

    def packed(self, name: str) -> AwqWeight | RowScaled | None:
        """The tensor of that name as it lies in the checkpoint, where that is a layout that a GPU's kernel multiplies."""
        if name in self._packed:
            stem = name.removesuffix("weight")
            codes, zeros, scales = (self._files.read(f"{stem}{part}") for part in ("qweight", "qzeros", "scales"))
            whole = self._packing.method == "awq" and codes.shape[0] // zeros.shape[0] % GROUP == 0
            return AwqWeight(codes, zeros, scales) if whole else None
        scale = self._scale(name)
        if scale is None:
            return None
        weight = self._files.read(name)
        if weight.dtype not in (torch.float8_e4m3fn, torch.int8) or not self._packing.by_row(weight, scale):
            return None
        return RowScaled(weight, scale.float().reshape(-1).expand(weight.shape[0]).contiguous())

    def _parts(self, name: str) -> _Grouped:
        stem = name.removesuffix("weight")
        g_idx = self._files.read(f"{stem}g_idx") if f"{stem}g_idx" in self._files else None
        return self._packing.unpack(*(self._files.read(f"{stem}{part}") for part in ("qweight", "qzeros", "scales")), g_idx)

    def _scaled(self, name: str, weight: Tensor) -> Tensor:
        """Weight times its scale, if it has one: of the tensor, of each row, or of each square block."""
        scale = self._scale(name)
        if scale is not None:
            return self._packing.scaled(weight, scale)
        if weight.dtype in (torch.float8_e4m3fn, torch.float8_e5m2, torch.int8):
            raise ModelError(f"{self.folder}: {name} is {weight.dtype} and has no scale beside it")
        return weight

    def _scale(self, name: str) -> Tensor | None:
        for scale_name in _SCALE_NAMES:
            stored = name.removesuffix("weight") + scale_name
            if name.endswith(".weight") and stored in self._files:
                return self._files.read(stored)
        return None


class _Grouped:
    """A matrix as GPTQ and AWQ mean it: value = scale * (q - zero), where inputs of one group share scale and zero."""

    def __init__(self, q: Tensor, zero: Tensor, scale: Tensor, group: Tensor, bits: int) -> None:
        """Takes q uint8 [out, in], zero and scale [out, groups], and each input's group [in]."""
        self._q, self._zero, self._scale, self._group, self._bits = q, zero, scale.float(), group.long(), bits

    def dequantize(self) -> Tensor:
        """float32 [out, in]."""
        return (self._q.float() - self._zero.float()[:, self._group]) * self._scale[:, self._group]

    def compact(self) -> QuantizedWeight:
        """The kernels' format: exact if each 32 neighbours are of one group."""
        inputs = self._q.shape[1]
        groups = self._group[::GROUP]
        neighbours = bool((self._group == groups.repeat_interleave(GROUP)[:inputs]).all())
        if neighbours and inputs % GROUP == 0:
            q, zero, scale = self._q.unflatten(1, (-1, GROUP)), self._zero[:, groups], self._scale[:, groups]
            if self._bits == 4:
                return QuantizedWeight(inputs, 4, q, scale, -scale * zero)
            if bool((zero == 128).all()):
                return QuantizedWeight(inputs, 8, (q ^ 128).view(torch.int8), scale)
        return QuantizedWeight.of(self.dequantize(), 8)


@dataclass(frozen=True, slots=True)
class _Packing:
    """How a checkpoint packs, from its quantization_config.

    Attributes:
        method: "gptq", "awq", or "scaled" where nothing is packed.
        bits: Of a weight.
        zero_plus: What is to be added to a stored zero.
        group_size: Inputs of a group; 0: all.
        block: Rows and columns that share a scale in fp8; None: the scales' shape says it.
    """

    method: Literal["gptq", "awq", "scaled"]
    bits: int = 8
    zero_plus: int = 0
    group_size: int = 0
    block: tuple[int, int] | None = None

    @classmethod
    def read(cls, folder: Path, config: Mapping[str, Any]) -> _Packing:
        """Reads it, or says what is not supported."""
        method, bits = config.get("quant_method"), config.get("bits", config.get("w_bit"))
        group_size = max(0, int(config.get("group_size", config.get("q_group_size", 0))))
        if method == "gptq" and bits in (4, 8):
            return cls("gptq", bits, 0 if config.get("checkpoint_format") == "gptq_v2" else 1, group_size)
        if method == "awq" and bits == 4 and str(config.get("version", "gemm")).lower() == "gemm":
            return cls("awq", bits, 0, group_size)
        if method == "fp8" or (method == "compressed-tensors" and config.get("format") in _SCALED_KINDS):
            block = config.get("weight_block_size")
            return cls("scaled", block=None if block is None else (int(block[0]), int(block[1])))
        told = {key: config[key] for key in ("quant_method", "bits", "version", "format") if key in config}
        raise ModelError(
            f"{folder} is quantised in a way that agentrt does not read: {told}; it reads gptq of 4 or 8 bits, awq (gemm) of"
            " 4, fp8, and compressed-tensors with a scale a row or tensor",
            param="model",
        )

    def unpack(self, qweight: Tensor, qzeros: Tensor, scales: Tensor, g_idx: Tensor | None) -> _Grouped:
        """One matrix.

        Args:
            qweight: int32 [in / packed, out] of GPTQ, [in, out / packed] of AWQ.
            qzeros: int32 [groups, out / packed].
            scales: [groups, out].
            g_idx: Each input's group, [in]; None: neighbours.
        """
        if self.method == "awq":
            q, zero = (_unpacked(packed, 4).unflatten(1, (-1, 8))[..., _AWQ_PLACES].flatten(1) for packed in (qweight, qzeros))
            q = q.T.contiguous()
        else:
            q, zero = _unpacked(qweight.T.contiguous(), self.bits), _unpacked(qzeros, self.bits)
        group = torch.arange(q.shape[1]) // (self.group_size or q.shape[1]) if g_idx is None else g_idx
        return _Grouped(q, zero.T.to(torch.int16) + self.zero_plus, scales.T, group, self.bits)

    def by_row(self, weight: Tensor, scale: Tensor) -> bool:
        """Whether one scale, or a scale a row, is all there is."""
        return (self.block is None or scale.dim() < 2) and scale.numel() in (1, weight.shape[0])

    def scaled(self, weight: Tensor, scale: Tensor) -> Tensor:
        """A matrix [out, in] times one scale, a scale a row, or a scale a block."""
        if self.block is None or scale.dim() < 2:
            return weight.float() * (scale.float() if scale.numel() == 1 else scale.float().reshape(-1, 1))
        spread = scale.float().repeat_interleave(self.block[0], 0).repeat_interleave(self.block[1], 1)
        return weight.float() * spread[: weight.shape[0], : weight.shape[1]]


def _unpacked(packed: Tensor, bits: int) -> Tensor:
    """int32 [rows, words] to uint8 [rows, values], each word's lowest bits first."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    return ((packed.unsqueeze(-1) >> shifts) & ((1 << bits) - 1)).to(torch.uint8).flatten(1)
