"""Where the time of a decode step goes: its parts at 1, 8 and 32 sequences with 300 tokens of context each, in one process.

The engine runs as it does in its worker, without the pipe. Clocks are put around the calls of one step, and the call that runs all layers
counts its own parts; what no clock covers is shown too, so that the parts add up. "The model" is linears, attention with rotary, norms and
activations, embedding and the like, and the output head; everything else (planning, batch assembly, masks, sampling, commit, output) is the engine's own work.

    python benchmarks/step.py [--model smollm2-135m] [--dtype int4] [--attention torch] [--constrained] [--json results.json]
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import platform
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from agentrt.attention.native_cpu import NativeAttention
from agentrt.config import CacheConfig, EngineConfig, Limits
from agentrt.engine import collector, executor
from agentrt.engine.assembly import build_engine
from agentrt.engine.engine import EngineCore
from agentrt.grammar import GrammarCache
from agentrt.hub import resolve_model
from agentrt.request import GrammarSpec, Request, SamplingParams
from agentrt.text import Tokenizer, load_tokenizer

SEED, CONTEXT, STEPS, WARM = 0, 300, 40, 4
SIZES = (1, 8, 32)
LAYERS = ("linears", "attention", "norms and activation")
MODEL = (*LAYERS, "around the layers", "head")
SCHEMA = json.dumps({"type": "object", "properties": {"text": {"type": "string", "minLength": 400}}, "required": ["text"]})


class Clocks:
    """Seconds by part of the step under way; a part inside another counts for itself alone."""

    def __init__(self, now: Callable[[], float]) -> None:
        self.now = now
        self.seconds: dict[str, float] = defaultdict(float)
        self._inner = [0.0]

    def around(self, part: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any, **named: Any) -> Any:
            self._inner.append(0.0)
            started = self.now()
            try:
                return call(*arguments, **named)
            finally:
                whole = self.now() - started
                self.seconds[part] += whole - self._inner.pop()
                self._inner[-1] += whole

        return timed

    def split(self, inside: Callable[[], tuple[float, ...]], call: Callable[..., Any]) -> Callable[..., Any]:
        """Around a call that itself counts what its parts take; the rest is "around the layers"."""

        def timed(*arguments: Any, **named: Any) -> Any:
            before, started = inside(), self.now()
            result = call(*arguments, **named)
            whole, parts = self.now() - started, [after - earlier for after, earlier in zip(inside(), before, strict=True)]
            for part, seconds in zip((*LAYERS, "around the layers"), (*parts, whole - sum(parts)), strict=True):
                self.seconds[part] += seconds
            self._inner[-1] += whole
            return result

        return timed

    def take(self) -> dict[str, float]:
        taken = dict(self.seconds)
        self.seconds.clear()
        return taken


def attach(core: Any, clocks: Clocks) -> None:
    """Puts clocks around the parts of a step; they are private to the engine, and this script has to know them."""
    local, decoder = core._executor, core._executor._runner._decoder
    runner = local._runner
    if decoder.native is not None and isinstance(runner._attention, NativeAttention):
        runner.forward = clocks.split(lambda: decoder.native.seconds, runner.forward)
    else:
        decoder._layers = tuple(
            dataclasses.replace(layer, **{name: clocks.around("linears", getattr(layer, name)) for name in ("qkv", "output", "gate_up", "down")})
            for layer in decoder._layers
        )
        runner._attention = timed_attention(runner._attention, clocks)
        runner.forward = clocks.around("norms and activation", runner.forward)
    runner.logits = clocks.around("head", runner.logits)
    local._sampler.sample = clocks.around("sampling", local._sampler.sample)
    local._states.apply = clocks.around("batch assembly", local._states.apply)
    executor.forward_batch = clocks.around("batch assembly", executor.forward_batch)
    core._scheduler.plan = clocks.around("plan", core._scheduler.plan)
    core._scheduler.commit = clocks.around("commit", core._scheduler.commit)
    core._masks.start = clocks.around("masks", core._masks.start)
    core._tell = clocks.around("output", core._tell)


def timed_attention(attention: Any, clocks: Clocks) -> Any:
    """The same attention, with a clock around each way to call it."""
    timed = clocks.around("attention", attention)
    if hasattr(attention, "from_qkv"):
        timed.from_qkv = clocks.around("attention", attention.from_qkv)  # type: ignore[attr-defined]
    return timed


def measure(core: EngineCore, clocks: Clocks, tokenizer: Tokenizer, size: int, constrained: bool) -> dict[str, float]:
    """Median milliseconds of each part of a step."""
    random = torch.Generator().manual_seed(SEED + size)
    most = WARM + STEPS + 4 + 2 * size  # prompts are computed over several steps, so that answers begin at different times
    grammar = GrammarCache(Limits()).compile(GrammarSpec(kind="json_schema", source=SCHEMA), tokenizer) if constrained else None
    for _ in range(size):
        ids = tuple(torch.randint(100, tokenizer.vocab_size, (CONTEXT - STEPS // 2,), generator=random).tolist())
        sampling = SamplingParams(temperature=0, max_tokens=most, ignore_eos=True)
        core.submit(Request(prompt_ids=ids, sampling=sampling), grammar)
    for _ in range(most):
        if sum(1 for delta in core.step() if delta.token_ids) == size:
            break
    for _ in range(WARM):
        core.step()
    clocks.take()
    parts: dict[str, list[float]] = defaultdict(list)
    for _ in range(STEPS):
        started = clocks.now()
        told = core.step()
        whole = clocks.now() - started
        if len(told) != size:
            raise RuntimeError(f"{len(told)} of {size} sequences took part in a step")
        step = clocks.take()
        step["the rest"] = whole - sum(step.values())
        step["whole step"] = whole
        for part, seconds in step.items():
            parts[part].append(seconds * 1e3)
    while not core.idle:
        core.step()
    core.flush_cache()
    return {part: statistics.median(values) for part, values in parts.items()}


def table(found: dict[int, dict[str, float]]) -> str:
    names = ("plan", "batch assembly", *MODEL, "masks", "sampling", "commit", "output", "the rest", "whole step")
    lines = ["| ms a step | " + " | ".join(map(str, found)) + " |", "|---|" + "---|" * len(found)]
    lines += [f"| {name} | " + " | ".join(f"{parts.get(name, 0.0):.2f}" for parts in found.values()) + " |" for name in names]
    return "\n".join((*lines, "| not the model | " + " | ".join(f"{share(parts):.1%}" for parts in found.values()) + " |"))


def share(parts: dict[str, float]) -> float:
    """The share of a step that is not the model."""
    return 1 - sum(parts.get(part, 0.0) for part in MODEL) / parts["whole step"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--attention", default="auto", choices=("auto", "torch"))
    parser.add_argument("--threads", type=int)
    parser.add_argument("--own-time", action="store_true", help="the thread's own processor time; with --threads 1, for a machine that others use")
    parser.add_argument("--constrained", action="store_true", help="every answer under one JSON Schema")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    files = resolve_model(options.model)
    tokenizer = load_tokenizer(str(files.folder))
    room = CacheConfig(kv_tokens=max(SIZES) * 2 * CONTEXT)  # all run at once, whatever memory is free
    config = EngineConfig(model=options.model, dtype=options.dtype, attention=options.attention, threads=options.threads, cache=room)
    core, facts = build_engine(config, files.folder, tokenizer)
    collector.settle()
    clocks = Clocks(time.thread_time if options.own_time else time.perf_counter)
    attach(core, clocks)
    found = {size: measure(core, clocks, tokenizer, size, options.constrained) for size in SIZES}
    core.close()
    print(f"{files.name}, {facts.dtype}, {facts.threads} threads, {CONTEXT} tokens of context, median of {STEPS} steps, seed {SEED}; {platform.processor() or platform.machine()}")
    print(table(found))
    if options.json:
        options.json.write_text(json.dumps({"model": files.name, "dtype": facts.dtype, "threads": facts.threads, "ms": found}, indent=1))


if __name__ == "__main__":
    main()
