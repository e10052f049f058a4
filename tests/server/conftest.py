"""Servers to ask: the application over ASGI on a scripted backend, the same on a port, and one with the default model."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator

import httpx
import pytest
import uvicorn

from agentrt.backend import Backend
from agentrt.backends.scripted import ScriptedBackend
from agentrt.config import ServerConfig
from agentrt.server.app import create_app
from agentrt.server.intake import Intake
from agentrt.server.wire import wire_config


class LiveServer:
    """An application on a port, run in a thread."""

    def __init__(self, backend: Backend, config: ServerConfig | None = None) -> None:
        self.backend = backend
        self.app = create_app(backend, config)
        self.service = self.app.state.service
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.port = self._socket.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        settings = wire_config(self.app, config or ServerConfig(), lifespan="on", log_level="error", log_config=None, timeout_graceful_shutdown=1)
        self._server = uvicorn.Server(settings)
        self._thread = threading.Thread(target=self._server.run, kwargs={"sockets": [self._socket]}, daemon=True)
        self._thread.start()
        until(lambda: self._server.started)

    def client(self, **options) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=60, **options)

    def connections(self) -> int:
        return len(self._server.server_state.connections)

    def bodies(self) -> int:
        """Bytes of bodies that are held."""
        layer = self.app.middleware_stack
        while not isinstance(layer, Intake):
            layer = getattr(layer, "app", None) or layer._app
        return layer.held_bytes

    def close(self) -> None:
        self._server.should_exit = True
        self._thread.join(10)
        self._socket.close()


def until(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    """Waits for a condition that must come true."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.005)


@contextlib.contextmanager
def live(backend: Backend, config: ServerConfig | None = None) -> Iterator[LiveServer]:
    server = LiveServer(backend, config)
    try:
        yield server
    finally:
        server.close()


@pytest.fixture
def serving() -> Iterator[Callable[..., LiveServer]]:
    """Starts live servers on scripted backends; all are closed at the end."""
    with contextlib.ExitStack() as stack:

        def start(script="ok", config: ServerConfig | None = None, **options) -> LiveServer:
            backend = ScriptedBackend(script, **options)
            stack.callback(backend.close)
            return stack.enter_context(live(backend, config))

        yield start


@pytest.fixture(scope="session")
def plain_server() -> Iterator[LiveServer]:
    """A server that says ok, one for the session."""
    with live(ScriptedBackend("ok")) as server:
        yield server


@pytest.fixture(scope="session", name="live")
def live_fixture() -> Callable[..., contextlib.AbstractContextManager[LiveServer]]:
    """Serves a backend of the test's own."""
    return live


@pytest.fixture(scope="session")
def wait_until() -> Callable[..., None]:
    """Waits for a condition that must come true."""
    return until


def _engine(model: str | None):
    import agentrt

    return agentrt.Engine(model, threads=1, kv_tokens=16_384)


@pytest.fixture(scope="session")
def model_server() -> Iterator[LiveServer]:
    """The default model behind HTTP, one for the session."""
    with _engine(None) as engine, live(engine) as server:
        yield server


@pytest.fixture(scope="session")
def calling_server() -> Iterator[LiveServer]:
    """The model whose calls make sense, behind HTTP, one for the session."""
    with _engine("qwen2.5-coder-0.5b") as engine, live(engine) as server:
        yield server
