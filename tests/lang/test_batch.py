"""Many runs at once: a failure costs its own result alone, the common prefix is computed once, and nobody has a thread."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

import agentrt as sgl  # noqa: F401  (a program written for sgl: text before a gen stays as it is)
from agentrt.backends.scripted import Answer, ScriptedBackend
from agentrt.errors import RequestError
from agentrt.lang.expressions import gen
from agentrt.lang.program import function


@function
def numbered(s, number):
    s += "A long prompt that all of them share. " + f"Number {number}:"
    s += gen("a")


def fails_on_three(text, request):
    return Answer("", error=RequestError("three")) if text.endswith("3:") else text[-2:]


def test_in_run_batch_one_failing_program_costs_only_its_own_result():
    backend = ScriptedBackend(fails_on_three)
    states = numbered.run_batch([{"number": n} for n in range(6)], backend=backend, return_exceptions=True)
    assert [type(s).__name__ for s in states] == ["State"] * 3 + ["RequestError"] + ["State"] * 2
    assert [s["a"] for s in states if not isinstance(s, Exception)] == ["0:", "1:", "2:", "4:", "5:"]
    with pytest.raises(RequestError, match="three"):
        numbered.run_batch([{"number": n} for n in range(6)], backend=backend)
    one_by_one = numbered.run_batch([(n,) for n in range(6)], backend=backend, generator_style=True)
    assert [next(one_by_one)["a"] for _ in range(3)] == ["0:", "1:", "2:"]
    with pytest.raises(RequestError):
        next(one_by_one)


def test_in_run_batch_a_fault_of_the_backend_costs_one_result_too():
    class Faulty(ScriptedBackend):
        def submit(self, request, sink):
            if self.tokenizer.decode(request.prompt_ids).endswith("3:"):
                raise TypeError("on purpose")
            super().submit(request, sink)

    states = []
    running = threading.Thread(
        target=lambda: states.extend(numbered.run_batch([{"number": n} for n in range(6)], backend=Faulty("ok"), return_exceptions=True)), daemon=True
    )
    running.start()
    running.join(30)
    assert [type(s).__name__ for s in states] == ["State"] * 3 + ["RequestError"] + ["State"] * 2


def test_run_batch_finds_the_common_prefix_without_running_bodies_twice():
    ran = []

    @function
    def counted(s, number):
        ran.append(number)
        s += "A long prompt that all of them share. " + f"Number {number}:"
        s += gen("a")

    backend = ScriptedBackend("x")
    counted.run_batch([{"number": n} for n in range(20)], backend=backend)
    assert sorted(ran) == list(range(20))
    first, rest = backend.requests[0], list(backend.requests)[1:]
    assert first.sampling.max_tokens == 0
    assert backend.tokenizer.decode(first.prompt_ids) == "A long prompt that all of them share. Number "
    assert len(rest) == 20
    assert all(r.prompt_ids[: len(first.prompt_ids)] == first.prompt_ids for r in rest)


@pytest.mark.parametrize("is_async", [False, True])
def test_run_batch_does_not_hang_when_bodies_wait_for_something_else_first(is_async):
    ready = threading.Event()

    def later():
        time.sleep(0.05)
        ready.set()

    threading.Thread(target=later).start()
    if is_async:

        @function
        async def body(s, n):
            while n == 1 and not ready.is_set():
                await asyncio.sleep(0.005)
            s += "Q" * 30 + gen("a")
    else:

        @function
        def body(s, n):
            if n == 1:
                ready.wait(10)
            s += "Q" * 30 + gen("a")

    states = body.run_batch([{"n": n} for n in range(3)], backend=ScriptedBackend("x"))
    assert [s["a"] for s in states] == ["x"] * 3


class AnswersWhenAllHaveAsked(ScriptedBackend):
    """Holds the first requests until `count` of them wait at the same time."""

    def __init__(self, script, count):
        super().__init__(script, tokens_per_delta=8)
        self.count, self.held, self.guard = count, [], threading.Lock()

    def submit(self, request, sink):
        with self.guard:
            if len(self.held) < self.count and request.sampling.max_tokens:
                self.held.append((request, sink))
                ready = self.held if len(self.held) == self.count else []
            else:
                ready = [(request, sink)]
        for held in ready:
            super().submit(*held)


@pytest.mark.slow
def test_2000_concurrent_sync_programs_run_on_under_20_threads():
    most = []

    def script(text, request):
        most.append(len(set(threading.enumerate()) - others))
        return "x" if text.endswith("first ") else "y"

    @function
    def program(s, number):
        s += f"{number} first " + gen("a")
        assert s["a"] == "x"
        s += " second " + gen("b")
        return s["b"]

    others = set(threading.enumerate())  # of other tests' servers and engines, which may end meanwhile
    backend = AnswersWhenAllHaveAsked(script, 2000)
    states = program.run_batch([{"number": n} for n in range(2000)], backend=backend)
    assert [s.ret_value for s in states] == ["y"] * 2000
    assert max(most) < 20
