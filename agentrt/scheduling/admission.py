"""The waiting requests, in the policy's order, and the bound on how long any of them can be passed over.

Two bounds hold, whatever the policy, the priorities and the load:

*Of every `TURNS` admissions one goes to the oldest request that waits*, once that has waited longer than `max_wait`. So a request with k
older ones before it is admitted after at most `max_wait` seconds and `TURNS` x (k + 1) admissions, where first come first served takes
k + 1; and all the other admissions follow the policy, so that a long queue does not undo it.

*No step looks at the whole queue.* A key is computed when its sequence arrives and when a change of the tree touched the place where its
match ends; of a bounded number in each step, the rest in the next. The key at the top is always up to date.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterable

from agentrt.cache.radix_tree import Place
from agentrt.scheduling.policy import Key, Policy
from agentrt.scheduling.sequence import Sequence
from agentrt.scheduling.view import LiveView

TURNS = 16
"""Of so many admissions one is the oldest's, once it is overdue."""

LOOKS_PER_STEP = 36
"""Sequences that one step ranks: each is a match, and 10,000 may arrive, or be touched by a change of the tree, at once.

A third is kept for outdated keys at the top, which are put in their place; after as many a step takes what is there. The rest goes to
those that arrived and those that were touched, half to each if there are many of both.
"""

Rank = tuple[int, Key]


