"""The seam behind which every matrix of a model stands: a weight goes in, a callable comes out.

The decoder never multiplies by itself, so another way to hold a weight (4-bit, 8-bit, picked by the number of rows) is
another `LinearFactory`, handed to the loader.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import Tensor
from torch.nn.functional import linear

Linear = Callable[[Tensor], Tensor]  #: [rows, in] -> [rows, out], in the dtype that came in
LinearFactory = Callable[[str, Tensor, Tensor | None], Linear]  #: name, weight [out, in], bias [out] or None


def dense(name: str, weight: Tensor, bias: Tensor | None) -> Linear:
    """The weight as it is."""
    del name
    return partial(linear, weight=weight, bias=bias)
