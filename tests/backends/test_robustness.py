"""Whatever one caller does, the engine goes on, the others get their answers, and nobody waits for ever."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
import subprocess
import sys
import threading
import time
from types import MappingProxyType

import psutil
import pytest

import agentrt
import agentrt.backends.hosts
from agentrt import Engine, FinishReason, GrammarSpec, Request, SamplingParams, UserError
from agentrt.backend import collect, stream
from agentrt.config import Limits
from agentrt.request import ProgramTag

LONG = {"max_tokens": 1900, "ignore_eos": True, "seed": 0}


def engine_on(folder, **options):
    return Engine(str(folder), **{"process": False, "check": True, "kv_tokens": 4096, "threads": 1, "dtype": "float32", **options})


@pytest.fixture(scope="module", params=["thread", pytest.param("process", marks=pytest.mark.slow)])
def engine(request, tiny_model):
    with engine_on(tiny_model, process=request.param == "process") as engine:
        yield engine


def alive(engine) -> bool:
    return len(engine.generate([5, 6], SamplingParams(max_tokens=3, ignore_eos=True)).token_ids) == 3


def wait_until(condition, seconds: float = 60) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.02)
    return False


BAD_CALLS = {
    "priority": lambda e: e.generate([5], SamplingParams(max_tokens=2), priority="high"),
    "deadline, a word": lambda e: e.generate([5], SamplingParams(max_tokens=2), deadline="5"),
    "deadline, not a number": lambda e: e.generate([5], SamplingParams(max_tokens=2), deadline=float("nan")),
    "program": lambda e: e.generate([5], SamplingParams(max_tokens=2), program="p"),
    "program, of no name": lambda e: e.generate([5], SamplingParams(max_tokens=2), program=ProgramTag(["p"])),
    "program, calls": lambda e: e.generate([5], SamplingParams(max_tokens=2), program=ProgramTag("p", expected_calls=None)),
    "program, fork": lambda e: e.generate([5], SamplingParams(max_tokens=2), program=ProgramTag("p", will_fork="two")),
    "prompt_tail, text": lambda e: e.generate([5], SamplingParams(max_tokens=2), prompt_tail="ab"),
    "prompt_tail, long": lambda e: e.generate([5], SamplingParams(max_tokens=2), prompt_tail=b"a" * 5000),
    "ids that are not whole": lambda e: list(stream(e, Request(prompt_ids=(5.5, 6.0)))),
    "stop pattern": lambda e: e.generate([5], SamplingParams(max_tokens=2, stop_regex=("foo**",))),
    "an id that no cache can hold": lambda e: e.cached_prefix([2**40]),
    "text for ids": lambda e: e.cached_prefix("abc"),
    "hold": lambda e: e.hold("p", float("inf")),
    "grammar that is nonsense": lambda e: e.generate([5], SamplingParams(max_tokens=2, regex="(")),
    "grammar of no kind": lambda e: e.generate([5], SamplingParams(max_tokens=2, grammar=GrammarSpec("nonsense", "a"))),
    "grammar that is no text": lambda e: e.generate([5], SamplingParams(max_tokens=2, grammar=GrammarSpec("regex", 5))),
    "grammar's options": lambda e: e.generate([5], SamplingParams(max_tokens=2, grammar=GrammarSpec("regex", "a", options=(("a", [1]),)))),
    "max_resamples": lambda e: e.generate([5], SamplingParams(max_resamples=10**9)),
    "unknown option": lambda e: e.generate([5], temperature=3),
    "request id for a list": lambda e: e.generate([[5], [6]], request_id="x"),
}


@pytest.mark.parametrize("call", BAD_CALLS.values(), ids=BAD_CALLS)
def test_a_bad_call_is_refused_and_the_next_one_answered(engine, call):
    with pytest.raises(agentrt.UserError):
        call(engine)
    assert alive(engine)


def test_a_grammar_that_gives_up_in_the_middle_fails_its_request_alone(engine):
    """llguidance has bounds of its own; reaching them is an error of the one request."""
    other = engine.stream([1, 2], SamplingParams(max_tokens=60, ignore_eos=True, seed=1))
    with contextlib.suppress(agentrt.UserError, agentrt.RequestError):  # an EngineError would be everybody's
        engine.generate([5, 6], SamplingParams(max_tokens=400, seed=1, ebnf="start: /([a-z ]{0,300}[aeiou]){1,200}x/"))
    assert len([t for delta in other for t in delta.token_ids]) == 60
    assert alive(engine)


def test_a_fault_in_taking_a_request_is_that_requests_alone(engine, monkeypatch):
    from agentrt.grammar.compiler import GrammarCache

    sampling = SamplingParams(max_tokens=2, regex="a+")
    engine.generate([5], sampling)  # so that there is a cache to look in
    if engine._host.THREAD != "agentrt-engine":
        pytest.skip("what the worker's process does is not to be changed from here")
    monkeypatch.setattr(GrammarCache, "find", lambda *_: 1 / 0)
    with pytest.raises(agentrt.RequestError, match="division by zero"):
        engine.generate([5], sampling)
    assert alive(engine)


def test_a_sink_that_raises_loses_its_own_request_only(engine):
    def bad(delta):
        raise RuntimeError("on purpose")

    request = Request(prompt_ids=(5, 6), sampling=SamplingParams(**LONG))
    engine.submit(request, bad)
    assert alive(engine)
    assert wait_until(lambda: engine.load().running == 0)


def test_a_sink_that_waits_for_the_engine_is_told_not_to(engine):
    caught: list[BaseException] = []
    done = threading.Event()

    def sink(delta):
        try:
            engine.stats()
        except BaseException as error:
            caught.append(error)
        done.set()

    engine.submit(Request(prompt_ids=(5, 6), sampling=SamplingParams(max_tokens=1)), sink)
    assert done.wait(60)
    assert isinstance(caught[0], agentrt.UserError)
    assert alive(engine)


def test_an_engine_that_nobody_holds_tells_its_sinks(tiny_model):
    got = []
    engine = engine_on(tiny_model)
    engine.submit(Request(prompt_ids=(5, 6), sampling=SamplingParams(**LONG)), got.append)
    del engine
    gc.collect()
    assert wait_until(lambda: bool(got) and got[-1].last)
    assert isinstance(got[-1].error, agentrt.EngineError)


def test_a_stream_that_is_lost_is_aborted(engine):
    deltas = engine.stream([5, 6], SamplingParams(**LONG))
    assert wait_until(lambda: engine.load().running == 1)
    del deltas  # never begun
    gc.collect()
    assert wait_until(lambda: engine.load().running == 0)


def test_an_event_loop_that_ends_first_hurts_nobody(engine):
    async def leave():
        deltas = engine.astream([5, 6], SamplingParams(**LONG))
        await anext(deltas)
        return deltas  # abandoned with its loop

    asyncio.run(leave())
    gc.collect()
    assert alive(engine)
    engine.flush_cache()


@pytest.mark.slow
def test_an_id_used_again_inherits_nothing(engine):
    with contextlib.suppress(agentrt.AbortedError):  # on a machine that is busy elsewhere
        engine.generate([5, 6], SamplingParams(max_tokens=4), request_id="again", deadline=0.4)
    answer = engine.generate([5, 6], SamplingParams(max_tokens=1500, ignore_eos=True, seed=0), request_id="again")
    assert answer.finish_reason is FinishReason.LENGTH
    held = engine.stream([5, 6], SamplingParams(**LONG), request_id="again")
    with pytest.raises(agentrt.UserError, match="in use"):
        engine.stream([5, 6], request_id="again")
    next(held)
    held.close()
    assert alive(engine)


def test_what_cannot_be_sent_leaves_nothing_behind(engine):
    class Unpicklable(str):
        def __reduce__(self):
            raise TypeError("on purpose")

    sampling = SamplingParams(max_tokens=4, logit_bias=MappingProxyType({5: 1.0}))
    engine.generate([5], sampling)  # any mapping will do
    for _ in range(2):
        try:
            engine.generate([5], SamplingParams(max_tokens=2), request_id="one", cache_salt=Unpicklable("x"))
        except TypeError:
            assert isinstance(engine._host, agentrt.backends.hosts.ProcessHost)
    assert alive(engine)


def test_of_requests_sent_together_one_that_cannot_be_sent_fails_alone(engine, monkeypatch):
    """The others are answered, and so is whoever asks next on this thread."""
    post, refused = engine._host.post, []

    def refusing(message):
        if any("bad" in str(one) for one in message[1:]):
            refused.append(message[0])
            raise UserError("on purpose")
        post(message)

    monkeypatch.setattr(engine._host, "post", refusing)
    sampling = SamplingParams(max_tokens=3, ignore_eos=True)
    with engine.together():
        streams = [engine.stream([5, number], sampling, request_id=name) for number, name in enumerate(("good", "bad", "fine"))]
        with engine.together():
            streams.append(engine.stream([6], sampling))
    answers = [collect_ids(one) for one in streams]
    assert [len(ids) for ids in answers] == [3, 0, 3, 3]
    assert refused == ["all", "submit"]
    assert alive(engine)


def collect_ids(deltas):
    with contextlib.suppress(agentrt.UserError):
        return [token_id for delta in deltas for token_id in delta.token_ids]
    return []


def test_what_is_aborted_before_it_was_sent_is_aborted(engine):
    got = []
    with engine.together():
        engine.submit(Request(prompt_ids=(5, 6), sampling=SamplingParams(**LONG), request_id="early"), got.append)
        engine.abort("early")
    assert wait_until(lambda: bool(got) and got[-1].last)
    assert got[-1].finish_reason is FinishReason.ABORT


def test_a_draft_longer_than_a_step_is_cut(tiny_model):
    spec = GrammarSpec("regex", "[ab]" + "ZQWJKVXYPM" * 3, jump_forward="exact_masked")
    with engine_on(tiny_model, step_tokens=4) as engine:
        answer = engine.generate([5, 6], SamplingParams(max_tokens=64, temperature=0, grammar=spec), deadline=120)
        assert answer.text[1:] == "ZQWJKVXYPM" * 3


def test_deadlines_run_while_a_grammar_is_compiled(tiny_model, monkeypatch):
    from agentrt.grammar.compiler import GrammarCache

    compile_quickly, may_end = GrammarCache.compile, threading.Event()

    def slowly(self, *args):
        may_end.wait(60)
        return compile_quickly(self, *args)

    monkeypatch.setattr(GrammarCache, "compile", slowly)
    with engine_on(tiny_model) as engine:
        with pytest.raises(agentrt.AbortedError, match="compiled"):
            engine.generate([5], SamplingParams(max_tokens=9, regex="aaaa"), deadline=0.1)
        first, second = (Request(prompt_ids=(5, 6), sampling=SamplingParams(max_tokens=9, regex=r), request_id="r") for r in ("aaaa", "bbbb"))
        deltas = stream(engine, first)
        engine.abort("r")
        assert collect(first, deltas).finish_reason is FinishReason.ABORT
        deltas = stream(engine, second)
        may_end.set()  # what the first one asked for is compiled now, too
        assert collect(second, deltas).text == "bbbb"


def test_limits_are_the_engines_own(tiny_model):
    limits = Limits(grammar_bytes=20)
    with engine_on(tiny_model, limits=limits) as engine, pytest.raises(agentrt.UserError, match="at most 20"):
        engine.generate([5], SamplingParams(regex="a" * 50))


def ended(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@pytest.mark.slow
def test_a_forked_child_leaves_its_parents_engine_alone(tiny_model):
    """Its exit closes nothing, its calls fail at once, and it does not keep the worker alive after the parent."""
    code = f"""
