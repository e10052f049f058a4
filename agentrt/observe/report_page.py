"""A program report as one HTML page that needs nothing else: when each call ran, the tree of branches, and every call's tokens.

It draws what `agentrt.observe.report` found and finds nothing itself. Bars are plain boxes in percent of their lane, so that the page is
as readable on a phone as on a desk. Invariant: every number in the page is in the JSON that it carries.
"""

from __future__ import annotations

import html
import json
from collections.abc import Mapping, Sequence
from typing import Any

Record = Mapping[str, Any]

#: Most lanes that are drawn; a program of thousands of branches is read from the JSON.
MOST_LANES = 200

_STYLE = """
:root{--ink:#1b1f24;--faint:#5b6570;--line:#d8dee4;--reused:#2f9e6e;--computed:#d9822b;--gen:#3d6fd9;--tool:#8a5cd1;--bad:#c43838;--paper:#fff;--soft:#f3f5f7}
@media(prefers-color-scheme:dark){:root{--ink:#e6e9ed;--faint:#9aa4af;--line:#39424d;--paper:#15191e;--soft:#1c2229;--bad:#ff6b6b}}
*{box-sizing:border-box}body{margin:0;padding:1rem;max-width:72rem;margin-inline:auto;font:15px/1.45 system-ui,sans-serif;color:var(--ink);background:var(--paper)}
h1{font-size:1.35rem;margin:.2rem 0}h2{font-size:1.05rem;margin:1.6rem 0 .3rem}p{margin:.3rem 0;color:var(--faint)}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(8.5rem,1fr));gap:.6rem;margin:.8rem 0}
.tile{border:1px solid var(--line);border-radius:.5rem;padding:.55rem .7rem}.tile b{display:block;font-size:1.25rem}.tile span{color:var(--faint);font-size:.85rem}
.key{display:flex;flex-wrap:wrap;gap:.3rem 1rem;font-size:.85rem;color:var(--faint);margin:.3rem 0 .5rem}
.key i{display:inline-block;width:.8rem;height:.8rem;border-radius:.2rem;vertical-align:-.1rem;margin-right:.3rem}
.lanes{border:1px solid var(--line);border-radius:.5rem;padding:.4rem .6rem;font-size:.8rem}
.lane{display:flex;align-items:center;height:1.4rem}.lane:nth-child(even){background:var(--soft)}
.lane>b{flex:0 0 var(--name);font-weight:400;white-space:nowrap;overflow:hidden;text-overflow:ellipsis}.lane>u{flex:1;position:relative;height:100%}
.lane>s{flex:0 0 3.4rem;text-align:right;text-decoration:none;color:var(--faint)}
.lane u i{position:absolute;top:.3rem;height:.8rem;min-width:2px;border-radius:.15rem}.lane u i.way{outline:2px solid var(--bad);z-index:1}
.lane u i.from{top:auto;bottom:.65rem;width:0;min-width:0;border-radius:0;border-left:1.5px solid var(--faint);z-index:0}
.axis{display:flex;justify-content:space-between;padding-left:var(--name);color:var(--faint)}
.call{border:1px solid var(--line);border-radius:.5rem;padding:.4rem .7rem;margin:.4rem 0}.call summary{cursor:pointer}
.call summary span{float:right;color:var(--faint);font-size:.85rem}.call code{overflow-wrap:anywhere}
.bar{clear:both;display:flex;height:.5rem;border-radius:.25rem;overflow:hidden;margin:.35rem 0 .1rem;background:var(--line)}.bar i{height:100%}
.r{background:var(--reused)}.c{background:var(--computed)}.g{background:var(--gen)}.f{background:var(--tool)}.e{background:var(--bad)}
dl{display:grid;grid-template-columns:auto 1fr;gap:.1rem .8rem;margin:.4rem 0 0}dt{color:var(--faint)}dd{margin:0}
.bad{color:var(--bad)}
"""


def page(values: Record) -> str:
    """Returns the page of a report's values."""
    parts = [
        f"<h1>{_e(values['program'])}</h1>",
        f"<p>{_e(', '.join(_facts(values)))}</p>",
        f'<p class="bad">{_e(values["error"])}</p>' if values["error"] else "",
        _tiles(values["totals"], values),
        "<h2>When</h2>",
        _key(("g", "the model answers"), ("f", "a tool runs"), ("way", "the critical path: what the end waited for")),
        _timeline(values),
        "<h2>Branches</h2><p>Widths are tokens. A branch begins where it left its parent: what they share is drawn once.</p>",
        _tree(values["branches"]),
        "<h2>Calls</h2>",
        _key(("r", "prompt, reused"), ("c", "prompt, computed"), ("g", "generated"), ("f", "forced by a grammar")),
        *(_call(place, call, values) for place, call in enumerate(values["calls"])),
    ]
    data = json.dumps(values, ensure_ascii=False).replace("<", "\\u003c")
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width,initial-scale=1">'
        f'<meta name="color-scheme" content="light dark"><title>{_e(values["program"])}</title><style>{_STYLE}</style></head>'
        f'<body>{"".join(parts)}<script type="application/json" id="report">{data}</script></body></html>'
    )


def _facts(values: Record) -> list[str]:
    seed = [] if values["seed"] is None else [f"seed {values['seed']}"]  # several runs together have none
    return [values["model"], *seed, _seconds(values["wall_seconds"])]


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


