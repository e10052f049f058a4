"""``agentrt simulate``: the real scheduler, tree and pool on a trace, in virtual time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from agentrt.simulation.report import Report, Spread
from agentrt.simulation.simulate import simulate


def run(trace: str, *, out: Path | None, html: Path | None, **options: Any) -> None:
    """Simulates, prints what came of it, and writes the reports that were asked for."""
    report = simulate(trace, out=out, html=html, progress=True, **{name: value for name, value in options.items() if value is not None})
    console = Console()
    console.print(_figures(report), highlight=False)
    console.print(_times(report), highlight=False)
    for path in (out, html):
        if path is not None:
            console.print(f"written: {path}", highlight=False)


def _figures(report: Report) -> Table:
    table = Table(title=f"{report.trace}: {report.setup['policy']}, {report.setup['eviction']}", title_justify="left", box=None, show_header=False, pad_edge=False)
    for name, value in (
        ("calls", f"{report.calls:,} of {report.programs:,} programs" + (f", {report.failed} failed" if report.failed else "")),
        ("prompt tokens", f"{report.prompt_tokens:,}, {report.computed_tokens:,} computed"),
        ("hit rate", f"{report.hit_rate:.1%} (unlimited cache {report.unlimited_hit_rate:.1%}, best possible eviction {report.belady_hit_rate:.1%})"),
        ("pool", f"{report.setup['pool_tokens']:,} tokens, working set {report.working_set:,}, slots filled {report.slots_filled:.1%}"),
        ("preemptions, evicted", f"{report.preemptions:,}, {report.evicted_tokens:,} tokens"),
        ("virtual time", f"{report.seconds:,.1f} s in {report.steps:,} steps"),
    ):
        table.add_row(name, value)
    return table


def _times(report: Report) -> Table:
    table = Table(box=None, pad_edge=False)
    for column in ("seconds", "mean", "p50", "p90", "p99", "worst"):
        table.add_column(column, justify="left" if column == "seconds" else "right")
    rows: list[tuple[str, Spread]] = [
        ("wait", report.wait),
        ("first token", report.first_token),
        ("whole call", report.whole),
        ("between tokens", report.gap),
        ("whole program", report.program_time),
    ]
    for name, spread in rows:
        table.add_row(name, *(f"{value:.3f}" for value in (spread.mean, spread.p50, spread.p90, spread.p99, spread.worst)))
    return table
