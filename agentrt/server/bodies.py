"""JSON bodies, read as the standard has them and no larger than they look.

What a body may hold is bounded before it is parsed, since a few megabytes of brackets become gigabytes of objects, and what
nests deeply breaks whatever walks it. Invariant: no NaN, no lone surrogates, at most so many values, at most so deep.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Coroutine
from typing import Any

import orjson
from fastapi import Request
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.responses import Response

_STRINGS = re.compile(rb'"(?:[^"\\]++|\\.)*+"', re.DOTALL)
_ONE_KIND = bytes.maketrans(b"{}", b"[]")
_NO_BRACKET = bytes(set(range(256)) - set(b"[]{}"))


def check_shape(text: bytes, *, max_values: int, max_depth: int) -> None:
    """Refuses a JSON text that has too many values or nests too deep; of what is no JSON, nothing is said.

    What plainly has neither is not looked at closely, and what is looked at is only counted and cut, which is fast.

    Raises:
        HTTPException: With 400.
    """
    if text.count(b"[") + text.count(b"{") <= max_depth and text.count(b",") < max_values:
        return
    strings = (text.count(b'"') - text.count(b'\\"')) // 2  # at least so many
    if strings > 2 * max_values:
        raise _too_many(strings, max_values)
    bare = _STRINGS.sub(b"", text)
    values = 1 + sum(bare.count(mark) for mark in (b"[", b"{", b","))
    if values > max_values:
        raise _too_many(values, max_values)
    brackets = bare.translate(_ONE_KIND, _NO_BRACKET)
    for _ in range(max_depth):  # each round takes the innermost pairs out
        if not brackets:
            return
        brackets = brackets.replace(b"[]", b"")
    if brackets:
        raise HTTPException(400, f"the body's JSON nests more than {max_depth} deep, or its brackets do not match")


def _too_many(values: int, limit: int) -> HTTPException:
    return HTTPException(400, f"the body's JSON has about {values} values; at most {limit} are allowed")


def strict_json_route(*, max_values: int, max_depth: int) -> type[APIRoute]:
    """A kind of route that reads its body so."""

    class StrictJsonRequest(Request):
        async def json(self) -> Any:
            """The body; kept once, as what it means."""
            if not hasattr(self, "_json"):
                text = await self.body()
                check_shape(text, max_values=max_values, max_depth=max_depth)
                try:
                    self._json = orjson.loads(text)
                except orjson.JSONDecodeError as error:
                    raise json.JSONDecodeError(error.msg, "", 0) from error
            return self._json

    class StrictJsonRoute(APIRoute):
        def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
            """The handler, with the request exchanged."""
            handler = super().get_route_handler()

            async def handle(http: Request) -> Response:
                return await handler(StrictJsonRequest(http.scope, http.receive))

            return handle

    return StrictJsonRoute