def _key(*names: tuple[str, str]) -> str:
    def swatch(kind: str) -> str:
        return '<i style="border:2px solid var(--bad)"></i>' if kind == "way" else f'<i class="{kind}"></i>'

    return '<div class="key">' + "".join(f"<span>{swatch(kind)}{_e(name)}</span>" for kind, name in names) + "</div>"


def _lanes(names: Sequence[str], lanes: Sequence[str]) -> str:
    """Opens a picture of lanes; their names take no more room than the longest needs."""
    room = min(max(map(len, names), default=0) + 2, 12)
    return f'<div class="lanes" style="--name:{room}ch">{"".join(lanes)}'


def _lane(label: str, bars: str, size: str = "", depth: int = 0) -> str:
    indent = f' style="padding-left:{0.6 * depth:.1f}rem"' if depth else ""
    after = f"<s>{size}</s>" if size else ""
    return f'<div class="lane"><b{indent} title="{_e(label)}">{_e(label)}</b><u>{bars}</u>{after}</div>'


def _box(kind: str, begin: float, size: float, title: str, extra: str = "") -> str:
    """A bar from `begin` on, `size` wide, both as shares of the lane."""
    return f'<i class="{kind}" style="left:{100 * begin:.2f}%;width:{100 * size:.2f}%{extra}" title="{_e(title)}"></i>'


def _timeline(values: Record) -> str:
    calls, tools = values["calls"], values["tools"]
    end = max([values["wall_seconds"], *(c["ended"] for c in calls), *(t["ended"] for t in tools), 1e-6])
    way = {(step["kind"], step["index"]) for step in values["critical_path"]["steps"]}
    spans = [("call", place, c, "g", c["name"] or c["kind"]) for place, c in enumerate(calls)]
    spans += [("tool", place, t, "f", t["name"]) for place, t in enumerate(tools)]
    bars: dict[str, list[str]] = {}
    for kind, place, span, color, label in spans:
        if span.get("error"):
            color = "e"
        title = f"{label}: {_seconds(span['ended'] - span['began'])}, from {_seconds(span['began'])} on"
        shown = color + (" way" if (kind, place) in way else "")
        box = _box(shown, span["began"] / end, (span["ended"] - span["began"]) / end, title)
        bars.setdefault(span["branch"], []).append(box)
    paths = sorted(bars, key=_order)[:MOST_LANES]
    lanes = _lanes([path or "trunk" for path in paths], [_lane(path or "trunk", "".join(bars[path])) for path in paths])
    return f'{lanes}{_more(len(bars))}<div class="axis"><span>0</span><span>{_seconds(end)}</span></div></div>'


def _tree(branches: Sequence[Record]) -> str:
    shown = sorted(branches, key=lambda b: _order(b["path"]))[:MOST_LANES]
    rows = {branch["path"]: place for place, branch in enumerate(shown)}
    longest = max([b["tokens"] for b in shown] or [1]) or 1
    lanes = []
    for place, branch in enumerate(shown):
        begin, own = branch["shared_tokens"] / longest, branch["tokens"] - branch["shared_tokens"]
        parent = rows.get(branch["parent"])
        stem = ""
        if branch["path"] and parent is not None:
            stem = f'<i class="from" style="left:{100 * begin:.2f}%;height:{1.4 * (place - parent):.1f}rem"></i>'
        title = f"{branch['shared_tokens']:,} tokens shared with its parent, {own:,} of its own"
        bar = _box("e" if branch["error"] else "g", begin, own / longest, title)
        lanes.append(_lane(branch["path"].rpartition("/")[2] or "trunk", stem + bar, f"{own:,}", branch["path"].count("/")))
    names = [f"{'  ' * branch['path'].count('/')}{branch['path'].rpartition('/')[2] or 'trunk'}" for branch in shown]
    return f"{_lanes(names, lanes)}{_more(len(branches))}</div>"


def _more(count: int) -> str:
    return f"<p>and {count - MOST_LANES:,} more</p>" if count > MOST_LANES else ""


def _order(path: str) -> list[list[tuple[int, str]]]:
    """Numbers by value, and before names: a program over HTTP calls its branches what it likes."""
    return [[(int(part), "") if part.isdecimal() else (1 << 62, part) for part in step.split(".")] for step in path.split("/") if step]


def _call(place: int, call: Record, values: Record) -> str:
    prompt, cached, made, forced = (call[n] for n in ("prompt_tokens", "cached_tokens", "completion_tokens", "forced_tokens"))
    whole = max(prompt + made, 1)
    shares = (("r", cached), ("c", prompt - cached), ("g", made - forced), ("f", forced))
    bar = "".join(f'<i class="{kind}" style="width:{100 * n / whole:.2f}%"></i>' for kind, n in shares if n > 0)
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
    label = f"{call['name'] or call['kind']} in {call['branch'] or 'trunk'}" + (", on the critical path" if critical else "")
    told = f"{cached:,} of {prompt:,} reused, {made:,} generated, {_seconds(call['ended'] - call['began'])}"
    return (
        f'<details class="call"><summary>{_e(label)} <span>{_e(told)}</span><div class="bar">{bar}</div></summary><dl>{rows}</dl></details>'
    )


def _reason(reason: Record) -> str:
    if reason["why"] == "new":
        first = f", from {reason['first']!r} on" if reason.get("first") else ""
        return f"{reason['tokens']:,} never seen{first}"
    if reason["why"] == "last":
        return "the last token, which every call computes"
    return f"{reason['tokens']:,} evicted"
