"""Programs that are away (at a tool, at a reader) and will be back for their context: how much of the pool admission leaves them.

Without it every pause lets a new program in, whose context evicts that of the paused ones, until all of them compute their contexts
anew at each call (thrashing). It pays where computing is dear and pauses are short, and not where memory is what everybody waits for:
keeping C tokens for a pause of P seconds costs P x C of memory and time, computing them anew keeps the whole pool of M tokens busy for
C x t seconds at t a token; so programs are waited for while P < t x M. Both are learnt. (InferCept, Abhyankar et al., 2024, weighs the same.)

A reservation is soft: it ends after a while, all together have a bounded share of the pool, and when nothing runs it counts for
nothing. It only holds back admission; which pages are kept is the eviction policy's affair.
"""

from __future__ import annotations

from collections import OrderedDict

from agentrt.scheduling.sequence import Sequence

MEMORY = 16
"""Pauses, and steps, over which the means are taken, roughly."""

FIRST_PAUSE = 1.0
"""Mean pause in seconds, before any is known."""

LARGE_PREFILL = 64
"""Prefilled tokens from which on a step's time tells the price of a token: a decode's is of another kind, and is not what is saved."""


class Absences:
    """Who is away, and with how many pages."""

    def __init__(self, seconds: float, most_pages: int, pool_tokens: int) -> None:
        """Nobody is away.

        Args:
            seconds: How long a program is waited for.
            most_pages: Pages reserved for all together, at most.
            pool_tokens: Token slots of the whole pool.
        """
        self._seconds = seconds
        self._most = most_pages
        self._pool_tokens = pool_tokens
        self._away: OrderedDict[str, tuple[float, int]] = OrderedDict()  # since when, pages; longest away first
        self._pages = 0
        self._pause = FIRST_PAUSE
        self._token = 0.0  # seconds

    def pages(self, now: float) -> int:
        """Pages to leave to those that are away."""
        while self._away and next(iter(self._away.values()))[0] + self._seconds < now:
            self._pages -= self._away.popitem(last=False)[1][1]
        return min(self._pages, self._most) if self._pause < self._token * self._pool_tokens else 0

    def changes_at(self) -> float:
        """When time alone may change what `pages` says: the one who is away longest is given up; infinite if nobody is."""
        return next(iter(self._away.values()))[0] + self._seconds if self._away else float("inf")

    def step(self, tokens: int, prefilled: int, seconds: float) -> None:
        """Learns from a step of so many tokens, of which so many were prefilled."""
        if prefilled >= LARGE_PREFILL:
            self._token += (seconds / tokens - self._token) / MEMORY

    def leave(self, sequence: Sequence, pages: int, now: float) -> None:
        """A call ended, and its program is expected back with all of it."""
        if sequence.program is not None:
            back = self._away.pop(sequence.program, (now, 0))[1]
            self._away[sequence.program] = now, max(back, pages)
            self._pages += max(pages - back, 0)

    def back(self, sequence: Sequence, now: float) -> None:
        """A call came: its program is not away any more."""
        if sequence.program is not None and sequence.program in self._away:
            since, pages = self._away.pop(sequence.program)
            self._pages -= pages
            self._pause += (now - since - self._pause) / MEMORY
