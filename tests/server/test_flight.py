"""The requests of one call."""

from __future__ import annotations

import asyncio

import pytest

from agentrt.backend import Sink
from agentrt.request import FinishReason, Request, SamplingParams, TokenDelta, Usage
from agentrt.server.flight import Flight, Mail


class Meeting:
    """A backend to which an abort comes while a request is on its way to it."""

    def __init__(self) -> None:
        self.flight: Flight | None = None
        self.sinks: dict[str, Sink] = {}

    def submit(self, request: Request, sink: Sink) -> None:
        assert self.flight is not None
        self.flight.abort()
        self.sinks[request.request_id] = sink

    def abort(self, request_id: str) -> None:
        sink = self.sinks.pop(request_id, None)  # of what it does not know yet it knows nothing
        if sink is not None:
            sink(TokenDelta(request_id, finish_reason=FinishReason.ABORT, usage=Usage(prompt_tokens=2)))


@pytest.mark.parametrize("count", [1, 3])
def test_an_abort_that_meets_the_submission_ends_every_request(count: int) -> None:
    async def run() -> int:
        backend = Meeting()
        requests = [Request(prompt_ids=(1, 2), sampling=SamplingParams(), request_id=f"r{n}") for n in range(count)]
        backend.flight = flight = Flight(backend, requests, Mail(), endpoint="e", call_id="c")
        await asyncio.to_thread(flight.submit)
        return len([delta async for delta in flight.deltas()])

    assert asyncio.run(asyncio.wait_for(run(), 20)) == count
