"""``agentrt models``: what is known, what is cached, where, how large."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from agentrt.cli.start import console, resolve_shown
from agentrt.hub import CATALOG, cache_home, list_cached
from agentrt.hub import remove as remove_cached


def show() -> None:
    """Prints the catalogue and the cache."""
    cached = list_cached()
    table = Table(box=None, pad_edge=False)
    for column in ("model", "kind", "size", "where"):
        table.add_column(column, justify="right" if column == "size" else "left", overflow="fold")
    for model in cached:
        table.add_row(model.name, model.kind, _size(model.bytes), str(model.path))
    known = {model.name for model in cached}
    for entry in CATALOG.values():
        if entry.name not in known:
            table.add_row(entry.name, "not fetched", _size(entry.size), f"agentrt models fetch {entry.name}")
    out = Console()
    out.print(table)
    out.print(f"\nmodel cache: {cache_home()} ({_size(sum(model.bytes for model in cached))}); AGENTRT_HOME moves it", highlight=False)


def fetch(name: str, *, quiet: bool = False) -> None:
    """Fetches one model and makes it ready."""
    files = resolve_shown(name, quiet=quiet)
    if not quiet:
        console.print(f"{files.name} is ready in {files.folder}", highlight=False)


def remove(name: str) -> None:
    """Deletes one model from the cache."""
    gone = remove_cached(name)
    console.print(f"removed {_size(sum(model.bytes for model in gone))}", highlight=False)


def _size(count: int) -> str:
    return f"{count / 1e9:.2f} GB" if count >= 1e9 else f"{count / 1e6:.0f} MB"
