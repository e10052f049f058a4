"""Torch attention against the definition: any mixture of runs, wherever their slots lie."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from agentrt.attention.base import AttentionBatch, AttentionSpec
from agentrt.attention.reference import ReferenceAttention
from agentrt.attention.torch_cpu import TorchAttention, plan_batch

SLOTS = 700
KV_HEADS, GROUP, HEAD_DIM = 2, 3, 6


def make_batch(runs: list[tuple[int, int, bool]], seed: int) -> AttentionBatch:
    """Runs of (new, context, scattered); slots of different runs never meet."""
    generator = torch.Generator().manual_seed(seed)
    free = torch.arange(SLOTS)
    slots = []
    for new, context, scattered in runs:
        mine, free = free[: new + context], free[new + context :]
        slots.append(mine[torch.randperm(new + context, generator=generator)] if scattered else mine)
    news, contexts = tuple(run[0] for run in runs), tuple(run[1] for run in runs)
    fresh = torch.cat([slot[context:] for slot, context in zip(slots, contexts, strict=True)])
    return AttentionBatch(news, contexts, tuple(slots), fresh)


def poisoned_store(batch: AttentionBatch, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Cached context where it belongs, and NaN in every other slot: whoever reads one is found out."""
    keys, values = (torch.full((SLOTS, KV_HEADS, HEAD_DIM), float("nan")) for _ in range(2))
    for slots, context in zip(batch.slots, batch.context_lengths, strict=True):
        for tensor in (keys, values):
            tensor[slots[:context]] = torch.randn(context, KV_HEADS, HEAD_DIM, generator=generator)
    return keys, values


runs = st.lists(
    st.tuples(st.sampled_from([1, 1, 1, 2, 5, 13]), st.sampled_from([0, 1, 6, 40]), st.booleans()),
    min_size=1,
    max_size=6,
)
specs = st.builds(
    AttentionSpec,
    st.sampled_from([0.2, 1.0]),
    st.sampled_from([None, 1, 4, 11, 1000]),
    st.sampled_from([None, 3.0]),
)


@settings(max_examples=40, deadline=None)
@given(runs, specs, st.integers(0, 2**20))
def test_equals_the_reference(runs: list[tuple[int, int, bool]], spec: AttentionSpec, seed: int) -> None:
    batch = make_batch(runs, seed)
    generator = torch.Generator().manual_seed(seed)
    tokens = sum(batch.query_lengths)
    store = poisoned_store(batch, generator)
    theirs = (store[0].clone(), store[1].clone())
    # Two layers on one batch: what the first leaves in `prepared` must suit the second, and another spec beside it.
    for layer_spec in (spec, spec, AttentionSpec(0.7)):
        qkv = torch.randn(tokens, (GROUP + 2) * KV_HEADS, HEAD_DIM, generator=generator)
        q, k, v = qkv.split([GROUP * KV_HEADS, KV_HEADS, KV_HEADS], 1)
        expected = ReferenceAttention()(q, k, v, theirs, batch, layer_spec)
        got = TorchAttention()(q, k, v, store, batch, layer_spec)
        torch.testing.assert_close(got, expected, atol=2e-6, rtol=1e-5)
        for mine, other in zip(store, theirs, strict=True):
            torch.testing.assert_close(mine, other, atol=0, rtol=0, equal_nan=True)


@settings(max_examples=30, deadline=None)
@given(runs, specs, st.integers(0, 2**20), st.lists(st.integers(0, 200), max_size=3))
def test_only_what_is_wanted(runs: list[tuple[int, int, bool]], spec: AttentionSpec, seed: int, rows: list[int]) -> None:
    """A run's tokens from the first wanted one on are as they are when all attend, and all are written."""
    batch = make_batch(runs, seed)
    generator = torch.Generator().manual_seed(seed)
    stores = [poisoned_store(batch, generator)]
    stores.append((stores[0][0].clone(), stores[0][1].clone()))
    tokens = sum(batch.query_lengths)
    wanted = torch.tensor([row % tokens for row in rows], dtype=torch.int64)
    only = batch.only(wanted)
    assert only.attending is not None
    ends = [sum(batch.query_lengths[: run + 1]) for run in range(len(runs))]
    for end, length, attending in zip(ends, batch.query_lengths, only.attending, strict=True):
        assert attending == max((end - row for row in wanted.tolist() if end - length <= row < end), default=0)
    qkv = torch.randn(tokens, (GROUP + 2) * KV_HEADS, HEAD_DIM, generator=generator).split([GROUP * KV_HEADS, KV_HEADS, KV_HEADS], 1)
    every, some = (TorchAttention()(*qkv, store, one, spec) for store, one in zip(stores, (batch, only), strict=True))
    torch.testing.assert_close(some[wanted], every[wanted], atol=2e-6, rtol=1e-5)
    for mine, other in zip(*stores, strict=True):
        torch.testing.assert_close(mine, other, atol=0, rtol=0, equal_nan=True)


