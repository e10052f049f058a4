"""Branches: joined in order, the first ones taken, each within its own bounds."""

from __future__ import annotations

import threading

import pytest

import agentrt as sgl  # noqa: F401  (a program written for sgl: text before a gen stays as it is)
from agentrt.backends.scripted import Answer, ScriptedBackend
from agentrt.errors import AbortedError, RequestError
from agentrt.lang.expressions import gen
from agentrt.lang.program import function
from agentrt.lang.waiting import wait


def test_join_keeps_order_and_meta_info_whatever_the_order_of_ending():
    delays = [0.05, 0.0, 0.02]

    def script(text, request):
        return Answer(f"answer {text[-1]}", delay=delays[int(text[-1])])

    @function
    def joins(s):
        s += "Q"
        forks = s.fork(3)
        forks += lambda i: str(i)
        forks += gen("a")
        forks.join()
        return s["a"], [meta["completion_tokens"] for meta in s.get_meta_info("a")]

    answers, tokens = joins.run(backend=ScriptedBackend(script)).ret_value
    assert answers == ["answer 0", "answer 1", "answer 2"]
    assert all(count > 0 for count in tokens)


def test_join_raises_the_failure_of_a_child_or_keeps_it_in_its_place():
    def script(text, request):
        return Answer("", error=RequestError("middle")) if text.endswith("1") else "ok"

    @function
    def joins(s, keep):
        s += "Q"
        forks = s.fork(3)
        forks += lambda i: str(i)
        forks += gen("a")
        forks.join(return_exceptions=keep)
        return s["a"]

    kept = joins.run(True, backend=ScriptedBackend(script)).ret_value
    assert [str(value) for value in kept] == ["ok", "middle", "ok"]
    assert isinstance(kept[1], RequestError)
    with pytest.raises(RequestError, match="middle"):
        joins.run(False, backend=ScriptedBackend(script))


def test_a_second_join_on_the_same_names_gathers_again():
    texts = iter(["one", "two", "three", "four"])
    backend = ScriptedBackend(lambda t, r: next(texts), inline=True)

    @function
    def joins(s):
        s += "Q"
        forks = s.fork(2)
        forks += gen("a")
        forks.join()
        first = s["a"]
        forks += gen("a")
        forks.join()
        return first, s["a"]

    assert joins.run(backend=backend).ret_value == (["one", "two"], ["three", "four"])


def test_1000_forks_of_one_prompt_compute_it_once_and_start_no_threads():
    @function
    def program(s):
        s += "word " * 100
        forks = s.fork(1000)
        forks += gen("a", max_tokens=1)
        forks.join()
        return len(s["a"])

    backend = ScriptedBackend("x")
    others = set(threading.enumerate())  # of other tests' servers and engines; a server that is left feels its engine's pulse now and then
    assert program.run(backend=backend).ret_value == 1000
    started = [thread for thread in threading.enumerate() if thread not in others and thread.name != "agentrt-pulse"]
    stats = backend.stats()
    assert stats["prompt_tokens"] - stats["cached_tokens"] <= 500 + 1000
    assert len(started) <= 2


def test_first_takes_the_winners_and_cancels_the_losers():
    def script(text, request):
        number = int(text[-1])
        return Answer("yes" if number % 2 else "no", delay=0.01 if number < 3 else 60)

    @function
    def program(s):
        s += "Q"
        forks = s.fork(5)
        forks += lambda i: str(i)
        forks += gen("a")
        winners = forks.first(1, where=lambda f: f["a"] == "yes")
        return [w["a"] for w in winners]

    backend = ScriptedBackend(script)
    state = program.run(backend=backend)
    assert state.ret_value == ["yes"]
    assert len(backend.aborts) in (2, 3)  # the third branch may have ended by then
    assert state.recording.winners == {"#1": [0, 1]} or 1 in next(iter(state.recording.winners.values()))


class OneAfterTheOther(ScriptedBackend):
    """Answers "x" to prompts by their last letters, in this order, each when the one before has ended; begins when it is told to."""

    def __init__(self, order):
        super().__init__("x")
        self.order, self.held, self.begun = list(order), {}, False

    def submit(self, request, sink):
        self.held[self.tokenizer.decode(request.prompt_ids)[-1]] = (request, sink)

    def begin(self):
        begun, self.begun = self.begun, True
        if not begun:
            self.answer_next()

    def answer_next(self):
        if self.order:
            request, sink = self.held[self.order.pop(0)]

            def told(delta):
                sink(delta)
                if delta.last:
                    self.answer_next()

            super().submit(request, told)


@pytest.fixture
def one_after_the_other(monkeypatch):
    """Makes such backends. They begin when the program waits for the first answer: what ended before that has no order any more."""
    made = []

    def begin_and_wait(news):
        made[-1].begin()
        return wait(news)

    def make(order):
        made.append(OneAfterTheOther(order))
        return made[-1]

    monkeypatch.setattr("agentrt.lang.forks.wait", begin_and_wait)
    return make


def test_a_replay_takes_the_winners_that_were_recorded_whoever_is_first_now(one_after_the_other):
    @function
    def program(s):
        s += "Q"
        forks = s.fork(3)
        forks += lambda i: str(i)
        forks += gen("a")
        (winner,) = forks.first(1)
        return winner.text()[1]

    state = program.run(backend=one_after_the_other("102"))
    assert state.ret_value == "1"
    assert program.run(backend=one_after_the_other("201")).ret_value == "2"
    assert program.replay(state.recording, backend=one_after_the_other("201")).ret_value == "1"


def test_the_deadline_of_a_branch_ends_that_branch_alone():
    def script(text, request):
        return Answer("x", delay=60 if text.endswith("1") else 0)

    @function
    def program(s):
        s += "Q"
        hurried, others = s.fork(1, deadline=0.1), s.fork(2)
        hurried += "1" + gen("a")
        others += "2" + gen("b")
        hurried.join(return_exceptions=True)
        others.join()
        s += "and on" + gen("c")
        return s["a"], s["b"], s["c"]

    backend = ScriptedBackend(script)
    (error,), answers, after = program.run(backend=backend).ret_value
    assert isinstance(error, AbortedError)
    assert (answers, after) == (["x", "x"], "x")
    assert backend.load().running == 0


def test_first_raises_when_too_few_branches_end_as_wanted():
    @function
    def program(s):
        s += "Q"
        forks = s.fork(3)
        forks += gen("a")
        forks.first(2, where=lambda f: f["a"] == "never")

    with pytest.raises(RequestError, match="only 0 of 3"):
        program.run(backend=ScriptedBackend("x"))


def test_as_completed_yields_in_the_order_of_ending(one_after_the_other):
    @function
    def program(s):
        s += "Q"
        forks = s.fork(3)
        forks += lambda i: str(i)
        forks += gen("a")
        return [s.text()[-2] for s in forks.as_completed()]

    assert program.run(backend=one_after_the_other("120")).ret_value == ["1", "2", "0"]
