"""Traces: what was asked of an engine, when, and what it answered; read from files, or made by `workloads`.

Two forms are read, both JSON lines, gzipped or not: the project's own (`schemas/trace.json`), and Mooncake's, in which a prompt is a
list of hashes of 512-token blocks. A `Call` may depend on others (`after`), as the calls of a program do. Prompts of blocks stay
compact until a sequence needs their ids.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import chain, islice, repeat
from pathlib import Path
from typing import Any, overload

from agentrt.errors import UserError
from agentrt.observe.trace import FORM, StepShape
from agentrt.request import ProgramTag

MOONCAKE_BLOCK = 512
"""Tokens that one hash of Mooncake's form stands for."""

FIRST_OUTPUT_ID = 1_000_000_000
"""Mooncake's form does not say what was generated: every call gets an id of its own, from here on."""


class Blocks(Sequence[int]):
    """Token ids as blocks of one repeated id: what is known of a prompt of which only hashes were kept."""

    __slots__ = ("blocks", "length", "size")

    def __init__(self, blocks: tuple[int, ...], size: int, length: int) -> None:
        """Makes `length` tokens.

        Args:
            blocks: The id of each block.
            size: Tokens a block; the last one may have fewer.
            length: Tokens in all.
        """
        self.blocks = blocks
        self.size = size
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[int]:
        return islice(chain.from_iterable(repeat(block, self.size) for block in self.blocks), self.length)

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[int, ...]: ...
    def __getitem__(self, index: int | slice) -> int | tuple[int, ...]:
        """The token at a place, or the tokens of a slice."""
        if isinstance(index, slice):
            return tuple(self)[index]
        if not -self.length <= index < self.length:
            raise IndexError(index)
        return self.blocks[index % self.length // self.size]


@dataclass(frozen=True, slots=True)
class Call:
    """One call of the model.

    Attributes:
        call_id: Its number in the trace.
        at: Seconds from the beginning at which it is submitted; with `after`, seconds from the end of the last of those.
        prompt: Token ids.
        output: Token ids that are generated, at least one.
        after: Calls that must have ended.
        max_tokens: What the request allows; None: exactly the output's length.
        salt: Whose tree it shares.
        priority: Of the request.
        program: Its place in a program.
        hold: Seconds for which its program asks for a hold when it ends.
        last: Whether its program ends with it.
    """

    call_id: int
    at: float
    prompt: Sequence[int]
    output: Sequence[int]
    after: tuple[int, ...] = ()
    max_tokens: int | None = None
    salt: str = ""
    priority: int = 0
    program: ProgramTag | None = None
    hold: float = 0.0
    last: bool = False


@dataclass(frozen=True, slots=True)
class Trace:
    """A whole trace.

    Attributes:
        name: To show.
        calls: In order of their numbers.
        page_size: Tokens a page that suits it.
        steps: Shapes and seconds of recorded steps, to fit a cost model.
    """

    name: str
    calls: tuple[Call, ...]
    page_size: int = 1
    steps: tuple[tuple[StepShape, float], ...] = ()

    @property
    def prompt_tokens(self) -> int:
        """Prompt tokens of all calls."""
        return sum(len(call.prompt) for call in self.calls)


@dataclass(slots=True)
class _Reader:
    """Gathers the lines of one file."""

    path: Path
    calls: list[Call] = field(default_factory=list)
    steps: list[tuple[StepShape, float]] = field(default_factory=list)
    page_size: int = 1

    def add(self, line: dict[str, Any]) -> None:
        if "hash_ids" in line:
            self.page_size = MOONCAKE_BLOCK
            self.calls.append(_mooncake_call(len(self.calls), line))
        elif "call" in line:
            self.calls.append(_own_call(line))
        elif "step" in line:
            self.steps.append((StepShape(**line["step"]), float(line["seconds"])))
        elif line.get("agentrt_trace") == FORM:
            self.page_size = int(line.get("page_size", 1))
        else:
            raise ValueError(f"it is neither a header of version {FORM}, a call, a step, nor a request of Mooncake's form")


def load_trace(path: Path) -> Trace:
    """Reads a trace in either form.

    Raises:
        UserError: There is no such file, or a line of it is in neither form; the message has the line.
    """
    reader = _Reader(path)
    try:
        for number, text in enumerate(_lines(path), 1):
            try:
                reader.add(json.loads(text))
            except (ValueError, KeyError, TypeError) as error:
                raise UserError(f"{path}, line {number} is not a trace's: {error!s}; see schemas/trace.json", param="trace") from None
    except OSError as error:
        raise UserError(f"the trace {path} cannot be read: {error!s}", param="trace") from None
    if not reader.calls:
        raise UserError(f"{path} has no calls in it", param="trace")
    name = path.name.removesuffix(".gz").removesuffix(".jsonl")
    calls = tuple(sorted(reader.calls, key=lambda call: call.call_id))
    return Trace(name, calls, reader.page_size, tuple(reader.steps))


def save_trace(trace: Trace, path: Path) -> None:
    """Writes a trace in the project's own form."""
    with path.open("w", encoding="utf-8") as file:
        for line in _own_lines(trace):
            file.write(json.dumps(line, separators=(",", ":")) + "\n")


def _lines(path: Path) -> Iterator[str]:
    with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8") as file:
        yield from (line for line in file if line.strip())


def _mooncake_call(number: int, line: dict[str, Any]) -> Call:
    length, hashes = int(line["input_length"]), tuple(line["hash_ids"])
    if len(hashes) * MOONCAKE_BLOCK < length:
        raise ValueError(f"{len(hashes)} hash_ids do not cover an input_length of {length}")
    output = max(int(line["output_length"]), 1)
    answer = Blocks((FIRST_OUTPUT_ID + number,), output, output)
    return Call(number, line["timestamp"] / 1000, Blocks(hashes, MOONCAKE_BLOCK, length), answer)


def _own_call(line: dict[str, Any]) -> Call:
    program = line.get("program")
    return Call(
        call_id=int(line["call"]),
        at=float(line["at"]),
        prompt=tuple(line["prompt"]),
        output=tuple(line["output"]) or (0,),
        after=tuple(line.get("after", ())),
        max_tokens=line.get("max_tokens"),
        salt=line.get("salt", ""),
        priority=line.get("priority", 0),
        program=None if program is None else ProgramTag(**program),
        hold=line.get("hold", 0.0),
        last=line.get("last", False),
    )


def _own_lines(trace: Trace) -> Iterable[dict[str, Any]]:
    yield {"agentrt_trace": FORM, "model": trace.name, "page_size": trace.page_size}
    for call in trace.calls:
        line: dict[str, Any] = {"call": call.call_id, "at": call.at, "prompt": list(call.prompt), "output": list(call.output)}
        for name in ("after", "max_tokens", "salt", "priority", "hold", "last"):
            value = getattr(call, name)
            if value:
                line[name] = value
        if call.program is not None:
            line["program"] = asdict(call.program)
        yield line
    for shape, seconds in trace.steps:
        yield {"step": asdict(shape), "seconds": seconds}
