"""`adaptive` on the Mooncake traces: never much below LRU, and well above it where the pool is small."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

_SCRIPT = Path(__file__).parents[2] / "benchmarks" / "eviction_traces.py"
_SPEC = importlib.util.spec_from_file_location("eviction_traces", _SCRIPT)
traces = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(traces)

CASES = [
    # trace, blocks, LRU's share (known), least that adaptive reuses of that
    pytest.param("synthetic", 3_000, 0.191, 1.15, marks=pytest.mark.slow),
    pytest.param("synthetic", 10_000, 0.424, 1.04, marks=pytest.mark.slow),
    pytest.param("synthetic", 30_000, 0.624, 0.98, marks=pytest.mark.slow),
    pytest.param("conversation", 3_000, 0.065, 1.15, marks=pytest.mark.proof),
    pytest.param("conversation", 10_000, 0.212, 1.04, marks=pytest.mark.proof),
    pytest.param("conversation", 30_000, 0.326, 0.98, marks=pytest.mark.proof),
]


@pytest.mark.parametrize(("trace", "blocks", "lru", "least"), CASES)
def test_adaptive_against_lru(trace, blocks, lru, least):
    if not (traces.corpora() / f"mooncake_{trace}_trace.jsonl.gz").exists():
        pytest.skip(
            f"the Mooncake {trace} trace is not in {traces.corpora()}; set AGENTRT_CORPORA to the folder that has it"
        )
    requests = traces.load(trace)
    found = traces.reused(requests, blocks, "lru")
    assert found == pytest.approx(lru, abs=0.002)
    assert traces.reused(requests, blocks, "adaptive") >= least * found
