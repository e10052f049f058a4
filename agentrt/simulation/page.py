"""A report as one self-contained page: a table of figures, and a chart of each over time. No script, nothing fetched."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape
from typing import Any

import numpy as np

from agentrt.simulation.charts import Line, line_chart, short
from agentrt.simulation.report import Report, Spread
from agentrt.simulation.simulator import CallRecord
from agentrt.simulation.timeline import Moment

INTERVALS = 80
"""Intervals of time for which percentiles of calls are drawn."""

_STYLE = """
:root { --ink: #1b1f24; --dim: #66707a; --rule: #e3e6ea; --back: #ffffff; --c0: #1f6feb; --c1: #d1570b; --c2: #1a7f4b; --c3: #8250df; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6e9ec; --dim: #98a2ad; --rule: #2b323a; --back: #14181d; --c0: #6cb0ff; --c1: #ffa257; --c2: #58d492; --c3: #c297ff; }
}
body { font: 15px/1.45 system-ui, sans-serif; color: var(--ink); background: var(--back); max-width: 1180px; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.35rem; margin: 0; } h2 { font-size: 1.05rem; margin: 2rem 0 .5rem; }
p { color: var(--dim); margin: .2rem 0; max-width: 75ch; }
.row { display: flex; flex-wrap: wrap; gap: 1.2rem 2.4rem; margin: 1.2rem 0; }
.figure b { display: block; font-size: 1.55rem; font-weight: 600; } .figure span { color: var(--dim); font-size: .85rem; }
table { border-collapse: collapse; } td, th { padding: .25rem .9rem .25rem 0; text-align: right; border-bottom: 1px solid var(--rule); font-variant-numeric: tabular-nums; }
td:first-child, th:first-child { text-align: left; } th { color: var(--dim); font-weight: 500; }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(440px, 100%), 1fr)); gap: 1.4rem; }
svg { width: 100%; height: auto; } svg text { font: 11px system-ui, sans-serif; fill: var(--dim); } svg .title { font-size: 13px; fill: var(--ink); }
.grid { stroke: var(--rule); stroke-width: 1; } .line { fill: none; stroke-width: 1.8; stroke-linejoin: round; }
@media (max-width: 600px) { td, th { padding-right: .45rem; font-size: .8rem; } body { margin-top: 1rem; } }
.c0 { stroke: var(--c0); } .c1 { stroke: var(--c1); } .c2 { stroke: var(--c2); } .c3 { stroke: var(--c3); }
"""


def page(report: Report, records: Sequence[CallRecord]) -> str:
    """The page's HTML."""
    answered = [record for record in records if not record.error]
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(report.trace)}: simulation</title><style>{_STYLE}</style></head><body>
<h1>{escape(report.trace)}: {report.calls:,} calls{f" of {report.programs:,} programs" if report.programs else ""}</h1>
<p>The real scheduler, tree and page pool; virtual time from a cost model.</p>
<p>{escape(_setup(report.setup))}.</p>
<div class="row">{"".join(_figure(*figure) for figure in _figures(report))}</div>
<h2>Seconds</h2>{_table(report)}
<h2>Over time</h2><div class="charts">{"".join([*_times_over_time(answered), *_over_time(report)])}{_spread_chart(answered)}</div>
</body></html>
"""


def _setup(setup: dict[str, Any]) -> str:
    """The engine's settings, in words; what was not set is left out."""
    return ", ".join(f"{name.replace('_', ' ')} {_value(value)}" for name, value in setup.items() if value is not None)


def _value(value: object) -> str:
    if isinstance(value, dict):
        return " + ".join(f"{price:g} s a {name}" for name, price in value.items() if price)
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def _figures(report: Report) -> list[tuple[str, str]]:
    bounds = f"of prompt tokens found; unlimited memory {report.unlimited_hit_rate:.1%}, Belady {report.belady_hit_rate:.1%}"
    return [
        (f"{report.hit_rate:.1%}", bounds),
        (short(report.prompt_tokens), "prompt tokens"),
        (short(report.output_tokens), "generated tokens"),
        (short(report.computed_tokens), "tokens computed"),
        (f"{report.seconds:,.0f} s", f"virtual time, {report.steps:,} steps"),
        (f"{report.preemptions:,}", "preemptions"),
        (short(report.evicted_tokens), "tokens evicted"),
        (f"{report.slots_filled:.1%}", "of slots in use hold a token"),
        *([(f"{report.failed:,}", "calls failed")] if report.failed else []),
    ]


