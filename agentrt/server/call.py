"""One call on its way: a flight, the answers that its deltas add up to, and what is written down when it ends.

Chat completions, text completions, responses, messages and the native endpoint all read a call; they differ in what they
write. Invariant: every call ends in the books exactly once, well or not, and leaves the table of flights.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from agentrt.observe.call_spans import CallEnded, CallSpans
from agentrt.observe.metrics import Metrics, RequestTimes
from agentrt.request import TokenDelta, Usage
from agentrt.server.answers import Heard, SampleAnswer
from agentrt.server.flight import Flight, FlightTable
from agentrt.server.programs import Asked, ProgramBook
from agentrt.server.refusals import refusal_of
from agentrt.server.turns import TurnMemory

#: Ended calls that the inspector shows.
RECENT_CALLS = 50


@dataclass(slots=True)
class Books:
    """Where a call is written down."""

    flights: FlightTable
    metrics: Metrics
    programs: ProgramBook
    turns: TurnMemory
    spans: CallSpans | None = None
    recent: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=RECENT_CALLS))


@dataclass(slots=True)
class Call:
    """A flight and its answers.

    Attributes:
        flight: The requests.
        answers: One a sample, numbered as the flight's deltas are.
        books: Where it is written down.
        remembers: Its answers are turns of a chat that may come back as text.
        context: The headers by which the caller's trace goes on.
        on_end: Called once when it has ended, however it did.
    """

    flight: Flight
    answers: list[SampleAnswer]
    books: Books
    remembers: bool = False
    context: Mapping[str, str] = field(default_factory=dict)
    on_end: Callable[[Call], None] | None = None
    failure: BaseException | None = None
    _ended: bool = field(default=False)

    @property
    def usages(self) -> list[Usage]:
        """What the requests cost, once they have ended."""
        return self.flight.usages

    async def events(self) -> AsyncIterator[tuple[int, TokenDelta, list[Heard]]]:
        """Each delta with the number of its sample and what became certain with it.

        Raises:
            AgentrtError: A request failed.
        """
        try:
            async for number, delta in self.flight.deltas():
                heard = self.answers[number].add(delta)
                if self.flight.over:
                    self.end()
                yield number, delta, heard
        except BaseException as error:
            self.end(error)
            raise

    async def whole(self) -> None:
        """Reads it to its end; `answers` are complete afterwards.

        Raises:
            AgentrtError: A request failed.
        """
        async for _ in self.events():
            pass

    def end(self, error: BaseException | None = None) -> None:
        """Writes it down and takes it out of the table; what has not ended is aborted. A second call does nothing."""
        if self._ended:
            return
        self._ended = True
        self.failure = error
        self.flight.abort()
        self.books.flights.remove(self.flight)
        if error is None and self.flight.over:
            self._note_success()
        else:
            self.books.metrics.failed(failure_code(error))
        self._tell_span(error)
        self.books.recent.appendleft(flight_summary(self.flight) | {"outcome": self._outcome(error)})
        if self.on_end is not None:
            self.on_end(self)

    def _tell_span(self, error: BaseException | None) -> None:
        if self.books.spans is None:
            return
        flight, well = self.flight, error is None and self.flight.over
        self.books.spans.tell(
            CallEnded(
                call_id=flight.call_id,
                endpoint=flight.endpoint,
                context=self.context,
                seconds=time.monotonic() - flight.started,
                first_token_seconds=_since(flight, flight.first_token),
                sampling=flight.requests[0].sampling,
                usages=flight.usages,
                finish_reasons=[answer.finish_reason.value for answer in self.answers if answer.finish_reason],
                error=None if well else failure_code(error),
                program=next((request.program.program for request in flight.requests if request.program), None),
            )
        )

    def _outcome(self, error: BaseException | None) -> str:
        if error is not None or not self.flight.over:
            return failure_code(error)
        return ", ".join(sorted({answer.finish_reason.value for answer in self.answers if answer.finish_reason}))

    def _note_success(self) -> None:
        flight, books = self.flight, self.books
        now = time.monotonic()
        first = 0
        for request, usage in zip(flight.requests, flight.usages, strict=False):
            answers = self.answers[first : first + request.sampling.n]
            first += request.sampling.n
            times = RequestTimes(_since(flight, flight.first_token), _since(flight, flight.last_token), now - flight.started)
            reasons = tuple(answer.finish_reason.value if answer.finish_reason else "abort" for answer in answers)
            books.metrics.ended(usage, times, reasons)
            if request.program is not None and answers:
                ids = [answer.token_ids for answer in answers]
                ended = ", ".join(sorted(set(reasons)))
                books.programs.note(Asked(request.program, flight.endpoint, request.prompt_ids, ids, usage, flight.started, now, ended))
            for answer in answers if self.remembers else ():
                books.turns.remember(request.prompt_ids, answer.token_ids, request.cache_salt)


def flight_summary(flight: Flight) -> dict[str, Any]:
    """What the inspector shows of a flight."""
    return {
        "id": flight.call_id,
        "endpoint": flight.endpoint,
        "seconds": round(time.monotonic() - flight.started, 3),
        "first_token_seconds": None if flight.first_token is None else round(flight.first_token - flight.started, 3),
        "running": flight.first_token is not None,
        "samples": sum(request.sampling.n for request in flight.requests),
        "prompt_tokens": sum(len(request.prompt_ids) for request in flight.requests),
        "cached_tokens": flight.cached_tokens,
        "generated_tokens": flight.generated_tokens,
        "forced_tokens": flight.forced_tokens,
        "program": next((request.program.program for request in flight.requests if request.program), None),
    }


def _since(flight: Flight, moment: float | None) -> float | None:
    return None if moment is None else moment - flight.started


def failure_code(error: BaseException | None) -> str:
    """A short word for why a call did not end well."""
    if error is None or not isinstance(error, Exception):
        return "client_gone"
    refusal = refusal_of(error)
    return refusal.code or refusal.kind
