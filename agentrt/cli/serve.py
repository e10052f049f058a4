"""``agentrt serve``: an engine behind OpenAI's protocol."""

from __future__ import annotations

from typing import Any

from agentrt.backend import Backend
from agentrt.cli.start import console, resolve_shown
from agentrt.config import ServerConfig
from agentrt.request import SamplingParams
from agentrt.runtime import Engine
from agentrt.server.serve import serve


def run(model: str | None, config: ServerConfig, **engine_options: Any) -> int:
    """Fetches the model if need be, listens, loads and serves; returns the exit status."""
    resolve_shown(model)
    where = f"http://{config.host}:{config.port}"
    console.print(f"agentrt on [bold]{where}[/] [dim](the inspector is there; the API is under {where}/v1)[/]", highlight=False)
    return serve(lambda: Engine(model, **engine_options), config, sampling_of=_recommended)


def _recommended(backend: Backend) -> SamplingParams | None:
    return backend.facts.sampling if isinstance(backend, Engine) else None
