"""Logits as blocks of 64, made ready to be chosen from: what may not be chosen is minus infinity, and the largest of each block is known.

On a CPU a native kernel reads and writes each logit once (`kernels/cpu/logits.cpp`); elsewhere, and where it cannot be built,
torch's operators do the same in several passes. Invariant: both give the same numbers, and a row's never depend on its neighbours.
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
_POINTER, _LONG, _INT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int


@dataclass(frozen=True, slots=True)
class LogitBlocks:
    """Logits that can be chosen from.

    Attributes:
        values: float32 [rows, blocks, 64]; -inf for tokens that cannot be chosen, also in rows that are not finite.
        tops: float32 [rows, blocks]: the largest of each block.
        finite: bool [rows]: whether the model's logits were.
    """

    values: Tensor
    tops: Tensor
    finite: Tensor


class LogitBlocker:
    """Makes `LogitBlocks` for one vocabulary."""

    def __init__(self, valid: Tensor) -> None:
        """Takes what holds for every row.

        Args:
            valid: bool [vocab]: ids that stand for a token; the others are never chosen.
        """
        whole = pad(valid.cpu(), (0, -len(valid) % BLOCK))
        self._valid = np.packbits(whole.numpy(), bitorder="little").view(np.uint32)
        self._invalid_ids = (~whole).nonzero()[:, 0]

    def blocks(self, logits: Tensor, masks: Sequence[NDArray[np.int32] | None]) -> LogitBlocks:
        """Forbids what is not valid and what masks do not allow.

        Args:
            logits: float32 [rows, vocab]; changed in place.
            masks: For each row, int32 [words], bit i of word w set if token 32 w + i is allowed, tokens beyond it are not; None: all are.
        """
        missing = -logits.shape[1] % BLOCK
        whole = pad(logits, (0, missing)) if missing else logits.contiguous()  # models nearly always have whole blocks
        words, mask_of_row = _stacked(masks, len(self._valid))
        library = _native() if logits.device.type == "cpu" else None
        if library is None:
            return self._by_torch(whole, words, mask_of_row)
        return self._by_kernel(library, whole, words, mask_of_row)

    def _by_kernel(self, library: ctypes.CDLL, logits: Tensor, words: NDArray[np.uint32], mask_of_row: NDArray[np.int32]) -> LogitBlocks:
        values = logits.view(len(logits), -1, BLOCK)
        tops, finite = torch.empty(values.shape[:2]), torch.empty(len(logits), dtype=torch.bool)
        addresses = (logits.data_ptr(), self._valid.ctypes.data, words.ctypes.data, mask_of_row.ctypes.data, tops.data_ptr(), finite.data_ptr())
        library.agentrt_block_tops(*addresses, *values.shape[:2], torch.get_num_threads())
        return LogitBlocks(values, tops, finite)

    def _by_torch(self, logits: Tensor, words: NDArray[np.uint32], mask_of_row: NDArray[np.int32]) -> LogitBlocks:
        finite = _finite(logits)
        if len(self._invalid_ids):
            logits.index_fill_(1, self._invalid_ids.to(logits.device), -torch.inf)
        if len(words):
            rows = torch.from_numpy(np.flatnonzero(mask_of_row >= 0)).to(logits.device)
            codes = torch.from_numpy(words.view(np.uint8)).to(logits.device).view(-1).int()
            added = _added(logits.device).index_select(0, codes).view(len(words), -1)
            logits.index_add_(0, rows, added)
        values = logits.view(len(logits), -1, BLOCK)
        return LogitBlocks(values, values.amax(-1), finite)


def _stacked(masks: Sequence[NDArray[np.int32] | None], width: int) -> tuple[NDArray[np.uint32], NDArray[np.int32]]:
    """The masks there are, uint32 [n, width], and which of them is each row's, int32 [rows], -1 for none."""
    places = [index for index, mask in enumerate(masks) if mask is not None]
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
        library.agentrt_block_tops.argtypes = (*[_POINTER] * 6, _LONG, _LONG, _INT)
        library.agentrt_block_tops.restype = None
    return library
