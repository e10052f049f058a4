"""Finds prefixes that runs of a step have in common, by their slots: the hint of `AttentionBatch.shared`.

A slot holds one token's KV, which depends on every token before it. So two sequences that have the same slot at the
same place have the same slots up to there, and the length that they share is found by bisection.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

LEAST = 64  #: Shorter prefixes are not worth reading apart.


def shared_prefixes(
    slots: Sequence[Tensor], context_lengths: Sequence[int], least: int = LEAST
) -> tuple[tuple[tuple[int, ...], int], ...]:
    """Groups runs so that reading each group's common prefix once saves most.

    Args:
        slots: For each run, int64 [at least its context], on the CPU.
        context_lengths: Cached tokens of each run; a shared prefix is part of the context of all who share it.
        least: Tokens that a prefix must have.

    Returns:
        (runs, tokens) for each group of two or more, every run in at most one; as `AttentionBatch.shared` wants it.
    """
    if len(slots) < 2:
        return ()
    places = [one.numpy() for one in slots]  # a look at a tensor's element takes microseconds
    alike: dict[int, list[int]] = defaultdict(list)
    for run, context in enumerate(context_lengths):
        if context >= least:
            alike[places[run].item(least - 1)].append(run)
    groups: list[tuple[tuple[int, ...], int]] = []
    for runs in alike.values():
        while len(runs) > 1:
            members, length = _best_group(runs, places, context_lengths)
            groups.append((tuple(members), length))
            runs = [run for run in runs if run not in members]
    return tuple(groups)


def _best_group(runs: list[int], slots: Sequence[NDArray[np.int64]], contexts: Sequence[int]) -> tuple[list[int], int]:
    """The leader and those with whom it saves most: with few for long, or with many for less."""
    leader = max(runs, key=lambda run: contexts[run])
    lengths = {run: _common(slots[leader], slots[run], contexts[run]) for run in runs if run != leader}
    others = sorted(lengths, key=lambda run: -lengths[run])
    best = max(range(len(others)), key=lambda last: (last + 1) * lengths[others[last]])
    return [leader, *others[: best + 1]], lengths[others[best]]


def _common(first: NDArray[np.int64], second: NDArray[np.int64], length: int) -> int:
    """How many of the `length` leading slots are the same; they are the same up to a place and differ after it."""
    low, high = 0, length
    while low < high:
        middle = (low + high + 1) // 2
        if first.item(middle - 1) == second.item(middle - 1):
            low = middle
        else:
            high = middle - 1
    return low
