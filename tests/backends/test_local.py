"""The engine's process: it dies with its parent, and takes no request with it silently."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

import agentrt
from agentrt import Engine, SamplingParams

pytestmark = pytest.mark.slow  # each starts a process that imports torch
LONG = SamplingParams(max_tokens=1900, ignore_eos=True, seed=0)


def engine_on(folder, **options):
    return Engine(str(folder), **{"kv_tokens": 4096, "threads": 1, "dtype": "float32", **options})


def gone(pid: int, seconds: float = 60) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
                return True
        except psutil.NoSuchProcess:
            return True
        time.sleep(0.05)
    return False


def test_the_death_of_the_process_fails_what_is_pending(tiny_model):
    engine = engine_on(tiny_model)
    deltas = engine.stream([1, 2, 3], LONG)
    next(deltas)
    os.kill(engine._host.pid, signal.SIGKILL)
    with pytest.raises(agentrt.EngineError, match="ended with status -9"):
        list(deltas)
    with pytest.raises(agentrt.EngineError):
        engine.generate([1], SamplingParams(max_tokens=1))
    with pytest.raises(agentrt.EngineError):
        engine.stats()
    engine.close()


@pytest.mark.parametrize("process", [True, False])
def test_closing_ends_what_is_pending_and_the_worker(tiny_model, process):
    engine = engine_on(tiny_model, process=process)
    pid = engine._host.pid if process else None
    deltas = engine.stream([1, 2, 3], LONG)
    next(deltas)
    engine.close()
    engine.close()
    with pytest.raises(agentrt.EngineError):
        list(deltas)
    assert pid is None or gone(pid)


def test_an_engine_that_nobody_holds_is_closed(tiny_model):
    engine = engine_on(tiny_model)
    pid = engine._host.pid
    del engine
    gc.collect()
    assert gone(pid)


@pytest.mark.parametrize("how", ["return", "exception", "kill"])
def test_no_orphan_is_left_when_the_parent_ends(tiny_model, how):
    code = f"""
import os, signal
import agentrt
engine = agentrt.Engine({str(tiny_model)!r}, kv_tokens=256, threads=1)
print(engine._host.pid, flush=True)
deltas = engine.stream([1, 2, 3], agentrt.SamplingParams(max_tokens=200, ignore_eos=True))
next(deltas)
how = {how!r}
if how == "exception":
    raise ValueError("on purpose")
if how == "kill":
    os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout.strip().isdigit(), done.stderr
    assert done.returncode == {"return": 0, "exception": 1, "kill": -9}[how], done.stderr
    assert gone(int(done.stdout))


def test_an_engine_that_cannot_start_says_why(tiny_model):
    with pytest.raises(agentrt.UserError, match="torch sees no GPU"):
        engine_on(tiny_model, device="cuda:7")
    with pytest.raises(agentrt.ModelError, match="nowhere"):
        Engine("nowhere")


def test_what_the_worker_warns_of_is_heard(tiny_model, tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("CXX", "false")
    monkeypatch.setenv("AGENTRT_HOME", str(tmp_path))
    monkeypatch.delenv("AGENTRT_NATIVE", raising=False)
    with engine_on(tiny_model) as engine:
        assert len(engine.generate([1], SamplingParams(max_tokens=2, ignore_eos=True)).token_ids) == 2
    assert "no native kernels, the slower torch path runs" in caplog.text


def test_a_start_brings_nothing_that_only_constraints_and_chats_need(tiny_model):
    code = f"""
import sys, agentrt
with agentrt.Engine({str(tiny_model)!r}, kv_tokens=256, threads=1, process=False) as engine:
    engine.generate([1, 2, 3], agentrt.SamplingParams(max_tokens=2))
    late = ("llguidance", "jsonschema", "pydantic", "jinja2", "outlines_core", "transformers", "fastapi", "numpy.random")
    assert not [name for name in late if name in sys.modules], [name for name in late if name in sys.modules]
    answer = engine.generate([1, 2, 3], agentrt.SamplingParams(max_tokens=20, choices=["yes", "no"]))
    assert answer.text in ("yes", "no")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("process", [True, False])
def test_prompts_of_one_list_begin_in_one_step(tiny_model, process):
    sampling = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
    with engine_on(tiny_model, process=process) as engine:
        for first in range(0, 50, 10):
            before = engine.stats().get("steps", 0)
            engine.generate([[first + number, 7, 8] for number in range(8)], sampling)
            assert engine.stats()["steps"] - before == 4
        assert len(engine.generate([[number, 9] for number in range(200)], sampling)) == 200
        with pytest.raises(agentrt.PromptError):
            engine.generate([[1, 2], [3], [10**6]], LONG)
        assert len(engine.generate([[number, 5] for number in range(3)], sampling)) == 3
        assert engine.load().running == 0


def test_the_parent_needs_no_torch(tiny_model):
    code = f"""
import sys, agentrt
with agentrt.Engine({str(tiny_model)!r}, kv_tokens=256, threads=1) as engine:
    engine.generate([1, 2, 3], agentrt.SamplingParams(max_tokens=2))
assert "torch" not in sys.modules and "transformers" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
