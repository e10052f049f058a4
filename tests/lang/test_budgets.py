"""Deadlines, token budgets and cancelling, for programs and for branches."""

from __future__ import annotations

import time

import pytest

import agentrt as sgl  # noqa: F401  (a program written for sgl: text before a gen stays as it is)
from agentrt.backends.scripted import Answer, ScriptedBackend
from agentrt.errors import AbortedError
from agentrt.lang.budget import BudgetError
from agentrt.lang.expressions import gen
from agentrt.lang.program import function


def wait_until(true, seconds=60.0):
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.002)


def test_deadlines_reach_the_backend_and_end_the_program():
    @function
    def program(s):
        s += "Q" + gen("a")

    quick = ScriptedBackend("x")
    program.run(backend=quick, deadline=100.0)
    assert 0 < quick.requests[0].deadline <= 100.0
    backend = ScriptedBackend(lambda t, r: Answer("x", delay=60))
    with pytest.raises(AbortedError):
        program.run(backend=backend, deadline=0.05)

    @function
    def one_call(s):
        s += "Q" + gen("a", deadline=0.03)

    with pytest.raises(AbortedError):
        one_call.run(backend=backend)


def test_token_budgets_bound_requests_and_end_the_program_when_used_up():
    @function
    def program(s):
        s += "Q"
        for _ in range(5):
            s += gen("a", max_tokens=4)

    backend = ScriptedBackend("abcdefgh")
    with pytest.raises(BudgetError, match="10"):
        program.run(backend=backend, token_budget=10)
    assert [r.sampling.max_tokens for r in backend.requests] == [4, 4, 2]


def test_a_branch_may_have_a_budget_of_its_own():
    @function
    def program(s):
        s += "Q"
        forks = s.fork(2, token_budget=3)
        forks += gen("a", max_tokens=10)
        forks.join()
        return s["a"]

    assert [len(a) for a in program.run(backend=ScriptedBackend("defghijk")).ret_value] == [3, 3]


@pytest.mark.parametrize("inline", [True, False])
def test_branches_that_run_at_the_same_time_never_generate_more_than_their_budget_together(inline):
    @function
    def program(s):
        s += "Q"
        forks = s.fork(300)
        forks += lambda i: f"{i}: " + gen("a", max_tokens=10)
        forks.join(return_exceptions=True)
        return s["a"]

    backend = ScriptedBackend(lambda text, request: "abc" if text.endswith("0: ") else "a", inline=inline)
    state = program.run(backend=backend, token_budget=200)
    answers, refused = [a for a in state.ret_value if isinstance(a, str)], [a for a in state.ret_value if not isinstance(a, str)]
    assert 180 <= backend.stats()["generated_tokens"] <= 200
    assert all(isinstance(error, BudgetError) for error in refused)
    assert refused
    # Nobody was cut for what others had reserved and did not use: only who came last had less than it asked for.
    assert sum(request.sampling.max_tokens < 10 for request in backend.requests) <= 9
    assert len(answers) == len(backend.requests)


def test_a_branch_that_waits_for_tokens_can_be_cancelled_and_the_others_get_them():
    @function
    def program(s):
        s += "Q"
        first, second, third = s.fork(3)
        first += "1" + gen("a", max_tokens=10)
        second += "2" + gen("a", max_tokens=10)
        third += "3" + gen("a", max_tokens=10)
        second.cancel()
        return first["a"], third["a"]

    backend = ScriptedBackend(lambda text, request: Answer("abc", delay=0.02))
    assert program.run(backend=backend, token_budget=12).ret_value == ("abc", "abc")


def test_cancelling_a_program_frees_its_requests():
    @function
    def program(s):
        s += "Q"
        forks = s.fork(4)
        forks += gen("a")
        forks.join()
        s["a"]

    backend = ScriptedBackend(lambda t, r: Answer("x", delay=60))
    state = program.run(backend=backend, stream=True)
    wait_until(lambda: backend.load().running == 4)
    state.cancel()
    wait_until(lambda: backend.load().running == 0)
    assert len(backend.aborts) == 4
    with pytest.raises(AbortedError):
        state.sync()
