"""The program report: what one run of a program asked, what was reused, what was computed again and why, and where the time went.

`build_report` turns plain records (made by the language, or by the server for HTTP programs) into a `Report`: JSON by the schema
``schemas/program_report.json``, a summary in words, and one HTML file that needs nothing else. It measures nothing itself.
Invariant: every number in the page is in the JSON.
"""

from __future__ import annotations

import html
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FORMAT = 1

Record = Mapping[str, Any]

_SUMS = (
    "prompt_tokens",
    "cached_tokens",
    "completion_tokens",
    "forced_tokens",
    "forward_passes",
    "passes_saved",
    "queue_seconds",
    "run_seconds",
)


@dataclass(frozen=True, slots=True)
class Report:
    """One program's report; `values` follows ``schemas/program_report.json``."""

    values: dict[str, Any]

    def to_json(self) -> str:
        """Returns the report as JSON."""
        return json.dumps(self.values, ensure_ascii=False, indent=1)

    def to_html(self) -> str:
        """Returns one self-contained page, readable on a phone."""
        return _page(self.values)

    def save(self, path: str | Path) -> Path:
        """Writes the report: HTML if the name ends in .html, else JSON. Returns the path."""
        target = Path(path)
        target.write_text(self.to_html() if target.suffix in (".html", ".htm") else self.to_json(), encoding="utf-8")
        return target

    def __str__(self) -> str:
        t = self.values["totals"]
        return (
            f"{self.values['program']}: {t['calls']} calls, {t['prompt_tokens']:,} prompt tokens of which {t['cached_tokens']:,} reused "
            f"({t['reuse']:.0%}), {t['computed_tokens']:,} computed; {t['completion_tokens']:,} generated of which {t['forced_tokens']:,} forced, "
            f"{t['passes_saved']:,} forward passes saved; {self.values['wall_seconds']:.2f} s, critical path {self.values['critical_path']['seconds']:.2f} s"
        )


def build_report(
    *,
    program: str,
    model: str,
    seed: int | None,
    wall_seconds: float,
    calls: Sequence[Record],
    tools: Sequence[Record] = (),
    branches: Sequence[Record] = (),
    error: str | None = None,
) -> Report:
    """Makes a report of plain records.

    Args:
        program: Name.
        model: Name of the model.
        seed: The run's, if it has one.
        wall_seconds: How long the run took.
        calls: One record per request: branch, number, name, kind, where, prompt_tokens, known_tokens (leading tokens that the program
            had computed before), cached_tokens, first_new (text of the first new token, or None), completion_tokens, forced_tokens,
            forward_passes, passes_saved, queue_seconds, run_seconds, began, ended (seconds since the run began), finish_reason.
        tools: One record per tool call: branch, name, began, ended, error.
        branches: One per branch: path, tokens, shared_tokens (taken over from its parent), error.
        error: What the run failed with, in words.
    """
    told = [
        dict(call) | {"recomputed": recomputed(call)} for call in sorted(calls, key=lambda c: (c["began"], c["ended"]))
    ]
    totals = _totals(told)
    values = {
        "format": FORMAT,
        "program": program,
        "model": model,
        "seed": seed,
        "wall_seconds": round(wall_seconds, 6),
        "error": error,
        "totals": totals,
        "calls": told,
        "tools": [dict(tool) for tool in tools],
        "branches": [dict(branch) | {"parent": _parent(branch["path"])} for branch in branches],
        "critical_path": critical_path(told, tools),
    }
    return Report(values)


def _totals(calls: Sequence[Record]) -> dict[str, Any]:
    totals: dict[str, Any] = {"calls": len(calls)}
    for name in _SUMS:
        totals[name] = sum(call[name] for call in calls)
    totals["computed_tokens"] = totals["prompt_tokens"] - totals["cached_tokens"]
    totals["reuse"] = totals["cached_tokens"] / totals["prompt_tokens"] if totals["prompt_tokens"] else 0.0
    return totals


def recomputed(call: Record) -> list[dict[str, Any]]:
    """Says of the prompt tokens that were computed, how many and why.

    "last" is the one token that every request computes, since its logits are wanted, or an answer's last one, which was sampled and
    never fed; "evicted" were computed earlier in this program and were not found; "new" were not computed before in this program.
    """
    prompt, known, cached = call["prompt_tokens"], call["known_tokens"], call["cached_tokens"]
    reasons: list[dict[str, Any]] = []
    lost = max(min(known, prompt) - cached, 0)
    if lost == 1:
        reasons.append({"why": "last", "tokens": 1})
    elif lost:
        reasons.append({"why": "evicted", "tokens": lost})
    new = prompt - max(known, cached)
    if new > 0:
        reasons.append({"why": "new", "tokens": new, "first": call.get("first_new")})
    return reasons


