"""Takes in bodies: each in time, and all of them together within a bound. Plain ASGI; it reads nothing of what they say.

Invariant: bytes are counted from when they come until the answer begins or the request is over, and given back once.
"""

from __future__ import annotations

import asyncio

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

#: Bytes that buy a client a further second.
BYTES_A_SECOND = 65_536


class Intake:
    """Passes bodies on to an application."""

    def __init__(self, app: ASGIApp, *, seconds: float, body_bytes: int, total_bytes: int) -> None:
        """Makes one.

        Args:
            app: Reads the bodies.
            seconds: How long one may take, beside a second for each `BYTES_A_SECOND` that came.
            body_bytes: Of one.
            total_bytes: Of all bodies that wait for their answer to begin.
        """
        self._app = app
        self._seconds = seconds
        self.body_bytes = body_bytes
        self._total_bytes = total_bytes
        self.held_bytes = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Takes one connection."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        body = _Body(self, receive, self._seconds)

        async def answer(message: Message) -> None:
            body.let_go()
            await send(message)

        try:
            await self._app(scope, body.receive, answer)
        finally:
            body.let_go()

    def hold(self, size: int) -> None:
        """Counts bytes that came.

        Raises:
            HTTPException: With 503, since there is no room for them.
        """
        if self.held_bytes + size > self._total_bytes:
            message = f"the requests that are being read have {self.held_bytes + size} bytes; at most {self._total_bytes} are held at a time; try again later"
            raise HTTPException(503, message, {"Retry-After": "1"})
        self.held_bytes += size


class _Body:
    def __init__(self, intake: Intake, receive: Receive, seconds: float) -> None:
        self._intake = intake
        self._receive = receive
        self._deadline = asyncio.get_running_loop().time() + seconds
        self._size = 0
        self._whole = False

    async def receive(self) -> Message:
        if self._whole:
            return await self._receive()  # it only waits for the client to hang up now
        try:
            async with asyncio.timeout_at(self._deadline):
                message = await self._receive()
        except TimeoutError:
            raise HTTPException(408, f"the body did not come in time; {self._size} bytes of it did", {"Connection": "close"}) from None
        if message["type"] == "http.request":
            size = len(message.get("body", b""))
            if self._size + size > self._intake.body_bytes:
                raise HTTPException(413, f"the body has more than {self._intake.body_bytes} bytes, which are allowed at most")
            self._intake.hold(size)
            self._size += size
            self._deadline += size / BYTES_A_SECOND
        self._whole = message["type"] != "http.request" or not message.get("more_body", False)
        return message

    def let_go(self) -> None:
        size, self._size = self._size, 0
        self._intake.held_bytes -= size
