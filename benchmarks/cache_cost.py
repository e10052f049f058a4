"""What the cache costs: match, publish and evict at a million cached tokens in twenty thousand branches, one core, no model.

    python benchmarks/cache_cost.py [--out cache_cost.json] [--seed 0] [--tokens 1000000] [--branches 20000]

Prints one table and writes the same figures as JSON. The tree is grown as requests would grow it: conversations that share
system prompts and long histories and part from them at the ends of turns, so that a prompt's path is some 60 nodes deep.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

from agentrt.cache.eviction import eviction_policy
from agentrt.cache.page_pool import PagePool
from agentrt.cache.prefix_cache import PrefixCache
from agentrt.cache.radix_tree import PrefixKey

PROMPT = 4096
EVICTED = 1000
TURN = 64
"""Branches part from their trunk at multiples of so many tokens."""
TARGETS_MS = {"match": 0.3, "evict": 5.0}


def build(
    tokens: int, branches: int, policy: str, page_size: int, rng: random.Random
) -> tuple[PrefixCache, list[list[int]]]:
    """A full cache of about so many tokens and leaves; and the ids of some of its longest paths, at least a prompt long."""
    cache = PrefixCache(PagePool(tokens // page_size, page_size), eviction_policy(policy))
    trunks = [[rng.randrange(150_000) for _ in range(PROMPT - 2 * TURN)] for _ in range(20)]
    for number, trunk in enumerate(trunks):
        store(cache, trunk, f"trunk-{number}")
    each = max(page_size, (tokens - cache.cached_tokens) // branches)
    paths = []
    for number in range(branches):
        trunk = trunks[rng.randrange(len(trunks))]
        cut = len(trunk) if number % 4 == 0 else rng.randrange(1, len(trunk) // TURN) * TURN
        ids = trunk[:cut] + [rng.randrange(150_000) for _ in range(each)]
        if cut == len(trunk):
            ids += [rng.randrange(150_000) for _ in range(PROMPT - len(ids))]
            paths.append(ids)
        if not store(cache, ids[: cut + each // page_size * page_size], f"program-{number}"):
            break
    return cache, paths


def store(cache: PrefixCache, ids: list[int], program: str | None) -> bool:
    """One request that computes `ids`; False if that would have evicted something."""
    lease = cache.acquire(ids, program=program)
    needed = len(ids) // cache.page_size - len(lease.pages)
    fits = needed <= cache.pool.free_count
    if fits:
        pages = cache.allocate(needed) or []
        cache.publish(lease, ids, lease.pages + pages)
    cache.release(lease)
    return fits


def timed(action: Callable[[], object]) -> float:
    """Milliseconds of one call."""
    began = time.perf_counter()
    action()
    return (time.perf_counter() - began) * 1000


def summary(samples: list[float]) -> dict[str, float]:
    ordered = sorted(samples)
    return {
        "median_ms": statistics.median(ordered),
        "p99_ms": ordered[int(0.99 * (len(ordered) - 1))],
        "n": len(ordered),
    }


def measure(tokens: int, branches: int, policy: str, page_size: int, seed: int) -> dict[str, dict[str, float]]:
    """Costs of the cache's verbs on one full tree, in milliseconds."""
    rng = random.Random(seed)
    cache, paths = build(tokens, branches, policy, page_size, rng)
    size = {"tokens": cache.cached_tokens, "nodes": cache.nodes}
    prompts = [rng.choice(paths) for _ in range(300)]
    keys = [PrefixKey(ids) for ids in prompts]
    costs: dict[str, list[float]] = {
        name: [] for name in ("match", "match from ids", "acquire", "publish 32", "evict", "refill")
    }
    for ids, key in zip(prompts, keys, strict=True):
        costs["match"].append(timed(lambda key=key: cache.match(key)))
        costs["match from ids"].append(timed(lambda ids=ids: cache.match_length(ids)))
        began = time.perf_counter()
        lease = cache.acquire(key)
        costs["acquire"].append((time.perf_counter() - began) * 1000)
        cache.release(lease)
    for _ in range(100):
        costs["evict"].append(timed(lambda: cache.evict(EVICTED // page_size)))
        ids = [rng.randrange(150_000) for _ in range(EVICTED)]
        costs["refill"].append(timed(lambda ids=ids: store(cache, ids, None)))
    cache.evict(PROMPT // page_size)
    lease = cache.acquire(prompts[0], limit=1024)
    held, pages = list(prompts[0][:1024]), list(lease.pages)
    for _ in range(60):  # a sequence that decodes and publishes every 32 tokens
        held += [rng.randrange(150_000) for _ in range(32)]
        pages += cache.allocate(len(held) // page_size - len(pages), pages[-1] if pages else None) or []
        began = time.perf_counter()
        cache.publish(lease, held, pages)
        costs["publish 32"].append((time.perf_counter() - began) * 1000)
    cache.release(lease)
    cache.check(0)
    return {"tree": size, **{name: summary(samples) for name, samples in costs.items()}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("cache_cost.json"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tokens", type=int, default=1_000_000)
    parser.add_argument("--branches", type=int, default=20_000)
    options = parser.parse_args()
    report = {
        "seed": options.seed,
        "machine": f"{platform.processor() or platform.machine()}, Python {sys.version.split()[0]}, one thread",
        "prompt_tokens": PROMPT,
        "evicted_tokens": EVICTED,
        "targets_ms": TARGETS_MS,
        "results": {},
    }
    print(
        f"seed {options.seed}; {report['machine']}; match: {PROMPT}-token prompts; evict: {EVICTED} tokens; milliseconds"
    )
    print(f"{'policy':10}{'page':>5}{'tokens':>11}{'nodes':>8}  {'what':16}{'median':>9}{'p99':>9}{'goal':>7}")
    for policy, page_size in (("lru", 1), ("lru", 16), ("slru", 1), ("adaptive", 1), ("program", 1)):
        costs = measure(options.tokens, options.branches, policy, page_size, options.seed)
        report["results"][f"{policy}, page size {page_size}"] = costs
        tree = costs.pop("tree")
        for name, cost in costs.items():
            goal = TARGETS_MS.get(name, "")
            print(
                f"{policy:10}{page_size:5}{tree['tokens']:11,}{tree['nodes']:8,}  {name:16}"
                f"{cost['median_ms']:9.3f}{cost['p99_ms']:9.3f}{goal:>7}",
                flush=True,
            )
        costs["tree"] = tree
    options.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
