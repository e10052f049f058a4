from __future__ import annotations

import random

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

import torch
from agentrt.kernels.sample import NOTHING_ALLOWED, sample, sample_reference

pytestmark = pytest.mark.slow

#: temperature, top_k, top_p, min_p
WAYS = (
    (0.0, 0, 1.0, 0.0), (1.0, 1, 1.0, 0.0), (1.0, 0, 1.0, 0.0), (0.7, 5, 1.0, 0.0), (1.3, 0, 0.9, 0.0), (1.0, 0, 1.0, 0.05),
    (0.8, 50, 0.5, 0.1), (2.0, 9999, 0.99, 0.0),
)  # fmt: skip


def check(logits: torch.Tensor, ways: list[tuple[float, int, float, float]], numbers: list[float], most: int = 4096) -> None:
    ours = sample(logits, torch.tensor([(*way, number) for way, number in zip(ways, numbers, strict=True)], dtype=torch.float64).T.contiguous(), most)
    # The references get the limits as float32 rounds them, since that is what the kernel has.
    rounded = [(float(torch.tensor(t)), k, float(torch.tensor(p)), float(torch.tensor(m))) for t, k, p, m in ways]
    assert ours.tolist() == [sample_reference(row, *way, u) for row, way, u in zip(logits, rounded, numbers, strict=True)]


def test_every_way_of_sampling():
    logits = torch.randn(len(WAYS), 4500, generator=torch.Generator().manual_seed(0)) * 3
    check(logits, list(WAYS), [0.71] * len(WAYS), most=64)  # two blocks of tokens; some rows keep fewer than can be set aside, some more


def test_ties_nothing_allowed_and_the_ends_of_the_range():
    logits = (torch.randn(6, 150, generator=torch.Generator().manual_seed(1)) * 2).round()
    logits[2] = -torch.inf
    logits[3, 3:] = -torch.inf
    logits[4] = 0.0
    logits[4, ::2] = -0.0
    ways = [(1.0, 7, 1.0, 0.0), (1.0, 0, 0.6, 0.0), (1.0, 3, 0.5, 0.1), (1.0, 5, 1.0, 0.0), (1.0, 4, 1.0, 0.0), (1.0, 0, 1.0, 0.0)]
    check(logits, ways, [0.999999, 0.5, 0.5, 0.9, 0.6, 0.0])
    assert sample_reference(logits[2], 1.0, 0, 1.0, 0.0, 0.5) == NOTHING_ALLOWED


@pytest.mark.proof
@pytest.mark.parametrize("seed", range(10))
def test_many_rows(seed):
    choice = random.Random(seed)
    logits = torch.randn(20, 5000, generator=torch.Generator().manual_seed(seed)) * choice.choice((0.1, 3.0, 20.0))
    check(logits, [choice.choice(WAYS) for _ in range(20)], [choice.random() for _ in range(20)])
