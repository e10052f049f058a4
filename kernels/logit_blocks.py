"""Logits as blocks of 64, made ready to be chosen from: what may not be chosen is minus infinity, and the largest of each block is known.

On a CPU a native kernel reads and writes each logit once (`kernels/cpu/logits.cpp`), and another sums a row's weights; elsewhere, and
where they cannot be built, torch's operators do the same in several passes. Invariant: both forbid the same and find the same largest
logits, weights agree to float32's rounding, and what a row gets never depends on its neighbours.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from agentrt.kernels.cpu.build import load
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad

BLOCK = 64
#: In place of the likeliest token of a row that is not finite; the kernel's number.
SPOILT = -2
#: Below this, exp gives what float32 has no normal number for.
_LIGHTEST = -87.0
#: Logits whose weights are in memory at once.
_PIECE = 1 << 20
_POINTER, _LONG, _INT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int


@dataclass(frozen=True, slots=True)
class LogitBlocks:
    """Logits that can be chosen from.

    Attributes:
        values: float32 [rows, blocks, 64]; -inf for tokens that cannot be chosen, also in rows that are not finite.
        tops: float32 [rows, blocks]: the largest of each block.
        likeliest: int64 [rows]: the token with the largest logit, of equal ones the first; -1 where none may be chosen, `SPOILT` where
            the model's logits were not finite.
    """

    values: Tensor
    tops: Tensor
    likeliest: Tensor

    @property
    def finite(self) -> Tensor:
        """Whether the model's logits were: bool [rows]."""
        return self.likeliest != SPOILT


