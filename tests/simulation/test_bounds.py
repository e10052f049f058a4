"""Belady's bound against brute force, against the real cache's LRU, and against the published figures of the Mooncake traces."""

from __future__ import annotations

import itertools
import os
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrt.simulation.bounds import Future
from agentrt.simulation.replay import replay_blocks
from agentrt.simulation.trace import Blocks, Call, load_trace

paths = st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=3).map(tuple), min_size=1, max_size=7)


def calls_of(prompts):
    return [Call(number, float(number), Blocks(prompt, 1, len(prompt)), (9,)) for number, prompt in enumerate(prompts)]


def best_by_brute_force(prompts, capacity):
    """Most blocks that any eviction of leaves can find: tries every set of prefixes that may be kept."""
    prompts = [tuple(prompt[: n + 1] for n in range(len(prompt))) for prompt in prompts]

    @cache
    def most(number, kept):
        if number == len(prompts):
            return 0
        path = prompts[number]
        found = next((n for n, prefix in enumerate(path) if prefix not in kept), len(path))
        others = sorted(kept - set(path))
        best = 0
        room = capacity - len(path)
        for size in range(min(room, len(others)), -1, -1):
            for chosen in itertools.combinations(others, size):
                keep = frozenset(chosen) | frozenset(path)
                if all(len(prefix) == 1 or prefix[:-1] in keep for prefix in chosen):
                    best = max(best, most(number + 1, keep))
        return found + best

    return most(0, frozenset())


@settings(max_examples=60, deadline=None)
@given(prompts=paths, capacity=st.integers(3, 6))
def test_belady_on_leaves_is_the_best_there_is(prompts, capacity):
    calls = calls_of(prompts)
    found = Future(calls, 1, keep_output=False, whole_blocks=True).belady(capacity).hit_tokens
    assert found == best_by_brute_force(prompts, capacity)
    assert replay_blocks(calls, "lru", capacity)[0] <= found


def test_unlimited_memory_finds_every_repeated_prefix():
    prompts = [(1, 2, 3), (1, 2, 4), (1, 2, 3, 5), (6,), (1, 2, 3)]
    assert Future(calls_of(prompts), 1, keep_output=False, whole_blocks=True).unlimited().hit_tokens == 0 + 2 + 3 + 0 + 3
    # as an engine counts: the last token of a prompt is always computed
    assert Future(calls_of(prompts), 1).unlimited().hit_tokens == 0 + 2 + 3 + 0 + 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "lru", "belady", "unlimited"),
    [("conversation", (6.5, 21.2, 32.6), (29.0, 36.6, 36.6), 36.6), ("synthetic", (19.1, 42.4, 62.4), (44.2, 61.6, 64.0), 64.0)],
)
def test_the_published_figures_of_the_mooncake_traces(name, lru, belady, unlimited):
    path = Path(os.environ.get("AGENTRT_CORPORA", Path(__file__).parents[2] / "../shared/data")) / f"mooncake_{name}_trace.jsonl.gz"
    if not path.exists():
        pytest.skip(f"{path} is not here")
    trace = load_trace(path)
    future = Future(trace.calls, 512, keep_output=False, whole_blocks=True)
    asked = sum(len(call.prompt.blocks) for call in trace.calls)

    def share(blocks_found):
        return 100 * blocks_found / asked

    assert share(future.unlimited().hit_tokens / 512) == pytest.approx(unlimited, abs=0.1)
    for blocks, of_lru, of_belady in zip((3_000, 10_000, 30_000), lru, belady, strict=True):
        assert share(replay_blocks(trace.calls, "lru", blocks)[0]) == pytest.approx(of_lru, abs=0.3)
        assert share(future.belady(blocks * 512).hit_tokens / 512) == pytest.approx(of_belady, abs=0.3)
