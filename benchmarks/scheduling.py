"""The table of docs/scheduling.md: policies and evictions on generated agent workloads and on the Mooncake traces.

    python benchmarks/scheduling.py [--rows 1,2,...] [--json results.json]

Everything is virtual time over the real scheduler, tree and pool, with the seeds and sizes below: the figures are the same on every
machine. The Mooncake traces are read from AGENTRT_CORPORA, or from ../shared/data beside the checkout; without them row 4 is left out.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np

from agentrt.errors import UserError
from agentrt.simulation.bounds import Future
from agentrt.simulation.cost_model import PRESETS
from agentrt.simulation.replay import replay_blocks
from agentrt.simulation.report import Spread, hit_rate, program_times
from agentrt.simulation.setup import Setup
from agentrt.simulation.simulator import Run, simulate_trace
from agentrt.simulation.trace import Call, Trace, load_trace
from agentrt.simulation.workloads import END, WORKLOADS, Writer, known_in_advance, shared_prefixes, workload

SEED = 0
CPU = Setup(cost=PRESETS["cpu-360m"], step_tokens=512, max_running=16, max_wait=30.0)
GPU = Setup(cost=PRESETS["gpu-8b"], step_tokens=2048, max_running=64, max_wait=5.0)

Row = dict[str, object]


def run(trace: Trace, setup: Setup, **changes: object) -> Run:
    return simulate_trace(replace(setup, **changes).simulator(trace))


def percent(value: float) -> str:
    return f"{100 * value:.1f}%"


def waits(result: Run) -> Spread:
    return Spread.of(record.admitted - record.due for record in result.records)


def row_1_shared_prefixes() -> Iterator[Row]:
    """64 prefixes of 1,900 tokens, 32 requests each, all at once in random order; a pool of 5 prefixes."""
    trace = shared_prefixes(seed=SEED)
    bound = Future(trace.calls, 16).unlimited().hit_rate
    first = 0.0
    for policy in ("fcfs", "lpm", "dfs", "program"):
        result = run(trace, GPU, policy=policy, pool_tokens=10_240, max_running=8)
        p99 = waits(result).p99
        first = first or p99
        yield {"policy": policy, "reused": percent(hit_rate(result)), "unlimited": percent(bound), "p99 wait": f"{p99:.1f} s", "of fcfs": f"{p99 / first:.2f} x"}


def row_2_chat() -> Iterator[Row]:
    """60 conversations of 8 turns, generated tokens included; memory for all of it."""
    for page_size, name in ((1, "radix, pages of 1"), (16, "16-token pages")):
        trace = workload("chat", seed=SEED, rate=2.0)
        result = run(trace, GPU, policy="program", page_size=page_size)
        yield {"pages": name, "reused": percent(hit_rate(result))}


def row_3_known_in_advance() -> Iterator[Row]:
    """All prompts of a workload at once, in random order, in a quarter of the working set; as a share of the optimal order's."""
    for name, kind in WORKLOADS.items():
        trace = known_in_advance(workload(name, seed=SEED, programs=kind.programs // 2), SEED)
        future = Future(trace.calls, 1)
        optimal = future.unlimited().hit_rate  # what any depth-first order reaches: every prefix is computed once
        shares = {}
        for policy in ("fcfs", "lpm", "dfs", "program"):
            result = run(trace, GPU, policy=policy, page_size=1, pool_tokens=_quarter(trace, future), max_running=32)
            shares[policy] = percent(hit_rate(result) / optimal)
        yield {"workload": name, "optimal": percent(optimal), **shares}


def _quarter(trace: Trace, future: Future) -> int:
    longest = max(len(call.prompt) + len(call.output) for call in trace.calls)
    return max(future.working_set // 4, 2 * longest)


def row_4_mooncake() -> Iterator[Row]:
    """Eviction alone: prompts in order of arrival, blocks of 512 tokens; share of the blocks that were found."""
    for name in ("conversation", "synthetic"):
        path = Path(os.environ.get("AGENTRT_CORPORA", "../shared/data")) / f"mooncake_{name}_trace.jsonl.gz"
        if not path.exists():
            yield {"trace": name, "note": f"{path} is not here"}
            continue
        trace = load_trace(path)
        future = Future(trace.calls, 512, keep_output=False, whole_blocks=True)
        asked = sum(len(call.prompt.blocks) for call in trace.calls)  # type: ignore[attr-defined]
        for blocks in (1_000, 3_000, 10_000, 30_000):
            found = {policy: _replayed(trace, policy, blocks) for policy in ("lru", "lfu", "slru", "adaptive")}
            shown = {policy: "-" if share is None else percent(share) for policy, share in found.items()}
            against = {} if found["adaptive"] is None or not found["lru"] else {"adaptive / lru": f"{found['adaptive'] / found['lru']:.2f} x"}
            yield {"trace": name, "blocks": blocks, **shown, "belady": percent(future.belady(blocks * 512).hit_tokens / 512 / asked), **against}


def _replayed(trace: Trace, policy: str, blocks: int) -> float | None:
    try:
        found, asked = replay_blocks(trace.calls, policy, blocks)
    except UserError:  # no such policy (yet)
        return None
    return found / asked


def row_5_programs_known() -> Iterator[Row]:
    """Eviction where the programs are known: a quarter of the working set; hits as a share of Belady's for the same order of calls."""
    for name in WORKLOADS:
        trace = workload(name, seed=SEED, rate=_rate(name, GPU, 1.0))
        pool = _quarter(trace, Future(trace.calls, 16))
        row: Row = {"workload": name, "pool": pool}
        for eviction in ("lru", "adaptive", "program"):
            result = run(trace, GPU, policy="program", eviction=eviction, pool_tokens=pool)
            calls = {call.call_id: call for call in trace.calls}
            belady = Future((calls[number] for number in result.order), 16).belady(pool).hit_rate
            row |= {eviction: percent(hit_rate(result)), f"{eviction} / belady": percent(hit_rate(result) / belady)}
        yield row


def _rate(name: str, setup: Setup, load: float, programs: int | None = None) -> float:
    """Programs a second that are `load` of what the engine does of them if all begin at once, under the best of three policies."""
    trace = workload(name, seed=SEED, programs=programs)
    fastest = min(run(trace, setup, policy=policy).seconds for policy in ("fcfs", "lpm", "program"))
    return load * (programs or WORKLOADS[name].programs) / fastest


def row_6_slots() -> Iterator[Row]:
    """Share of the slots in use that hold a token, over time; the pool is a quarter of the working set."""
    for name in WORKLOADS:
        trace = workload(name, seed=SEED)
        pool = max(_quarter(trace, Future(trace.calls, 16)), 16_384)
        filled = {f"pages of {size}": percent(run(trace, GPU, pool_tokens=pool, page_size=size).slots_filled) for size in (16, 1)}
        yield {"workload": name, **filled}


def row_7_program_time() -> Iterator[Row]:
    """Mean time of a whole program under load: programs arrive at random at a share of the rate that the engine can do at most."""
    cases = (
        ("tree-of-thought", CPU, 16_384, None, (0.8,)), ("tree-of-thought", GPU, 16_384, None, (0.8,)),
        ("react", CPU, 8_192, None, (0.8,)), ("react", GPU, 16_384, 320, (0.8, 1.0, 1.2)),
    )  # fmt: skip
    for name, base, pool, programs, loads in cases:
        setup = replace(base, pool_tokens=pool, max_running=16 if name == "tree-of-thought" else 64)
        most = _rate(name, setup, 1.0, programs)
        for load in loads:
            trace = workload(name, seed=SEED + 1, programs=programs, rate=load * most)
            found = {policy: run(trace, setup, policy=policy) for policy in ("fcfs", "lpm", "program")}
            means = {policy: Spread.of(program_times(result.records)).mean for policy, result in found.items()}
            yield {
                "workload": name,
                "cost": "cpu-360m" if setup.cost == CPU.cost else "gpu-8b",
                "load": f"{load:.0%}",
                **{policy: f"{mean:.1f} s" for policy, mean in means.items()},
                **{f"{other} / program": f"{means[other] / means['program']:.2f} x" for other in ("fcfs", "lpm")},
                "fcfs p99 wait": f"{waits(found['fcfs']).p99:.1f} s",
            }


def row_8_too_small() -> Iterator[Row]:
    """200 programs at once in a pool four times smaller than what 64 running sequences want."""
    for name in ("react", "tree-of-thought", "chat"):
        trace = workload(name, seed=SEED, programs=200)
        longest = sorted(len(call.prompt) + len(call.output) for call in trace.calls)
        pool = 64 * longest[len(longest) // 2] // 4 // 16 * 16
        result = run(trace, GPU, policy="program", eviction="program", pool_tokens=max(pool, longest[-1] + 16))
        right = sum(record.output == tuple(record.call.output) for record in result.records)
        yield {
            "workload": name,
            "pool": pool,
            "calls": len(trace.calls),
            "ended": len(result.records),
            "with the right output": right,
            "preemptions": result.preemptions,
            "worst wait": f"{waits(result).worst:.1f} s of {result.seconds:.1f} s",
        }


def row_9_stall() -> Iterator[Row]:
    """16 sequences decode; a prompt of 4,000 tokens comes every 1 s (gpu) or 25 s (cpu): gap between two tokens of those that decode."""
    for cost, every, setup in (("gpu-8b", 1.0, GPU), ("cpu-360m", 25.0, CPU)):
        writer = Writer(np.random.default_rng(SEED))
        calls = [Call(number, 0.0, writer.text(200), (*writer.text(600), END)) for number in range(16)]
        calls += [Call(16 + n, every * (n + 1), writer.text(4000), writer.text(2)) for n in range(3)]
        trace = Trace("stall", tuple(calls))
        for name, step, prefill in (("whole prompt in one step", 8192, 8192), ("half a step", setup.step_tokens, None), ("a quarter", setup.step_tokens, setup.step_tokens // 4), ("an eighth", setup.step_tokens, setup.step_tokens // 8)):
            result = run(trace, setup, max_running=32, step_tokens=step, prefill_tokens=prefill, policy="fcfs")
            gap = Spread.of((gap for gap, _ in result.gaps), (count for _, count in result.gaps))
            first = Spread.of(record.first_token - record.due for record in result.records if len(record.call.prompt) == 4000)
            yield {"cost": cost, "prefill": name, "gap p50": f"{gap.p50 * 1e3:.0f} ms", "gap worst": f"{gap.worst * 1e3:.0f} ms", "first token of the prompt": f"{first.mean:.2f} s"}


ROWS: list[Callable[[], Iterator[Row]]] = [
    row_1_shared_prefixes, row_2_chat, row_3_known_in_advance, row_4_mooncake, row_5_programs_known, row_6_slots, row_7_program_time,
    row_8_too_small, row_9_stall,
]  # fmt: skip


def table(rows: list[Row]) -> str:
    """Rows as a Markdown table."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    lines = ["| " + " | ".join(names) + " |", "|" + "---|" * len(names)]
    lines += ["| " + " | ".join(f"{row.get(name, ''):,}" if isinstance(row.get(name), int) else str(row.get(name, "")) for name in names) + " |" for row in rows]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", default=",".join(str(n + 1) for n in range(len(ROWS))))
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    results: dict[str, list[Row]] = {}
    print(f"seed {SEED}; Python {platform.python_version()}; virtual time\n")
    for number in map(int, arguments.rows.split(",")):
        row, started = ROWS[number - 1], time.perf_counter()
        results[row.__name__] = list(row())
        print(f"### {number}. {row.__doc__}\n\n{table(results[row.__name__])}\n\n({time.perf_counter() - started:.0f} s)\n", flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