def critical_path(calls: Sequence[Record], tools: Sequence[Record] = ()) -> dict[str, Any]:
    """Finds the chain of calls and tools that the end of the run waited for.

    From what ended last, each step goes back to what ended last before it began: what it can have waited for.
    """
    spans = [("call", place, c["began"], c["ended"]) for place, c in enumerate(calls)]
    spans += [("tool", place, t["began"], t["ended"]) for place, t in enumerate(tools)]
    chain: list[dict[str, Any]] = []
    limit = float("inf")
    by_end = sorted(spans, key=lambda span: span[3])
    while by_end:
        span = by_end.pop()
        if span[3] <= limit:
            chain.append({"kind": span[0], "index": span[1], "seconds": round(span[3] - span[2], 6)})
            limit = span[2] + 1e-9
    chain.reverse()
    return {"seconds": round(sum(step["seconds"] for step in chain), 6), "steps": chain}


def _parent(path: str) -> str | None:
    if not path:
        return None
    return path.rpartition("/")[0]


# ------------------------------------------------------------------------ the page

_STYLE = """
:root{--ink:#1b1f24;--faint:#5b6570;--line:#d8dee4;--reused:#2f9e6e;--computed:#d9822b;--new:#d9822b;--gen:#3d6fd9;--tool:#8a5cd1;--bad:#c43838;--paper:#fff}
@media(prefers-color-scheme:dark){:root{--ink:#e6e9ed;--faint:#9aa4af;--line:#39424d;--paper:#15191e}}
*{box-sizing:border-box}body{margin:0;padding:1rem;max-width:72rem;margin-inline:auto;font:15px/1.45 system-ui,sans-serif;color:var(--ink);background:var(--paper)}
h1{font-size:1.35rem;margin:.2rem 0}h2{font-size:1.05rem;margin:1.6rem 0 .5rem}p{margin:.3rem 0;color:var(--faint)}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(8.5rem,1fr));gap:.6rem;margin:.8rem 0}
.tile{border:1px solid var(--line);border-radius:.5rem;padding:.55rem .7rem}.tile b{display:block;font-size:1.25rem}.tile span{color:var(--faint);font-size:.85rem}
.scroll{overflow-x:auto;border:1px solid var(--line);border-radius:.5rem;padding:.5rem}
svg{display:block;width:100%;height:auto}svg text{fill:var(--ink);font:11px system-ui,sans-serif}
.call{border:1px solid var(--line);border-radius:.5rem;padding:.5rem .7rem;margin:.5rem 0}.call summary{cursor:pointer}
.call code{overflow-wrap:anywhere}.bar{display:flex;height:.6rem;border-radius:.3rem;overflow:hidden;margin:.35rem 0;background:var(--line)}
.bar i{display:block;height:100%}.r{background:var(--reused)}.c{background:var(--computed)}.g{background:var(--gen)}.f{background:var(--tool)}
dl{display:grid;grid-template-columns:auto 1fr;gap:.1rem .8rem;margin:.4rem 0 0}dt{color:var(--faint)}dd{margin:0}
.key{display:flex;flex-wrap:wrap;gap:.4rem 1rem;font-size:.85rem;color:var(--faint)}.key i{display:inline-block;width:.8rem;height:.8rem;border-radius:.2rem;vertical-align:-.1rem;margin-right:.3rem}
.bad{color:var(--bad)}
"""


def _page(values: Record) -> str:
    totals = values["totals"]
    parts = [
        f"<h1>{_e(values['program'])}</h1>",
        f"<p>{_e(values['model'])}, seed {_e(values['seed'])}, {_seconds(values['wall_seconds'])}</p>",
        f'<p class="bad">{_e(values["error"])}</p>' if values["error"] else "",
        _tiles(totals, values),
        _key(),
        "<h2>When</h2>",
        f'<div class="scroll">{_timeline(values)}</div>',
        "<h2>Branches</h2><p>Widths are tokens; what a branch took over from its parent is drawn once, at the parent.</p>",
        f'<div class="scroll">{_tree(values["branches"])}</div>',
        "<h2>Calls</h2>",
        *(_call(place, call, values) for place, call in enumerate(values["calls"])),
    ]
    data = json.dumps(values, ensure_ascii=False).replace("<", "\\u003c")
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{_e(values['program'])}</title><style>{_STYLE}</style></head><body>{''.join(parts)}"
        f'<script type="application/json" id="report">{data}</script></body></html>'
    )


