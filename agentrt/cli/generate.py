"""``agentrt generate`` with one prompt, streamed; and what the command line may say about how to answer.

Invariant: standard output gets the answer and nothing else.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentrt.backend import stream
from agentrt.backends.door import Prompt
from agentrt.cli.console import console, say, show
from agentrt.cli.start import start_engine
from agentrt.errors import UserError
from agentrt.request import SamplingParams
from agentrt.runtime import Engine


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What the command line said about how to answer; see `agentrt generate --help`."""

    model: str | None = None
    system: str | None = None
    raw: bool = False
    max_tokens: int | None = None
    temperature: float | None = None
    seed: int | None = None
    schema: Path | None = None
    regex: str | None = None
    dtype: str = "auto"
    kv_tokens: int | None = None
    threads: int | None = None
    record_trace: Path | None = None

    def engine(self) -> Engine:
        """An engine that is ready."""
        trace = None if self.record_trace is None else str(self.record_trace)
        return start_engine(self.model, dtype=self.dtype, kv_tokens=self.kv_tokens, threads=self.threads, record_trace=trace)

    def sampling_changes(self) -> dict[str, Any]:
        """What the command line says instead of the model's own defaults.

        Raises:
            UserError: Something of it is wrong; no engine is needed to find that out.
        """
        given: dict[str, Any] = {
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "seed": self.seed,
            "regex": self.regex,
            "json_schema": _read_schema(self.schema) if self.schema else None,
        }
        changes = {name: value for name, value in given.items() if value is not None}
        SamplingParams(**changes)
        return changes

    def prompt(self, text: str) -> Prompt:
        """The text itself, or a chat that asks it."""
        if self.raw:
            return text
        system = [{"role": "system", "content": self.system}] if self.system else []
        return [*system, {"role": "user", "content": text}]


def _read_schema(path: Path) -> Any:
    try:
        schema = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"the schema {path} cannot be read: {error}", param="schema") from error
    if not isinstance(schema, dict | bool):
        raise UserError(f"the schema {path} is {json.dumps(schema)[:80]}; a JSON Schema is an object, true or false", param="schema")
    return schema


def one(prompt: str | None, options: Options) -> None:
    """Streams the answer to one prompt to standard output."""
    changes = options.sampling_changes()
    if prompt is None or prompt == "-":
        prompt = _read_standard_input()
    with options.engine() as engine:
        request = engine.request(options.prompt(prompt), engine.facts.sampling.replace(**changes))
        usage = None
        for delta in stream(engine, request):
            show(delta.text)
            usage = delta.usage or usage
        show("\n")
    if usage is not None and console.is_terminal:
        seconds = max(usage.run_seconds, 1e-9)
        speed = f"{usage.completion_tokens / seconds:.0f} a second"
        say(f"{usage.prompt_tokens} prompt tokens, {usage.completion_tokens} generated ({speed})", "dim")


def _read_standard_input() -> str:
    if sys.stdin.isatty():
        say("type the prompt; Ctrl-D ends it", "dim")
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as error:
        raise UserError(f"standard input is not {error.encoding}: {error}", param="prompt") from error
