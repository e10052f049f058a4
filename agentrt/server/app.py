"""The application: routes put together, errors told, and what begins and ends with it. No logic, no globals."""

from __future__ import annotations

import asyncio
import logging
import reprlib
import secrets
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from fastapi import APIRouter, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from agentrt import __version__
from agentrt.backend import Backend
from agentrt.config import ServerConfig
from agentrt.errors import AgentrtError, EngineError, UserError
from agentrt.request import SamplingParams
from agentrt.server.anthropic_routes import anthropic_routes
from agentrt.server.bodies import strict_json_route
from agentrt.server.gate import Gate
from agentrt.server.inspector_routes import inspector_routes
from agentrt.server.intake import Intake
from agentrt.server.native_routes import native_routes
from agentrt.server.openai_routes import openai_routes
from agentrt.server.presence import ClientGoneError
from agentrt.server.refusals import Refusal, Refused, refusal_of
from agentrt.server.responses_routes import responses_routes
from agentrt.server.service import Service, json_response

_log = logging.getLogger("agentrt.server")

#: Seconds between two questions to the engine whether it is alive.
PULSE_SECONDS = 1.0

#: Shows values that are wrong, however large or deep they are.
_SHOWN = reprlib.Repr()
_SHOWN.maxlevel, _SHOWN.maxstring, _SHOWN.maxother = 3, 77, 77


def create_app(
    backend: Backend,
    config: ServerConfig | None = None,
    *,
    sampling: SamplingParams | None = None,
    on_engine_death: Callable[[EngineError], None] | None = None,
) -> FastAPI:
    """Makes the application that serves `backend`.

    Args:
        backend: What is served; it is not closed here.
        config: How.
        sampling: What holds where a client says nothing, such as the model's own recommendation.
        on_engine_death: Called once, from any thread, when the engine turns out to be down.

    Raises:
        UserError: The config does not fit.
    """
    config = config or ServerConfig()
    service = Service(backend, config, sampling)

    def on_death(error: EngineError) -> None:
        _log.error("the engine is down: %s", error)
        if on_engine_death is not None:
            on_engine_death(error)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        watching = asyncio.create_task(service.pulse.watch(PULSE_SECONDS, on_death))
        yield
        watching.cancel()
        if service.books.spans is not None:
            await asyncio.to_thread(service.books.spans.close)

    app = FastAPI(title="agentrt", version=__version__, lifespan=lifespan, docs_url=None, redoc_url=None)
    app.state.service = service
    route = strict_json_route(max_values=config.json_values, max_depth=config.json_depth)
    for routes in (openai_routes, responses_routes, anthropic_routes, native_routes, inspector_routes):
        app.include_router(routes(service, APIRouter(route_class=route)))
    _tell_errors(app, service, on_death)
    app.add_middleware(Intake, seconds=config.read_seconds, body_bytes=config.body_bytes, total_bytes=config.bodies_bytes)
    app.add_middleware(Gate, api_key=config.api_key, header_bytes=config.header_bytes, body_bytes=config.body_bytes, local=_is_loopback(config.host))
    return app


def _tell_errors(app: FastAPI, service: Service, on_death: Callable[[EngineError], None]) -> None:
    def told(http: Request, refusal: Refusal) -> Response:
        body = refusal.anthropic() if http.url.path.startswith("/v1/messages") else refusal.openai()
        return json_response(body, refusal.status, refusal.headers)

    @app.exception_handler(Refused)
    @app.exception_handler(AgentrtError)
    async def known(http: Request, error: Exception) -> Response:
        if isinstance(error, EngineError):
            service.pulse.note_death(error, on_death)
        return told(http, refusal_of(error))

    @app.exception_handler(ClientGoneError)
    async def gone(http: Request, error: Exception) -> Response:
        return Response(status_code=499)

    @app.exception_handler(RequestValidationError)
    async def malformed(http: Request, error: RequestValidationError) -> Response:
        return told(http, _malformed(error))

    @app.exception_handler(HTTPException)
    async def plain(http: Request, error: HTTPException) -> Response:
        return told(http, _plain(http, error))

    @app.exception_handler(Exception)
    async def unknown(http: Request, error: Exception) -> Response:
        number = secrets.token_hex(4)
        _log.error("error %s in %s %s", number, http.method, http.url.path, exc_info=error)
        return told(http, Refusal(500, f"something went wrong inside; the server's log has it as {number}", "server_error", code="internal"))


#: Short words for what is refused before a route reads it.
_CODES = {400: "invalid_json", 404: "not_found", 405: "method_not_allowed", 408: "request_timeout", 413: "body_too_large", 503: "overloaded"}


def _plain(http: Request, error: HTTPException) -> Refusal:
    message = {
        404: f"there is nothing at {http.method} {http.url.path}",
        405: f"{http.url.path} takes {(error.headers or {}).get('Allow', 'another method')}, not {http.method}",
    }.get(error.status_code, str(error.detail))
    kind = "invalid_request_error" if error.status_code < 500 else "overloaded_error"
    return Refusal(error.status_code, message, kind, code=_CODES.get(error.status_code), headers=dict(error.headers or {}))


def _is_loopback(host: str) -> bool:
    return host == "localhost" or host.startswith("127.") or host == "::1"


def _malformed(error: RequestValidationError) -> Refusal:
    """The first thing that is wrong with a body, under the name that the client knows."""
    first = error.errors()[0]
    cause = first.get("ctx", {}).get("error")
    if isinstance(cause, UserError):
        return refusal_of(cause)
    place = [str(part) for part in first["loc"] if part != "body"]
    if first["type"] == "json_invalid":
        return Refusal(400, f"the body is not JSON: {first.get('ctx', {}).get('error', first['msg'])}", code="invalid_json")
    if not place and isinstance(first.get("input"), bytes):
        return Refusal(415, "the body is not taken for JSON; send the header Content-Type: application/json", code="unsupported_media_type")
    value = _SHOWN.repr(first.get("input"))
    return Refusal(400, f"{'.'.join(place) or 'the body'}: {first['msg']} (got {value})", param=".".join(place) or None, code="invalid_value")
