"""Every block of docs/language.md runs, in order: with a stand-in for the model here, with the real one where it is at hand."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

import agentrt as sgl

PAGE = Path(__file__).parents[2] / "docs" / "language.md"


def blocks():
    return re.findall(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)


def run_page(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {"__name__": "language_page"}
    for number, block in enumerate(blocks()):
        exec(compile(block, f"{PAGE.name}, block {number + 1}", "exec"), names)


def stand_in(text, request):
    spec = request.sampling.grammar
    if spec is not None and spec.kind == "tools" and "pay" in text:
        return '<tool_call>\n{"name": "pay", "arguments": {"euros": 25}}\n</tool_call>'
    if spec is not None and spec.kind == "tools":
        return '<tool_call>\n{"name": "add", "arguments": {"a": 17, "b": 25}}\n</tool_call>'
    if request.sampling.json_schema is not None:
        return json.dumps({"name": "Paris", "big": True})
    return " Paris."


def test_the_page_runs(tmp_path, monkeypatch, capsys):
    assert len(blocks()) >= 9
    sgl.set_default_backend(sgl.ScriptedBackend(stand_in))
    try:
        run_page(tmp_path, monkeypatch)
    finally:
        sgl.set_default_backend(None)
    assert "{'a': 17, 'b': 25} 42 None" in capsys.readouterr().out


@pytest.mark.model
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*knows no tools")
def test_the_page_runs_on_the_default_model(tmp_path, monkeypatch, engine):
    sgl.set_default_backend(engine)
    try:
        run_page(tmp_path, monkeypatch)
    finally:
        sgl.set_default_backend(None)
