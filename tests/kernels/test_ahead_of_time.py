"""Every kernel compiles for GPUs that are not there, as it is launched, without spills and within shared memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

HERE = Path(__file__).parent
#: One of each kind whose registers are near their limit; everything stands in `launches.py`.
SAMPLE = ("attention narrow 64", "attention wide 128", "q4 512", "sample")

#: All launches, in pieces of under a minute.
KINDS = ("attention narrow", "attention wide", "merge", "rotary", "norm", "gate_up", "int8", "fp8", "q4", "q8", "awq", "sample", "mask")


def report(names: list[str], cache: Path) -> list[dict[str, int]]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(cache)
    # Triton warns of options that its next versions have another default for.
    script = [sys.executable, "-W", "error::UserWarning", str(HERE / "ahead_of_time.py"), *names]
    told = subprocess.run(script, capture_output=True, text=True, env=environment, timeout=3000)
    assert told.returncode == 0, told.stderr[-3000:]
    answer: list[dict[str, int]] = json.loads(told.stdout)
    return answer


def check(names: list[str], cache: Path) -> None:
    told = report(names, cache)
    assert {one["launch"] for one in told} == set(names)
    wrong = [one for one in told if one["STACK"] or one["LOCAL"] or one["shared"] > one["most_shared"]]
    assert not wrong


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="triton carries ptxas for Linux only")
def test_a_sample_of_launches(tmp_path):
    check(list(SAMPLE), tmp_path)


def every_launch() -> list[str]:
    """Names of `launches.LAUNCHES`."""
    sys.path.insert(0, str(HERE))
    try:
        import launches
    finally:
        sys.path.remove(str(HERE))
    return list(launches.LAUNCHES)


@pytest.mark.proof
@pytest.mark.timeout(3000)
@pytest.mark.skipif(sys.platform != "linux", reason="triton carries ptxas for Linux only")
@pytest.mark.parametrize("kind", KINDS)
def test_every_launch(kind, tmp_path):
    names = every_launch()
    assert all(name.startswith(KINDS) for name in names)
    check([name for name in names if name.startswith(kind)], tmp_path)
