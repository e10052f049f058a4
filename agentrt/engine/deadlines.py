"""Who has to be done by when: a heap of deadlines that forgets whoever was done before."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from typing import Generic, TypeVar

T = TypeVar("T")


class Deadlines(Generic[T]):
    """Items with a time each, told once when it has passed. An item is in it at most once."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int]] = []
        self._items: dict[int, T] = {}
        self._numbers: dict[int, int] = {}  # id of an item -> its number
        self._next = 0

    def __len__(self) -> int:
        return len(self._items)

    def add(self, time: float, item: T) -> None:
        """Adds an item."""
        self._next += 1
        self._items[self._next] = item
        self._numbers[id(item)] = self._next
        heapq.heappush(self._heap, (time, self._next))

    def discard(self, item: T) -> None:
        """Takes an item out, if it is in."""
        number = self._numbers.pop(id(item), None)
        if number is not None:
            del self._items[number]
        if len(self._heap) > 2 * len(self._items) + 64:
            self._heap = [entry for entry in self._heap if entry[1] in self._items]
            heapq.heapify(self._heap)

    def passed(self, now: float) -> Iterator[T]:
        """Takes out and gives those whose time has come."""
        while self._heap and self._heap[0][0] <= now:
            _, number = heapq.heappop(self._heap)
            item = self._items.pop(number, None)
            if item is not None:
                del self._numbers[id(item)]
                yield item

    def next(self) -> float | None:
        """The earliest time, or one of an item that was taken out; None if there is none."""
        return self._heap[0][0] if self._heap else None
