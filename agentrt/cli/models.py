"""``agentrt models``: what is known, what is cached, where, how large."""

from __future__ import annotations

from rich.console import Console

from agentrt.cli.console import say
from agentrt.cli.start import resolve_shown
from agentrt.hub import CATALOG, cache_home, list_cached
from agentrt.hub import remove as remove_cached


def show() -> None:
    """Prints the catalogue and the cache: a line for each model, and where it lies on a line below."""
    out = Console()
    home, cached = cache_home(), list_cached()
    known = {model.name for model in cached}
    missing = [entry for entry in CATALOG.values() if entry.name not in known]
    entries: list[tuple[str, str, int, str]] = [
        *((model.name, model.kind, model.bytes, str(model.path.relative_to(home))) for model in cached),
        *((entry.name, "not fetched", entry.size, f"agentrt models fetch {entry.name}") for entry in missing),
    ]
    width = max(len(name) for name, *_ in entries)
    for name, kind, count, below in entries:
        say(f"{name:{width}}  {kind:11}  {_size(count):>8}", "bold", out)
        say(f"  {below}", "dim", out)
    say(f"\nall in {home}, {_size(sum(model.bytes for model in cached))}; AGENTRT_HOME moves it", screen=out)


def fetch(name: str, *, quiet: bool = False) -> None:
    """Fetches one model and makes it ready."""
    files = resolve_shown(name, quiet=quiet)
    if not quiet:
        say(f"{files.name} is ready in {files.folder}")


def remove(name: str) -> None:
    """Deletes one model from the cache."""
    gone = remove_cached(name)
    say(f"removed {_size(sum(model.bytes for model in gone))}")


def _size(count: int) -> str:
    return f"{count / 1e9:.2f} GB" if count >= 1e9 else f"{count / 1e6:.0f} MB"
