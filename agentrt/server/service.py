"""What all routes of one server share, and the one way in which a call begins. No globals: `create_app` makes one.

Invariant: a request that cannot be served is refused before its response begins; a call that has begun is in the table
of flights until it ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

import anyio.to_thread
import orjson
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from agentrt import __version__
from agentrt.backend import Backend
from agentrt.config import ServerConfig
from agentrt.errors import AgentrtError, UserError
from agentrt.observe.call_spans import spans_from_environment
from agentrt.observe.metrics import Metrics
from agentrt.request import SamplingParams
from agentrt.server.asks import CallOptions
from agentrt.server.call import Books, Call, failure_code
from agentrt.server.flight import Flight, FlightTable, Mail, Runway
from agentrt.server.framed_calls import FramedCalls
from agentrt.server.model_habits import find_habits
from agentrt.server.openai_convert import Face
from agentrt.server.presence import while_present
from agentrt.server.programs import ProgramBook
from agentrt.server.prompting import Prepared, Prompter
from agentrt.server.pulse import Pulse
from agentrt.server.refusals import not_found
from agentrt.server.think_first import ThinkFirst
from agentrt.server.turns import TurnMemory

T = TypeVar("T")

#: Longest name of a program and longest salt that a client may send, in characters.
NAME_LENGTH = 256


def json_response(body: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """A JSON response."""
    return Response(orjson.dumps(body), status, headers, media_type="application/json")


class Service:
    """A backend with what serving it needs."""

    def __init__(self, backend: Backend, config: ServerConfig, sampling: SamplingParams | None = None) -> None:
        """Makes a service.

        Args:
            backend: What is served.
            config: How.
            sampling: What holds where a client says nothing; None: temperature 1 and nothing else.
        """
        self.backend = backend
        self.config = config
        self.started = int(time.time())
        self.names = config.model_names or (backend.capabilities.model,)
        self.habits = find_habits(backend.tokenizer, tool_format=config.tool_format, reasoning=config.reasoning)
        self.metrics = Metrics(self.names[0])
        self.flights = FlightTable(config.queued)
        self.programs = ProgramBook(config.programs)
        self.turns = TurnMemory(backend.tokenizer, config.remembered_tokens)
        self.books = Books(self.flights, self.metrics, self.programs, self.turns, spans_from_environment(self.names[0]))
        self.prompter = Prompter(backend, config, self.habits, self.turns, sampling or SamplingParams())
        self.pulse = Pulse(backend, config.silence_seconds)
        self._mail: Mail | None = None

    @property
    def fingerprint(self) -> str:
        """Names model and engine version."""
        return f"{self.backend.capabilities.model}-agentrt-{__version__}"

    def face(self, prefix: str, model: str | None) -> Face:
        """What an answer's bodies repeat, under a new id."""
        return Face(f"{prefix}{secrets.token_hex(12)}", model or self.names[0], int(time.time()), self.fingerprint)

    def check_model(self, name: str | None) -> None:
        """Refuses a model that is not served.

        Raises:
            Refused: With 404.
        """
        if name is not None and name not in self.names:
            raise not_found(f"the model {name!r} is not served here; {', '.join(self.names)} is", param="model", code="model_not_found")

    def options(self, http: HttpRequest, cache_salt: str | None = None, priority: int | None = None) -> CallOptions:
        """What concerns a call rather than its answer."""
        program = http.headers.get("x-agentrt-program")
        for name, value in (("X-Agentrt-Program", program), ("cache_salt", cache_salt)):
            if value is not None and len(value) > NAME_LENGTH:
                raise UserError(f"{name} has {len(value)} characters; at most {NAME_LENGTH} are allowed", param=name)
        if priority is not None and abs(priority) > 1_000_000:
            raise UserError(f"priority is {priority}; it must be from -1000000 to 1000000", param="priority")
        return CallOptions(cache_salt=cache_salt or "", priority=priority or 0, program=program)

    def later(self, work: Callable[[], object]) -> None:
        """Runs `work` in a thread of its own, some time; what it raises is a hint's failure and is dropped."""

        def run() -> None:
            with contextlib.suppress(AgentrtError):
                work()

        threading.Thread(target=run, name="agentrt-hint", daemon=True).start()

    async def off_loop(self, work: Callable[[], T]) -> T:
        """Runs what takes a while, or may block, in a thread."""
        return await anyio.to_thread.run_sync(work)

    async def begin(self, http: HttpRequest, endpoint: str, call_id: str, prepare: Callable[[], Prepared], **call_options: Any) -> Call:
        """Prepares and submits a call, and waits for the first sign of its answer.

        Args:
            http: Whose call; if the client hangs up, the call ends.
            endpoint: For the inspector.
            call_id: By which it can be aborted.
            prepare: Gives the requests; runs in a thread.
            call_options: Further fields of `Call`.

        Raises:
            AgentrtError: It is refused, or failed at once.
            ClientGoneError: The client hung up.
        """
        try:
            self.flights.check_room()
            prepared = await self.off_loop(prepare)
            flight = Flight(self._runway(prepared), prepared.requests, self._mail_here(), endpoint=endpoint, call_id=call_id)
            self.flights.add(flight)
        except Exception as error:
            self.metrics.failed(failure_code(error))
            raise
        context = {name: value for name, value in http.headers.items() if name in ("traceparent", "tracestate")}
        call = Call(flight, prepared.answers, self.books, context=context, **call_options)
        try:
            await while_present(http, self._launch(flight))
        except BaseException as error:
            call.end(error)
            raise
        return call

    async def answered(self, http: HttpRequest, call: Call) -> None:
        """Waits until a call's answer is whole, as long as the client does.

        Raises:
            AgentrtError: It failed.
            ClientGoneError: The client hung up.
        """
        try:
            await while_present(http, call.whole())
        except BaseException as error:
            call.end(error)
            raise

    def _mail_here(self) -> Mail:
        if self._mail is None or self._mail.loop is not asyncio.get_running_loop():
            self._mail = Mail()
        return self._mail

    def _runway(self, prepared: Prepared) -> Runway:
        marks = self.habits.thinking
        if prepared.thinks_first and marks is not None:
            return ThinkFirst(self.backend, marks, inside=prepared.inside_thinking, budget=prepared.thinking_budget)
        return self.backend if prepared.unframed is None else FramedCalls(self.backend, prepared.unframed)

    async def _launch(self, flight: Flight) -> None:
        await self.off_loop(flight.submit)
        await flight.begun()