def _figure(value: str, what: str) -> str:
    return f'<div class="figure"><b>{escape(value)}</b><span>{escape(what)}</span></div>'


def _table(report: Report) -> str:
    spreads: list[tuple[str, Spread]] = [
        ("wait for admission", report.wait),
        ("to the first token", report.first_token),
        ("to the last token", report.whole),
        ("between two tokens", report.gap),
    ]
    if report.programs:
        spreads.append(("whole program", report.program_time))
    rows = "".join(
        f"<tr><td>{name}</td>" + "".join(f"<td>{value:.3f}</td>" for value in (s.mean, s.p50, s.p90, s.p99, s.worst)) + "</tr>"
        for name, s in spreads
    )
    return f"<table><tr><th></th><th>mean</th><th>p50</th><th>p90</th><th>p99</th><th>worst</th></tr>{rows}</table>"


def _times_over_time(records: Sequence[CallRecord]) -> list[str]:
    """Of the calls whose first token, or last, came in an interval: how long it took, and how much of their prompts was found."""
    first = _Intervals(records, lambda record: record.first_token)
    last = _Intervals(records, lambda record: record.ended)
    return [
        line_chart("To the first token", first.spread(lambda record: record.first_token - record.due), y="seconds"),
        line_chart("To the last token", last.spread(lambda record: record.ended - record.due), y="seconds"),
        line_chart("Hit rate", [first.hit_rate()], y="% of the prompt tokens"),
    ]


class _Intervals:
    """Calls by the interval of time in which something came for them; intervals in which nothing came are left out."""

    def __init__(self, records: Sequence[CallRecord], came: Callable[[CallRecord], float]) -> None:
        width = max((came(record) for record in records), default=0.0) / INTERVALS or 1.0
        calls: dict[int, list[CallRecord]] = {}
        for record in records:
            calls.setdefault(min(int(came(record) / width), INTERVALS - 1), []).append(record)
        self._middles = [(number + 0.5) * width for number in sorted(calls)]
        self._calls = [calls[number] for number in sorted(calls)]

    def spread(self, time: Callable[[CallRecord], float]) -> list[Line]:
        """Median and 99th percentile of a time, interval by interval."""
        times = [np.array([time(record) for record in calls]) for calls in self._calls]
        return [
            Line(name, self._middles, [float(np.percentile(some, level, method="higher")) for some in times])
            for name, level in (("median", 50), ("99th percentile", 99))
        ]

    def hit_rate(self) -> Line:
        """Share of the prompt tokens that were found, interval by interval."""
        shares = [
            100 * sum(record.cached_tokens for record in calls) / sum(len(record.call.prompt) for record in calls)
            for calls in self._calls
        ]
        return Line("hit rate", self._middles, shares)


def _over_time(report: Report) -> list[str]:
    moments: Sequence[Moment] = report.moments
    xs = [moment.time for moment in moments]
    share = 100 * report.setup["page_size"] / report.setup["pool_tokens"]

    def line(name: str, of: str, scale: float = 1.0) -> Line:
        return Line(name, xs, [scale * getattr(moment, of) for moment in moments])

    return [
        line_chart("Sequences", [line("running", "running"), line("waiting", "waiting")]),
        line_chart("Occupancy of pages", [line("in the tree", "pages_cached", share), line("in use", "pages_used", share)], y="% of the pool"),
        line_chart("Tokens evicted, so far", [line("evicted", "evicted_tokens")]),
        line_chart("Preemptions, so far", [line("preemptions", "preemptions")]),
        line_chart("Calls ended, so far", [line("ended", "ended")]),
    ]


def _spread_chart(records: Sequence[CallRecord]) -> str:
    """Which share of the calls took at most how long."""
    lines = []
    for name, times in (
        ("first token", [record.first_token - record.due for record in records]),
        ("last token", [record.ended - record.due for record in records]),
    ):
        ordered = sorted(times)
        places = sorted({round(share / 200 * (len(ordered) - 1)) for share in range(201)}) if ordered else []
        lines.append(Line(name, [ordered[place] for place in places], [100 * (place + 1) / len(ordered) for place in places]))
    return line_chart("Calls answered within", lines, y="%")
