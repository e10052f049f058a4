"""Budgets: the tokens and the time that a run or a branch may use, a branch's inside its parent's.

Tokens are reserved before a request is made: as many as its answer may have. What an answer leaves unused comes back when it ends.
Where others hold what a request wants, it waits for them, in the order of asking, and only where nobody else holds anything it
gets less than it wants. So branches that run at the same time never generate more than the budget together, and no answer is cut
short for tokens that another did not use. The price: an answer of open length (a typed one without ``max_tokens``) reserves all that
is left, so that such answers come one after another. Invariant: used + reserved <= tokens, for every budget, at every moment.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Generator
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from agentrt.errors import AbortedError, RequestError
from agentrt.lang.waiting import Promise


class BudgetError(RequestError):
    """A program or a branch has used up the tokens it was given.

    Attributes:
        limit: Tokens that it was given.
    """

    def __init__(self, message: str, *, limit: int) -> None:
        super().__init__(message)
        self.limit = limit


@dataclass(slots=True)
class _Ticket:
    """A request that waits for tokens: which budget it is on, how many it wants (None: all), and how many it cannot do without."""

    budget: Budget
    wanted: int | None
    least: int
    granted: Promise[int] = field(default_factory=Promise)


class _Queue:
    """Whoever waits for tokens of a run, in the order of asking. It serves from one thread at a time, and never recursively."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self._waiting: list[_Ticket] = []
        self._serving = self._again = False

    def add(self, ticket: _Ticket) -> None:
        with self.lock:
            self._waiting.append(ticket)
        self.serve()

    def serve(self) -> None:
        """Gives every ticket that can have its tokens what it wants; who is told may ask again, or give back, at once."""
        with self.lock:
            self._again = True
            if self._serving:
                return
            self._serving = True
        while True:
            with self.lock:
                if not self._again:
                    self._serving = False
                    return
                self._again = False
                outcomes = [(ticket, ticket.budget._outcome(ticket)) for ticket in self._waiting]
                self._waiting = [ticket for ticket, outcome in outcomes if outcome is None]
            for ticket, outcome in outcomes:
                if isinstance(outcome, int):
                    ticket.granted.set_result(outcome)
                elif outcome is not None:
                    ticket.granted.set_exception(outcome)


class Budget:
    """What a run or a branch may use; see the module's text.

    Args:
        outer: The budget that this one is inside of.
        tokens: Most tokens to generate; None for no bound of its own.
        seconds: How long it lasts from now; None for no bound of its own.
    """

    __slots__ = ("_queue", "bounded", "deadline", "outer", "reserved", "timed", "tokens", "used")

    def __init__(self, outer: Budget | None = None, tokens: int | None = None, seconds: float | None = None) -> None:
        self.outer = outer
        self.tokens = tokens
        self.deadline = None if seconds is None else time.monotonic() + seconds
        self.used = self.reserved = 0
        self.bounded: bool = tokens is not None or (outer is not None and outer.bounded)
        self.timed: bool = seconds is not None or (outer is not None and outer.timed)
        self._queue: _Queue = _Queue() if outer is None else outer._queue

    def reserve(self, wanted: int | None, least: int = 1) -> Generator[Future[Any], Any, int]:
        """Waits for tokens and returns how many were reserved; give them back with `release`.

        Args:
            wanted: How many; None for all that are left.
            least: How many it cannot do without.

        Raises:
            BudgetError: Fewer than `least` are left, and nobody will give any back.
        """
        ticket = _Ticket(self, wanted, least)
        self._queue.add(ticket)
        try:
            granted: int = yield ticket.granted
        except GeneratorExit:  # cancelled while it waited, and the tokens came all the same
            if ticket.granted.done() and ticket.granted.exception() is None:
                self.release(ticket.granted.result())
            raise
        return granted

    def release(self, tokens: int) -> None:
        """Gives back what was reserved, whether it was spent or not."""
        with self._queue.lock:
            for budget in self._chain():
                budget.reserved -= tokens
        self._queue.serve()

    def spend(self, tokens: int) -> None:
        """Counts generated tokens."""
        with self._queue.lock:
            budget: Budget | None = self
            while budget is not None:
                budget.used += tokens
                budget = budget.outer

    def seconds(self) -> float | None:
        """Seconds that are left, None for no bound.

        Raises:
            AbortedError: The deadline has passed.
        """
        if not self.timed:
            return None
        outer = self.outer.seconds() if self.outer is not None else None
        if self.deadline is None:
            return outer
        own = self.deadline - time.monotonic()
        if own <= 0:
            raise AbortedError("the deadline of the program or branch has passed")
        return own if outer is None else min(own, outer)

    def _chain(self) -> list[Budget]:
        budget: Budget | None = self
        chain = []
        while budget is not None:
            chain.append(budget)
            budget = budget.outer
        return chain

    def _outcome(self, ticket: _Ticket) -> int | BudgetError | None:
        """What a ticket gets now: its tokens, which are then reserved, an error, or None while it must wait. The lock is held."""
        bounds = [budget for budget in self._chain() if budget.tokens is not None]
        free = min((budget.tokens or 0) - budget.used - budget.reserved for budget in bounds)
        if ticket.wanted is None or free < ticket.wanted:
            if any(budget.reserved for budget in bounds):
                return None
            if free < ticket.least:
                return _used_up(next(b for b in bounds if (b.tokens or 0) - b.used < ticket.least))
        granted = free if ticket.wanted is None else min(free, ticket.wanted)
        for budget in self._chain():
            budget.reserved += granted
        return granted


def _used_up(budget: Budget) -> BudgetError:
    limit = budget.tokens or 0
    return BudgetError(f"the token budget of {limit} is used up ({budget.used} generated)", limit=limit)
