"""Quantised matrices as a GGUF file has them, from a converted folder to the kernels' format, without going through float.

The layouts are ggml's (https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h). Invariant: a matrix dequantises to the very float32 values of
the converted folder.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from agentrt.hub.model_cache import BLOCKS_FILE
from agentrt.kernels.quantized_linear import QuantizedWeight


class GgufBlocks:
    """The quantised matrices of a converted folder; there are none in other folders."""

    def __init__(self, folder: Path) -> None:
        """Opens the folder's file of blocks, if it has one."""
        path = folder / BLOCKS_FILE
        self._file: Any = safe_open(path, framework="pt") if path.exists() else None
        self._kinds: dict[str, str] = {} if self._file is None else self._file.metadata() or {}

    def __bool__(self) -> bool:
        """Whether there are any."""
        return bool(self._kinds)

    def __call__(self, name: str) -> list[QuantizedWeight]:
        """The parts of a matrix, its rows in order; empty if it is not stored quantised.

        Args:
            name: Such as "model.layers.0.mlp.down_proj.weight".
        """
        parts: list[QuantizedWeight] = []
        while (part := f"{name}.{len(parts)}") in self._kinds:
            parts.append(from_blocks(self._kinds[part], self._file.get_tensor(part)))
        return parts


def from_blocks(kind: str, raw: Tensor) -> QuantizedWeight:
    """One matrix.

    Args:
        kind: GGML's name of the type.
        raw: uint8 [out, bytes a row].
    """
    return _KINDS[kind](raw)


def _q4_0(raw: Tensor) -> QuantizedWeight:
    """Scale, 16 bytes of two halves; value = scale * (q - 8)."""
    blocks = raw.unflatten(1, (-1, 18))
    scale = _halfs(blocks[..., :2])
    return QuantizedWeight(blocks.shape[1] * 32, 4, _nibbles(blocks[..., 2:]), scale, scale * -8)


def _q4_1(raw: Tensor) -> QuantizedWeight:
    """Scale, minimum, 16 bytes of two halves."""
    blocks = raw.unflatten(1, (-1, 20))
    q = _nibbles(blocks[..., 4:])
    return QuantizedWeight(blocks.shape[1] * 32, 4, q, _halfs(blocks[..., :2]), _halfs(blocks[..., 2:4]))


def _q8_0(raw: Tensor) -> QuantizedWeight:
    """Scale, 32 bytes."""
    blocks = raw.unflatten(1, (-1, 34))
    return QuantizedWeight(blocks.shape[1] * 32, 8, blocks[..., 2:].contiguous().view(torch.int8), _halfs(blocks[..., :2]))


def _q5_0(raw: Tensor) -> QuantizedWeight:
    """Scale, 32 fifth bits, 16 bytes of two halves; value = scale * (q - 16)."""
    blocks = raw.unflatten(1, (-1, 22))
    scale = _halfs(blocks[..., :2])
    return QuantizedWeight(blocks.shape[1] * 32, 5, _with_fifths(blocks[..., 2:]), scale, scale * -16)


def _q5_1(raw: Tensor) -> QuantizedWeight:
    """Scale, minimum, 32 fifth bits, 16 bytes of two halves."""
    blocks = raw.unflatten(1, (-1, 24))
    return QuantizedWeight(blocks.shape[1] * 32, 5, _with_fifths(blocks[..., 4:]), _halfs(blocks[..., :2]), _halfs(blocks[..., 2:4]))


def _q4_k(raw: Tensor) -> QuantizedWeight:
    """Eight groups: their scales, then four times 32 bytes of two halves."""
    blocks = raw.unflatten(1, (-1, 144))
    return QuantizedWeight(blocks.shape[1] * 256, 4, _eight_groups(blocks[..., 16:]).flatten(1, 2), *_eight_scales(blocks))


def _q5_k(raw: Tensor) -> QuantizedWeight:
    """Eight groups: their scales, 32 bytes of which bit n is a fifth one of group n, then four times 32 bytes of two halves."""
    blocks = raw.unflatten(1, (-1, 176))
    fifth = (blocks[..., 16:48].unsqueeze(-2) >> torch.arange(8, dtype=torch.uint8).unsqueeze(-1)) & 1
    q = _eight_groups(blocks[..., 48:]) | fifth << 4
    return QuantizedWeight(blocks.shape[1] * 256, 5, q.flatten(1, 2), *_eight_scales(blocks))


def _q6_k(raw: Tensor) -> QuantizedWeight:
    """Twice 64 bytes of two halves, four upper bits of as many numbers in each of twice 32 bytes, a factor for each 16 numbers, a scale for all."""
    blocks = raw.unflatten(1, (-1, 210))
    lower, upper = blocks[..., :128].unflatten(-1, (2, 1, 64)), blocks[..., 128:192].unflatten(-1, (2, 1, 32))
    twos = torch.tensor((0, 2, 4, 6), dtype=torch.uint8).unsqueeze(-1)
    q = torch.cat((lower & 15, lower >> 4), -2).flatten(-3) | (upper >> twos & 3).flatten(-3) << 4
    factors = blocks[..., 192:208].contiguous().view(torch.int8).unflatten(-1, (8, 2))
    scale = _halfs(blocks[..., 208:]).unsqueeze(-1).expand(-1, -1, 8).flatten(1)
    return QuantizedWeight(blocks.shape[1] * 256, 6, q.unflatten(-1, (8, 32)).flatten(1, 2), scale, factors=factors.flatten(1, 2))


_KINDS = {"Q4_0": _q4_0, "Q4_1": _q4_1, "Q4_K": _q4_k, "Q5_0": _q5_0, "Q5_1": _q5_1, "Q5_K": _q5_k, "Q6_K": _q6_k, "Q8_0": _q8_0}


def _halfs(pairs: Tensor) -> Tensor:
    """uint8 [..., 2] to float16 [...]."""
    return pairs.contiguous().view(torch.float16).squeeze(-1)


def _nibbles(packed: Tensor) -> Tensor:
    """[..., 16] to [..., 32]: the low halves of all bytes, then the high ones."""
    return torch.cat((packed & 15, packed >> 4), -1)


def _with_fifths(packed: Tensor) -> Tensor:
    """[..., 20] to [..., 32]: the fifth bits of all, then their lower halves as `_nibbles` has them."""
    fifth = (packed[..., :4].unsqueeze(-1) >> torch.arange(8, dtype=torch.uint8)) & 1
    return _nibbles(packed[..., 4:]) | fifth.flatten(-2) << 4


def _eight_groups(packed: Tensor) -> Tensor:
    """[..., 128] to [..., 8, 32]: of each 32 bytes the low halves, then the high ones."""
    four = packed.unflatten(-1, (4, 32))
    return torch.stack((four & 15, four >> 4), -2).flatten(-3, -2)


def _eight_scales(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Scales and minima, [out, groups], of blocks that begin with two scales for all, then a 6-bit scale and minimum for each of eight groups."""
    packed = blocks[..., 4:16]
    low, high, mixed = packed[..., :4], packed[..., 4:8], packed[..., 8:]
    scales = torch.cat((low & 63, (mixed & 15) | (low >> 6) << 4), -1)
    minima = torch.cat((high & 63, (mixed >> 4) | (high >> 6) << 4), -1)
    scale = _halfs(blocks[..., :2]).float().unsqueeze(-1) * scales.float()
    minimum = _halfs(blocks[..., 2:4]).float().unsqueeze(-1) * minima.float()
    return scale.flatten(1), -minimum.flatten(1)
