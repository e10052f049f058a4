"""Eviction policies on the Mooncake traces: tokens reused as a share of all, through the real tree, pool and prefix cache.

    python benchmarks/eviction_traces.py [--pools 3000,10000,30000] [--policies lru,lfu,slru,adaptive] [--seeds 6] [--out eviction.json]

Requests run one after another in arrival order; a block of 512 tokens is one page, so a request's block ids stand for its
tokens. Answers are not in the traces and are not cached. `adaptive` looks at leaves by chance: with `--seeds 6` it is run with
the seeds 0 to 5, and each is a line. The traces are found through AGENTRT_CORPORA, or in
../shared/data beside the checkout.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import time
from pathlib import Path

from agentrt.cache.adaptive import Adaptive
from agentrt.cache.eviction import eviction_policy
from agentrt.cache.page_pool import PagePool
from agentrt.cache.prefix_cache import PrefixCache

TRACES = ("conversation", "synthetic")


def corpora() -> Path:
    given = os.environ.get("AGENTRT_CORPORA")
    return Path(given) if given else Path(__file__).parents[1].parent / "shared" / "data"


def load(name: str) -> list[list[int]]:
    """Block ids of each request."""
    with gzip.open(corpora() / f"mooncake_{name}_trace.jsonl.gz", "rt") as lines:
        return [json.loads(line)["hash_ids"] for line in lines]


def reused(requests: list[list[int]], pool: int, policy: str, seed: int = 0) -> float:
    """Share of all blocks that were found in the cache."""
    clock = iter(range(10**9))
    order = Adaptive(seed) if policy == "adaptive" else eviction_policy(policy)
    cache = PrefixCache(PagePool(pool, 1), order, clock=lambda: float(next(clock)))
    hits = total = 0
    for blocks in requests:
        lease = cache.acquire(blocks)
        hits += lease.cached_tokens
        total += len(blocks)
        pages = cache.allocate(len(blocks) - len(lease.pages))
        if pages:
            cache.publish(lease, blocks, lease.pages + pages)
        cache.release(lease)
    cache.check(0)
    return hits / total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pools", default="3000,10000,30000")
    parser.add_argument("--policies", default="lru,lfu,slru,adaptive")
    parser.add_argument("--traces", default=",".join(TRACES))
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    rows = []
    print(f"{'trace':14}{'blocks':>8}  {'policy':10}{'reused':>8}{'/ LRU':>8}{'seconds':>9}")
    for trace in options.traces.split(","):
        requests = load(trace)
        for pool in map(int, options.pools.split(",")):
            baseline = None
            for policy, seed in _runs(options.policies, options.seeds):
                began = time.perf_counter()
                share = reused(requests, pool, policy, seed)
                baseline = share if policy == "lru" else baseline
                ratio = share / baseline if baseline else float("nan")
                seconds = time.perf_counter() - began
                rows.append(
                    {
                        "trace": trace,
                        "blocks": pool,
                        "policy": policy,
                        "seed": seed,
                        "reused": share,
                        "of_lru": ratio,
                        "seconds": seconds,
                    }
                )
                print(f"{trace:14}{pool:8,}  {policy:10}{share:8.1%}{ratio:8.2f}{seconds:9.1f}", flush=True)
    if options.out:
        options.out.write_text(json.dumps({"block_tokens": 512, "results": rows}, indent=1) + "\n")


def _runs(policies: str, seeds: int) -> list[tuple[str, int]]:
    """Each policy, and `adaptive` with each seed."""
    return [(policy, seed) for policy in policies.split(",") for seed in range(seeds if policy == "adaptive" else 1)]


if __name__ == "__main__":
    main()
