"""One HTTP call's requests on the backend: submitted together, read as one stream of deltas, and aborted together.

Invariant: whatever becomes of the call (answered, failed, cancelled, its client gone), each of its requests ends; a
flight that is left is aborted within a step. The table of flights is what the inspector, /abort and draining look at.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Protocol

from agentrt.backend import Sink
from agentrt.errors import QueueFullError, UserError
from agentrt.request import Request, TokenDelta, Usage


class Runway(Protocol):
    """Where requests are submitted: a backend, or what stands before one."""

    def submit(self, request: Request, sink: Sink) -> None:
        """As `Backend.submit`."""
        ...

    def abort(self, request_id: str) -> None:
        """As `Backend.abort`."""
        ...


Delta = tuple[int, TokenDelta]


class Mail:
    """Carries deltas from the engine's threads to the event loop; however many a step brings, the loop is woken once."""

    def __init__(self) -> None:
        """Carries to the loop that runs."""
        self.loop = asyncio.get_running_loop()
        self._items: deque[tuple[asyncio.Queue[Delta], Delta]] = deque()
        self._woken = False

    def send(self, to: asyncio.Queue[Delta], delta: Delta) -> bool:
        """Sends one; may be called from any thread. False if the loop has ended."""
        self._items.append((to, delta))
        if not self._woken:  # else it is sure to look again: it unsets this before it looks
            self._woken = True
            try:
                self.loop.call_soon_threadsafe(self._deliver)
            except RuntimeError:
                self._woken = False
                self._items.clear()
                return False
        return True

    def _deliver(self) -> None:
        self._woken = False
        while self._items:
            to, delta = self._items.popleft()
            to.put_nowait(delta)


class Flight:
    """The requests of one call, in the order of their answers."""

    def __init__(self, backend: Runway, requests: Sequence[Request], mail: Mail, *, endpoint: str, call_id: str) -> None:
        """Makes a flight that has not begun.

        Args:
            backend: Where it goes.
            requests: What is asked; their samples are numbered through.
            mail: Brings their deltas.
            endpoint: For the inspector.
            call_id: By which it can be aborted.
        """
        self.requests = tuple(requests)
        self.endpoint = endpoint
        self.call_id = call_id
        self.started = time.monotonic()
        self.first_token: float | None = None
        self.last_token: float | None = None
        self.generated_tokens = 0
        self.forced_tokens = 0
        self.cached_tokens: int | None = None
        self._usages: dict[str, Usage] = {}
        self._backend = backend
        self._mail = mail
        self._deltas: asyncio.Queue[Delta] = asyncio.Queue()
        self._peeked: list[Delta] = []
        self._pending: dict[str, int] = {}
        self._aborted = False

    @property
    def usages(self) -> list[Usage]:
        """What those requests cost that ended well, in order."""
        return [self._usages[request.request_id] for request in self.requests if request.request_id in self._usages]

    @property
    def over(self) -> bool:
        """Whether every request has ended."""
        return not self._pending

    def submit(self) -> None:
        """Submits every request, or none; may be called from any thread.

        Raises:
            AgentrtError: As `Backend.submit`.
        """
        first = 0
        try:
            for request in self.requests:
                self._pending[request.request_id] = first
                try:
                    self._backend.submit(request, self._sink_of(first))
                except BaseException:
                    del self._pending[request.request_id]
                    raise
                if self._aborted:  # maybe before the backend knew of it
                    self._backend.abort(request.request_id)
                first += request.sampling.n
        except BaseException:
            self.abort()
            raise

    def _sink_of(self, first: int) -> Sink:
        def sink(delta: TokenDelta) -> None:
            if not self._mail.send(self._deltas, (first + delta.index, delta)):  # the loop ended before its aborted request did
                self._pending.pop(delta.request_id, None)

        return sink

    async def begun(self) -> None:
        """Waits for the first delta, so that what is refused late is still refused before a stream begins.

        Raises:
            AgentrtError: The request failed at once.
        """
        number, delta = await self._deltas.get()
        self._note(delta)
        if delta.error is not None:
            raise delta.error
        self._peeked.append((number, delta))

    async def deltas(self) -> AsyncIterator[Delta]:
        """Every delta with the number of its sample, until all requests have ended.

        Raises:
            AgentrtError: A request failed; the others are aborted.
        """
        for item in self._peeked:
            yield item
        self._peeked.clear()
        while self._pending:
            number, delta = await self._deltas.get()
            self._note(delta)
            if delta.error is not None:
                raise delta.error
            yield number, delta

    def _note(self, delta: TokenDelta) -> None:
        if delta.token_ids:
            self.last_token = time.monotonic()
            self.first_token = self.first_token or self.last_token
            self.generated_tokens += len(delta.token_ids)
            self.forced_tokens += sum(delta.forced)
        if delta.last:
            self._pending.pop(delta.request_id, None)
        if delta.usage is not None:
            self._usages[delta.request_id] = delta.usage
            self.cached_tokens = (self.cached_tokens or 0) + delta.usage.cached_tokens

    def abort(self) -> None:
        """Ends what has not ended, and what is yet to be submitted; the deltas of what was aborted still come."""
        self._aborted = True
        for request_id in list(self._pending):
            self._backend.abort(request_id)


class FlightTable:
    """The flights that are under way, with a bound on how many of them may wait."""

    def __init__(self, max_waiting: int) -> None:
        """Makes an empty table; `max_waiting` requests may be without their first token, all flights together."""
        self._max_waiting = max_waiting
        self._flights: dict[str, Flight] = {}
        self.accepting = True
        self._empty = asyncio.Event()
        self._empty.set()

    def __iter__(self) -> Iterator[Flight]:
        return iter(list(self._flights.values()))

    def __len__(self) -> int:
        return len(self._flights)

    @property
    def waiting(self) -> int:
        """Requests that have no token yet."""
        return sum(len(flight.requests) for flight in self._flights.values() if flight.first_token is None)

    def add(self, flight: Flight) -> None:
        """Takes a flight.

        Raises:
            QueueFullError: Too many wait, or the server is about to end.
            UserError: Its id is another's, who would be aborted for it.
        """
        self.check_room(len(flight.requests))
        if flight.call_id in self._flights:
            raise UserError(f"request_id {flight.call_id!r} is under way; an id names one request at a time", param="request_id")
        self._flights[flight.call_id] = flight
        self._empty.clear()

    def check_room(self, requests: int = 1) -> None:
        """Refuses what there is no room for, before any work goes into it.

        Raises:
            QueueFullError: As `add`.
        """
        if not self.accepting:
            raise QueueFullError("the server is shutting down", retry_after=5.0)
        waiting = self.waiting
        if waiting and waiting + requests > self._max_waiting:
            raise QueueFullError(f"{waiting} requests wait for their first token; at most {self._max_waiting} may; try again later")

    def remove(self, flight: Flight) -> None:
        """Forgets a flight that is over or was aborted."""
        if self._flights.get(flight.call_id) is flight:
            del self._flights[flight.call_id]
        if not self._flights:
            self._empty.set()

    def abort(self, call_id: str | None) -> int:
        """Aborts the flight of that id, or all of them for None; returns how many."""
        chosen = [flight for flight in self if call_id is None or call_id in (flight.call_id, *(r.request_id for r in flight.requests))]
        for flight in chosen:
            flight.abort()
        return len(chosen)

    async def emptied(self) -> None:
        """Waits until none is under way."""
        await self._empty.wait()
