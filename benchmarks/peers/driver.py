"""What `compare.py` says to the process of an engine and hears from it: one JSON object a line, over stdin and stdout.

    its argument   {"gguf": FILE, "folder": FOLDER, "threads": 2, "context": 4096, "kv_bytes": 2147483648}
    it says        {"ready": "OpenVINO GenAI 2026.4.1, the GGUF's own 4 bits"}
    it is asked    {"prompts": [[1, 2, 3]], "texts": ["abc"], "max_tokens": 64, "schemas": [{...}] or null}
    it answers     {"seconds": 1.5, "answers": [[4, 5]], "texts": null, "computed": 70, "passes": 64}
    or             {"cannot": "transformers knows no constraints"}

All prompts of a line are asked at once. Without schemas every answer has exactly `max_tokens` tokens, whatever they are, so that all
engines do the same work; with schemas an answer ends where its document does. Only the standard library is used, since this runs in
the peers' environments too; what an engine prints goes to stderr, so that it never comes between two lines.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Protocol


@dataclass(frozen=True)
class Setting:
    """The same for all engines: model, threads, longest sequence, and the size of the KV store; `dtype` is agentrt's alone."""

    gguf: str
    folder: str
    threads: int
    context: int
    kv_bytes: int
    dtype: str = "auto"


@dataclass(frozen=True)
class Ask:
    """Prompts to be answered at once, as token ids and as text; `schemas`, if there are any, one a prompt."""

    prompts: list[list[int]]
    texts: list[str]
    max_tokens: int
    schemas: list[dict[str, Any]] | None = None


@dataclass(frozen=True)
class Told:
    """Answers as token ids, or as `texts` where an engine has no ids; None for what an engine does not tell.

    `computed` are the tokens that went through the model, those of the answers included; `passes` the forward passes, of all at once.
    """

    answers: list[list[int]] | None
    texts: list[str] | None = None
    computed: int | None = None
    passes: int | None = None


class CannotError(Exception):
    """This engine has no such thing; the row is left out for it, with the reason."""


class Driven(Protocol):
    """An engine as its driver presents it."""

    about: str

    def answer(self, ask: Ask) -> Told: ...


def natively_bfloat16() -> bool:
    """Whether the processor multiplies bfloat16 itself; where it does not, float32 is the faster choice."""
    with open("/proc/cpuinfo") as lines:
        flags = next((line.split() for line in lines if line.startswith("flags")), [])
    return "avx512_bf16" in flags or "amx_bf16" in flags


def serve(start: Callable[[Setting], Driven]) -> None:
    """Starts an engine and answers until stdin ends."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def say(value: dict[str, Any]) -> None:
        out.write(json.dumps(value) + "\n")
        out.flush()

    engine = start(Setting(**json.loads(sys.argv[1])))
    say({"ready": engine.about})
    for line in sys.stdin:
        ask = Ask(**json.loads(line))
        begun = time.perf_counter()
        try:
            told = engine.answer(ask)
        except CannotError as reason:
            say({"cannot": str(reason)})
        else:
            say({"seconds": time.perf_counter() - begun} | asdict(told))