def _e(value: Any) -> str:
    return html.escape(str(value))


def _seconds(value: float) -> str:
    return f"{value * 1000:.1f} ms" if value < 1 else f"{value:.2f} s"


def _tiles(totals: Record, values: Record) -> str:
    tiles = [
        (f"{totals['calls']:,}", "calls"),
        (f"{totals['reuse']:.0%}", f"of {totals['prompt_tokens']:,} prompt tokens reused"),
        (f"{totals['computed_tokens']:,}", "prompt tokens computed"),
        (f"{totals['completion_tokens']:,}", f"generated, {totals['forced_tokens']:,} forced"),
        (f"{totals['passes_saved']:,}", f"forward passes saved, {totals['forward_passes']:,} made"),
        (_seconds(totals["queue_seconds"]), "waited in the queue, all calls"),
        (_seconds(values["critical_path"]["seconds"]), "critical path"),
    ]
    return (
        '<div class="tiles">'
        + "".join(f'<div class="tile"><b>{_e(b)}</b><span>{_e(s)}</span></div>' for b, s in tiles)
        + "</div>"
    )


def _key() -> str:
    names = (("r", "prompt, reused"), ("c", "prompt, computed"), ("g", "generated"), ("f", "forced, or a tool"))
    return '<div class="key">' + "".join(f'<span><i class="{c}"></i>{n}</span>' for c, n in names) + "</div>"


def _timeline(values: Record) -> str:
    calls, tools = values["calls"], values["tools"]
    lanes = list(dict.fromkeys([*(c["branch"] for c in calls), *(t["branch"] for t in tools)]))[:200]
    row, left, width = 18, 70, 900
    end = max([values["wall_seconds"], *(c["ended"] for c in calls), *(t["ended"] for t in tools), 1e-6])
    critical = {(step["kind"], step["index"]) for step in values["critical_path"]["steps"]}

    def x(seconds: float) -> float:
        return left + float(seconds / end) * (width - left - 8)

    shapes = [
        f'<text x="4" y="{place * row + 13}">{_e(lane or "trunk")}</text><line x1="{left}" x2="{width}" y1="{place * row + 17}" y2="{place * row + 17}" '
        'stroke="var(--line)"/>'
        for place, lane in enumerate(lanes)
    ]
    spans = [("call", i, c, "var(--gen)", c["name"] or c["kind"]) for i, c in enumerate(calls)]
    spans += [("tool", i, t, "var(--tool)", t["name"]) for i, t in enumerate(tools)]
    for kind, place, span, color, label in spans:
        if span["branch"] not in lanes:
            continue
        top, begin = lanes.index(span["branch"]) * row + 3, x(span["began"])
        size = max(x(span["ended"]) - begin, 1.5)
        stroke = ' stroke="var(--bad)" stroke-width="1.5"' if (kind, place) in critical else ""
        title = f"<title>{_e(label)}: {_seconds(span['ended'] - span['began'])}</title>"
        shapes.append(
            f'<rect x="{begin:.1f}" y="{top}" width="{size:.1f}" height="11" rx="2" fill="{color}"{stroke}>{title}</rect>'
        )
    high = max(len(lanes), 1) * row + 22
    shapes.append(
        f'<text x="{left}" y="{high - 5}">0</text><text x="{width - 8}" y="{high - 5}" text-anchor="end">{_seconds(end)}</text>'
    )
    return f'<svg viewBox="0 0 {width} {high}" style="min-width:34rem" role="img" aria-label="timeline">{"".join(shapes)}</svg>'


def _tree(branches: Sequence[Record]) -> str:
    shown = sorted(branches, key=lambda b: _order(b["path"]))[:200]
    row, left, width = 18, 70, 900
    longest = max([b["tokens"] for b in shown] or [1]) or 1
    scale = (width - left - 60) / longest
    shapes = []
    for place, branch in enumerate(shown):
        top = place * row + 3
        begin, own = left + branch["shared_tokens"] * scale, branch["tokens"] - branch["shared_tokens"]
        color = "var(--bad)" if branch["error"] else "var(--gen)" if branch["path"] else "var(--reused)"
        shapes.append(f'<text x="4" y="{top + 10}">{_e(branch["path"] or "trunk")}</text>')
        if branch["path"]:
            shapes.append(
                f'<line x1="{left}" x2="{begin:.1f}" y1="{top + 6}" y2="{top + 6}" stroke="var(--line)" stroke-dasharray="3 3"/>'
            )
        title = f"<title>{branch['shared_tokens']:,} shared + {own:,} own tokens</title>"
        shapes.append(
            f'<rect x="{begin:.1f}" y="{top}" width="{max(own * scale, 1.5):.1f}" height="11" rx="2" fill="{color}">{title}</rect>'
        )
        shapes.append(f'<text x="{begin + max(own * scale, 1.5) + 4:.1f}" y="{top + 10}">{own:,}</text>')
    more = (
        f'<text x="4" y="{len(shown) * row + 14}">and {len(branches) - len(shown)} more</text>'
        if len(branches) > len(shown)
        else ""
    )
    high = max(len(shown), 1) * row + 20
    return f'<svg viewBox="0 0 {width} {high}" style="min-width:34rem" role="img" aria-label="branches">{"".join(shapes)}{more}</svg>'


