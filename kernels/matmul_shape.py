"""How the matrix products cut their output: one place for the block sizes of all of them, by the number of rows.

It knows nothing of what a weight looks like. Weights are [out, in]; blocks are rows x out, and `depth` of `in` at a time.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class MatmulShape:
    """Rows and outputs of a program, inputs that it takes at a time, and its launch."""

    rows: int
    outputs: int
    depth: int
    warps: int
    stages: int


def matmul_shape(rows: int, most_depth: int = 128) -> MatmulShape:
    """The blocks for so many rows: few rows are bound by reading the weight, many by arithmetic.

    Args:
        rows: Of the activations.
        most_depth: At most so many inputs at a time, for weights that take many registers to unpack.
    """
    if rows <= 16:
        return MatmulShape(16, 32, min(128, most_depth), 4, 4)
    if rows <= 64:
        return MatmulShape(64, 64, min(128, most_depth), 4, 3)
    return MatmulShape(128, 128, min(64, most_depth), 8, 3)
