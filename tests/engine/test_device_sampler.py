"""The device's sampler chooses as the common one does."""

from __future__ import annotations

import math

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

import numpy as np
import torch

from agentrt.engine.device_sampler import DeviceSampler
from agentrt.engine.sampler import Row, Sampler
from agentrt.request import SamplingParams

pytestmark = pytest.mark.slow

VOCAB = 320
WAYS = ({"temperature": 0}, {}, {"top_k": 5}, {"top_p": 0.6}, {"min_p": 0.1, "top_k": 40}, {"temperature": 0.5, "top_p": 0.9})


def rows_of(random: np.random.Generator, **more: object) -> list[Row]:
    masks = [None, *random.integers(-(2**31), 2**31, (len(WAYS) - 1, VOCAB // 32), dtype=np.int64).astype(np.int32)]
    return [Row(SamplingParams(**way, **more), 3, place, place, mask=mask) for place, (way, mask) in enumerate(zip(WAYS, masks, strict=True))]


def test_rows_that_ask_for_nothing_unusual_get_the_same_tokens():
    random = np.random.default_rng(0)
    logits = torch.from_numpy((random.standard_normal((len(WAYS), VOCAB)) * 3).astype(np.float32))
    valid = torch.from_numpy(random.random(VOCAB) < 0.9)
    rows = rows_of(random)
    assert DeviceSampler(valid, (1,)).sample(logits.clone(), rows) == Sampler(valid, (1,)).sample(logits.clone(), rows)


def test_broken_and_forbidden_rows_fail_by_themselves():
    logits = torch.randn(4, VOCAB, generator=torch.Generator().manual_seed(0))
    logits[1, 7], logits[2, 9] = math.nan, -math.inf
    nothing = np.zeros(VOCAB // 32, dtype=np.int32)
    rows = [Row(SamplingParams(), 1, 1, 0), Row(SamplingParams(), 1, 1, 0), Row(SamplingParams(), 1, 1, 0), Row(SamplingParams(), 1, 1, 0, mask=nothing)]
    valid = torch.ones(VOCAB, dtype=torch.bool)
    ours, theirs = DeviceSampler(valid, ()).sample(logits.clone(), rows), Sampler(valid, ()).sample(logits.clone(), rows)
    assert [(one.token_id, str(one.error), type(one.error)) for one in ours] == [(one.token_id, str(one.error), type(one.error)) for one in theirs]


def test_rows_that_ask_for_more_go_the_common_way():
    random = np.random.default_rng(1)
    logits = torch.from_numpy(random.standard_normal((len(WAYS), VOCAB)).astype(np.float32))
    valid = torch.ones(VOCAB, dtype=torch.bool)
    for more in ({"logprobs": 2}, {"logit_bias": {4: 30.0}}, {"min_tokens": 100}):
        rows = rows_of(random, **more)
        assert DeviceSampler(valid, (4,)).sample(logits.clone(), rows) == Sampler(valid, (4,)).sample(logits.clone(), rows)
