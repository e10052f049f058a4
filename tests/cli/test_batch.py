"""A batch of prompts: what it refuses to touch, what it makes of every line, and that a second run goes on."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrt import ScriptedBackend
from agentrt.backends.door import Prompt, prompt_ids
from agentrt.backends.scripted import Answer
from agentrt.cli.batch import run
from agentrt.cli.generate import Options
from agentrt.errors import EngineError, NumericalError, UserError
from agentrt.request import Request, SamplingParams

#: What ends a line for `str.splitlines`, and not for JSON.
BREAKS = "\u2028\u2029\x85\v\f\x1c"


class Scripted(ScriptedBackend):
    """A backend with as much of an engine's face as a batch looks at."""

    facts = SimpleNamespace(sampling=SamplingParams(max_tokens=1000))

    def request(self, prompt: Prompt, sampling: SamplingParams) -> Request:
        return Request(prompt_ids=prompt_ids(prompt, self.tokenizer), sampling=sampling)

    def __enter__(self) -> Scripted:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class OnScript(Options):
    """Options that answer from a script."""

    script: Any = "ok"
    raw: bool = True

    def engine(self) -> Any:
        return Scripted(self.script, inline=True)


class Unreached(Options):
    """Options for what must fail before an engine is started."""

    def engine(self) -> Any:
        raise AssertionError("an engine was started")


def echo(prompt: str, request: Request) -> str:
    return prompt.upper()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"question {n}", "id": n}) + "\n" for n in range(4)))
    return path


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "answers.jsonl"


def records(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in out.read_bytes().split(b"\n") if line]


@pytest.mark.parametrize(
    "theirs",
    [
        b"my only copy of a thesis\n",
        b"the same without an end of line",
        b'{"line": 1, "text": "ok", "id": 0}\nnotes\n{"line": 2, "te',
        b'{"prompt": "somebody\'s prompts"}\n',
        b'{"line": true, "text": "not a number"}\n',
        b'{"line": "1", "text": "a number as text"}\n',
        b"\xff\xfe\x00binary\n",
        b"[1, 2]",
        b'{"line": 9, "text": "of a longer file"}\n',
        b'{"line": 1, "text": "of a file with other ids", "id": "x"}\n',
    ],
)
def test_a_file_that_is_not_ours_is_refused_and_left_as_it_is(file, out, theirs):
    out.write_bytes(theirs)
    with pytest.raises(UserError, match=rf"{out}:\d .*nothing was changed.*--out another file"):
        run(file, out, Unreached())
    assert out.read_bytes() == theirs
    assert sorted(path.name for path in out.parent.iterdir()) == ["answers.jsonl", "prompts.jsonl"]


def test_the_prompts_are_never_the_answers_or_the_trace(file, tmp_path):
    before = file.read_bytes()
    link = tmp_path / "link.jsonl"
    link.symlink_to(file)
    for out, trace in ((file, None), (link, None), (tmp_path / ".." / tmp_path.name / file.name, None), (tmp_path / "out", file), (tmp_path / "out", tmp_path / "out")):
        with pytest.raises(UserError, match="the same file as --"):
            run(file, out, Unreached(record_trace=trace))
    with pytest.raises(UserError, match="--file needs --out"):
        run(file, None, Unreached())
    assert file.read_bytes() == before


