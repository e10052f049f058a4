"""``agentrt run``: the file runs as itself, and every program that it ran is in the report."""

from __future__ import annotations

import json
import sys
from importlib.resources import files

import jsonschema
import pytest

from agentrt.cli.run import run
from agentrt.errors import UserError

FILE = """
import sys
import agentrt

agentrt.set_default_backend(agentrt.ScriptedBackend("ok"))

@agentrt.function
def ask(s, question):
    s += question
    s += agentrt.gen("answer")

if __name__ == "__main__":
    ask.run_batch([{"question": "one?"}, {"question": "two?"}])
    print(ask.run("three?")["answer"], sys.argv[1:])
    if "fail" in sys.argv:
        raise KeyError("the file's own")
"""


@pytest.fixture
def file(tmp_path):
    from agentrt import set_default_backend

    path = tmp_path / "program.py"
    path.write_text(FILE)
    yield path
    set_default_backend(None)


def test_every_program_is_in_the_report(file, tmp_path, capsys):
    argv = sys.argv
    report, trace = tmp_path / "out.html", tmp_path / "out.json"
    run(file, ["a", "b"], report=report, trace=trace)
    assert capsys.readouterr().out == "ok ['a', 'b']\n"
    values = json.loads(trace.read_text())
    jsonschema.validate(values, json.loads((files("agentrt.schemas") / "program_report.json").read_text()))
    assert (values["program"], values["totals"]["calls"], len(values["branches"])) == ("program", 3, 3)
    assert report.read_text().startswith("<!doctype html>")
    assert sys.argv is argv


def test_a_file_that_fails_raises_its_own_error_and_is_reported_all_the_same(file, tmp_path):
    with pytest.raises(KeyError, match="the file's own"):
        run(file, ["fail"], trace=tmp_path / "out.json")
    assert json.loads((tmp_path / "out.json").read_text())["totals"]["calls"] == 3


def test_a_file_that_is_not_there_is_named():
    with pytest.raises(UserError, match=r"no file 'nowhere\.py'"):
        run("nowhere.py")
