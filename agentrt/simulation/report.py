"""What a simulation found, added up: rates beside their bounds, percentiles, and the state over time; as JSON and as one page."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from agentrt.simulation.bounds import Future
from agentrt.simulation.simulator import CallRecord, Run
from agentrt.simulation.timeline import Moment
from agentrt.simulation.trace import Trace

LEVELS = (50, 90, 99)


@dataclass(frozen=True, slots=True)
class Spread:
    """How a time is distributed, in seconds."""

    mean: float
    p50: float
    p90: float
    p99: float
    worst: float

    @classmethod
    def of(cls, values: Iterable[float], weights: Iterable[int] | None = None) -> Spread:
        """The spread of `values`, each counted as often as its weight says."""
        array = np.fromiter(values, dtype=np.float64)
        if not len(array):
            return cls(0.0, 0.0, 0.0, 0.0, 0.0)
        counts = np.ones(len(array), dtype=np.int64) if weights is None else np.fromiter(weights, dtype=np.int64)
        order = np.argsort(array)
        reached = np.cumsum(counts[order])
        places = [int(np.searchsorted(reached, level / 100 * reached[-1])) for level in LEVELS]
        p50, p90, p99 = (float(array[order[min(place, len(array) - 1)]]) for place in places)
        return cls(float(np.average(array, weights=counts)), p50, p90, p99, float(array.max()))


@dataclass(frozen=True, slots=True)
class Report:
    """One simulation.

    Attributes:
        trace: Name of what was asked.
        setup: The engine's settings.
        calls: How many were asked; `failed` of them failed.
        programs: How many programs they belong to.
        prompt_tokens, output_tokens, computed_tokens: Asked, generated, and gone through the model.
        seconds: Virtual time.
        steps: Steps of the engine.
        hit_rate: Share of the prompt tokens that were found in the cache at first admission.
        unlimited_hit_rate: The same for the same order of calls, one after the other, with memory for everything.
        belady_hit_rate: The same with this pool and the best eviction that knows the future.
        working_set: Tokens that an unlimited cache would hold in the end.
        wait: From submission to first admission.
        first_token: From submission to the first token.
        whole: From submission to the last token.
        gap: Between two tokens of a sequence.
        program_time: From a program's first submission to its last token.
        preemptions, evicted_tokens: In all.
        slots_filled: Mean share of the slots in use that hold a token.
        moments: The state over time.
    """

    trace: str
    setup: dict[str, Any]
    calls: int
    failed: int
    programs: int
    prompt_tokens: int
    output_tokens: int
    computed_tokens: int
    seconds: float
    steps: int
    hit_rate: float
    unlimited_hit_rate: float
    belady_hit_rate: float
    working_set: int
    wait: Spread
    first_token: Spread
    whole: Spread
    gap: Spread
    program_time: Spread
    preemptions: int
    evicted_tokens: int
    slots_filled: float
    moments: tuple[Moment, ...]

    def to_json(self) -> str:
        """All of it, as JSON."""
        return json.dumps(asdict(self), indent=1)

    def save(self, path: Path) -> None:
        """Writes the JSON."""
        path.write_text(self.to_json() + "\n", encoding="utf-8")


def hit_rate(run: Run) -> float:
    """Share of the prompt tokens that were found in the cache at first admission."""
    asked = sum(len(record.call.prompt) for record in run.records)
    return sum(record.cached_tokens for record in run.records) / max(asked, 1)


def program_times(records: Iterable[CallRecord]) -> list[float]:
    """Seconds from each program's first submission to its last token."""
    spans: dict[str, tuple[float, float]] = {}
    for record in records:
        if record.call.program is not None:
            began, ended = spans.get(record.call.program.program, (record.due, record.ended))
            spans[record.call.program.program] = min(began, record.due), max(ended, record.ended)
    return [ended - began for began, ended in spans.values()]


def report(trace: Trace, setup: dict[str, Any], run: Run) -> Report:
    """Adds a run up. `setup` must have `pool_tokens` and `page_size`."""
    calls = {call.call_id: call for call in trace.calls}
    future = Future((calls[number] for number in run.order), setup["page_size"])
    records = [record for record in run.records if not record.error]
    times = program_times(records)
    return Report(
        trace=trace.name,
        setup=setup,
        calls=len(trace.calls),
        failed=len(run.records) - len(records),
        programs=len(times),
        prompt_tokens=trace.prompt_tokens,
        output_tokens=sum(len(record.output) for record in records),
        computed_tokens=run.computed_tokens,
        seconds=run.seconds,
        steps=run.steps,
        hit_rate=hit_rate(run),
        unlimited_hit_rate=future.unlimited().hit_rate,
        belady_hit_rate=future.belady(setup["pool_tokens"]).hit_rate,
        working_set=future.working_set,
        wait=Spread.of(record.admitted - record.due for record in records),
        first_token=Spread.of(record.first_token - record.due for record in records),
        whole=Spread.of(record.ended - record.due for record in records),
        gap=Spread.of((gap for gap, _ in run.gaps), (count for _, count in run.gaps)),
        program_time=Spread.of(times),
        preemptions=run.preemptions,
        evicted_tokens=run.evicted_tokens,
        slots_filled=run.slots_filled,
        moments=tuple(run.timeline.moments),
    )
