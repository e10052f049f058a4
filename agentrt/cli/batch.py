"""A batch: a file of prompts in, a file of answers out, and a second run that goes on where the first one stopped.

Both are JSON, one object a line. Only "\\n" ends a line: JSON may hold U+2028, U+2029 and U+0085 as they are. Invariant: a file
that holds anything but this batch's own records is refused before anything is written, and what is taken out of it (records
of failures, which are asked again, and a last line that was cut off) is taken out by one rename.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from agentrt.backend import DeltaStream, collect, stream
from agentrt.backends.door import Prompt
from agentrt.cli.console import console, say
from agentrt.cli.generate import Options
from agentrt.errors import AgentrtError, EngineError, UserError
from agentrt.request import Request, SamplingParams
from agentrt.runtime import Engine
from agentrt.text.chat_messages import plain_messages

#: Requests of a batch that are with the engine at a time; enough to keep it full, few enough to hold in memory.
IN_FLIGHT = 256

#: How every record begins, so that one that was cut off can be told from somebody else's last line.
_BEGINNING = b'{"line": '

Record = dict[str, Any]
Write = Callable[[Record], None]


@dataclass(frozen=True, slots=True)
class Line:
    """One prompt of the batch.

    Attributes:
        number: Its line in the file, from 1.
        prompt: What is asked.
        mark: Its own "id", under that name, if it has one; goes into its record.
    """

    number: int
    prompt: Prompt
    mark: Record

    @property
    def record(self) -> Record:
        """The beginning of its record."""
        return {"line": self.number, **self.mark}


def run(file: Path, out: Path | None, options: Options) -> int:
    """Answers every line of a file. Answers are written as they come; a line that has one already is not asked again.

    Args:
        file: The prompts.
        out: Where the answers go, and where those of earlier runs are.
        options: How to answer.

    Returns:
        How many prompts failed; their records say why, and the next run asks them again.

    Raises:
        UserError: A file cannot be read or written, a line is not a prompt, or `out` holds what is not ours.
        EngineError: The engine is down; what was answered so far is in `out`.
    """
    if out is None:
        raise UserError("--file needs --out, where the answers go", param="out")
    _check_distinct(file, out, options.record_trace)
    changes = options.sampling_changes()
    lines = _read_prompts(file, options)
    done = _answered(out, file, {line.number: line for line in lines})
    todo = [line for line in lines if line.number not in done]
    with _opened(out) as write:
        if done:
            say(f"{len(done)} of {len(lines)} prompts are answered in {out} already; going on")
        failed = _ask(todo, len(lines), write, options, changes) if todo else 0
    if failed:
        say(f"{failed} prompts failed; their lines in {out} say why, and the same command asks them again", "red")
    return failed


def _check_distinct(file: Path, out: Path, trace: Path | None) -> None:
    named = [("--file", file), ("--out", out), *([("--record-trace", trace)] if trace else [])]
    for index, (option, path) in enumerate(named):
        for earlier, other in named[:index]:
            if os.path.realpath(path) == os.path.realpath(other):
                raise UserError(f"{option} is {path}, the same file as {earlier}; give it one of its own", param=option.strip("-"))


# -- prompts ---------------------------------------------------------------------------------------------------------------


def _read_prompts(file: Path, options: Options) -> list[Line]:
    """Every prompt of the file, all of them checked."""
    try:
        text = file.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise UserError(f"the file {file} cannot be read: {error}", param="file") from error
    except UnicodeDecodeError as error:
        number = error.object.count(b"\n", 0, error.start) + 1
        raise UserError(f"{file}:{number} is not UTF-8 ({error}); save the file as UTF-8", param="file") from error
    numbered = enumerate(text.split("\n"), 1)
    return [_read_prompt(f"{file}:{number}", number, line, options) for number, line in numbered if line.strip()]


def _read_prompt(where: str, number: int, line: str, options: Options) -> Line:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where} is not JSON: {error}", param="file") from error
    if isinstance(value, str):
        value = {"prompt": value}
    if not isinstance(value, dict) or not ("prompt" in value or "messages" in value):
        raise UserError(f"{where} has neither 'prompt' nor 'messages'", param="file")
    mark = {"id": value["id"]} if "id" in value else {}
    return Line(number, _prompt(where, value, options), mark)


def _prompt(where: str, value: Record, options: Options) -> Prompt:
    if "messages" in value:
        try:
            return plain_messages(value["messages"])
        except UserError as error:
            raise UserError(f"{where}: {error}", param="file") from error
    if not isinstance(value["prompt"], str):
        raise UserError(f"{where} has {json.dumps(value['prompt'])[:80]} as its prompt; it must be a text", param="file")
    return options.prompt(value["prompt"])


# -- answers of earlier runs -----------------------------------------------------------------------------------------------


def _answered(out: Path, file: Path, lines: dict[int, Line]) -> set[int]:
    """Lines of the batch that have an answer in `out`; what is no answer is taken out of it."""
    if not out.is_file():
        return set()
    try:
        content = out.read_bytes()
    except OSError as error:
        raise UserError(f"the file {out} cannot be read: {error}", param="out") from error
    *whole, rest = content.split(b"\n")
    records = [(raw, _record(f"{out}:{number}", raw, file, lines)) for number, raw in enumerate(whole, 1) if raw.strip()]
    if rest.strip() and not _is_cut_off(rest):
        records.append((rest, _record(f"{out}:{len(whole) + 1}", rest, file, lines)))
    kept = b"".join(raw + b"\n" for raw, record in records if "text" in record)
    if kept != content:
        _replace(out, kept)
    return {record["line"] for _, record in records if "text" in record}


def _is_cut_off(rest: bytes) -> bool:
    """Whether a last line without an end is the beginning of a record."""
    return _parsed(rest) is None and (rest.startswith(_BEGINNING) or _BEGINNING.startswith(rest))


def _record(where: str, raw: bytes, file: Path, lines: dict[int, Line]) -> Record:
    """A line of `out`, if it is a record of this batch."""
    advice = "give --out another file, or move that line away"
    record = _parsed(raw)
    if not _is_record(record):
        raise UserError(f"{where} is not an answer of `agentrt generate`; nothing was changed: {advice}", param="out")
    line = lines.get(record["line"])
    if line is None or line.mark.get("id") != record.get("id"):
        said = f"line {record['line']}" + (f" with the id {json.dumps(record['id'])[:80]}" if "id" in record else "")
        raise UserError(f"{where} answers {said}, which {file} does not have; nothing was changed: {advice}", param="out")
    known: Record = record
    return known


def _parsed(raw: bytes) -> Any:
    """The value of a line; None if it is not JSON."""
    try:
        return json.loads(raw)
    except (ValueError, RecursionError):
        return None


def _is_record(value: Any) -> bool:
    if not isinstance(value, dict) or type(value.get("line")) is not int:
        return False
    return isinstance(value.get("text"), str) or isinstance(value.get("error"), str)


def _replace(path: Path, content: bytes) -> None:
    """Gives a file another content so that a reader, or a crash, finds the old one or the new one."""
    path = Path(os.path.realpath(path))  # through a link, not over it
    partial = None
    try:
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f"{path.name}.", suffix=".partial", delete=False) as file:
            partial = file.name
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        shutil.copymode(path, partial)
        os.replace(partial, path)
    except OSError as error:
        if partial is not None:
            Path(partial).unlink(missing_ok=True)
        raise _unwritable(path, error) from error


@contextmanager
def _opened(out: Path) -> Iterator[Write]:
    """Gives what adds one record; a record is with the system before the next one is waited for."""
    try:
        file = out.open("ab", buffering=0)
    except OSError as error:
        raise _unwritable(out, error) from error

    def write(record: Record) -> None:
        # What UTF-8 cannot hold, half of a surrogate pair in an id, becomes the escape that JSON has for it.
        rest = (json.dumps(record, ensure_ascii=False) + "\n").encode("utf-8", "backslashreplace")
        try:
            while rest:
                rest = rest[file.write(rest) :]
        except OSError as error:
            raise _unwritable(out, error) from error

    with file:
        yield write


def _unwritable(out: Path, error: OSError) -> UserError:
    return UserError(f"the file {out} cannot be written: {error}", param="out")


# -- asking ----------------------------------------------------------------------------------------------------------------


def _ask(todo: Sequence[Line], total: int, write: Write, options: Options, changes: Record) -> int:
    """Asks what is to do, and returns how many failed."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    failed, answered = 0, total - len(todo)
    with options.engine() as engine, Progress(*columns, console=console) as progress:
        task = progress.add_task("answering", total=total, completed=answered)
        try:
            for record in _records(engine, todo, engine.facts.sampling.replace(**changes)):
                write(record)
                failed += "error" in record
                answered += "text" in record
                progress.advance(task)
        except EngineError as error:
            raise EngineError(f"{error}\n{answered} of {total} prompts are answered; the same command goes on from there") from error
    return failed


