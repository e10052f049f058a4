"""The state of a simulated engine over time, at so many moments and no more: when there are too many, every second one goes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

MOMENTS = 1024
"""Most moments kept."""


@dataclass(frozen=True, slots=True)
class Moment:
    """What stood where, and what had come together by then.

    Attributes:
        time: Seconds.
        running: Sequences that run.
        waiting: Sequences that wait.
        pages_used: Pages in use by sequences, shared or private.
        pages_cached: Pages in the tree.
        hit_tokens: Tokens found in the tree, so far.
        asked_tokens: Tokens looked for, so far.
        evicted_tokens: So far.
        preemptions: So far.
        ended: Calls that ended, so far.
    """

    time: float
    running: int
    waiting: int
    pages_used: int
    pages_cached: int
    hit_tokens: int
    asked_tokens: int
    evicted_tokens: int
    preemptions: int
    ended: int


class Timeline:
    """Moments, at even distances of steps."""

    def __init__(self) -> None:
        self.moments: list[Moment] = []
        self._stride = 1
        self._seen = 0

    def add(self, moment: Callable[[], Moment], *, force: bool = False) -> None:
        """Adds a moment, if it is one's turn (else it is not even made); `force` adds it in any case."""
        if force or self._seen % self._stride == 0:
            self.moments.append(moment())
        self._seen += 1
        if len(self.moments) > MOMENTS:
            self.moments = self.moments[::2]
            self._stride *= 2