def test_a_run_does_not_depend_on_its_neighbours() -> None:
    """Alone or among others, in any order: the same numbers to rounding, though the calls differ."""
    kinds = [(1, 40, True), (1, 3, True), (24, 40, False), (1, 200, True), (5, 6, True), (9, 0, True)]
    batch = make_batch(kinds, seed=1)
    store = poisoned_store(batch, torch.Generator().manual_seed(1))
    rows = torch.randn(sum(batch.query_lengths), 10, HEAD_DIM).split(list(batch.query_lengths))
    news = batch.new_slots.split(list(batch.query_lengths))

    def attend(chosen: list[int]) -> list[Tensor]:
        q, k, v = torch.cat([rows[run] for run in chosen]).split([6, 2, 2], 1)
        part = AttentionBatch(
            tuple(batch.query_lengths[run] for run in chosen),
            tuple(batch.context_lengths[run] for run in chosen),
            tuple(batch.slots[run] for run in chosen),
            torch.cat([news[run] for run in chosen]),
        )
        out = TorchAttention()(q, k, v, store, part, AttentionSpec(0.4))
        return list(out.split(list(part.query_lengths)))

    together = attend([5, 2, 0, 4, 1, 3])
    for place, run in enumerate([5, 2, 0, 4, 1, 3]):
        torch.testing.assert_close(together[place], attend([run])[0], atol=1e-6, rtol=1e-5)


def test_scattered_decodes_share_calls_without_much_padding() -> None:
    """The batching itself: many short runs make few calls, and none reads far beyond its own length."""
    lengths = [30] * 10 + [300] * 10 + [310] * 2
    slots = tuple(torch.randperm(4000)[:length] for length in lengths)
    batch = AttentionBatch((1,) * 22, tuple(n - 1 for n in lengths), slots, torch.stack([s[-1] for s in slots]))
    parts = plan_batch(batch, None, torch.float32).parts
    assert len(parts) == 2
    assert sum(len(part.slots) for part in parts if isinstance(part.slots, Tensor)) <= 1.1 * sum(lengths)


shared_runs = st.lists(st.tuples(st.sampled_from([1, 1, 4, 12]), st.sampled_from([0, 3, 30])), min_size=2, max_size=4)


@settings(max_examples=25, deadline=None)
@given(shared_runs, shared_runs, st.booleans(), specs, st.integers(0, 2**20))
def test_a_shared_prefix_is_read_once_and_merged(
    first: list[tuple[int, int]], second: list[tuple[int, int]], scattered: bool, spec: AttentionSpec, seed: int
) -> None:
    """Two groups, each over a prefix of its own, beside a run that shares nothing: still the reference."""
    generator = torch.Generator().manual_seed(seed)
    free = torch.randperm(SLOTS, generator=generator) if scattered else torch.arange(SLOTS)
    runs, shared, cached = [], [], []
    for group, length in ((first, 150), (second, 70), ([(1, 30)], 0)):
        prefix, free = free[:length], free[length:]
        shared.append((tuple(range(len(runs), len(runs) + len(group))), length))
        cached.append(prefix)
        for new, own in group:
            mine, free = free[: own + new], free[own + new :]
            cached.append(mine[:own])
            runs.append((new, length + own, torch.cat((prefix, mine))))
    news, contexts, slots = zip(*runs, strict=True)
    fresh = torch.cat([slot[context:] for _, context, slot in runs])
    batch = AttentionBatch(news, contexts, slots, fresh, shared=tuple(shared[:2]))
    assert len(plan_batch(batch, None, torch.float32).prefixes) == 2
    keys, values = (torch.full((SLOTS, KV_HEADS, HEAD_DIM), float("nan")) for _ in range(2))
    for tensor in (keys, values):
        for part in cached:
            tensor[part] = torch.randn(len(part), KV_HEADS, HEAD_DIM, generator=generator) * 2
    q, k, v = (torch.randn(sum(news), 10, HEAD_DIM, generator=generator) * 2).split([6, 2, 2], 1)
    expected = ReferenceAttention()(q, k, v, (keys.clone(), values.clone()), batch, spec)
    got = TorchAttention()(q, k, v, (keys, values), batch, spec)
    torch.testing.assert_close(got, expected, atol=5e-5, rtol=1e-4)  # scores of up to 100 in float32
    wanted = torch.randperm(sum(news), generator=generator)[: seed % 3]
    some = TorchAttention()(q, k, v, (keys, values), batch.only(wanted), spec)
    torch.testing.assert_close(some[wanted], expected[wanted], atol=5e-5, rtol=1e-4)


def test_bfloat16_is_the_reference_rounded() -> None:
    batch = make_batch([(1, 40, True), (1, 6, True), (9, 40, False)], seed=2)
    store = tuple(t.nan_to_num().bfloat16() for t in poisoned_store(batch, torch.Generator().manual_seed(2)))
    q, k, v = torch.randn(11, 10, HEAD_DIM).bfloat16().split([6, 2, 2], 1)
    for spec in (AttentionSpec(0.4), AttentionSpec(0.4, window=5), AttentionSpec(0.4, softcap=2.0)):
        expected = ReferenceAttention()(q, k, v, (store[0].clone(), store[1].clone()), batch, spec)
        got = TorchAttention()(q, k, v, (store[0], store[1]), batch, spec)
        assert got.dtype == torch.bfloat16
        torch.testing.assert_close(got, expected, atol=2e-2, rtol=2e-2)
