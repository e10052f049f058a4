"""The server without a port: httpx transports that hand each request to the application in this process.

For frameworks that want an OpenAI client where there is an engine and no network. The application runs on one event loop in a
thread of its own, so that plain and async clients are served alike; answers stream as they do over a socket. Invariant: a response
that is closed, or whose caller was cancelled, is to the application a client that hung up.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import httpx
from starlette.types import ASGIApp, Message

from agentrt.backend import Backend
from agentrt.config import ServerConfig
from agentrt.request import SamplingParams
from agentrt.server.app import create_app

#: Where clients of a transport believe the server to be.
BASE_URL = "http://agentrt.localhost/v1"

#: What the application says: its messages, then None, or what it raised.
_Told = Message | BaseException | None


class _Stage:
    """An application on a loop in a thread, ended with the transport that it is for."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="agentrt-in-process", daemon=True)
        self._thread.start()
        self._lock = threading.Lock()
        self._closed = False

    def begin(self, request: httpx.Request, body: bytes, tell: Callable[[_Told], object]) -> Callable[[], None]:
        """Begins a request; returns what hangs up on it."""
        with self._lock:
            if self._closed:
                raise httpx.TransportError("this client is closed", request=request)
            gone = asyncio.Event()
            asyncio.run_coroutine_threadsafe(self._answer(request, body, gone, tell), self._loop)
        return lambda: self._soon(gone.set)

    def _soon(self, work: Callable[[], object]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended, and with it everything on it
            self._loop.call_soon_threadsafe(work)

    async def _answer(self, request: httpx.Request, body: bytes, gone: asyncio.Event, tell: Callable[[_Told], object]) -> None:
        asked = False

        async def receive() -> Message:
            nonlocal asked
            if asked:
                await gone.wait()
                return {"type": "http.disconnect"}
            asked = True
            return {"type": "http.request", "body": body, "more_body": False}

        async def send(message: Message) -> None:
            if gone.is_set():
                raise OSError("the client is gone")
            tell(message)

        try:
            await self._app(_scope(request), receive, send)
            tell(None)
        except asyncio.CancelledError:  # by `close`; whoever waits for this answer would wait for ever
            tell(httpx.TransportError("this client is closed", request=request))
            raise
        except Exception as error:
            tell(error)

    def close(self) -> None:
        """Ends what runs, and the loop; a second call does nothing."""
        with self._lock:
            closed, self._closed = self._closed, True
        if closed:
            return
        asyncio.run_coroutine_threadsafe(_cancel_all(), self._loop).result(10)
        self._soon(self._loop.stop)
        self._thread.join(10)
        self._loop.close()


async def _cancel_all() -> None:
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _scope(request: httpx.Request) -> dict[str, Any]:
    return {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": request.method,
        "scheme": request.url.scheme,
        "path": request.url.path,
        "raw_path": request.url.raw_path.split(b"?")[0],
        "query_string": request.url.query,
        "root_path": "",
        "headers": [(name.lower(), value) for name, value in request.headers.raw],
        "server": (request.url.host, request.url.port),
        "client": ("127.0.0.1", 0),
    }


def _response(told: _Told, stream: httpx.SyncByteStream | httpx.AsyncByteStream) -> httpx.Response:
    if isinstance(told, BaseException):
        raise told
    if told is None or told["type"] != "http.response.start":
        raise httpx.RemoteProtocolError("the application ended without an answer")
    return httpx.Response(told["status"], headers=told["headers"], stream=stream)


def _piece(told: _Told) -> bytes:
    if isinstance(told, BaseException):
        raise told
    return b"" if told is None else told.get("body", b"")


class _PlainStream(httpx.SyncByteStream):
    def __init__(self, told: queue.SimpleQueue[_Told], hang_up: Callable[[], None]) -> None:
        self._told, self._hang_up = told, hang_up

    def __iter__(self) -> Iterator[bytes]:
        while (told := self._told.get()) is not None:
            yield _piece(told)

    def close(self) -> None:
        self._hang_up()


class _AsyncStream(httpx.AsyncByteStream):
    def __init__(self, told: asyncio.Queue[_Told], hang_up: Callable[[], None]) -> None:
        self._told, self._hang_up = told, hang_up

    async def __aiter__(self) -> AsyncIterator[bytes]:
        while (told := await self._told.get()) is not None:
            yield _piece(told)

    async def aclose(self) -> None:
        self._hang_up()


class InProcessTransport(httpx.BaseTransport):
    """For `httpx.Client`."""

    def __init__(self, app: ASGIApp) -> None:
        """Serves `app`."""
        self._stage = _Stage(app)

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        """Asks the application."""
        told: queue.SimpleQueue[_Told] = queue.SimpleQueue()
        hang_up = self._stage.begin(request, request.read(), told.put)
        try:
            return _response(told.get(), _PlainStream(told, hang_up))
        except BaseException:
            hang_up()
            raise

    def close(self) -> None:
        """Ends it."""
        self._stage.close()


class AsyncInProcessTransport(httpx.AsyncBaseTransport):
    """For `httpx.AsyncClient`."""

    def __init__(self, app: ASGIApp) -> None:
        """Serves `app`."""
        self._stage = _Stage(app)

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Asks the application."""
        loop = asyncio.get_running_loop()
        told: asyncio.Queue[_Told] = asyncio.Queue()

        def tell(item: _Told) -> None:
            with contextlib.suppress(RuntimeError):  # the caller's loop has ended: nobody waits
                loop.call_soon_threadsafe(told.put_nowait, item)

        hang_up = self._stage.begin(request, await request.aread(), tell)
        try:
            return _response(await told.get(), _AsyncStream(told, hang_up))
        except BaseException:
            hang_up()
            raise

    async def aclose(self) -> None:
        """Ends it."""
        await asyncio.to_thread(self._stage.close)


def in_process_client(backend: Backend, *, sampling: SamplingParams | None = None, config: ServerConfig | None = None) -> httpx.Client:
    """A plain HTTP client of a server that has no port; closing it ends the server, not the backend."""
    return httpx.Client(transport=InProcessTransport(create_app(backend, config, sampling=sampling)), base_url=BASE_URL, timeout=None)


def async_in_process_client(
    backend: Backend, *, sampling: SamplingParams | None = None, config: ServerConfig | None = None
) -> httpx.AsyncClient:
    """The async twin of `in_process_client`."""
    return httpx.AsyncClient(transport=AsyncInProcessTransport(create_app(backend, config, sampling=sampling)), base_url=BASE_URL, timeout=None)