def _records(engine: Engine, todo: Sequence[Line], sampling: SamplingParams) -> Iterator[Record]:
    """Keeps `IN_FLIGHT` requests with the engine, and gives their records in order."""
    window: deque[Callable[[], Record]] = deque()
    for line in todo:
        window.append(_submit(engine, line, sampling))
        if len(window) >= IN_FLIGHT:
            yield window.popleft()()
    while window:
        yield window.popleft()()


def _submit(engine: Engine, line: Line, sampling: SamplingParams) -> Callable[[], Record]:
    """Submits one prompt; what is returned waits for its record."""
    try:
        request = engine.request(line.prompt, sampling)
        deltas = stream(engine, request)
    except EngineError:
        raise
    except AgentrtError as error:
        record = line.record | {"error": str(error)}
        return lambda: record
    return lambda: _wait(line, request, deltas)


def _wait(line: Line, request: Request, deltas: DeltaStream) -> Record:
    try:
        completion = collect(request, deltas)
    except EngineError:
        raise
    except AgentrtError as error:
        return line.record | {"error": str(error)}
    usage = completion.usage
    return line.record | {
        "text": completion.text,
        "finish_reason": completion.finish_reason,
        "usage": {
            "prompt_tokens": usage.prompt_tokens,
            "cached_tokens": usage.cached_tokens,
            "completion_tokens": usage.completion_tokens,
            "forced_tokens": usage.forced_tokens,
        },
    }
