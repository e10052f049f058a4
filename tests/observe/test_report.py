"""The program report: counts and reasons, the critical path, the schema, and the page."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from importlib import resources

import jsonschema
import pytest

import agentrt as sgl  # noqa: F401  (a program written for sgl: text before a gen stays as it is)
from agentrt.backends.scripted import Answer, ScriptedBackend
from agentrt.errors import RequestError
from agentrt.lang.agent import tool_call
from agentrt.lang.expressions import assistant, gen, select, system, user
from agentrt.lang.program import function
from agentrt.lang.tools import tool
from agentrt.observe.report import build_report, critical_path, joined, recomputed

SCHEMA = json.loads((resources.files("agentrt.schemas") / "program_report.json").read_text())


@tool
def look(where: str) -> str:
    """Looks <there>."""
    return "nothing & nobody"


@function
def program(s):
    s += system("Be brief.")
    s += user("Look <b>here</b>.")
    s += tool_call("calls", [look])
    s += assistant(gen("a", max_tokens=4))
    forks = s.fork(3)
    forks += user("More")
    forks += assistant(gen("b"))
    forks.join()
    s += " So: " + select("c", ["yes", "no"])


def script(text, request):
    if request.sampling.grammar is not None:
        return '<tool_call>\n{"name": "look", "arguments": {"where": "here"}}\n</tool_call>'
    return Answer("the answer", forced=2)


@pytest.fixture(scope="module")
def report():
    return program.run(backend=ScriptedBackend(script)).report()


def test_it_follows_its_schema_and_counts_every_call(report):
    jsonschema.validate(report.values, SCHEMA)
    kinds = [call["kind"] for call in report.values["calls"]]
    assert sorted(kinds) == sorted(["tool_call", "gen", "gen", "gen", "gen", "select", "select"])
    totals = report.values["totals"]
    assert totals["prompt_tokens"] == sum(call["prompt_tokens"] for call in report.values["calls"])
    assert totals["computed_tokens"] + totals["cached_tokens"] == totals["prompt_tokens"]
    assert 0.5 < totals["reuse"] < 1
    assert [t["name"] for t in report.values["tools"]] == ["look"]
    assert "reused" in str(report)


def test_each_call_says_what_was_computed_and_why(report):
    first, second = report.values["calls"][:2]
    assert [r["why"] for r in first["recomputed"]] == ["new"]
    assert first["recomputed"][0]["tokens"] == first["prompt_tokens"]
    assert sum(r["tokens"] for r in second["recomputed"]) == second["prompt_tokens"] - second["cached_tokens"]
    assert second["known_tokens"] > first["prompt_tokens"]
    assert re.search(r"test_report\.py:\d+$", first["where"])


def test_the_branches_share_their_parents_tokens(report):
    branches = {branch["path"]: branch for branch in report.values["branches"]}
    assert set(branches) == {"", "0.0", "0.1", "0.2"}
    assert branches["0.1"]["parent"] == ""
    assert 0 < branches["0.1"]["shared_tokens"] < branches["0.1"]["tokens"]


def test_reasons_are_exact():
    def call(prompt, known, cached):
        return recomputed({"prompt_tokens": prompt, "known_tokens": known, "cached_tokens": cached, "first_new": "x"})

    assert call(10, 0, 0) == [{"why": "new", "tokens": 10, "first": "x"}]
    assert call(10, 6, 5) == [{"why": "last", "tokens": 1}, {"why": "new", "tokens": 4, "first": "x"}]
    assert call(10, 8, 2) == [{"why": "evicted", "tokens": 6}, {"why": "new", "tokens": 2, "first": "x"}]
    assert call(10, 0, 9) == [{"why": "new", "tokens": 1, "first": "x"}]
    assert call(10, 10, 10) == []


def test_the_critical_path_is_the_chain_that_the_end_waited_for():
    calls = [{"began": 0, "ended": 2}, {"began": 2, "ended": 3}, {"began": 2, "ended": 7}, {"began": 9, "ended": 10}]
    tools = [{"began": 7, "ended": 9}]
    path = critical_path(calls, tools)
    assert [(step["kind"], step["index"]) for step in path["steps"]] == [
        ("call", 0),
        ("call", 2),
        ("tool", 0),
        ("call", 3),
    ]
    assert path["seconds"] == 10


def test_branches_of_one_fork_do_not_wait_for_each_other():
    calls = [
        {"branch": "", "began": 0, "ended": 1},
        {"branch": "0.0", "began": 1, "ended": 4},
        {"branch": "0.1", "began": 5, "ended": 9},  # began late, but not because of 0.0
        {"branch": "1.0", "began": 9, "ended": 10},
    ]
    assert [step["index"] for step in critical_path(calls)["steps"]] == [0, 2, 3]


def test_only_the_branch_that_failed_is_shown_as_failed():
    @function
    def fails(s):
        s += "Q"
        forks = s.fork(3)
        forks += lambda i: f"{i}" + gen("a")
        forks.join()

    backend = ScriptedBackend(lambda t, r: Answer("x", error=RequestError("no") if t.endswith("1") else None))
    state = fails.run(backend=backend, stream=True)
    assert state.error() is not None
    assert {b["path"]: b["error"] is None for b in state.report().values["branches"]} == {"": False, "0.0": True, "0.1": False, "0.2": True}


class Page(HTMLParser):
    """Collects what a browser would fetch, and checks that tags are balanced."""

    VOID = frozenset({"meta", "line", "rect", "br", "i"})

    def __init__(self):
        super().__init__()
        self.open, self.fetched, self.texts = [], [], []

    def handle_starttag(self, tag, attrs):
        if tag not in self.VOID:
            self.open.append(tag)
        self.fetched += [value for name, value in attrs if name in ("src", "href")]

    def handle_endtag(self, tag):
        if tag not in self.VOID:
            assert self.open.pop() == tag

    def handle_data(self, text):
        self.texts.append(text)


def test_the_page_needs_nothing_else_escapes_what_it_shows_and_carries_its_json(report, tmp_path):
    path = report.save(tmp_path / "out.html")
    text = path.read_text()
    page = Page()
    page.feed(text)
    assert page.open == []
    assert page.fetched == []
    assert "http" not in text.split("<script")[0].replace("http://www.w3.org", "")
    assert 'name="viewport"' in text
    carried = json.loads(re.search(r'id="report">(.*?)</script>', text)[1])
    assert carried == json.loads(report.to_json())
    assert report.save(tmp_path / "out.json").read_text() == report.to_json()
    evil = build_report(program="<script>alert(1)</script>", model="m", seed=1, wall_seconds=1, calls=[], branches=[])
    assert "<script>alert" not in evil.to_html()
    jsonschema.validate(evil.values, SCHEMA)


def test_a_failed_run_has_a_report_too():
    @function
    def fails(s):
        s += "Q" + gen("a") + gen("b")

    seen = []
    backend = ScriptedBackend(
        lambda t, r: Answer("x", error=RequestError("no") if len(seen) else None) if seen.append(1) or True else ""
    )
    state = fails.run(backend=backend, stream=True)
    assert state.error() is not None
    values = state.report().values
    assert values["error"] == "RequestError: no"
    jsonschema.validate(values, SCHEMA)


def test_reports_of_several_runs_join_into_one(report):
    both = joined([report, report], program="two")
    jsonschema.validate(both.values, SCHEMA)
    assert both.values["totals"]["calls"] == 2 * report.values["totals"]["calls"]
    assert {b["path"] for b in both.values["branches"]} >= {"0", "1", "1/0.2"}
    both.to_html()
