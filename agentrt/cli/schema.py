"""``agentrt schema``: what a JSON Schema would do to a request, keyword by keyword; and compiling it ahead of time."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from agentrt.cli.console import console
from agentrt.errors import UserError
from agentrt.grammar.check import check_schema, compile_ahead

_COLOURS = {"ENFORCED": "green", "CHECKED": "yellow", "REJECTED": "red"}


def check(source: str) -> int:
    """Prints the ledger of a schema; returns 1 if a request with it would be refused."""
    report = check_schema(_read(source))
    table = Table(box=None, pad_edge=False)
    for column in ("where", "keyword", "standing", "why"):
        table.add_column(column, overflow="fold")
    for pointer, keyword, standing, why in report.rows:
        table.add_row(Text(pointer), Text(keyword), Text(standing, style=_COLOURS.get(standing.upper(), "")), Text(why))
    out = Console()
    out.print(table, highlight=False)
    out.print()
    for line in report.summary:
        out.print(line, highlight=False, markup=False, soft_wrap=True)
    return int(bool(report.error))


def compile_files(sources: Sequence[str]) -> None:
    """Compiles schemas of the regular kind ahead of time, and says what became of each."""
    for source, (what, path) in zip(sources, compile_ahead([_read(source) for source in sources]), strict=True):
        console.print(f"{source}: {what}" + (f", kept in {path}" if path else ""), highlight=False, markup=False, soft_wrap=True)


def _read(source: str) -> Any:
    try:
        return json.loads(sys.stdin.read() if source == "-" else Path(source).read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"the schema {source} cannot be read: {error}", param="file") from error
    except ValueError as error:
        raise UserError(f"the schema {source} is not JSON: {error}", param="file") from error
