"""Stands before every route: bounds what a request announces, checks the key or, where there is none, that no web page is behind the request.

A server without a key on this machine is in reach of every page that its user opens: by a name that was made to point here, or
by a form. Such requests carry the page's name as Host or as Origin. Plain ASGI, so that a client's hanging up reaches the
routes. Invariant: without the key no route but /health and /ready is reached, and the key is compared in constant time.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import hmac
import ipaddress

from starlette.types import ASGIApp, Receive, Scope, Send

from agentrt.server.refusals import Refusal
from agentrt.server.service import json_response

#: What a load balancer may ask without a key.
OPEN_PATHS = frozenset({"/health", "/ready"})

#: Names below these are given by nobody on the Internet.
_PRIVATE_ENDINGS = (".localhost", ".local", ".internal")


class Gate:
    """Lets requests through, or refuses them."""

    def __init__(self, app: ASGIApp, *, api_key: str | None, header_bytes: int, body_bytes: int, local: bool = True) -> None:
        """Guards `app`; without a key every program may pass, and web pages may not if the server is `local` to this machine."""
        self._app = app
        self._local = local
        self._key = None if api_key is None else api_key.encode()
        self._header_bytes = header_bytes
        self._body_bytes = body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Takes one connection."""
        refusal = self._refusal(scope) if scope["type"] == "http" else None
        if refusal is None:
            head = scope["type"] == "http" and scope["method"] == "HEAD"  # answered as GET; the wire leaves the body out
            await self._app({**scope, "method": "GET"} if head else scope, receive, send)
        else:
            body = refusal.anthropic() if scope["path"].startswith("/v1/messages") else refusal.openai()
            await json_response(body, refusal.status, refusal.headers)(scope, receive, send)

    def _refusal(self, scope: Scope) -> Refusal | None:
        size = len(scope["path"]) + len(scope["query_string"]) + sum(len(name) + len(value) for name, value in scope["headers"])
        if size > self._header_bytes:
            return Refusal(431, f"the headers have {size} bytes; at most {self._header_bytes} are allowed", code="headers_too_large")
        length = dict(scope["headers"]).get(b"content-length", b"0")
        if length.isdigit() and (len(length) > 18 or int(length) > self._body_bytes):
            return Refusal(413, f"the body has {length[:18].decode()} bytes; at most {self._body_bytes} are allowed", code="body_too_large")
        if scope["path"] in OPEN_PATHS:
            return None
        if self._key is None:
            return self._of_a_page(scope) if self._local else None
        if self._has_key(scope):
            return None
        page = scope["path"] == "/" or scope["path"].startswith("/inspector/")
        wanted = {"WWW-Authenticate": 'Basic realm="agentrt: the api key is the password"' if page else "Bearer"}
        return Refusal(401, "the api key is missing or wrong; send it as a bearer token", code="invalid_api_key", headers=wanted)

    def _of_a_page(self, scope: Scope) -> Refusal | None:
        headers = dict(scope["headers"])
        host, origin = (headers.get(name, b"").decode("latin-1").lower() for name in (b"host", b"origin"))
        if not _is_near(host):
            return Refusal(403, f"without an api key only names of this machine are answered, not {host[:100]!r}; use 127.0.0.1, or set --api-key", code="foreign_host")
        if origin and origin.partition("://")[2] != host:
            return Refusal(403, f"without an api key no other page's requests are answered, and {origin[:100]!r} is one; set --api-key", code="foreign_origin")
        return None

    def _has_key(self, scope: Scope) -> bool:
        headers = dict(scope["headers"])
        scheme, _, token = headers.get(b"authorization", b"").partition(b" ")
        sent = {b"bearer": token.strip(), b"basic": _password(token)}.get(scheme.lower(), headers.get(b"x-api-key", b""))
        return self._key is not None and hmac.compare_digest(sent, self._key)


def _is_near(host: str) -> bool:
    """Whether a Host is an address, or a name that no one on the Internet can own."""
    name = host.rpartition("]")[0].removeprefix("[") if host.startswith("[") else host.partition(":")[0]
    if "." not in name and ":" not in name:
        return True
    with contextlib.suppress(ValueError):
        ipaddress.ip_address(name)
        return True
    return name.rstrip(".").endswith(_PRIVATE_ENDINGS)


def _password(token: bytes) -> bytes:
    """The password of basic authentication, which is how a browser sends the key."""
    try:
        return base64.b64decode(token, validate=True).partition(b":")[2]
    except binascii.Error:
        return b""
