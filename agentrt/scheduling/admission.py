"""The waiting requests, in the policy's order, and the bound on how long any of them can be passed over.

A heap holds one key per sequence; a key is computed when the sequence arrives, when it is woken, and once more when it
comes to the top, so that a step never matches the whole queue. Whoever has waited longer than `max_wait` goes first, in
order of arrival, whatever the policy says: that is the bound on anybody's extra wait.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable

from agentrt.scheduling.policy import Key, Policy, View
from agentrt.scheduling.sequence import Sequence


class WaitingQueue:
    """Waiting sequences. A sequence is in it from `push` until `remove`; parked ones too."""

    def __init__(self, policy: Policy, view: Callable[[Sequence], View], max_wait: float) -> None:
        """Makes an empty queue.

        Args:
            policy: Orders the sequences.
            view: What the policy may know of a sequence now.
            max_wait: Seconds after which a sequence goes before all younger ones.
        """
        self._policy = policy
        self._view = view
        self._max_wait = max_wait
        self._waiting: dict[int, Sequence] = {}
        self._keys: dict[int, tuple[int, Key]] = {}  # the key under which a sequence is in the heap, if it is
        self._heap: list[tuple[tuple[int, Key], int]] = []
        self._arrivals: list[tuple[float, int]] = []  # those that are not parked, by age

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence.sequence_id in self._waiting

    def push(self, sequence: Sequence) -> None:
        """Adds a sequence that arrived, or was preempted; a preempted one keeps its arrival, and so its age."""
        self._waiting[sequence.sequence_id] = sequence
        self.rekey(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Takes a sequence out, wherever it is; nothing if it is not there."""
        self._waiting.pop(sequence.sequence_id, None)
        self._keys.pop(sequence.sequence_id, None)

    def park(self, sequence: Sequence) -> None:
        """Takes a sequence out of the order, until it is rekeyed; it goes on waiting, and ageing."""
        self._keys.pop(sequence.sequence_id, None)

    def rekey(self, sequence: Sequence) -> None:
        """Computes a waiting sequence's key anew."""
        if sequence.sequence_id not in self._waiting:
            return
        key = self._key(sequence)
        if sequence.sequence_id not in self._keys:
            heapq.heappush(self._arrivals, (sequence.arrival, sequence.sequence_id))
        self._keys[sequence.sequence_id] = key
        heapq.heappush(self._heap, (key, sequence.sequence_id))

    def overdue(self, now: float) -> Sequence | None:
        """The oldest sequence that is not parked, if it has waited longer than the bound.

        A parked one waits for a sibling that runs in every step, so its wait is bounded by the sibling's work.
        """
        while self._arrivals and self._arrivals[0][1] not in self._keys:
            heapq.heappop(self._arrivals)
        if self._arrivals and now - self._arrivals[0][0] > self._max_wait:
            return self._waiting[self._arrivals[0][1]]
        return None

    def first(self) -> Sequence | None:
        """The first in the policy's order, its key up to date; None if all that wait are parked."""
        while self._heap:
            key, sequence_id = self._heap[0]
            if self._keys.get(sequence_id) != key:
                heapq.heappop(self._heap)
                continue
            sequence = self._waiting[sequence_id]
            now = self._key(sequence)
            if now == key:
                return sequence
            self._keys[sequence_id] = now
            heapq.heapreplace(self._heap, (now, sequence_id))
        return None

    def _key(self, sequence: Sequence) -> tuple[int, Key]:
        return -sequence.request.priority, self._policy(sequence, self._view(sequence))
