"""Stands before every route: bounds headers, checks the key, and counts nothing else.

Plain ASGI, so that a client's hanging up reaches the routes. Invariant: without the key no route but /health and
/ready is reached, and the key is compared in constant time.
"""

from __future__ import annotations

import base64
import binascii
import hmac

from starlette.types import ASGIApp, Receive, Scope, Send

from agentrt.server.refusals import Refusal
from agentrt.server.service import json_response

#: What a load balancer may ask without a key.
OPEN_PATHS = frozenset({"/health", "/ready"})


class Gate:
    """Lets requests through, or refuses them."""

    def __init__(self, app: ASGIApp, *, api_key: str | None, header_bytes: int) -> None:
        """Guards `app`; without a key everyone may pass."""
        self._app = app
        self._key = None if api_key is None else api_key.encode()
        self._header_bytes = header_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Takes one connection."""
        refusal = self._refusal(scope) if scope["type"] == "http" else None
        if refusal is None:
            await self._app(scope, receive, send)
        else:
            body = refusal.anthropic() if scope["path"].startswith("/v1/messages") else refusal.openai()
            await json_response(body, refusal.status, refusal.headers)(scope, receive, send)

    def _refusal(self, scope: Scope) -> Refusal | None:
        size = len(scope["path"]) + len(scope["query_string"]) + sum(len(name) + len(value) for name, value in scope["headers"])
        if size > self._header_bytes:
            return Refusal(431, f"the headers have {size} bytes; at most {self._header_bytes} are allowed", code="headers_too_large")
        if self._key is None or scope["path"] in OPEN_PATHS or self._has_key(scope):
            return None
        page = scope["path"] == "/" or scope["path"].startswith("/inspector/")
        wanted = {"WWW-Authenticate": 'Basic realm="agentrt: the api key is the password"' if page else "Bearer"}
        return Refusal(401, "the api key is missing or wrong; send it as a bearer token", code="invalid_api_key", headers=wanted)

    def _has_key(self, scope: Scope) -> bool:
        headers = dict(scope["headers"])
        scheme, _, token = headers.get(b"authorization", b"").partition(b" ")
        sent = {b"bearer": token.strip(), b"basic": _password(token)}.get(scheme.lower(), headers.get(b"x-api-key", b""))
        return self._key is not None and hmac.compare_digest(sent, self._key)


def _password(token: bytes) -> bytes:
    """The password of basic authentication, which is how a browser sends the key."""
    try:
        return base64.b64decode(token, validate=True).partition(b":")[2]
    except binascii.Error:
        return b""