import os, signal, sys, time
import agentrt
import agentrt.backends.hosts
engine = agentrt.Engine({str(tiny_model)!r}, kv_tokens=256, threads=1)
child = os.fork()
if child == 0:
    try:
        engine.generate([5], agentrt.SamplingParams(max_tokens=1))
    except agentrt.EngineError as error:
        sys.exit(7 if "forked" in str(error) else 8)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
print(len(engine.generate([5], agentrt.SamplingParams(max_tokens=2, ignore_eos=True)).token_ids), engine._host.pid, flush=True)
sleeper = os.fork()
if sleeper == 0:
    time.sleep(30)
    os._exit(0)
print(sleeper, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    try:
        count, worker = process.stdout.readline().split()
        sleeper = int(process.stdout.readline())
        assert count == "2"
        assert process.wait(60) == -signal.SIGKILL
        assert wait_until(lambda: ended(int(worker)), 20)
        os.kill(sleeper, signal.SIGKILL)
    finally:
        process.stdout.close()


@pytest.mark.slow
def test_what_lies_in_the_current_folder_is_not_imported(tiny_model, tmp_path):
    (tmp_path / "psutil.py").write_text("raise RuntimeError('shadowed')")
    code = f"import sys; sys.path = [p for p in sys.path if p]\nimport agentrt\nagentrt.Engine({str(tiny_model)!r}, kv_tokens=256, threads=1).close()"
    done = subprocess.run([sys.executable, "-P", "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
