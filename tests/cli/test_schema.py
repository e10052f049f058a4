"""``agentrt schema``: the ledger, what a request would do, and which engine takes it and why."""

from __future__ import annotations

import io
import json

import pytest

from agentrt.cli import schema
from agentrt.errors import UserError

CLOSED = {"type": "object", "properties": {"a": {"enum": ["x", "y"]}}, "required": ["a"], "additionalProperties": False}


@pytest.fixture
def check(monkeypatch, capsys, tmp_path):
    """Checks a schema given on standard input; what was printed, its spaces joined, and the exit status."""
    monkeypatch.setenv("AGENTRT_HOME", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "200")

    def run(value: object) -> tuple[str, int]:
        monkeypatch.setattr("sys.stdin", io.StringIO(json.dumps(value)))
        status = schema.check("-")
        return " ".join(capsys.readouterr().out.split()), status

    return run


@pytest.mark.parametrize(
    ("value", "words", "status"),
    [
        (CLOSED, ["/properties/a enum ENFORCED", "Every keyword is enforced", "a finite automaton of 12 states would"], 0),
        ({"type": "array", "uniqueItems": True}, ["/ uniqueItems CHECKED", "held back", "strict=True refuses it"], 0),
        ({"type": "string", "pattern": "a(?=b)"}, ["/ pattern CHECKED", "lookaround"], 0),
        ({"type": "object"}, ["/ type ENFORCED", "llguidance takes it; an automaton cannot, because an object is open"], 0),
        ({"items": {"$ref": "http://example.org/a"}}, ["/items $ref REJECTED", "nothing is fetched", "A request is refused"], 1),
        ({"type": "string", "minLength": 3, "maxLength": 2}, ["REJECTED", "A request is refused"], 1),
    ],
    ids=["enforced", "checked", "lookaround", "open", "network", "unsatisfiable"],
)
def test_the_ledger_says_what_a_request_would_do(check, value, words, status):
    told, returned = check(value)
    assert returned == status
    for word in words:
        assert word in told


def test_a_schema_compiled_ahead_of_time_takes_the_automaton_and_check_says_so(check, tmp_path, capsys):
    assert "compiled ahead of time (agentrt schema compile)" in check(CLOSED)[0]
    (tmp_path / "closed.json").write_text(json.dumps(CLOSED))
    (tmp_path / "open.json").write_text('{"type": "object"}')
    schema.compile_files([str(tmp_path / "closed.json"), str(tmp_path / "open.json")])
    told = " ".join(capsys.readouterr().err.split())
    assert "closed.json: 12 states, kept in" in told
    assert "open.json: stays on llguidance, because an object is open" in told
    assert "It was compiled ahead of time, so an automaton takes it" in check(CLOSED)[0]


def test_what_cannot_be_read_is_named(tmp_path):
    with pytest.raises(UserError, match=r"nowhere\.json cannot be read"):
        schema.check(str(tmp_path / "nowhere.json"))
    (tmp_path / "bad.json").write_text("{")
    with pytest.raises(UserError, match=r"bad\.json is not JSON"):
        schema.check(str(tmp_path / "bad.json"))
