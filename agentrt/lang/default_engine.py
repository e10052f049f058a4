"""What SGLang's frontend asks of the backend that programs run on by default."""

from __future__ import annotations

from typing import Any

from agentrt.backend import Backend, FlushReport, default_backend


def flush_cache(backend: Backend | None = None) -> FlushReport:
    """Frees every cached token that no request is using, on `backend` or the default one."""
    return (backend or default_backend()).flush_cache()


def get_server_info(backend: Backend | None = None) -> dict[str, Any]:
    """What `backend`, or the default one, is and has done: its model, limits, load and counters."""
    there = backend or default_backend()
    able, load = there.capabilities, there.load()
    return {
        "model": able.model,
        "max_context": able.max_context,
        "kv_tokens": able.kv_tokens,
        "running": load.running,
        "waiting": load.waiting,
        "kv_usage": load.kv_usage,
        **there.stats(),
    }
