"""The seam behind which every matrix of a model stands: a weight goes in, a callable comes out.

The decoder never multiplies by itself, so another way to hold a weight is another `LinearFactory`, handed to the loader.
Invariant: whatever the factory, a row's result does not depend on its neighbours.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from functools import partial
from itertools import groupby

import torch
from torch import Tensor
from torch.nn.functional import linear

from agentrt.kernels.quantized_linear import QuantizedWeight, quantized_linear

Linear = Callable[[Tensor], Tensor]  #: [rows, in] -> [rows, out], in the dtype that came in
LinearFactory = Callable[[str, Tensor, Tensor | None], Linear]  #: name, weight [out, in], bias [out] or None

#: The weight's name -> its parts as a checkpoint has them quantised, rows in order; empty: it has not.
StoredWeights = Callable[[str], Sequence[QuantizedWeight]]

#: One part and its bias -> what multiplies by it.
Hold = Callable[[QuantizedWeight, Tensor | None], Linear]

_HEAD = "lm_head"


def dense(name: str, weight: Tensor, bias: Tensor | None) -> Linear:
    """The weight as it is."""
    del name
    return partial(linear, weight=weight, bias=bias)


class Quantized:
    """Weights in 4 or 8 bits: as the checkpoint has them, if it has them so, else quantised here.

    "4 bits" means none below 4: what a checkpoint holds in 5, 6 or 8 bits stays so, and an output head that it holds in
    float gets 8, since a head's errors reach the logits at once. "8 bits" means 8 for every weight.
    """

    def __init__(self, bits: int, stored: StoredWeights, hold: Hold = quantized_linear, held: Container[int] = (4, 5, 6, 8)) -> None:
        """A factory.

        Args:
            bits: 4 or 8.
            stored: What the checkpoint has.
            hold: What multiplies: a CPU's kernel, unless told otherwise.
            held: Bits that it takes; the checkpoint's others become 8.
        """
        self._bits = bits
        self._held = (8,) if bits == 8 else held
        self._stored = stored
        self._hold = hold

    def __call__(self, name: str, weight: Tensor, bias: Tensor | None) -> Linear:
        """Holds one matrix."""
        bits = 8 if name == _HEAD else self._bits
        parts = list(self._stored(f"{name}.weight")) or [QuantizedWeight.of(weight, bits)]
        rows = [part.q.shape[0] for part in parts]
        joined = _joined(
            [part if part.bits in self._held else part.in_8_bits(values) for part, values in zip(parts, weight.split(rows), strict=True)]
        )
        biases = [None] * len(joined) if bias is None else bias.split([part.q.shape[0] for part in joined])
        linears = [self._hold(part, own) for part, own in zip(joined, biases, strict=True)]
        return linears[0] if len(linears) == 1 else SideBySide(linears)


def _joined(parts: list[QuantizedWeight]) -> list[QuantizedWeight]:
    """Neighbours of one format become one."""
    joined = []
    for _, group in groupby(parts, lambda part: (part.bits, part.scale.dtype)):
        alike = list(group)
        minimum, factors = (_together([getattr(part, name) for part in alike]) for name in ("minimum", "factors"))
        q, scale = torch.cat([part.q for part in alike]), torch.cat([part.scale for part in alike])
        joined.append(QuantizedWeight(alike[0].inputs, alike[0].bits, q, scale, minimum, factors))
    return joined


def _together(tensors: Sequence[Tensor | None]) -> Tensor | None:
    """All, or none of them are there."""
    there = [tensor for tensor in tensors if tensor is not None]
    return torch.cat(there) if there else None


class SideBySide:
    """Matrices on the same input, whose outputs are put one after the other.

    Attributes:
        parts: In order.
    """

    def __init__(self, parts: Sequence[Linear]) -> None:
        self.parts = tuple(parts)

    def __call__(self, x: Tensor) -> Tensor:
        """[rows, in] -> [rows, out]."""
        return torch.cat([part(x) for part in self.parts], -1)


def parts(matrix: Linear) -> tuple[Linear, ...]:
    """What a matrix is put together from; itself, if it is one."""
    return matrix.parts if isinstance(matrix, SideBySide) else (matrix,)
