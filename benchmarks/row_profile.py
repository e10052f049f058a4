"""Where the time of `compare.py`'s rows goes in agentrt: the same prompts and answers, with `step.py`'s clocks around the parts of every step.

The engine runs in this process, without its thread, so what asking costs is not in it. Seconds of a whole row; a first repeat warms up.

    python benchmarks/row_profile.py [--rows few-shot chats tools] [--threads 2]
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent / "peers"))

import torch
from driver import Ask, Told
from rows import ROWS, Row
from step import MODEL, Clocks, attach

from agentrt.config import CacheConfig, EngineConfig, Limits
from agentrt.engine.assembly import build_engine
from agentrt.engine.engine import EngineCore
from agentrt.grammar import GrammarCache
from agentrt.hub import resolve_model
from agentrt.request import GrammarSpec, Request, SamplingParams
from agentrt.text import Tokenizer, load_tokenizer

COLUMNS = ("linears", "attention", "head", "other parts of the model", "the engine's own")
KV_TOKENS = 40_000


class Profiled:
    """An engine whose steps are counted by their parts."""

    def __init__(self, model: str, threads: int | None) -> None:
        """Builds it."""
        folder = resolve_model(model).folder
        self.tokenizer: Tokenizer = load_tokenizer(str(folder))
        config = EngineConfig(model=model, threads=threads, cache=CacheConfig(kv_tokens=KV_TOKENS))
        self.core: EngineCore = build_engine(config, folder, self.tokenizer)[0]
        self.clocks = Clocks(time.perf_counter)
        self.grammars = GrammarCache(Limits())
        attach(self.core, self.clocks)

    def answer(self, ask: Ask, seconds: Counter[str]) -> Told:
        """Answers like a driver of `compare.py`, and adds what it took."""
        answers: dict[str, list[int]] = {}
        for number, ids in enumerate(ask.prompts):
            spec = GrammarSpec(kind="json_schema", source=json.dumps(ask.schemas[number])) if ask.schemas else None
            sampling = SamplingParams(max_tokens=ask.max_tokens, temperature=0, grammar=spec, ignore_eos=spec is None)
            request = Request(prompt_ids=tuple(ids), sampling=sampling)
            grammar = None if spec is None else self.grammars.compile(spec, self.tokenizer)
            answers[request.request_id] = []
            self.core.submit(request, grammar)
        while not self.core.idle:
            started = time.perf_counter()
            for delta in self.core.step():
                answers[delta.request_id] += delta.token_ids
            whole, parts = time.perf_counter() - started, self.clocks.take()
            model = sum(parts.get(part, 0.0) for part in MODEL)
            named = {part: parts.get(part, 0.0) for part in ("linears", "attention", "head")}
            seconds.update({**named, "other parts of the model": model - sum(named.values()), "the engine's own": whole - model, "seconds": whole, "steps": 1})
        return Told(list(answers.values()))


def profile(engine: Profiled, row: Row) -> Counter[str]:
    """Seconds of a row by part, steps, and tokens computed."""
    seconds: Counter[str] = Counter()
    for repeat in (1, 0):  # the one that counts is compare.py's first
        seconds = Counter()
        before = engine.core.stats().get("computed_tokens", 0)
        work = row.work(engine.tokenizer, repeat, False)
        told: Any = None
        while True:
            try:
                part = work.send(told)
            except StopIteration:
                break
            counted = seconds if part.counts else Counter[str]()
            told = engine.answer(part.ask, counted)
        seconds["tokens"] = engine.core.stats().get("computed_tokens", 0) - before
        engine.core.flush_cache()
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", default=["one", "thirty-two", "cold", "few-shot", "chats", "tools"], choices=sorted(set(ROWS) - {"start"}))
    parser.add_argument("--threads", type=int)
    options = parser.parse_args()
    engines: dict[str, Profiled] = {}
    print("| row | seconds | " + " | ".join(COLUMNS) + " | tokens computed | steps |\n|---|" + "---|" * (len(COLUMNS) + 3))
    with torch.inference_mode():
        for name in options.rows:
            row = ROWS[name]
            engine = engines.get(row.model) or engines.setdefault(row.model, Profiled(row.model, options.threads))
            found = profile(engine, row)
            shares = " | ".join(f"{found[column]:.2f}" for column in COLUMNS)
            print(f"| {row.title} | {found['seconds']:.2f} | {shares} | {found['tokens']:,.0f} | {found['steps']:.0f} |", flush=True)


if __name__ == "__main__":
    main()
