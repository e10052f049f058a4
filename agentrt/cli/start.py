"""Starts an engine for a command, with a word on what takes long."""

from __future__ import annotations

from typing import Any

from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.text import Text

from agentrt.cli.console import console as console
from agentrt.hub import ModelFiles, resolve_model
from agentrt.hub import Progress as FetchProgress
from agentrt.runtime import Engine


def resolve_shown(model: str | None, *, quiet: bool = False) -> ModelFiles:
    """Finds a model; shows progress while it is fetched and converted."""
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=quiet) as progress:
        tasks: dict[str, TaskID] = {}

        def show(seen: FetchProgress) -> None:
            if seen.stage not in tasks:
                tasks[seen.stage] = progress.add_task(seen.stage, total=seen.total)
            progress.update(tasks[seen.stage], completed=seen.done, total=seen.total)

        return resolve_model(model, show)


def start_engine(model: str | None, *, dtype: str = "auto", **options: Any) -> Engine:
    """An engine that is ready, after a line that says what it is."""
    files = resolve_shown(model)
    with console.status(Text(f"loading {files.name}")):
        return Engine(model, dtype=dtype, **options)  # type: ignore[arg-type]
