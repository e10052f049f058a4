"""Records what an engine was asked and what it did, as a trace that `agentrt simulate` reads. Not a log: no text, no times of day.

The form is JSON lines (`schemas/trace.json`): a header, then a line for each call when it has ended, and a line for each step,
from which a cost model can be fitted. Invariant: what is written so far is a valid trace, whenever the engine stops.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TextIO

from agentrt.request import Request

FORM = 1
"""Version of the form; a reader refuses others."""


@dataclass(frozen=True, slots=True)
class StepShape:
    """What a step's cost depends on.

    Attributes:
        tokens: New tokens.
        sequences: Runs.
        context: Tokens of KV read: what each run's sequence had computed before.
        attention: Pairs of a new token and a token that it attends to.
    """

    tokens: int
    sequences: int
    context: int
    attention: int

    @classmethod
    def of(cls, runs: Iterable[tuple[int, int]]) -> StepShape:
        """The shape of a step of (start, count) runs."""
        tokens = sequences = context = attention = 0
        for start, count in runs:
            sequences += 1
            tokens += count
            context += start
            attention += count * start + count * (count + 1) // 2
        return cls(tokens, sequences, context, attention)


class TraceRecorder:
    """Writes a trace. One thread calls it."""

    def __init__(self, path: Path, *, model: str = "", page_size: int = 1, kv_tokens: int = 0) -> None:
        """Begins a trace.

        Args:
            path: The file, which is overwritten.
            model: Name of the model, for the reader's eyes.
            page_size: Tokens a page of the engine.
            kv_tokens: Token slots of the engine.

        Raises:
            OSError: The file cannot be written.
        """
        self._file: TextIO = path.open("w", encoding="utf-8")
        self._calls: dict[str, dict[str, Any]] = {}
        self._next = 0
        self._began: float | None = None
        self._write({"agentrt_trace": FORM, "model": model, "page_size": page_size, "kv_tokens": kv_tokens})

    def arrived(self, request: Request, now: float) -> None:
        """Notes that a request was submitted, at `now` on the engine's clock."""
        self._began = now if self._began is None else self._began
        call: dict[str, Any] = {"at": now - self._began, "prompt": list(request.prompt_ids)}
        if request.sampling.max_tokens is not None:
            call["max_tokens"] = request.sampling.max_tokens
        if request.cache_salt:
            call["salt"] = request.cache_salt
        if request.priority:
            call["priority"] = request.priority
        if request.program is not None:
            call["program"] = asdict(request.program)
        self._calls[request.request_id] = {"call": self._next, **call}
        self._next += request.sampling.n

    def ended(self, request_id: str, outputs: Iterable[tuple[int, ...]]) -> None:
        """Writes a request that ended: a call for each of its samples, with the ids it gave."""
        call = self._calls.pop(request_id, None)
        if call is None:
            return
        for index, output in enumerate(outputs):
            self._write({**call, "call": call["call"] + index, "output": list(output)})

    def step(self, runs: Iterable[tuple[int, int]], seconds: float) -> None:
        """Writes a step: the (start, count) of each run, and how long it took."""
        self._write({"step": asdict(StepShape.of(runs)), "seconds": seconds})

    def close(self) -> None:
        """Ends the trace; calls that have not ended are left out."""
        self._file.close()

    def _write(self, line: dict[str, Any]) -> None:
        self._file.write(json.dumps(line, separators=(",", ":")) + "\n")
