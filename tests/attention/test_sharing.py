"""Shared prefixes are found, grouped where it saves most, and never claimed where there are none."""

from __future__ import annotations

import random

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrt.attention.sharing import shared_prefixes


def test_few_for_long_go_before_many_for_little() -> None:
    system, chat = list(range(100)), list(range(500, 900))
    long = [torch.tensor([*system, *chat, 2000 + i]) for i in range(3)]
    short = [torch.tensor([*system, 3000 + 10 * i, 3001 + 10 * i]) for i in range(3)]
    alone = [torch.arange(4000, 4400)]
    slots = [*short, *long, *alone]
    groups = shared_prefixes(slots, [len(slot) - 1 for slot in slots])
    assert {tuple(sorted(members)): length for members, length in groups} == {(3, 4, 5): 500, (0, 1, 2): 100}


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**20), st.integers(1, 12), st.integers(1, 6))
def test_groups_of_a_random_tree(seed: int, count: int, least: int) -> None:
    """Sequences as walks through a tree of slots: every claim is true, and nobody is claimed twice."""
    chance = random.Random(seed)
    paths: list[list[int]] = []
    fresh = iter(range(10_000))
    for _ in range(count):
        stem = chance.choice(paths)[: chance.randrange(30)] if paths and chance.random() < 0.8 else []
        paths.append(stem + [next(fresh) for _ in range(chance.randrange(1, 12))])
    contexts = [chance.randrange(len(path)) for path in paths]
    groups = shared_prefixes([torch.tensor(path) for path in paths], contexts, least)
    claimed = [run for members, _ in groups for run in members]
    assert len(claimed) == len(set(claimed))
    for members, length in groups:
        assert len(members) > 1
        assert least <= length <= min(contexts[run] for run in members)
        assert len({tuple(paths[run][:length]) for run in members}) == 1
    left = [run for run in range(count) if run not in claimed and contexts[run] >= least]
    assert len({tuple(paths[run][:least]) for run in left}) == len(left), "two that share were left apart"