@settings(max_examples=30, deadline=None)
@given(answers=st.lists(st.text(st.sampled_from(BREAKS + "a\r\n\"\\é"), max_size=8), min_size=1, max_size=5), cut=st.integers(0, 10**6))
def test_cut_off_anywhere_it_ends_with_every_answer_once(tmp_path_factory, answers, cut):
    folder = tmp_path_factory.mktemp("batch")
    file, out = folder / "prompts.jsonl", folder / "answers.jsonl"
    lines = [{"prompt": f"p{BREAKS}{text}", "id": text} for text in answers]
    file.write_bytes("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines).encode())
    assert run(file, out, OnScript(script=echo)) == 0
    whole = records(out)
    assert [(record["line"], record["id"], record["text"]) for record in whole] == [
        (number, text, f"P{BREAKS}{text.upper()}") for number, text in enumerate(answers, 1)
    ]
    content = out.read_bytes()
    kept = content[: cut % (len(content) + 1)]
    out.write_bytes(kept)
    asked: list[str] = []

    def watched(prompt: str, request: Request) -> str:
        asked.append(prompt)
        return prompt.upper()

    assert run(file, out, OnScript(script=watched)) == 0
    assert records(out) == whole or [{**r, "usage": 0} for r in records(out)] == [{**r, "usage": 0} for r in whole]
    entire = kept.count(b"\n") + (1 if kept.rpartition(b"\n")[2].endswith(b"}}") else 0)
    assert len(asked) == len(answers) - entire


def test_a_failure_costs_its_own_line_and_is_asked_again(file, out):
    def second_fails(prompt: str, request: Request) -> Answer:
        return Answer("ok", error=NumericalError("NaN") if prompt == "question 1" else None)

    assert run(file, out, OnScript(script=second_fails)) == 1
    assert [record.get("error") for record in records(out)] == [None, "NaN", None, None]
    out.chmod(0o600)
    assert run(file, out, OnScript(script=echo)) == 0
    assert [(record["id"], record["text"]) for record in records(out)] == [(0, "ok"), (2, "ok"), (3, "ok"), (1, "QUESTION 1")]
    assert out.stat().st_mode & 0o777 == 0o600
    assert run(file, out, Unreached()) == 0  # nothing is left to ask


def test_a_dead_engine_stops_the_batch_and_the_next_run_goes_on(file, out):
    def dies(prompt: str, request: Request) -> Answer:
        return Answer("ok", error=EngineError("it is gone") if prompt == "question 2" else None)

    with pytest.raises(EngineError, match=r"it is gone\n2 of 4 prompts are answered"):
        run(file, out, OnScript(script=dies))
    assert [record["id"] for record in records(out)] == [0, 1]
    assert run(file, out, OnScript(script=echo)) == 0
    assert [record["id"] for record in records(out)] == [0, 1, 2, 3]


def test_a_rewrite_that_fails_leaves_the_old_file(file, out, monkeypatch):
    out.write_text('{"line": 1, "text": "kept", "id": 0}\n{"line": 2, "error": "was busy", "id": 1}\n')
    before = out.read_bytes()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("agentrt.cli.batch.os.replace", full)
    with pytest.raises(UserError, match="No space left"):
        run(file, out, Unreached())
    assert out.read_bytes() == before
    assert sorted(path.name for path in out.parent.iterdir()) == ["answers.jsonl", "prompts.jsonl"]


@pytest.mark.parametrize(
    ("line", "why"),
    [
        (b'{"messages": 5}', "messages is a int"),
        (b'{"messages": "hi"}', "messages is a str"),
        (b'{"messages": [5]}', "message 0 is a int"),
        (b'{"messages": []}', "messages is empty"),
        (b'{"messages": [{"content": "x"}]}', "message 0 has the role None"),
        (b'{"prompt": null}', "null as its prompt"),
        (b'{"prompt": 7}', "7 as its prompt"),
        (b'{"question": "x"}', "neither 'prompt' nor 'messages'"),
        (b"[1]", "neither 'prompt' nor 'messages'"),
        (b"{", "is not JSON"),
        (b"[" * 100_000, "is not JSON"),
        (b'"caf\xe9"', "is not UTF-8"),
    ],
)
def test_every_line_is_checked_before_anything_starts(tmp_path, out, line, why):
    file = tmp_path / "prompts.jsonl"
    file.write_bytes(b'"good"\n\n{"prompt": "good"}\n' + line + b'\n"good"\n')
    with pytest.raises(UserError, match=rf"{file}:4.*{why}"):
        run(file, out, Unreached())
    assert not out.exists()


def test_prompts_may_be_texts_or_chats_from_any_editor(tmp_path, out):
    file = tmp_path / "prompts.jsonl"
    chat = {"messages": [{"role": "user", "content": "chat"}], "id": "\ud800"}
    file.write_bytes(b'\xef\xbb\xbf"text"\r\n \r\n{"prompt": "object"}\r\n' + json.dumps(chat).encode())
    run(file, out, OnScript(script="yes"))
    assert [(record["line"], record["text"], record.get("id")) for record in records(out)] == [(1, "yes", None), (3, "yes", None), (4, "yes", "\ud800")]
    assert run(file, out, Unreached()) == 0


def test_where_answers_cannot_go_is_said_before_anything_starts(file, tmp_path):
    for out in (tmp_path, tmp_path / "no" / "folder", file / "below"):
        with pytest.raises(UserError, match=rf"{out} cannot be written"):
            run(file, out, Unreached())
    with pytest.raises(UserError, match=r"/dev/full cannot be written.*No space"):
        run(file, Path("/dev/full"), OnScript(script=echo))
    with pytest.raises(UserError, match="none cannot be read"):
        run(tmp_path / "none", tmp_path / "out", Unreached())


def test_what_is_wrong_with_the_options_is_said_before_anything_starts(file, out, tmp_path):
    schema = tmp_path / "schema.json"
    for text in ("null", "5", "{", "[1]"):
        schema.write_text(text)
        with pytest.raises(UserError, match=f"the schema {schema}"):
            run(file, out, Unreached(schema=schema))
    schema.write_text("{}")
    with pytest.raises(UserError, match="given together"):
        run(file, out, Unreached(schema=schema, regex="a"))
