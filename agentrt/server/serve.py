"""Runs the application until it is told to end: it listens while the engine loads, and drains before it stops.

Invariant: the exit status is 0 only if the engine lived to the end; a second signal ends at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from types import FrameType
from typing import Any

import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send

from agentrt.backend import Backend
from agentrt.config import ServerConfig
from agentrt.errors import EngineError
from agentrt.request import SamplingParams
from agentrt.server.app import create_app
from agentrt.server.flight import FlightTable
from agentrt.server.gate import OPEN_PATHS
from agentrt.server.refusals import Refusal
from agentrt.server.service import json_response
from agentrt.server.wire import wire_config

_log = logging.getLogger("agentrt.server")

#: Seconds between the engine's death and the server's, in which clients are told.
LAST_WORDS_SECONDS = 1.0


class Front:
    """Answers while the engine loads, and hands over to the application when there is one."""

    def __init__(self) -> None:
        self.app: ASGIApp | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Takes one connection."""
        if self.app is not None:
            await self.app(scope, receive, send)
        elif scope["type"] == "http":
            await _loading(scope)(scope, receive, send)


def _loading(scope: Scope) -> Callable[[Scope, Receive, Send], Awaitable[None]]:
    if scope["path"] in OPEN_PATHS:
        return json_response({"status": "loading"}, 200 if scope["path"] == "/health" else 503)
    refusal = Refusal(503, "the model is being loaded", "server_error", code="loading", headers={"Retry-After": "5"})
    return json_response(refusal.openai(), refusal.status, refusal.headers)


class _Server(uvicorn.Server):
    """Drains on the first signal, and ends on the second."""

    def __init__(self, config: uvicorn.Config, drain_seconds: float) -> None:
        super().__init__(config)
        self._drain_seconds = drain_seconds
        self._loop: asyncio.AbstractEventLoop | None = None
        self._signals = 0
        self.flights: FlightTable | None = None
        self.engine_died = False
        self.ending = asyncio.Event()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """A signal came."""
        self._signals += 1
        loop = asyncio.get_event_loop() if self._loop is None else self._loop
        loop.call_soon_threadsafe(self._first_signal if self._signals == 1 else self.end_now)

    def _first_signal(self) -> None:
        self._draining = asyncio.ensure_future(self.drain())

    async def drain(self) -> None:
        """Takes nothing new, waits for what runs, and ends."""
        if self.flights is not None:
            self.flights.accepting = False
            _log.info("shutting down: %d calls may take up to %g s", len(self.flights), self._drain_seconds)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._drain_seconds):
                    await self.flights.emptied()
            self.flights.abort(None)
        self.should_exit = True
        self.ending.set()

    def end_now(self) -> None:
        """Ends without waiting for anyone."""
        if self.flights is not None:
            self.flights.abort(None)
        self.should_exit = self.force_exit = True
        self.ending.set()

    def end_after_death(self, error: EngineError) -> None:
        """The engine is down; may be called from any thread."""
        self.engine_died = True
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._loop.call_later, LAST_WORDS_SECONDS, self.end_now)

    async def host(self, front: Front, load: Callable[[], Backend], config: ServerConfig, sampling_of: Callable[[Backend], SamplingParams | None]) -> None:
        """Listens, loads, serves, and closes the engine."""
        self._loop = asyncio.get_running_loop()
        listening = asyncio.ensure_future(self.serve())
        loading = asyncio.wrap_future(_in_daemon(load))
        ending = asyncio.ensure_future(self.ending.wait())
        first: set[asyncio.Future[Any]] = {listening, loading, ending}
        await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
        if not loading.done():  # told to end, or the port is taken: nobody waits for the model any more
            self.should_exit = True
            await listening
            return
        try:
            await self._serve_backend(front, loading.result(), config, sampling_of, listening)
        finally:
            self.should_exit = True
            ending.cancel()
            await listening

    async def _serve_backend(
        self,
        front: Front,
        backend: Backend,
        config: ServerConfig,
        sampling_of: Callable[[Backend], SamplingParams | None],
        listening: asyncio.Future[None],
    ) -> None:
        try:
            app = create_app(backend, config, sampling=sampling_of(backend), on_engine_death=self.end_after_death)
            self.flights = app.state.service.flights
            async with app.router.lifespan_context(app):
                front.app = app
                while not self.started and not listening.done():
                    await asyncio.sleep(0.01)
                if self.started:
                    _log.info("serving %s at %s", backend.capabilities.model, ", ".join(self._addresses()))
                await listening
        finally:
            await asyncio.to_thread(backend.close)

    def _addresses(self) -> list[str]:
        names = [sock.getsockname() for server in self.servers for sock in server.sockets]
        return [f"http://{name[0]}:{name[1]}" for name in names]


def _in_daemon(work: Callable[[], Backend]) -> Future[Backend]:
    """Runs `work` in a thread that the process does not wait for."""
    future: Future[Backend] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="agentrt-load", daemon=True).start()
    return future


def _no_defaults(backend: Backend) -> SamplingParams | None:
    return None


def serve(
    load: Callable[[], Backend],
    config: ServerConfig | None = None,
    *,
    sampling_of: Callable[[Backend], SamplingParams | None] = _no_defaults,
) -> int:
    """Serves until SIGTERM or SIGINT; returns the exit status.

    Args:
        load: Makes the backend; runs in a thread while /ready says 503. The server closes it.
        config: How to serve.
        sampling_of: Gives what holds where a client says nothing, such as the model's own recommendation.

    Returns:
        0 after a drain; 1 if the engine died or the port could not be had.

    Raises:
        AgentrtError: The backend could not be made.
    """
    config = config or ServerConfig()

    async def main() -> int:
        front = Front()
        server = _Server(wire_config(front, config), config.drain_seconds)
        await server.host(front, load, config, sampling_of)
        return 1 if server.engine_died or not server.started else 0

    return asyncio.run(main())