class LogitBlocker:
    """Makes `LogitBlocks` for one vocabulary."""

    def __init__(self, valid: Tensor) -> None:
        """Takes what holds for every row.

        Args:
            valid: bool [vocab]: ids that stand for a token; the others are never chosen.
        """
        whole = pad(valid.cpu(), (0, -len(valid) % BLOCK))
        self._valid = np.packbits(whole.numpy(), bitorder="little").view(np.uint32)
        self._valid_at = self._valid.ctypes.data
        self._invalid_ids = (~whole).nonzero()[:, 0]

    def blocks(self, logits: Tensor, masks: Sequence[NDArray[np.int32] | None]) -> LogitBlocks:
        """Forbids what is not valid and what masks do not allow.

        Args:
            logits: float32 [rows, vocab]; changed in place.
            masks: For each row, int32 [words], bit i of word w set if token 32 w + i is allowed, tokens beyond it are not; None: all are.
        """
        missing = -logits.shape[1] % BLOCK
        whole = pad(logits, (0, missing)) if missing else logits.contiguous()  # models nearly always have whole blocks
        stacked = _stacked(masks, len(self._valid))
        library = _native() if logits.is_cpu else None
        return self._by_torch(whole, stacked) if library is None else self._by_kernel(library, whole, stacked)

    def _by_kernel(self, library: ctypes.CDLL, logits: Tensor, stacked: _Stacked | None) -> LogitBlocks:
        rows, width = logits.shape
        tops, likeliest = torch.empty((rows, width // BLOCK)), torch.empty(rows, dtype=torch.int64)
        masks = (None, None) if stacked is None else tuple(part.ctypes.data for part in stacked)
        given = (logits.data_ptr(), self._valid_at, *masks, tops.data_ptr(), likeliest.data_ptr())
        library.agentrt_block_tops(*given, rows, width // BLOCK, torch.get_num_threads())
        return LogitBlocks(logits.view(rows, -1, BLOCK), tops, likeliest)

    def _by_torch(self, logits: Tensor, stacked: _Stacked | None) -> LogitBlocks:
        finite = _finite(logits)
        if len(self._invalid_ids):
            logits.index_fill_(1, self._invalid_ids.to(logits.device), -torch.inf)
        if stacked is not None:
            words, mask_of_row = stacked
            rows = torch.from_numpy(np.flatnonzero(mask_of_row >= 0)).to(logits.device)
            codes = torch.from_numpy(words.view(np.uint8)).to(logits.device).view(-1).int()
            added = _added(logits.device).index_select(0, codes).view(len(words), -1)
            logits.index_add_(0, rows, added)
        values = logits.view(len(logits), -1, BLOCK)
        tops = values.amax(-1)
        found = likeliest(values, tops).where(tops.amax(-1) > -torch.inf, -1)
        return LogitBlocks(values, tops, found.where(finite, SPOILT))


def likeliest(values: Tensor, tops: Tensor) -> Tensor:
    """The token with the largest logit of each row, of equal ones the first: int64 [rows].

    Args:
        values, tops: As of `LogitBlocks`.
    """
    block = tops.argmax(-1)
    inside = values[torch.arange(len(block), device=block.device), block].argmax(-1)
    return block * BLOCK + inside


def block_weights(values: Tensor, tops: Tensor, index: Tensor, peaks: Tensor, temperatures: Tensor) -> Tensor:
    """exp((logit - peak) / temperature), summed in each block. A block without a token that weighs anything counts as nothing.

    Args:
        values, tops: As of `LogitBlocks`.
        index: int64 [n], the rows.
        peaks: float32 [n], at least the rows' largest logits.
        temperatures: float32 [n], above 0.

    Returns:
        float32 [n, blocks].
    """
    library = _native() if values.device.type == "cpu" else None
    if library is not None:
        weights = torch.empty(len(index), tops.shape[1])
        given = [each.contiguous() for each in (values, tops, index, peaks, temperatures)]
        library.agentrt_block_weights(*(each.data_ptr() for each in given), weights.data_ptr(), *weights.shape, torch.get_num_threads())
        return weights
    rows = max(1, _PIECE // (tops.shape[1] * BLOCK))
    pieces = zip(*(torch.split(each, rows) for each in (index, peaks, temperatures)), strict=True)
    return torch.cat([_weights_by_torch(values, tops, *piece) for piece in pieces])


def _weights_by_torch(values: Tensor, tops: Tensor, index: Tensor, peaks: Tensor, temperatures: Tensor) -> Tensor:
    """Under a mask most blocks may weigh nothing, and they are not read; exponents are bounded, since exp takes ten times as long below."""
    peaks, temperatures = peaks[:, None, None], temperatures[:, None, None]
    some = (tops.index_select(0, index)[..., None] - peaks).div_(temperatures)[..., 0] > _LIGHTEST
    place = torch.from_numpy(np.flatnonzero(some.cpu().numpy())).to(index.device)
    if 2 * len(place) > some.numel():
        weights = values.index_select(0, index).sub_(peaks).div_(temperatures).clamp_(min=_LIGHTEST).exp_().sum(-1)
        return weights.where(some, 0)
    row, block = place // some.shape[1], place % some.shape[1]
    chosen = values.view(-1, BLOCK).index_select(0, index[row] * some.shape[1] + block)
    weights = chosen.sub_(peaks[row, 0]).div_(temperatures[row, 0]).clamp_(min=_LIGHTEST).exp_().sum(-1)
    return torch.zeros(some.numel(), device=index.device).index_copy_(0, place, weights).view(some.shape)


#: The masks there are, uint32 [n, width], and which of them is each row's, int32 [rows], -1 for none.
_Stacked = tuple[NDArray[np.uint32], NDArray[np.int32]]


def _stacked(masks: Sequence[NDArray[np.int32] | None], width: int) -> _Stacked | None:
    """None if there is no mask."""
    places = [index for index, mask in enumerate(masks) if mask is not None]
    if not places:
        return None
    words, mask_of_row = np.zeros((len(places), width), dtype=np.uint32), np.full(len(masks), -1, dtype=np.int32)
    mask_of_row[places] = np.arange(len(places), dtype=np.int32)
    for row, place in zip(words, places, strict=True):
        mask = masks[place]
        assert mask is not None  # for the type checker
        shared = mask[:width].view(np.uint32)
        row[: len(shared)] = shared
    return words, mask_of_row


def _finite(logits: Tensor) -> Tensor:
    """Whether each row of logits [rows, width] is finite: one NaN or infinity is enough to spoil a sum."""
    finite = logits.sum(1).isfinite()
    for index in (~finite).nonzero()[:, 0].tolist():
        finite[index] = logits[index].isfinite().all()  # a sum also overflows where no logit is infinite
    return finite


@functools.cache
def _added(device: torch.device) -> Tensor:
    """For each byte of a mask, what to add to eight logits: 0 where the bit is set."""
    bits = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
    return torch.from_numpy(np.where(bits, 0, -np.inf).astype(np.float32)).to(device)


@functools.cache
def _native() -> ctypes.CDLL | None:
    """The library with its function's types, or None."""
    library = load("logits")
    if library is not None:
        for function, pointers in ((library.agentrt_block_tops, 6), (library.agentrt_block_weights, 6)):
            function.argtypes, function.restype = (*[_POINTER] * pointers, _LONG, _LONG, _INT), None
    return library
