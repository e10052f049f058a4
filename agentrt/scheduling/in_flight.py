"""Prefixes that running sequences are computing now, so that siblings wait for them instead of computing them too.

Prompts are cut into blocks of whole pages, at least `BLOCK` tokens, each named by a hash of everything up to its end. A
waiting sequence whose next uncached block is in flight gains by waiting; it is *parked* on the last block that it shares with
the sequence that computes it, and woken once: when that block has been published, or its sequence gave up.

Costs: naming is a few passes over the ids, once a sequence and only when it comes to the top of the queue (a prompt of 100,000
tokens: 6,250 names, 50 kB, about 1 ms); a check is a binary search. Two blocks of one name, which 64 bits make unlikely, cost a
needless wait and nothing else: what is reused is decided by the tree, on the ids themselves.
"""

from __future__ import annotations

import os
from array import array
from collections import defaultdict

import numpy as np

from agentrt.scheduling.sequence import Sequence

BLOCK = 16
"""Tokens for which waiting pays, whatever the pages."""

_NO_NAMES = array("q")
_MASK = 2**64 - 1


class InFlight:
    """Who computes which block, and who waits for it."""

    def __init__(self, page_size: int) -> None:
        """Nothing is in flight.

        Args:
            page_size: Tokens a page: only whole pages are published.
        """
        self.block = page_size * -(-BLOCK // page_size)
        self._factors = np.empty(0, dtype=np.uint64)
        self._names: dict[int, array[int]] = {}  # sequence id -> names of its whole blocks, in order
        self._computing: dict[int, int] = {}  # block name -> sequence id
        self._done: dict[int, int] = {}  # sequence id -> blocks of it that are published
        self._parked: defaultdict[int, list[Sequence]] = defaultdict(list)

    def awaited(self, sequence: Sequence, cached_tokens: int) -> int | None:
        """Name of the last block that the waiting sequence lacks and another one is computing now; None if there is none.

        Args:
            sequence: Waits.
            cached_tokens: What the tree has of it.
        """
        first, stop = cached_tokens // self.block, sequence.reuse_limit // self.block
        if not self._computing or first >= stop:
            return None
        names = self._of(sequence)
        if names[first] not in self._computing:
            return None
        while stop - first > 1:  # what is in flight is a beginning of what is lacking
            middle = (first + stop) // 2
            first, stop = (middle, stop) if names[middle] in self._computing else (first, middle)
        return names[first]

    def park(self, sequence: Sequence, name: int) -> None:
        """Lets a sequence wait until the block is done."""
        self._parked[name].append(sequence)

    def start(self, sequence: Sequence) -> None:
        """The sequence was admitted and will compute what is not cached."""
        names = self._of(sequence)
        first = sequence.computed_tokens // self.block
        for name in names[first:]:
            self._computing.setdefault(name, sequence.sequence_id)
        self._done[sequence.sequence_id] = first

    def progress(self, sequence: Sequence) -> list[Sequence]:
        """The sequence published what it has computed; returns the sequences to wake."""
        names = self._names.get(sequence.sequence_id, _NO_NAMES)
        first = self._done.get(sequence.sequence_id, len(names))
        done = min(sequence.computed_tokens // self.block, len(names))
        if done <= first:
            return []
        self._done[sequence.sequence_id] = done
        return self._release(sequence, names[first:done])

    def stop(self, sequence: Sequence) -> list[Sequence]:
        """The sequence left (finished, failed or preempted); returns the sequences to wake."""
        names = self._names.pop(sequence.sequence_id, _NO_NAMES)
        first = self._done.pop(sequence.sequence_id, len(names))
        return self._release(sequence, names[first:])

    def _of(self, sequence: Sequence) -> array[int]:
        """Names of the sequence's whole blocks, made once."""
        names = self._names.get(sequence.sequence_id)
        if names is None:
            names = self._names[sequence.sequence_id] = self._named(sequence.key.packed, hash(sequence.namespace))
        return names

    def _named(self, packed: bytes, seed: int) -> array[int]:
        """Names of the whole blocks of packed ids: the sum, modulo 2**64, of each id so far times a random number of its place.

        The numbers are random, odd, and drawn anew in each process, so nobody can aim at one name for two beginnings; by chance it
        comes once in 2**63, or once in 2**32 for ids whose only difference is in their highest bit.
        """
        count = len(packed) // (4 * self.block) * self.block
        while len(self._factors) < count:
            more = np.frombuffer(os.urandom(8 * max(count, 4096)), dtype=np.uint64) | np.uint64(1)
            self._factors = np.concatenate((self._factors, more))
        ids = np.frombuffer(packed, dtype=np.int32, count=count).astype(np.uint64) + np.uint64(1)  # so that an id of 0 counts too
        sums = (ids * self._factors[:count]).cumsum()[self.block - 1 :: self.block]
        return array("q", (sums + np.uint64(seed & _MASK)).tobytes())

    def _release(self, sequence: Sequence, names: array[int]) -> list[Sequence]:
        woken: list[Sequence] = []
        for name in names:
            if self._computing.get(name) == sequence.sequence_id:
                del self._computing[name]
                woken.extend(self._parked.pop(name, ()))
        return woken
