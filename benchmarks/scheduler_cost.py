"""What scheduling costs: planning with 10,000 waiting, matching and evicting in a large tree, a plain decode step. One core, its own time.

Planning is measured in three equal runs, and of each step the quickest of the three counts, so that what other processes of the
machine did to it is left out. Python's garbage collector is off here; what the engine's process does about it is in
`agentrt/engine/collector.py`.

    OMP_NUM_THREADS=1 python benchmarks/scheduler_cost.py [--json results.json]
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import time
from pathlib import Path

import numpy as np

from agentrt.cache.eviction import eviction_policy
from agentrt.cache.page_pool import PagePool
from agentrt.cache.prefix_cache import PrefixCache
from agentrt.cache.radix_tree import PrefixKey
from agentrt.request import ProgramTag, Request, SamplingParams
from agentrt.scheduling.plan import Sampled, StepOutput, StepPlan
from agentrt.scheduling.policy import POLICIES
from agentrt.scheduling.scheduler import Budget, Scheduler
from agentrt.scheduling.sequence import Sequence

SEED = 0
WAITING = 10_000
BRANCHES, TREE_TOKENS = 20_000, 1_000_000

Text = tuple[int, ...]
Row = dict[str, str]


def texts(random: np.random.Generator, count: int, length: int) -> list[Text]:
    return [tuple(row) for row in random.integers(0, 32_000, (count, length)).tolist()]


def spread(name: str, seconds: list[float], bound: str) -> Row:
    ordered = sorted(seconds)
    shown = {level: ordered[min(int(level / 100 * len(ordered)), len(ordered) - 1)] * 1e3 for level in (50, 99)}
    return {"what": name, "p50": f"{shown[50]:.3f} ms", "p99": f"{shown[99]:.3f} ms", "worst": f"{ordered[-1] * 1e3:.3f} ms", "asked": bound}


def run(plan: StepPlan) -> StepOutput:
    return StepOutput({one.sequence_id: Sampled((7,) if one.sample_at else ()) for one in plan.runs})


def planning(policy: str, page_size: int) -> list[Row]:
    """10,000 waiting, 200 to a prefix of 1,000 tokens, all there before the first step; the steps until 64 run and some 500 after."""
    runs = [_planning(policy, page_size) for _ in range(3)]
    planned, committed, adding = ([min(same) for same in zip(*taken, strict=True)] for taken in zip(*runs, strict=True))
    name = f"{policy}, pages of {page_size}"
    return [
        spread(f"plan, {WAITING:,} waiting ({name})", planned, "5 ms"),
        spread(f"commit and publish, {WAITING:,} waiting ({name})", committed, ""),
        spread(f"add ({name})", adding, ""),
    ]


def _planning(policy: str, page_size: int) -> tuple[list[float], list[float], list[float]]:
    """Seconds of each plan, commit and add of one run."""
    random = np.random.default_rng(SEED)
    clock = [0.0]
    pages = 200_000 // page_size
    cache = PrefixCache(PagePool(pages, page_size), eviction_policy("lru"), clock=lambda: clock[0])
    scheduler = Scheduler(cache, Budget(2048, 1024, 64), POLICIES[policy], clock=lambda: clock[0], max_wait=5.0)
    prefixes = texts(random, 50, 1000)
    tails = texts(random, WAITING, 24)
    adding = []
    for number, tail in enumerate(tails):
        request = Request(prompt_ids=(*prefixes[number % 50], *tail), sampling=SamplingParams(max_tokens=32), program=ProgramTag(f"p{number % 500}"))
        sequence = Sequence(number + 1, request, 0, 0, 0.0, 1024 + 32, frozenset())
        started = time.thread_time()
        scheduler.add(sequence)
        adding.append(time.thread_time() - started)
    planned, committed = [], []
    for _ in range(600):
        clock[0] += 0.03
        started = time.thread_time()
        plan = scheduler.plan()
        planned.append(time.thread_time() - started)
        assert plan is not None
        started = time.thread_time()
        scheduler.commit(plan, run(plan))
        committed.append(time.thread_time() - started)
    return planned, committed, adding


def large_tree(apart: int) -> list[Row]:
    """A tree of 1,000,000 tokens in 20,000 branches, which part from a trunk of 4,096 tokens at every `apart`-th."""
    random = np.random.default_rng(SEED)
    pages = TREE_TOKENS + 50_000
    cache = PrefixCache(PagePool(pages, 1), eviction_policy("lru"))
    trunk = texts(random, 1, 4096)[0]
    each = (TREE_TOKENS - len(trunk)) // BRANCHES
    for number, tail in enumerate(texts(random, BRANCHES, each)):
        ids = (*trunk[: apart * (number % (len(trunk) // apart)) + apart], *tail)
        lease = cache.acquire(ids)
        fresh = cache.allocate(len(ids) - lease.cached_tokens)
        assert fresh is not None
        cache.publish(lease, ids, [*lease.pages, *fresh])
        cache.release(lease)
    key, matching = PrefixKey(trunk), []
    for _ in range(300):
        started = time.thread_time()
        cache.match(key)
        matching.append(time.thread_time() - started)
    evicting = []
    for _ in range(50):
        started = time.thread_time()
        cache.evict(1000)
        evicting.append(time.thread_time() - started)
    size = f"{TREE_TOKENS:,} tokens, {BRANCHES:,} branches, {len(trunk) // apart} nodes deep"
    return [spread(f"match 4,096 tokens ({size})", matching, "0.3 ms"), spread(f"evict 1,000 pages ({size})", evicting, "5 ms")]


def decode_step(running: int) -> list[Row]:
    """Nothing but decodes: what a step costs beside the model."""
    cache = PrefixCache(PagePool(10_000, 16), eviction_policy("lru"))
    scheduler = Scheduler(cache, Budget(2048, 1024, running), POLICIES["program"], clock=time.monotonic, max_wait=5.0)
    for number in range(running):
        request = Request(prompt_ids=(number + 10, *range(30)), sampling=SamplingParams(max_tokens=512))
        scheduler.add(Sequence(number + 1, request, 0, 0, 0.0, 543, frozenset()))
    taken = []
    for step in range(400):
        started = time.thread_time()
        plan = scheduler.plan()
        assert plan is not None
        output = run(plan)
        scheduler.commit(plan, output)
        if step > 20:
            taken.append(time.thread_time() - started)
    return [spread(f"plan and commit, {running} decode", taken, "")]


def in_flight() -> list[Row]:
    """Naming the blocks of a prompt of 100,000 tokens, once in its life."""
    from agentrt.scheduling.in_flight import InFlight

    taken = []
    for number in range(20):
        request = Request(prompt_ids=tuple(range(100_000)), sampling=SamplingParams(max_tokens=1))
        sequence = Sequence(number, request, 0, 0, 0.0, 100_001, frozenset())
        _ = sequence.key
        flight = InFlight(1)
        started = time.thread_time()
        flight.start(sequence)
        taken.append(time.thread_time() - started)
    return [spread("put a prompt of 100,000 tokens in flight", taken, "")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    gc.collect()
    gc.disable()
    rows = [*planning("program", 16), *planning("lpm", 1), *planning("dfs", 16), *large_tree(64), *large_tree(4), *decode_step(64), *decode_step(256), *in_flight()]
    print(f"seed {SEED}; Python {platform.python_version()}; {platform.processor() or platform.machine()}, one core\n")
    print("| what | p50 | p99 | worst | asked |\n|---|---|---|---|---|")
    for row in rows:
        print("| " + " | ".join(row.values()) + " |")
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
