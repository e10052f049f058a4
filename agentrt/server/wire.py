"""The connections: how many there may be, how long a request's head may take and grow, and what ends them.

uvicorn's parser does the reading. What it leaves open is closed here: a head without end, a client that says nothing, a body
that goes on after its answer, an answer that nobody reads, and a pipelined request that hides that the client is gone.
Invariant: a connection on which nothing moves ends, and when it ends every request on it is told.
"""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass
from typing import Any

import orjson
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from agentrt.config import ServerConfig
from agentrt.server.logs import log_config
from agentrt.server.refusals import Refusal

#: Seconds in which a client may read its answer while its body is no longer wanted.
LINGER_SECONDS = 2.0
#: Most that is read at once, and so most that can belong to someone else than whom it is counted for.
_ONE_READ = 262_144
#: Framing that a chunk may have for each byte of body.
_FRAMING = 8
#: Files and sockets that are not clients' connections.
_OTHER_FILES = 64

_REASONS = {408: "Request Timeout", 431: "Request Header Fields Too Large", 503: "Service Unavailable"}


@dataclass(frozen=True, slots=True)
class WireBounds:
    """See `ServerConfig`."""

    connections: int
    header_bytes: int
    read_seconds: float
    stall_seconds: float


class WireConfig(uvicorn.Config):
    """uvicorn's settings, and our bounds."""

    def __init__(self, app: ASGIApp, bounds: WireBounds, **settings: Any) -> None:
        super().__init__(app, http=BoundedProtocol, ws="none", timeout_keep_alive=75, server_header=False, **settings)
        self.bounds = bounds


def wire_config(app: ASGIApp, config: ServerConfig, **settings: Any) -> WireConfig:
    """How uvicorn serves `app`."""
    connections = min(config.connections, max(_files_allowed() - _OTHER_FILES, 1))
    bounds = WireBounds(connections, config.header_bytes, config.read_seconds, config.stall_seconds)
    known: dict[str, Any] = {"host": config.host, "port": config.port, "lifespan": "off", "timeout_graceful_shutdown": 5, "log_config": log_config(config.log_format)}
    return WireConfig(app, bounds, **known | settings)


def _files_allowed() -> int:
    """How many files this process may open, after asking for as many as it can have."""
    try:
        import resource
    except ImportError:  # not a Unix
        return 512
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        soft = hard
    return 1 << 20 if soft == resource.RLIM_INFINITY else soft


class BoundedProtocol(HttpToolsProtocol):
    """One connection."""

    config: WireConfig

    # ---- from the first byte to the last

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """It is there."""
        super().connection_made(transport)
        self._running: RequestResponseCycle | None = None
        self._head_began: float | None = self.loop.time()
        self._bytes_in = self._body_in = 0
        self._unsent, self._moved = 0, 0.0
        self._look_timer = self.loop.call_later(self._pace, self._look)
        if len(self.connections) > self.config.bounds.connections:
            limit = self.config.bounds.connections
            self._refuse(Refusal(503, f"{limit} connections are open, which is the most there may be", "overloaded_error", code="too_many_connections"))

    def connection_lost(self, exc: Exception | None) -> None:
        """It is gone: so is the client of the request that runs and of those that wait behind it."""
        self._look_timer.cancel()
        waiting = [cycle for cycle, _ in self.pipeline]
        self.pipeline.clear()
        for cycle in (self._running, *waiting):
            if cycle is not None and not cycle.response_complete:
                cycle.disconnected = True
                cycle.message_event.set()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Bytes came."""
        if self.transport.is_closing():
            return
        if self._head_began is None and self._idle:
            self._head_began = self.loop.time()
        self._bytes_in += len(data)
        super().data_received(data)
        bounds = self.config.bounds
        beside_body = self._bytes_in - (1 + _FRAMING) * self._body_in
        if beside_body > bounds.header_bytes + _ONE_READ and not self.transport.is_closing():
            self._refuse(Refusal(431, f"the head has more than {bounds.header_bytes} bytes", code="headers_too_large"))

    # ---- what the parser tells

    def on_message_begin(self) -> None:
        """A request begins."""
        self._bytes_in = self._body_in = 0
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """Its head is there."""
        self._head_began = None
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """A piece of its body is there."""
        self._body_in += len(body)
        super().on_body(body)

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._running = cycle
        super()._start_asgi_task(cycle, app)

    def on_response_complete(self) -> None:
        """An answer is on its way."""
        if self._running is not None and self._running.more_body:  # the rest of the body would be read for nothing
            self.loop.call_later(LINGER_SECONDS, self.transport.close)
        super().on_response_complete()

    # ---- looking after it

    @property
    def _idle(self) -> bool:
        return self._running is None or self._running.response_complete

    @property
    def _pace(self) -> float:
        return max(min(self.config.bounds.read_seconds, self.config.bounds.stall_seconds) / 4, 0.05)

    def _look(self) -> None:
        """Ends what does not move; looks again later."""
        now, bounds = self.loop.time(), self.config.bounds
        self._look_timer = self.loop.call_later(self._pace, self._look)
        unsent = self.transport.get_write_buffer_size()
        if unsent != self._unsent or not unsent:
            self._unsent, self._moved = unsent, now
        if (self._idle or self.transport.is_closing()) and now - self._moved > bounds.stall_seconds:
            self.transport.abort()  # an answer that nobody reads
        elif self._head_began is not None and now - self._head_began > bounds.read_seconds and not self.transport.is_closing():
            self._refuse(Refusal(408, f"no request came within {bounds.read_seconds:g} s", code="request_timeout"))

    def _refuse(self, refusal: Refusal) -> None:
        if self._running is not None and self._running.response_started and not self._running.response_complete:
            self.transport.close()  # an answer has begun: another one would be read as a part of it
            return
        body = orjson.dumps(refusal.openai())
        head = f"HTTP/1.1 {refusal.status} {_REASONS[refusal.status]}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        retry = "Retry-After: 1\r\n" if refusal.status == 503 else ""
        self.transport.write(f"{head}{retry}Connection: close\r\n\r\n".encode() + body)
        self.transport.close()
