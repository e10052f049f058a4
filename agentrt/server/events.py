"""Server-sent events: encoded, kept alive, and ended when the client is gone or stops reading.

Invariant: `on_end` runs once the response is over, however it ended.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
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
        super().__init__(_with_comments(events, keep_alive), headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"})
        self._stall = stall
        self._on_end = on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends it."""

        async def send_in_time(message: Message) -> None:
            async with asyncio.timeout(self._stall):
                await send(message)

        try:
            await super().__call__(scope, receive, send_in_time)
        except (TimeoutError, OSError):
            pass  # the client stopped reading, or is gone: there is nobody to tell
        finally:
            self._on_end()


async def _with_comments(events: AsyncGenerator[bytes, None], seconds: float) -> AsyncIterator[bytes]:
    following = asyncio.ensure_future(anext(events, None))
    try:
        while True:
            done, _ = await asyncio.wait({following}, timeout=seconds)
            if not done:
                yield KEEPALIVE_COMMENT
                continue
            encoded = following.result()
            if encoded is None:
                return
            yield encoded
            following = asyncio.ensure_future(anext(events, None))
    finally:
        following.cancel()
