"""Prefixes that running sequences are computing now, so that siblings wait for them instead of computing them too.

Prompts are cut into blocks of `BLOCK` tokens, each named by the hash of everything up to its end. A waiting sequence
whose next uncached block is in flight gains by waiting; it is *parked* on that block and woken when the block has been
published, or its sequence gave up. Checking costs one look-up, however many sequences wait.
"""

from __future__ import annotations

from collections import defaultdict

from agentrt.scheduling.sequence import Sequence

BLOCK = 16


class InFlight:
    """Who computes which block, and who waits for it."""

    def __init__(self) -> None:
        self._names: dict[int, list[int]] = {}  # sequence id -> names of its prompt's blocks, in order
        self._computing: dict[int, int] = {}  # block name -> sequence id
        self._held: dict[int, int] = {}  # sequence id -> blocks of it that are done or were another's
        self._parked: defaultdict[int, list[Sequence]] = defaultdict(list)

    def names(self, sequence: Sequence) -> list[int]:
        """Names of the sequence's whole blocks, computed once."""
        names = self._names.get(sequence.sequence_id)
        if names is None:
            names, name = [], hash(sequence.namespace)
            ids = sequence.token_ids
            for end in range(BLOCK, len(ids) + 1, BLOCK):
                name = hash((name, *ids[end - BLOCK : end]))
                names.append(name)
            self._names[sequence.sequence_id] = names
        return names

    def computed_elsewhere(self, sequence: Sequence, cached_tokens: int) -> int | None:
        """Name of the sequence's next uncached block if another sequence is computing it now."""
        names = self.names(sequence)
        block = cached_tokens // BLOCK
        if block >= len(names) or (block + 1) * BLOCK >= len(sequence.token_ids):
            return None  # what is left is recomputed anyway
        owner = self._computing.get(names[block])
        return names[block] if owner is not None and owner != sequence.sequence_id else None

    def park(self, sequence: Sequence, name: int) -> None:
        """Lets a sequence wait until the block is done."""
        self._parked[name].append(sequence)

    def start(self, sequence: Sequence) -> None:
        """The sequence was admitted and will compute what is not cached."""
        names = self.names(sequence)
        first = sequence.computed_tokens // BLOCK
        for name in names[first:]:
            self._computing.setdefault(name, sequence.sequence_id)
        self._held[sequence.sequence_id] = first

    def progress(self, sequence: Sequence) -> list[Sequence]:
        """The sequence published up to `computed_tokens`; returns the sequences to wake."""
        names = self._names.get(sequence.sequence_id, [])
        first = self._held.get(sequence.sequence_id, len(names))
        done = min(sequence.computed_tokens // BLOCK, len(names))
        if done <= first:
            return []
        self._held[sequence.sequence_id] = done
        return self._release(sequence.sequence_id, names[first:done])

    def stop(self, sequence: Sequence) -> list[Sequence]:
        """The sequence left (finished, failed or preempted); returns the sequences to wake."""
        names = self._names.pop(sequence.sequence_id, [])
        first = self._held.pop(sequence.sequence_id, len(names))
        return self._release(sequence.sequence_id, names[first:])

    def _release(self, sequence_id: int, names: list[int]) -> list[Sequence]:
        woken: list[Sequence] = []
        for name in names:
            if self._computing.get(name) == sequence_id:
                del self._computing[name]
                woken.extend(self._parked.pop(name, ()))
        return woken
