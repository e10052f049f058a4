"""Memory that matrices are packed into, piece after piece, in large pages where the system has them.

A step of one row reads every weight once, and with small pages the walks that find them take a fifth of its time. A
matrix may be smaller than a large page, so matrices share blocks. It is no allocator: nothing is handed out twice, and a
block goes when the last tensor in it does. Invariant: pieces never overlap, and begin at a cache line.
"""

from __future__ import annotations

import contextlib
import mmap
import sys
import threading

import torch
from torch import Tensor

BLOCK = 1 << 25  #: Bytes that small pieces share.
LINE = 64  #: Bytes of a cache line.


class PackedMemory:
    """Hands out pieces; may be asked by several threads."""

    def __init__(self) -> None:
        """Starts without a block."""
        self._rest = torch.empty(0, dtype=torch.uint8)
        self._lock = threading.Lock()

    def take(self, size: int) -> Tensor:
        """A piece that nobody else has.

        Args:
            size: Bytes.

        Returns:
            uint8 [size], not written to.
        """
        if 2 * size > BLOCK:
            return _block(size)
        whole = -(-size // LINE) * LINE
        with self._lock:
            if whole > self._rest.numel():
                self._rest = _block(BLOCK)
            piece, self._rest = self._rest[:size], self._rest[whole:]
        return piece


def _block(size: int) -> Tensor:
    if sys.platform != "linux":
        return torch.empty(size, dtype=torch.uint8)
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without large pages refuses; small ones do
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)


packed_memory = PackedMemory()  #: For all matrices of this process.
