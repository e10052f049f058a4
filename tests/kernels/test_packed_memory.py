"""Memory for packed weights: pieces lie apart, whoever asks, and stay when others go."""

from __future__ import annotations

import itertools
from concurrent.futures import ThreadPoolExecutor

import torch
from agentrt.kernels.packed_memory import BLOCK, LINE, PackedMemory

SIZES = [1, 63, 64, 65, 1000, BLOCK // 2 + 1, BLOCK // 3, BLOCK // 3, BLOCK // 3, BLOCK + 7, 5] + [100_000] * 400


def test_pieces_lie_apart_at_cache_lines():
    memory = PackedMemory()
    with ThreadPoolExecutor(4) as threads:
        pieces = list(threads.map(memory.take, SIZES))
    assert [piece.numel() for piece in pieces] == SIZES
    assert all(piece.dtype == torch.uint8 for piece in pieces)
    spans = sorted((piece.data_ptr(), piece.data_ptr() + piece.numel()) for piece in pieces)
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))
    assert all(start % LINE == 0 for start, _ in spans)


def test_a_piece_stays_when_its_neighbours_go():
    memory = PackedMemory()
    first, second = memory.take(BLOCK // 3), memory.take(BLOCK // 3)
    assert first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()
    second.fill_(7)
    del first, memory
    assert (second == 7).all()