class WaitingQueue:
    """Waiting sequences. A sequence is in it from `push` until `remove`; parked ones too."""

    def __init__(self, policy: Policy, look: Callable[[Sequence], LiveView], max_wait: float) -> None:
        """Makes an empty queue.

        Args:
            policy: Orders the sequences.
            look: Gives the view of a sequence.
            max_wait: Seconds of waiting after which the oldest gets its turns.
        """
        self._policy = policy
        self._look = look
        self._max_wait = max_wait
        self._waiting: dict[int, Sequence] = {}
        self._new: set[int] = set()  # not ranked yet; who of them comes next:
        self._arrivals: deque[int] = deque()  # the first to come, so that everybody's turn comes
        self._urgent: list[tuple[int, int, int]] = []  # the highest priority, so that it need not wait for all before it
        self._pushed = 0
        self._ranks: dict[int, Rank] = {}  # of those that are ranked and not parked
        self._heap: list[tuple[Rank, int]] = []
        self._ages: list[tuple[float, int]] = []  # the same, by arrival
        self._turns = 0  # admissions since the oldest had its turn
        self._looks = 0  # sequences that this step may still rank
        self._listening: dict[Place, dict[int, Sequence]] = {}
        self._places: dict[int, tuple[Place, ...]] = {}
        self._lasting: set[int] = set()  # whose rank changes only where they listen
        self._touched: deque[dict[int, Sequence]] = deque()  # to be ranked anew

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence.sequence_id in self._waiting

    # -- coming and going ---------------------------------------------------------------------------------------------

    def push(self, sequence: Sequence) -> None:
        """Adds a sequence that arrived, or was preempted; a preempted one keeps its arrival, and so its age."""
        sequence_id = sequence.sequence_id
        self._waiting[sequence_id] = sequence
        self._new.add(sequence_id)
        self._arrivals.append(sequence_id)
        self._pushed += 1
        heapq.heappush(self._urgent, (-sequence.request.priority, self._pushed, sequence_id))

    def remove(self, sequence: Sequence) -> None:
        """Takes a sequence out, wherever it is; nothing if it is not there."""
        self._waiting.pop(sequence.sequence_id, None)
        self._new.discard(sequence.sequence_id)
        self.park(sequence)

    def park(self, sequence: Sequence) -> None:
        """Takes a sequence out of the order until it is woken; it goes on waiting, and ageing."""
        self._ranks.pop(sequence.sequence_id, None)
        self._lasting.discard(sequence.sequence_id)
        self._unlisten(sequence)

    def wake(self, sequences: Iterable[Sequence]) -> None:
        """Puts parked sequences back into the order, in this step or one of the next."""
        woken = {sequence.sequence_id: sequence for sequence in sequences if sequence in self}
        if woken:
            self._touched.append(woken)

    def touch(self, place: Place) -> None:
        """Hears that the tree changed at `place`: who listens there is to be ranked anew."""
        touched = self._listening.pop(place, None)
        if touched:
            self._touched.append(touched)

    # -- the order ----------------------------------------------------------------------------------------------------

    @property
    def settled(self) -> bool:
        """Whether every sequence that is not parked is ranked as of now, as far as the last step could tell."""
        return not self._touched and not self._new and self._looks > 0

    def refresh(self) -> None:
        """Ranks what was touched and what is new, as much as one step may."""
        third = LOOKS_PER_STEP // 3
        self._looks = LOOKS_PER_STEP
        self._rank_touched(2 * third - min(third, len(self._new)))
        self._rank_new(self._looks - third)

    def first(self, now: float) -> Sequence | None:
        """Whose turn it is: the oldest's, or the policy's first; None if nobody is ranked."""
        oldest = self._oldest()
        if oldest is not None and self._turns >= TURNS - 1 and now - oldest.arrival > self._max_wait:
            return oldest
        while self._looks > 0:
            top = self._top()
            if top is None or self._untouched(top):
                return top
            before = self._ranks[top.sequence_id]
            if self._rank(top) == before:
                return top
            self._looks -= 1
        return self._top()

    def admitted(self, sequence: Sequence) -> None:
        """Takes out a sequence that was admitted, and counts turns."""
        self._turns = 0 if sequence is self._oldest() else self._turns + 1
        self.remove(sequence)

    def turn_comes(self, now: float) -> float:
        """When time alone will change whose turn it is; infinite if it will not."""
        oldest = self._oldest()
        if oldest is None or self._turns < TURNS - 1 or now - oldest.arrival > self._max_wait:
            return float("inf")
        return oldest.arrival + self._max_wait

    def _oldest(self) -> Sequence | None:
        while self._ages and self._ages[0][1] not in self._ranks:
            heapq.heappop(self._ages)
        return self._waiting[self._ages[0][1]] if self._ages else None

    def _top(self) -> Sequence | None:
        while self._heap:
            rank, sequence_id = self._heap[0]
            if self._ranks.get(sequence_id) == rank:
                return self._waiting[sequence_id]
            heapq.heappop(self._heap)
        return None

    def _rank_new(self, most: int) -> None:
        """Ranks up to so many new ones: by turns the first to have come, and the one of the highest priority."""
        while most and self._new:
            sequence_id = self._arrivals.popleft() if most % 2 else heapq.heappop(self._urgent)[-1]
            if sequence_id in self._new:  # else it is ranked, or has left
                self._new.remove(sequence_id)
                self._rank(self._waiting[sequence_id])
                self._looks -= 1
                most -= 1
        if not self._new:
            self._arrivals.clear()
            self._urgent.clear()

    def _rank_touched(self, most: int) -> None:
        while most and self._touched:
            batch = self._touched[0]
            sequence_id = next(iter(batch))
            sequence = batch.pop(sequence_id)
            if not batch:
                self._touched.popleft()
            if sequence_id in self._waiting:
                self._rank(sequence)
                self._looks -= 1
                most -= 1

    def _rank(self, sequence: Sequence) -> Rank:
        """Computes a sequence's rank and puts it in the order; listens for what would change it."""
        sequence_id = sequence.sequence_id
        view = self._look(sequence)
        rank = (-sequence.request.priority, self._policy(sequence, view))
        if sequence_id not in self._ranks:
            heapq.heappush(self._ages, (sequence.arrival, sequence_id))
        if self._ranks.get(sequence_id) != rank:
            self._ranks[sequence_id] = rank
            heapq.heappush(self._heap, (rank, sequence_id))
            self._compact()
        self._listen(sequence, view.places)
        (self._lasting.add if view.lasting else self._lasting.discard)(sequence_id)
        return rank

    def _compact(self) -> None:
        """Drops outdated entries once they are the larger part."""
        if len(self._heap) > 2 * len(self._ranks) + 64:
            self._heap = [(rank, sequence_id) for sequence_id, rank in self._ranks.items()]
            heapq.heapify(self._heap)
        if len(self._ages) > 2 * len(self._ranks) + 64:
            self._ages = [(self._waiting[sequence_id].arrival, sequence_id) for sequence_id in self._ranks]
            heapq.heapify(self._ages)

    # -- listening to the tree ----------------------------------------------------------------------------------------

    def _listen(self, sequence: Sequence, places: tuple[Place, ...]) -> None:
        self._unlisten(sequence)
        if places:
            self._places[sequence.sequence_id] = places
        for place in places:
            self._listening.setdefault(place, {})[sequence.sequence_id] = sequence

    def _untouched(self, sequence: Sequence) -> bool:
        """Whether nothing has changed that its rank was made from."""
        places = self._places.get(sequence.sequence_id, ())
        return sequence.sequence_id in self._lasting and all(sequence.sequence_id in self._listening.get(place, ()) for place in places)

    def _unlisten(self, sequence: Sequence) -> None:
        for place in self._places.pop(sequence.sequence_id, ()):
            listeners = self._listening.get(place)
            if listeners is not None:
                listeners.pop(sequence.sequence_id, None)
                if not listeners:
                    del self._listening[place]
