"""Where models come from: names to files, files to a folder in Hugging Face's layout. No torch, no arithmetic on tokens.

Invariant: whatever this room hands out is complete and checked; a file that is still arriving has another name.
"""

from __future__ import annotations

from agentrt.hub.catalog import CATALOG, DEFAULT_MODEL, CatalogEntry, Source, resolve
from agentrt.hub.fetch import Progress, fetch
from agentrt.hub.model_cache import CachedModel, cache_home, list_cached, remove
from agentrt.hub.model_files import ModelFiles, resolve_model

__all__ = [
    "CATALOG",
    "DEFAULT_MODEL",
    "CachedModel",
    "CatalogEntry",
    "ModelFiles",
    "Progress",
    "Source",
    "cache_home",
    "fetch",
    "list_cached",
    "remove",
    "resolve",
    "resolve_model",
]
