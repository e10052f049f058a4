"""The program report: what one run of a program asked, what was reused, what was computed again and why, and where the time went.

`build_report` turns plain records (made by the language, or by the server for HTTP programs) into a `Report`: JSON by the schema
``schemas/program_report.json``, a summary in words, and one HTML file that needs nothing else. It measures nothing itself.
Invariant: it holds plain values only.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentrt.observe.report_page import page
from agentrt.request import Usage

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


def cost(usage: Usage) -> dict[str, float]:
    """What a record of a call says of its cost, by the names that are added up."""
    return {name: getattr(usage, name) for name in _SUMS}


@dataclass(frozen=True, slots=True)
class Report:
    """One program's report; `values` follows ``schemas/program_report.json``."""

    values: dict[str, Any]

    def to_json(self) -> str:
        """Returns the report as JSON."""
        return json.dumps(self.values, ensure_ascii=False, indent=1)

    def to_html(self) -> str:
        """Returns one self-contained page, readable on a phone."""
        return page(self.values)

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

    From what ended last, each step goes back to what ended last before it began: what it can have waited for. Branches of one fork do
    not wait for each other.
    """
    spans = [("call", place, c) for place, c in enumerate(calls)] + [("tool", place, t) for place, t in enumerate(tools)]
    chain: list[dict[str, Any]] = []
    limit, branch = float("inf"), ""
    for kind, place, span in sorted(spans, key=lambda each: each[2]["ended"], reverse=True):
        here = span.get("branch", "")
        if span["ended"] <= limit and not _side_by_side(here, branch):
            chain.append({"kind": kind, "index": place, "seconds": round(span["ended"] - span["began"], 6)})
            limit, branch = span["began"] + 1e-9, here
    chain.reverse()
    return {"seconds": round(sum(step["seconds"] for step in chain), 6), "steps": chain}


def _side_by_side(one: str, other: str) -> bool:
    """Whether two branches lie in different branches of one fork ("0.1/2.0" and "0.3": the second and the fourth of the first)."""
    for a, b in zip(one.split("/"), other.split("/"), strict=False):
        if a != b:
            return "." in a and "." in b and a.partition(".")[0] == b.partition(".")[0]
    return False


def _parent(path: str) -> str | None:
    if not path:
        return None
    return path.rpartition("/")[0]


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
