"""Programs that are away (at a tool, at a reader) and will be back for their context: how much of the pool admission leaves them.

Without it every pause lets a new program in, whose context evicts that of the paused ones, until all of them compute their contexts
anew at each call (thrashing). A reservation is soft: it ends after a while, all together have a bounded share of the pool, and when
nothing runs it counts for nothing. It only holds back admission; which pages are kept is the eviction policy's affair.
"""

from __future__ import annotations

from collections import OrderedDict

from agentrt.scheduling.sequence import Sequence


class Absences:
    """Who is away, and with how many pages."""

    def __init__(self, seconds: float, most_pages: int) -> None:
        """Nobody is away.

        Args:
            seconds: How long a program is waited for.
            most_pages: Pages reserved for all together, at most.
        """
        self._seconds = seconds
        self._most = most_pages
        self._away: OrderedDict[str, tuple[float, int]] = OrderedDict()  # since when, pages; longest away first
        self._pages = 0

    def pages(self, now: float) -> int:
        """Pages to leave to those that are away."""
        while self._away and next(iter(self._away.values()))[0] + self._seconds < now:
            self._pages -= self._away.popitem(last=False)[1][1]
        return min(self._pages, self._most)

    def leave(self, sequence: Sequence, pages: int, now: float) -> None:
        """A call ended, and its program is expected back with all of it."""
        if sequence.program is not None:
            back = self._away.pop(sequence.program, (now, 0))[1]
            self._away[sequence.program] = now, max(back, pages)
            self._pages += max(pages - back, 0)

    def back(self, sequence: Sequence) -> None:
        """A call came: its program is not away any more."""
        if sequence.program is not None:
            self._pages -= self._away.pop(sequence.program, (0.0, 0))[1]
