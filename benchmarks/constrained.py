"""What constraints cost the step loop, and what jump-forward saves, on a real model in one run.

    python benchmarks/constrained.py [--model smollm2-135m] [--batch 32] [--rounds 5] [--tokens 64] [--only steps] [--json results.json]

Two questions, each asked in turns, so that the ratios hold on a noisy machine. The engine is in this process, so that processor seconds
(of all its threads) can be told beside seconds on the wall: neighbours on the machine stretch only the latter.

* Tool calls: the corpus' requests under `required`, `--batch` at once, greedy, with jump-forward on and off. Both write the same
  text (told as "same"). Prompts are cached from a first round that does not count: the prefill would be the same for both.
* Steps: free decoding against decoding under a schema (jump-forward off, so that each step is one token a sequence in both), at
  temperature 1, without the worker around the engine. Three engines step in turns; the ratios are the medians over steps of neighbours.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

import agentrt.grammar as grammar
from agentrt import Completion, Engine, GrammarSpec, SamplingParams
from agentrt.config import CacheConfig, EngineConfig
from agentrt.engine import collector
from agentrt.engine.assembly import build_engine
from agentrt.engine.engine import EngineCore
from agentrt.hub import resolve_model
from agentrt.request import Request
from agentrt.text import load_tokenizer

SEED = 0
Json = dict[str, Any]
Work = list[tuple[Sequence[int], SamplingParams]]

#: A record as extraction asks for it: keys, enums, numbers, dates and free text, often enough that it never ends.
RECORD = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "kind": {"enum": ["person", "place", "event", "organisation"]},
        "year": {"type": "integer", "minimum": 0, "maximum": 2100},
        "date": {"type": "string", "format": "date"},
        "tags": {"type": "array", "items": {"type": "string"}},
        "notes": {"type": "string"},
    },
    "required": ["name", "kind", "year", "date", "tags", "notes"],
    "additionalProperties": False,
}
RECORDS = {"type": "array", "items": RECORD, "minItems": 1000}


@dataclass
class Measured:
    """One work's rounds: seconds on the wall and of processors, and what the last round gave."""

    wall: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    last: list[Completion] = field(default_factory=list)


def run(engine: Engine, work: Work, measured: Measured) -> None:
    """Does all of it at once."""
    prompts, sampling = [list(prompt) for prompt, _ in work], [one for _, one in work]
    wall, cpu = time.perf_counter(), time.process_time()
    measured.last = engine.generate(prompts, sampling)
    measured.wall.append(time.perf_counter() - wall)
    measured.cpu.append(time.process_time() - cpu)


def interleaved(engine: Engine, works: dict[str, Work], rounds: int) -> dict[str, Measured]:
    """Runs each work once to warm up, then `rounds` times, in turns and in alternating order."""
    for work in works.values():
        run(engine, work, Measured())
    measured = {name: Measured() for name in works}
    for number in range(rounds):
        for name in list(works)[:: -1 if number % 2 else 1]:
            run(engine, works[name], measured[name])
    return measured


def ratio(over: Sequence[float], under: Sequence[float]) -> float:
    """The median of the ratios of neighbours in time."""
    return statistics.median(a / b for a, b in zip(over, under, strict=True))


# ---- tool calls, with jump-forward on and off


def tool_calls(engine: Engine, tokenizer: Any, rows: list[Json], rounds: int) -> Json:
    works: dict[str, Work] = {}
    for mode in ("on", "off"):
        works[mode] = [(tokenizer.encode_chat(row["messages"], tools=row["tools"]), _calling(row, mode)) for row in rows]
    measured = interleaved(engine, works, rounds)
    on, off = measured["on"], measured["off"]
    tokens = sum(c.usage.completion_tokens for c in on.last)
    return {
        "tool calls at once": len(rows),
        "tokens": tokens,
        "same": sum(a.token_ids == b.token_ids for a, b in zip(on.last, off.last, strict=True)),
        "seconds off": round(statistics.median(off.wall), 2),
        "seconds on": round(statistics.median(on.wall), 2),
        "times faster, wall": round(ratio(off.wall, on.wall), 2),
        "times less processor": round(ratio(off.cpu, on.cpu), 2),
        "passes off": sum(c.usage.forward_passes for c in off.last),
        "passes on": sum(c.usage.forward_passes for c in on.last),
        "forced": f"{100 * sum(c.usage.forced_tokens for c in on.last) / tokens:.1f}%",
    }


def _calling(row: Json, mode: str) -> SamplingParams:
    spec = grammar.tools_spec(row["tools"], tool_choice="required", parallel=False)
    assert spec is not None
    return SamplingParams(grammar=replace(spec, jump_forward=mode), temperature=0, max_tokens=100)  # type: ignore[arg-type]


# ---- steps, free and constrained


