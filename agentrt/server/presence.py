"""Waits for an answer only as long as the client does."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.requests import Request

T = TypeVar("T")


class ClientGoneError(Exception):
    """The client hung up before its answer was there."""


async def while_present(http: Request, work: Coroutine[Any, Any, T]) -> T:
    """Awaits `work`; cancels it if the client hangs up first.

    Raises:
        ClientGoneError: It did.
    """
    working = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(_gone(http))
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientGoneError
    finally:
        for task in (working, watching):
            if not task.done():
                task.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


async def _gone(http: Request) -> None:
    while (await http.receive())["type"] != "http.disconnect":
        pass