def _order(path: str) -> list[list[tuple[int, str]]]:
    """Numbers by value, and before names: a program over HTTP calls its branches what it likes."""
    return [[(int(part), "") if part.isdecimal() else (1 << 62, part) for part in step.split(".")] for step in path.split("/") if step]


def _call(place: int, call: Record, values: Record) -> str:
    prompt, cached, made, forced = (
        call["prompt_tokens"],
        call["cached_tokens"],
        call["completion_tokens"],
        call["forced_tokens"],
    )
    whole = max(prompt + made, 1)
    shares = (("r", cached), ("c", prompt - cached), ("g", made - forced), ("f", forced))
    bar = "".join(f'<i class="{c}" style="width:{100 * n / whole:.2f}%"></i>' for c, n in shares if n > 0)
    facts = {
        "prompt": f"{prompt:,} tokens, {cached:,} reused, {prompt - cached:,} computed",
        "computed": "; ".join(_reason(reason) for reason in call["recomputed"]) or "nothing",
        "generated": f"{made:,} tokens, {forced:,} forced; {call['passes_saved']:,} forward passes saved",
        "time": f"{_seconds(call['queue_seconds'])} queued, {_seconds(call['run_seconds'])} run",
        "ended": call["finish_reason"],
        "where": call["where"],
    }
    rows = "".join(f"<dt>{_e(name)}</dt><dd><code>{_e(text)}</code></dd>" for name, text in facts.items())
    critical = any(step["kind"] == "call" and step["index"] == place for step in values["critical_path"]["steps"])
    label = f"{call['name'] or call['kind']} in {call['branch'] or 'trunk'}" + (
        ", on the critical path" if critical else ""
    )
    opened = " open" if len(values["calls"]) <= 8 else ""
    return f'<details class="call"{opened}><summary>{_e(label)}</summary><div class="bar">{bar}</div><dl>{rows}</dl></details>'


def _reason(reason: Record) -> str:
    if reason["why"] == "new":
        first = f", from {reason['first']!r} on" if reason.get("first") else ""
        return f"{reason['tokens']:,} never seen{first}"
    if reason["why"] == "last":
        return "the last token, which every call computes"
    return f"{reason['tokens']:,} evicted"


def joined(reports: Iterable[Report], *, program: str, began: Sequence[float] | None = None) -> Report:
    """Makes one report of several runs (a batch, an example).

    Args:
        reports: In order.
        program: Name of the whole.
        began: When each run began, in seconds on one clock; None: one after another, with nothing between them.
    """
    calls: list[dict[str, Any]] = []
    tools: list[dict[str, Any]] = []
    branches: list[dict[str, Any]] = []
    wall, model, errors = 0.0, "", []
    for number, report in enumerate(reports):
        values = report.values
        start = wall if began is None else began[number] - began[0]
        model = values["model"]
        for record in values["calls"]:
            calls.append(
                record
                | {
                    "branch": _under(number, record["branch"]),
                    "began": record["began"] + start,
                    "ended": record["ended"] + start,
                }
            )
        for record in values["tools"]:
            tools.append(
                record
                | {
                    "branch": _under(number, record["branch"]),
                    "began": record["began"] + start,
                    "ended": record["ended"] + start,
                }
            )
        branches += [record | {"path": _under(number, record["path"])} for record in values["branches"]]
        errors += [values["error"]] if values["error"] else []
        wall = max(wall, start + values["wall_seconds"])
    return build_report(
        program=program,
        model=model,
        seed=None,
        wall_seconds=wall,
        calls=calls,
        tools=tools,
        branches=branches,
        error="; ".join(errors) or None,
    )


def _under(number: int, path: str) -> str:
    return f"{number}" + (f"/{path}" if path else "")