def steps(folder: Path, tokenizer: Any, model: str, batch: int, tokens: int, rounds: int) -> list[Json]:
    """What a step costs in which all sequences decode, at temperature 1: free, and under each engine of constraints.

    Each has an engine of its own, and they step in turns, so that each step has neighbours in time of every kind.
    """
    records = grammar.json_schema_spec(RECORDS)
    constraints: dict[str, GrammarSpec | None] = {
        "free": None,
        "schema, llguidance": replace(records, engine="llguidance", jump_forward="off"),
        "schema, fsm": replace(grammar.json_schema_spec(_regular()), engine="fsm", jump_forward="off"),
    }
    config = EngineConfig(model=model, cache=CacheConfig(kv_tokens=batch * (tokens + 64)))
    engines = {name: Stepping(build_engine(config, folder, tokenizer)[0], tokenizer, spec) for name, spec in constraints.items()}
    collector.settle()
    order = random.Random(SEED)
    for number in range(-1, rounds):
        for engine in engines.values():
            engine.begin(batch, tokens)
        for turn in range(tokens + 1):
            for name in order.sample(list(engines), len(engines)):  # what a step leaves in the caches helps none more than others
                engines[name].step(counts=number >= 0 and 3 < turn < tokens)  # the first round meets states for the first time
        for engine in engines.values():
            engine.finish()
    free = engines["free"]
    return [
        {
            "batch": batch,
            "decoding": name,
            "steps": len(one.wall),
            "wall ms a step": round(1e3 * statistics.median(one.wall), 2),
            "processor ms a step": round(1e3 * statistics.median(one.processor), 2),
            "over free, wall": f"{100 * (ratio(one.wall, free.wall) - 1):+.1f}%",
            "over free, processor": f"{100 * (ratio(one.processor, free.processor) - 1):+.1f}%",
            "not the model, ms": round(1e3 * statistics.median(one.own), 2),
        }
        for name, one in engines.items()
    ]


class Stepping:
    """An engine that is stepped by hand, and the seconds of its steps: on the wall, of all processors, on the wall outside the model's calls."""

    def __init__(self, core: EngineCore, tokenizer: Any, spec: GrammarSpec | None) -> None:
        self._core, self._tokenizer, self._spec = core, tokenizer, spec
        self._compiled = None if spec is None else grammar.compile(spec, tokenizer)
        self._model = ModelClock(core)
        self.wall: list[float] = []
        self.processor: list[float] = []
        self.own: list[float] = []

    def begin(self, batch: int, tokens: int) -> None:
        """Takes in as many requests."""
        for number in range(batch):
            prompt = self._tokenizer.encode(f"Record {number}, about what happened in that year:\n")
            sampling = SamplingParams(grammar=self._spec, max_tokens=tokens, ignore_eos=self._spec is None, seed=number, temperature=1)
            self._core.submit(Request(prompt_ids=tuple(prompt), sampling=sampling), self._compiled)

    def step(self, counts: bool) -> None:
        """One step; its times are kept if it `counts`."""
        wall, processor, before = time.perf_counter(), time.process_time(), self._model.seconds
        self._core.step()
        wall, processor = time.perf_counter() - wall, time.process_time() - processor
        if counts:
            self.wall.append(wall)
            self.processor.append(processor)
            self.own.append(wall - (self._model.seconds - before))

    def finish(self) -> None:
        """Takes the steps that are left."""
        while not self._core.idle:
            self._core.step()


class ModelClock:
    """Counts the seconds of the calls in which the model computes; they are private to the engine, and this script has to know them."""

    def __init__(self, core: EngineCore) -> None:
        self.seconds = 0.0
        self._runner = core._executor._runner  # type: ignore[attr-defined]
        self._runner.forward, self._runner.logits = self._timed(self._runner.forward), self._timed(self._runner.logits)

    def _timed(self, call: Any) -> Any:
        def timed(*arguments: Any) -> Any:
            started = time.perf_counter()
            try:
                return call(*arguments)
            finally:
                self.seconds += time.perf_counter() - started

        return timed


def _regular() -> Json:
    """The same for an automaton, which has no room for bounds on numbers, and for a thousand records."""
    item = {**RECORD, "properties": {**RECORD["properties"], "year": {"type": "integer"}}}  # type: ignore[dict-item]
    return {"type": "array", "items": item, "minItems": 3}


def show(rows: list[Json]) -> None:
    print("| " + " | ".join(rows[0]) + " |\n|" + "---|" * len(rows[0]))
    for row in rows:
        print("| " + " | ".join(map(str, row.values())) + " |")
    print()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--only", choices=["calls", "steps"], default=None)
    parser.add_argument("--threads", type=int, default=None, help="of torch")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    folder = Path(os.environ.get("AGENTRT_CORPORA", Path(__file__).parents[2] / "shared" / "data"))
    tokenizer = load_tokenizer(arguments.model)
    made: dict[str, Any] = {}
    print(f"seed {SEED}; {arguments.model}; Python {platform.python_version()}; {os.cpu_count()} cores, {platform.machine()}\n")
    if arguments.only != "steps":
        with Engine(arguments.model, process=False, threads=arguments.threads) as engine:
            with (folder / "bfcl_tools.jsonl").open(encoding="utf-8") as lines:
                rows = random.Random(SEED).sample([json.loads(line) for line in lines], arguments.batch)
            made["calls"] = [tool_calls(engine, tokenizer, rows, arguments.rounds)]
            show(made["calls"])
    if arguments.only != "calls":
        if arguments.threads:
            torch.set_num_threads(arguments.threads)
        made["steps"] = steps(resolve_model(arguments.model).folder, tokenizer, arguments.model, arguments.batch, arguments.tokens, arguments.rounds)
        show(made["steps"])
    if arguments.json:
        arguments.json.write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
