"""A config that cannot be is refused when it is made, by the name of the field and with what would do."""

from __future__ import annotations

import pytest

from agentrt.config import CacheConfig, EngineConfig, SchedulerConfig
from agentrt.errors import UserError


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: CacheConfig(kv_tokens=0), "kv_tokens is 0; it must be at least 1"),
        (lambda: CacheConfig(eviction="fifo"), "eviction is 'fifo'; it must be one of lru"),
        (lambda: SchedulerConfig(policy="best"), "policy is 'best'; it must be one of fcfs"),
        (lambda: SchedulerConfig(step_tokens=0), "step_tokens is 0"),
        (lambda: EngineConfig(dtype="int3"), "dtype is 'int3'"),
        (lambda: EngineConfig(threads=0), "threads is 0"),
    ],
)
def test_what_cannot_be_is_refused_by_name(make, words):
    with pytest.raises(UserError, match=words):
        make()
