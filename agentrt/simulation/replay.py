"""Calls one after the other through the real cache, without time or scheduler: what eviction alone is worth on a trace."""

from __future__ import annotations

from collections.abc import Iterable

from agentrt.cache.eviction import eviction_policy
from agentrt.cache.page_pool import PagePool
from agentrt.cache.prefix_cache import PrefixCache
from agentrt.simulation.simulator import Clock
from agentrt.simulation.trace import Blocks, Call


def replay_blocks(calls: Iterable[Call], eviction: str, blocks: int) -> tuple[int, int]:
    """Replays the prompts of Mooncake's form, a page for each block, in order of arrival.

    Args:
        calls: Their prompts must be `Blocks`.
        eviction: Name of the policy.
        blocks: Pages of the pool.

    Returns:
        Blocks found, and blocks asked for; a prompt's last block counts whole, as in Mooncake's own figures.
    """
    clock = Clock()
    cache = PrefixCache(PagePool(blocks, 1), eviction_policy(eviction), clock=clock)
    for call in calls:
        if not isinstance(call.prompt, Blocks):
            raise TypeError(f"call {call.call_id} has a prompt of tokens, not of blocks")
        clock.now = call.at
        ids = call.prompt.blocks
        lease = cache.acquire(ids, call.salt)
        fresh = cache.allocate(len(ids) - lease.cached_tokens)
        if fresh is not None:  # else the prompt alone is larger than the pool
            cache.publish(lease, ids, [*lease.pages, *fresh])
        cache.release(lease)
    return cache.hit_tokens_total, cache.queried_tokens_total
