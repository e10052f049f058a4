"""The inspector: a page at / that shows what the server is doing, and the JSON that it asks for. Nothing is logged by it."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import FileResponse, Response

from agentrt import __version__
from agentrt.errors import AgentrtError
from agentrt.server.call import flight_summary
from agentrt.server.flight import Flight
from agentrt.server.refusals import not_found
from agentrt.server.service import Service, json_response

PAGES = Path(__file__).parent / "inspector"
#: What may be sent, and as what.
_KINDS = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
_FILES = {path.name: path for path in PAGES.iterdir() if path.suffix in _KINDS} if PAGES.is_dir() else {}
#: The page takes nothing from elsewhere, and nobody frames it.
_POLICY = {"Content-Security-Policy": "default-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'", "Cache-Control": "no-cache"}
#: Most calls, programs and paths of the prefix tree that one answer lists.
SHOWN = 200
SHOWN_PATHS = 24


def inspector_routes(service: Service, router: APIRouter) -> APIRouter:
    """Adds the routes to `router`."""

    def page(name: str) -> Response:
        path = _FILES.get(name)
        if path is None:
            raise not_found(f"the inspector has no file {name!r}")
        return FileResponse(path, media_type=_KINDS[path.suffix], headers=_POLICY)

    @router.get("/")
    async def index() -> Response:
        """The inspector."""
        return page("index.html")

    @router.get("/inspector/state")
    async def state(http: Request) -> Response:
        """What is going on now."""
        return json_response(await service.off_loop(lambda: _state(service)))

    @router.get("/inspector/{name}")
    async def part(name: str) -> Response:
        """A part of the page."""
        return page(name)

    return router


def _state(service: Service) -> dict[str, Any]:
    complaint = service.pulse.complaint()
    stats: dict[str, Any] = {}
    paths: list[Any] = []
    under_way: Mapping[str, Any] = {}
    if complaint is None:
        try:
            stats = service.backend.stats()
            service.pulse.load = service.backend.load()
            paths = _paths(service)
            under_way = getattr(service.backend, "under_way", dict)()
        except AgentrtError as error:
            complaint = str(error)
    load = service.pulse.load
    capabilities = service.backend.capabilities
    return {
        "version": __version__,
        "model": capabilities.model,
        "models": list(service.names),
        "max_context": capabilities.max_context,
        "kv_tokens": capabilities.kv_tokens,
        "uptime_seconds": int(time.time()) - service.started,
        "complaint": complaint,
        "accepting": service.flights.accepting,
        "load": asdict(load) if load else None,
        "stats": {name: value for name, value in stats.items() if isinstance(value, int | float | str)},
        "calls": [_call(flight, under_way) for flight in list(service.flights)[:SHOWN]],
        "recent": list(service.books.recent),
        "paths": paths,
        "programs": service.programs.names()[:SHOWN],
    }


def _call(flight: Flight, under_way: Mapping[str, Any]) -> dict[str, Any]:
    """A call as the server knows it, and as the engine does, if it tells."""
    known = [(len(request.prompt_ids), under_way[request.request_id]) for request in flight.requests if request.request_id in under_way]
    admitted = [(length, each) for length, each in known if each.cached_tokens is not None]
    if not known:
        return flight_summary(flight)
    now: dict[str, Any] = {"running": any(each.running for _, each in known)}
    if admitted:
        now["cached_tokens"] = sum(each.cached_tokens for _, each in admitted)
        now["computed_tokens"] = sum(max(min(length, each.computed_tokens) - each.cached_tokens, 0) for length, each in admitted)
    return flight_summary(flight) | now


def _paths(service: Service) -> list[dict[str, Any]]:
    """The hottest paths of the prefix tree, if the backend tells them."""
    hot_paths = getattr(service.backend, "hot_paths", None)
    if hot_paths is None:
        return []
    return [
        {
            "text": service.backend.tokenizer.decode(path.first_ids, skip_special=False),
            "start": path.start,
            "tokens": path.tokens,
            "nodes": path.nodes,
            "hits": path.hits,
            "locked_tokens": path.locked_tokens,
            "parent": path.parent,
        }
        for path in hot_paths(SHOWN_PATHS)
    ]
