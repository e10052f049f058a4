"""Attention in Triton's kernels, in its interpreter, against the definition."""

from __future__ import annotations

import random

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

import torch
from torch import Tensor

from agentrt.attention.base import AttentionBatch, AttentionSpec
from agentrt.attention.reference import ReferenceAttention
from agentrt.attention.sharing import shared_prefixes
from agentrt.attention.triton_paged import TritonAttention
from agentrt.models.rotary import rotate

HEADS, KV_HEADS, HEAD_DIM = 6, 2, 16


def make_batch(seed: int, page: int, kinds: list[tuple[int, int]], shared: int) -> tuple[AttentionBatch, int]:
    """Runs of (new, context) on pages in random places; all share so many leading pages. Returns how many slots there are, too."""
    choice = random.Random(seed)
    pages = sum(-(-(new + context) // page) for new, context in kinds) + 2
    free = choice.sample(range(pages), pages)
    common, slots = [free.pop() for _ in range(shared)], []
    for new, context in kinds:
        mine = common + [free.pop() for _ in range(-(-(new + context) // page) - shared)]
        slots.append(torch.tensor([mine[p // page] * page + p % page for p in range(new + context)]))
    news, contexts = tuple(new for new, _ in kinds), tuple(context for _, context in kinds)
    fresh = torch.cat([slot[context:] for slot, context in zip(slots, contexts, strict=True)])
    return AttentionBatch(news, contexts, tuple(slots), fresh, shared_prefixes(slots, contexts)), pages * page


def make_store(slots: int, batch: AttentionBatch, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    store = [torch.full((slots, KV_HEADS, HEAD_DIM), float("nan")) for _ in range(2)]
    for mine, context in zip(batch.slots, batch.context_lengths, strict=True):
        for tensor in store:
            tensor[mine[:context]] = torch.randn(context, KV_HEADS, HEAD_DIM, generator=generator)
    return store[0], store[1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("page", "kinds", "shared"),
    [
        (1, [(1, 5), (7, 0), (1, 300)], 0),
        (4, [(1, 150), (1, 140), (3, 161), (30, 0)], 34),
        (16, [(1, 170), (2, 177), (1, 400), (1, 0)], 0),
    ],
)
def test_equals_the_reference(page, kinds, shared):
    generator = torch.Generator().manual_seed(page)
    batch, slots = make_batch(page, page, kinds, shared)
    attention = TritonAttention(HEADS, KV_HEADS, HEAD_DIM, page, torch.device("cpu"))
    store = make_store(slots, batch, generator)
    theirs = (store[0].clone(), store[1].clone())
    # Layers that share what the batch has prepared, and one that may not; what the definition gets is rotated beforehand.
    for spec in (AttentionSpec(0.3), AttentionSpec(0.5, softcap=2.0), AttentionSpec(0.3, window=20)):
        qkv = torch.randn(sum(batch.query_lengths), HEADS + 2 * KV_HEADS, HEAD_DIM, generator=generator)
        cos, sin = torch.randn(2, len(qkv), 1, HEAD_DIM, generator=generator)
        qk, v = rotate(qkv[:, : HEADS + KV_HEADS], cos, sin), qkv[:, HEADS + KV_HEADS :]
        expected = ReferenceAttention()(qk[:, :HEADS], qk[:, HEADS:], v, theirs, batch, spec)
        fused = attention.from_qkv(qkv, (cos, sin), HEADS, store, batch, spec)
        torch.testing.assert_close(fused, expected, atol=5e-6, rtol=1e-5)
        plain = attention(qk[:, :HEADS], qk[:, HEADS:], v, store, batch, spec)
        torch.testing.assert_close(plain, expected, atol=5e-6, rtol=1e-5)
        for mine, other in zip(store, theirs, strict=True):
            torch.testing.assert_close(mine, other, atol=1e-6, rtol=1e-6, equal_nan=True)


def test_lists_fit_a_fixed_room_whatever_the_step_is():
    attention = TritonAttention(HEADS, KV_HEADS, HEAD_DIM, 1, torch.device("cpu"))
    most = 60
    room = attention.capacity(new=most, pages=60_000)
    for seed in range(40):
        choice = random.Random(seed)
        shared = choice.choice((0, 130, 700))
        news = [1] * 12 if seed % 2 else [choice.choice((1, 1, 1, 2, 7, 36)) for _ in range(20)]
        kinds = [(new, shared + choice.choice((0, 1, 300, 900))) for place, new in enumerate(news) if sum(news[: place + 1]) <= most]
        batch, _ = make_batch(seed, 1, kinds, shared)
        for window in (None, 64):
            fixed, sections = attention.pack(batch, window, room)
            exact, fitting = attention.pack(batch, window)
            for name in ("tokens", "rows", "narrow", "wide", "merged", "members", "part_rows", "pages"):
                assert getattr(fitting.capacity, name) <= getattr(room, name), name
            assert fixed[sections.pages :].tolist() == exact[fitting.pages :].tolist()
            assert int((fixed[sections.narrow : sections.wide].reshape(-1)[1::6] > 0).sum()) == fitting.capacity.narrow


@pytest.mark.parametrize("page", [1, 4, 16])
def test_what_was_foreseen_is_completed_where_the_new_tokens_go(page):
    attention = TritonAttention(HEADS, KV_HEADS, HEAD_DIM, page, torch.device("cpu"))
    batch, _ = make_batch(page, page, [(1, context) for context in (0, 3, 16, 31, 32, 64, 300)], 0)
    unknown = tuple(torch.cat((slots[:-1], torch.zeros(1, dtype=torch.int64))) for slots in batch.slots)
    early = AttentionBatch(batch.query_lengths, batch.context_lengths, unknown, batch.new_slots, batch.shared)
    for window in (None, 64):
        attention.foresee(early, window)
    for mine, known in zip(unknown, batch.slots, strict=True):
        mine[-1] = known[-1]
    for window in (None, 64):
        assert attention.pack(early, window)[0].tolist() == attention.pack(batch, window)[0].tolist()


@pytest.mark.slow
def test_a_step_in_a_fixed_room_is_the_same_step():
    """As a captured graph runs it: idle tiles, merges and rows beside the real ones, which are not disturbed."""
    generator = torch.Generator().manual_seed(0)
    batch, slots = make_batch(3, 1, [(1, 700), (1, 650), (1, 3)], 0)
    attention = TritonAttention(HEADS, KV_HEADS, HEAD_DIM, 1, torch.device("cpu"))
    store = make_store(slots, batch, generator)
    spec = AttentionSpec(0.3)
    q, k, v = (torch.randn(5, heads, HEAD_DIM, generator=generator) for heads in (HEADS, KV_HEADS, KV_HEADS))
    expected = attention(q[:3], k[:3], v[:3], (store[0].clone(), store[1].clone()), batch, spec)
    host, sections = attention.pack(batch, None, attention.capacity(new=5, pages=3000))
    padded = AttentionBatch((1,) * 5, (0,) * 5, (), torch.cat((batch.new_slots, torch.tensor([-1, -1]))))
    padded.prepared[TritonAttention, None] = sections.on(torch.from_numpy(host))
    torch.testing.assert_close(attention(q, k, v, store, padded, spec)[:3], expected, atol=0, rtol=0)
