"""Server-sent events: encoded, kept alive, and ended when the client is gone or stops reading.

Invariant: `on_end` runs once the response is over, however it ended.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable
from typing import Any

import orjson
from fastapi.sse import KEEPALIVE_COMMENT, format_sse_event
from starlette.responses import StreamingResponse
from starlette.types import Message, Receive, Scope, Send

#: What ends a stream of OpenAI's.
DONE = format_sse_event(data_str="[DONE]")


def event(body: Any, name: str | None = None) -> bytes:
    """One event with a JSON body."""
    return format_sse_event(data_str=orjson.dumps(body).decode(), event=name)


class EventStream(StreamingResponse):
    """A response of events."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes, None], *, keep_alive: float, stall: float, on_end: Callable[[], None]) -> None:
        """Makes a response that has not begun.

        Args:
            events: Encoded events.
            keep_alive: Seconds without an event after which a comment is sent.
            stall: Seconds without reading after which the client is taken for lost.
            on_end: Called when the response is over.
        """
        super().__init__(events, headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"})
        self._keep_alive = keep_alive
        self._stall = stall
        self._on_end = on_end
        self._sent: float | None = None  # when something was sent last; None before the response begins
        self._sending: float | None = None  # since when something is being sent

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends it."""
        loop = asyncio.get_running_loop()

        async def send_watched(message: Message) -> None:
            self._sending = loop.time()
            await send(message)
            self._sent, self._sending = loop.time(), None

        responding = asyncio.ensure_future(super().__call__(scope, receive, send_watched))
        watching = asyncio.ensure_future(self._watch(responding, send_watched))
        try:
            await responding
        except OSError:
            pass  # the client is gone: there is nobody to tell
        except asyncio.CancelledError:
            responding.cancel()
            if not watching.done():
                raise  # it was not the watch, which has found a client that does not read
        finally:
            watching.cancel()
            self._on_end()

    async def _watch(self, responding: asyncio.Future[None], send: Send) -> None:
        """Sends a comment whenever nothing was sent for a while; returns, and ends the response, when the client does not read.

        Each event is one message, so that no comment cuts one in two. One clock for the whole stream costs nothing an event.
        """
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(min(self._keep_alive, self._stall) / 4)
            now = loop.time()
            if self._sending is not None:
                if now - self._sending >= self._stall:
                    responding.cancel()
                    return
            elif self._sent is not None and now - self._sent >= self._keep_alive:
                with contextlib.suppress(OSError):  # the stream itself will find out
                    await send({"type": "http.response.body", "body": KEEPALIVE_COMMENT, "more_body": True})
