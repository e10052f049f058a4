"""The command line, as a user types it; on the tiny model, in a process of its own."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from agentrt.cli.main import guarded
from agentrt.errors import UserError

AGENTRT = [sys.executable, "-c", "from agentrt.cli.main import main; main()"]


def agentrt(*args: str, env: dict[str, str] | None = None, stdin: str | None = None) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "COLUMNS": "200", **(env or {})}
    return subprocess.run([*AGENTRT, *map(str, args)], capture_output=True, text=True, timeout=280, check=False, env=environment, input=stdin)


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


def test_models_lie_on_lines_that_can_be_copied(tmp_path):
    home = tmp_path / ("a long way from home" * 3)
    lying = ("models/smollm2-135m/SmolLM2-135M-Instruct.Q4_1.gguf", "converted/b179c9523d0e6a0f98a330c7562b6827-v1/config.json")
    for place in lying:
        (home / place).parent.mkdir(parents=True)
        (home / place).write_text("{}")
    done = agentrt("models", env={"AGENTRT_HOME": str(home), "COLUMNS": "80"})
    lines = [line.rstrip() for line in done.stdout.splitlines()]
    assert lines[1] == f"  {lying[0]}"
    assert lines[3] == f"  {Path(lying[1]).parent}"
    assert [line.split()[:2] for line in (lines[0], lines[2])] == [["smollm2-135m", "fetched"], ["smollm2-135m", "converted"]]
    assert done.stdout.count(str(home)) == 1
    assert all(len(line) <= 80 for line in lines if str(home) not in line)


def test_an_error_is_printed_as_it_is(capsys):
    message = "the pattern 'a[/b]c' of [red]x[/red] :smile: \\ is not one; see " + "/a/long/path" * 30

    def fails() -> None:
        raise UserError(message)

    assert guarded(fails) == 1
    assert capsys.readouterr().err == f"error: {message}\n"
    done = agentrt("generate", "hello", "--model", "x[/b]y:smile:")
    assert done.returncode == 1
    assert "x[/b]y:smile:" in done.stderr


def test_a_schema_is_shown_as_it_is():
    done = agentrt("schema", "check", "-", stdin=json.dumps({"properties": {"a[/b]:smile:": {"type": "string"}}}))
    assert done.returncode == 0, done.stderr
    assert "/properties/a[/b]:smile:" in done.stdout.replace("~1", "/")


@pytest.mark.slow
def test_doctor_recommends_what_there_is(monkeypatch):
    """Every option that it names is one of both commands that load a model, and of serve."""
    from types import SimpleNamespace

    from agentrt.cli import doctor

    monkeypatch.setattr(doctor.psutil, "virtual_memory", lambda: SimpleNamespace(available=10**9, total=4 * 10**9))
    named = {option for finding in doctor.examine() for option in re.findall(r"--[a-z-]+", finding.mend)}
    assert named == {"--kv-tokens"}
    for command in ("generate", "chat", "serve"):
        shown = agentrt(command, "--help").stdout
        assert named <= set(re.findall(r"--[a-z-]+", shown))
        assert "--threads" in shown


@pytest.mark.slow
@pytest.mark.timeout(600)  # it builds the native kernels in a cache of its own
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
def test_options_of_the_engine_reach_it(tiny_model):
    done = agentrt("generate", "--model", tiny_model, "-n", "40", "--raw", "--kv-tokens", "32", "--threads", "1", "hello")
    assert done.returncode == 1
    assert "the KV store has 32" in done.stderr
    assert done.stdout == ""


@pytest.mark.slow
def test_an_answer_that_the_encoding_cannot_hold_is_printed_all_the_same(tiny_model):
    args = ("generate", "--model", tiny_model, "--regex", "naïve 🙂", "hello")
    assert agentrt(*args).stdout == "naïve 🙂\n"
    done = agentrt(*args, env={"PYTHONIOENCODING": "ascii"})
    assert (done.returncode, done.stdout) == (0, "na?ve ?\n")


def wait_until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not true():
        assert time.monotonic() < deadline, "it never came"
        time.sleep(0.02)


@pytest.mark.slow
def test_a_reader_that_leaves_takes_everything_with_it(talker):
    """As `| head -1` does: no traceback, no process left."""
    args = ("generate", "--model", str(talker), "-n", "8000", "-t", "0", "--raw", "hello")
    with subprocess.Popen([*AGENTRT, *args], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.read(1)
        (worker,) = psutil.Process(process.pid).children()
        process.stdout.close()
        said = process.stderr.read().decode()
    assert process.returncode != 0
    assert "Traceback" not in said
    assert "Exception ignored" not in said
    assert not worker.is_running()


@pytest.mark.slow
def test_an_engine_that_dies_stops_the_batch_and_a_second_run_goes_on(talker, tmp_path):
    prompts, answers = tmp_path / "prompts.jsonl", tmp_path / "answers.jsonl"
    texts = [f"question {n}" for n in range(300)] + ["not ~ a number"]
    prompts.write_text("".join(json.dumps(text) + "\n" for text in texts))
    # In so small a store five are answered at a time: the engine dies long before the last.
    args = ("generate", "--file", prompts, "--out", answers, "--model", talker, "-t", "0", "--raw", "--kv-tokens", "256")
    process = subprocess.Popen([*AGENTRT, *map(str, args), "-n", "40"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    wait_until(lambda: answers.exists() and answers.stat().st_size > 0)
    (worker,) = psutil.Process(process.pid).children()
    worker.kill()
    printed, said = process.communicate(timeout=120)
    assert process.returncode == 1
    assert printed == ""
    assert "Traceback" not in said
    some = [json.loads(line) for line in answers.read_text().splitlines()]
    assert 0 < len(some) < 300
    assert all("text" in record for record in some)
    assert f"{len(some)} of 301 prompts are answered" in said
    second = agentrt(*args, "-n", "1")
    assert second.returncode == 1, second.stderr
    assert "1 prompts failed" in second.stderr
    records = [json.loads(line) for line in answers.read_text().splitlines()]
    assert records[: len(some)] == some
    assert [record["line"] for record in records] == list(range(1, 302))
    assert [record["line"] for record in records if "error" in record] == [301]


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
    args = ("generate", "--file", prompts, "--out", answers, "--model", tiny_model, "-n", "4", "-t", "0", "--raw", "--dtype", "float32")
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


def test_help_of_serve_is_grouped_and_fits_a_screen():
    lines = agentrt("serve", "--help", env={"COLUMNS": "80", "TERMINAL_WIDTH": "80"}).stdout.splitlines()
    assert len(lines) <= 40
    assert [group for group in ("Engine", "Where", "Requests") if any(f" {group} " in line for line in lines)] == ["Engine", "Where", "Requests"]
    assert not any("…" in line for line in lines)  # no name is cut
