"""The command line, as a user types it; on the tiny model, in a process of its own."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

AGENTRT = [sys.executable, "-c", "from agentrt.cli.main import main; main()"]


def agentrt(*args: str, env: dict[str, str] | None = None, stdin: str | None = None) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "COLUMNS": "200", **(env or {})}
    return subprocess.run([*AGENTRT, *map(str, args)], capture_output=True, text=True, timeout=120, check=False, env=environment, input=stdin)


def test_help_names_every_command_and_imports_no_torch():
    done = agentrt("--help")
    assert done.returncode == 0
    for command in ("demo", "generate", "chat", "models", "doctor"):
        assert command in done.stdout
    code = "import sys; sys.argv = ['agentrt', '--help']\nfrom agentrt.cli.main import app\ntry:\n    app()\nexcept SystemExit:\n    pass\nassert 'torch' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode == 0


def test_models_shows_what_is_not_fetched_and_how_to(tmp_path):
    done = agentrt("models", env={"AGENTRT_HOME": str(tmp_path)})
    assert done.returncode == 0
    assert "agentrt models fetch smollm2-135m" in done.stdout
    assert str(tmp_path) in done.stdout


def test_an_unknown_model_is_a_message_not_a_traceback():
    done = agentrt("generate", "hello", "--model", "smollm3")
    assert done.returncode == 1
    assert "smollm2-135m" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_doctor_finds_what_is_wrong(tmp_path):
    well = agentrt("doctor", env={"AGENTRT_HOME": str(tmp_path)})
    assert well.returncode == 0
    assert "agentrt models fetch smollm2-135m" in well.stdout
    not_a_folder = tmp_path / "file"
    not_a_folder.write_text("")
    broken = agentrt("doctor", env={"AGENTRT_HOME": str(not_a_folder)})
    assert broken.returncode == 1
    assert "set AGENTRT_HOME" in broken.stdout


@pytest.mark.slow
def test_generate_prints_the_answer_alone(tiny_model):
    args = ("generate", "--model", tiny_model, "-n", "12", "-t", "0", "--raw")
    done = agentrt(*args, "the quick brown")
    assert done.returncode == 0, done.stderr
    from_stdin = agentrt(*args, "-", stdin="the quick brown")
    assert from_stdin.stdout == done.stdout
    assert done.stdout.strip()
    assert "tokens" not in done.stdout  # what is not the answer is on standard error


@pytest.mark.slow
def test_generate_obeys_a_schema(tiny_model, tmp_path):
    schema = tmp_path / "schema.json"
    schema.write_text(json.dumps({"enum": ["red", "green"]}))
    done = agentrt("generate", "colour?", "--model", tiny_model, "--schema", schema)
    assert json.loads(done.stdout) in ("red", "green"), done.stderr
    done = agentrt("generate", "colour?", "--model", tiny_model, "--regex", "foo**")
    assert done.returncode == 1
    assert "foo**" in done.stderr or "multiple repeat" in done.stderr or "*" in done.stderr


@pytest.mark.slow
def test_a_batch_goes_on_where_it_stopped(tiny_model, tmp_path):
    prompts, answers = tmp_path / "prompts.jsonl", tmp_path / "answers.jsonl"
    lines = [{"prompt": f"question {n}", "id": n} for n in range(6)] + [{"prompt": "x" * 20_000, "id": 6}]
    prompts.write_text("".join(json.dumps(line) + "\n" for line in lines))
    args = ("generate", "--file", prompts, "--out", answers, "--model", tiny_model, "-n", "4", "-t", "0", "--raw")
    first = agentrt(*args)
    assert first.returncode == 1, first.stderr
    records = [json.loads(line) for line in answers.read_text().splitlines()]
    assert [record["id"] for record in records] == list(range(7))
    assert "context" in records[6]["error"]  # one that cannot be served costs only its own line
    assert "1 prompts failed" in first.stderr
    whole = answers.read_text().splitlines(keepends=True)
    answers.write_text("".join(whole[:3]) + whole[3][:20])  # stopped in the middle of a line
    second = agentrt(*args)
    assert "3 of 7 prompts are answered" in second.stderr
    again = sorted((json.loads(line) for line in answers.read_text().splitlines()), key=lambda record: record["line"])
    assert [r.get("text") for r in again] == [r.get("text") for r in records]
    missing = agentrt("generate", "--file", tmp_path / "none.jsonl", "--out", answers, "--model", tiny_model)
    assert missing.returncode == 1
    assert "none.jsonl" in missing.stderr


@pytest.mark.slow
def test_chat_talks_in_a_terminal(tiny_model: Path):
    """In a pseudo-terminal, as a person would: two turns, a command, and out."""
    master, slave = pty.openpty()
    process = subprocess.Popen([*AGENTRT, "chat", "--model", str(tiny_model), "-n", "4", "-t", "0"], stdin=slave, stdout=slave, stderr=slave)
    os.close(slave)
    screen = b""
    for line in ("hello", "and again", "/clear", "/quit"):
        while not screen.rstrip(b" ").endswith(b">"):
            screen += os.read(master, 1024)
        os.write(master, line.encode() + b"\n")
        screen += b"\n"
    try:
        while chunk := os.read(master, 1024):
            screen += chunk
    except OSError:  # the terminal closes with the process
        pass
    assert process.wait(30) == 0
    os.close(master)
    assert b"of them reused" in screen
    assert b"Traceback" not in screen


@pytest.mark.slow
def test_a_recorded_run_can_be_simulated(tiny_model, tmp_path):
    prompts, answers, trace, page = (tmp_path / name for name in ("prompts.jsonl", "answers.jsonl", "trace.jsonl", "report.html"))
    prompts.write_text("".join(json.dumps({"prompt": "the quick brown fox " * 5 + str(n)}) + "\n" for n in range(8)))
    done = agentrt("generate", "--file", prompts, "--out", answers, "--model", tiny_model, "-n", "30", "--raw", "--record-trace", trace)
    assert done.returncode == 0, done.stderr
    done = agentrt("simulate", trace, "--cost-model", "recorded", "--pool", "4096", "--out", tmp_path / "report.json", "--html", page)
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["calls"] == 8
    assert report["hit_rate"] > 0.5
    assert "<svg" in page.read_text()
    done = agentrt("simulate", tmp_path / "none")
    assert done.returncode == 1
    assert "none" in done.stderr
