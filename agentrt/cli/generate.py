"""``agentrt generate``: one prompt, streamed; or a file of prompts, going on where the last run stopped."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from agentrt.backend import collect, stream
from agentrt.backends.door import Prompt
from agentrt.cli.start import console, start_engine
from agentrt.errors import AgentrtError, UserError
from agentrt.request import Completion, Request, SamplingParams
from agentrt.runtime import Engine

#: Requests of a batch that are with the engine at a time; enough to keep it full, few enough to hold in memory.
IN_FLIGHT = 256


@dataclass(frozen=True, slots=True)
class Options:
    """What the command line said about how to answer; see `agentrt generate --help`."""

    model: str | None
    system: str | None
    raw: bool
    max_tokens: int | None
    temperature: float | None
    seed: int | None
    schema: Path | None
    regex: str | None
    dtype: str
    record_trace: Path | None = None

    def engine(self) -> Engine:
        """An engine that is ready."""
        trace = None if self.record_trace is None else str(self.record_trace)
        return start_engine(self.model, dtype=self.dtype, record_trace=trace)

    def sampling(self, defaults: SamplingParams) -> SamplingParams:
        """The model's own defaults, with what the command line says instead."""
        given: dict[str, Any] = {
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "seed": self.seed,
            "regex": self.regex,
            "json_schema": _read_schema(self.schema) if self.schema else None,
        }
        return defaults.replace(**{name: value for name, value in given.items() if value is not None})

    def prompt(self, text: str) -> Prompt:
        """The text itself, or a chat that asks it."""
        if self.raw:
            return text
        system = [{"role": "system", "content": self.system}] if self.system else []
        return [*system, {"role": "user", "content": text}]


def _read_schema(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"the schema {path} cannot be read: {error}", param="schema") from error


def one(prompt: str | None, options: Options) -> None:
    """Streams the answer to one prompt to standard output."""
    if prompt is None or prompt == "-":
        prompt = sys.stdin.read()
    with options.engine() as engine:
        request = engine.request(options.prompt(prompt), options.sampling(engine.facts.sampling))
        usage = None
        for delta in stream(engine, request):
            print(delta.text, end="", flush=True)
            usage = delta.usage or usage
        print()
    if usage is not None and console.is_terminal:
        seconds = max(usage.run_seconds, 1e-9)
        console.print(
            f"[dim]{usage.prompt_tokens} prompt tokens, {usage.completion_tokens} generated "
            f"({usage.completion_tokens / seconds:.0f} a second)[/]"
        )


def batch(file: Path, out: Path | None, options: Options) -> None:
    """Answers every line of a file. Answers are written as they come; a line that has one already is not asked again.

    Raises:
        UserError: The file cannot be read, a line is not an object with a prompt, or `out` is missing.
    """
    if out is None:
        raise UserError("--file needs --out, where the answers go", param="out")
    lines = list(_read_lines(file))
    done = _answered(out)
    todo = [(number, line) for number, line in lines if number not in done]
    if done:
        console.print(f"{len(done)} of {len(lines)} prompts are answered in {out} already; going on")
    if not todo:
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with (
        options.engine() as engine,
        out.open("a", encoding="utf-8") as answers,
        Progress(*columns, console=console) as progress,
    ):
        task = progress.add_task("answering", total=len(lines), completed=len(done))
        failed = 0
        for record in _answers(engine, todo, options):
            failed += "error" in record
            _write(answers, record)
            progress.advance(task)
    if failed:
        console.print(f"[red]{failed} prompts failed; their lines in {out} say why[/]")


def _read_lines(file: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    try:
        text = file.read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"the file {file} cannot be read: {error}", param="file") from error
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except ValueError as error:
            raise UserError(f"{file}:{number} is not JSON: {error}", param="file") from error
        if isinstance(value, str):
            value = {"prompt": value}
        if not isinstance(value, dict) or not ("prompt" in value or "messages" in value):
            raise UserError(f"{file}:{number} has neither 'prompt' nor 'messages'", param="file")
        yield number, value


def _answered(out: Path) -> set[int]:
    """Lines of the input that have an answer. A last line that was cut off in the middle is taken away."""
    if not out.exists():
        return set()
    kept = [line for line in out.read_text(encoding="utf-8").splitlines(keepends=True) if _is_answer(line)]
    out.write_text("".join(kept), encoding="utf-8")
    return {json.loads(line)["line"] for line in kept}


def _is_answer(line: str) -> bool:
    try:
        record = json.loads(line)
    except ValueError:
        return False
    return line.endswith("\n") and isinstance(record, dict) and "text" in record and "line" in record


def _answers(engine: Engine, todo: list[tuple[int, dict[str, Any]]], options: Options) -> Iterator[dict[str, Any]]:
    """Keeps `IN_FLIGHT` requests with the engine, and gives their answers in order."""
    sampling = options.sampling(engine.facts.sampling)
    window: list[tuple[dict[str, Any], Request | None, Any]] = []
    for number, line in todo:
        window.append(_submit(engine, number, line, sampling, options))
        if len(window) >= IN_FLIGHT:
            yield _wait(*window.pop(0))
    while window:
        yield _wait(*window.pop(0))


def _submit(engine: Engine, number: int, line: dict[str, Any], sampling: SamplingParams, options: Options) -> tuple[dict[str, Any], Request | None, Any]:
    record: dict[str, Any] = {"line": number, **({"id": line["id"]} if "id" in line else {})}
    try:
        prompt: Prompt = line["messages"] if "messages" in line else options.prompt(str(line["prompt"]))
        request = engine.request(prompt, sampling)
        return record, request, stream(engine, request)
    except AgentrtError as error:
        return record | {"error": str(error)}, None, None


def _wait(record: dict[str, Any], request: Request | None, deltas: Any) -> dict[str, Any]:
    if request is None:
        return record
    try:
        completion: Completion = collect(request, deltas)
    except AgentrtError as error:
        return record | {"error": str(error)}
    usage = completion.usage
    return record | {
        "text": completion.text,
        "finish_reason": completion.finish_reason,
        "usage": {
            "prompt_tokens": usage.prompt_tokens,
            "cached_tokens": usage.cached_tokens,
            "completion_tokens": usage.completion_tokens,
            "forced_tokens": usage.forced_tokens,
        },
    }


def _write(file: TextIO, record: dict[str, Any]) -> None:
    file.write(json.dumps(record, ensure_ascii=False) + "\n")
    file.flush()
