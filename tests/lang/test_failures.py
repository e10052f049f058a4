"""What goes wrong in a program is raised where it is read, with the program's line; nothing hangs and nothing is swallowed."""

from __future__ import annotations

import asyncio
import inspect
import time

import pytest

import agentrt as sgl  # noqa: F401  (a program written for sgl: text before a gen stays as it is)
from agentrt.backends.scripted import Answer, ScriptedBackend
from agentrt.errors import AbortedError, ConstraintError, EngineError, QueueFullError, RequestError, UserError
from agentrt.lang.expressions import gen
from agentrt.lang.program import function
from agentrt.lang.variables import UnknownVariableError


def line_of(func, text):
    lines, start = inspect.getsourcelines(getattr(func, "func", func))
    return next(start + i for i, line in enumerate(lines) if text in line)


@function
def asks_twice(s):
    s += "Q"
    s += gen("a")
    s += "R"
    s += gen("b")  # the failing line
    s += "end"
    return s["b"]


def fails_on_second(error):
    def script(text, request):
        return Answer("half", error=error) if text.endswith("R") else "fine"

    return ScriptedBackend(script)


@pytest.mark.parametrize(
    "error", [EngineError("engine down"), ConstraintError("bad"), QueueFullError("full"), AbortedError("gone")]
)
def test_a_backend_error_is_raised_from_run_with_the_programs_source_line(error):
    with pytest.raises(type(error), match=str(error)) as caught:
        asks_twice.run(backend=fails_on_second(error))
    note = "\n".join(caught.value.__notes__)
    assert f"{__file__}:{line_of(asks_twice, 'the failing line')}" in note
    assert "asks_twice" in note
    assert 's += gen("b")' in note


def test_an_error_at_the_door_is_raised_from_run_with_the_programs_source_line():
    @function
    def bad(s):
        s += "x"
        s += gen("a", temperature=-1)  # here

    with pytest.raises(UserError, match="temperature") as caught:
        bad.run(backend=ScriptedBackend())
    assert f":{line_of(bad, '# here')}" in caught.value.__notes__[0]


def test_a_body_error_is_raised_from_run_and_ends_what_is_in_flight():
    backend = ScriptedBackend(lambda t, r: Answer("x", delay=60))

    @function
    def breaks(s):
        s += "Q" + gen("a")
        raise ZeroDivisionError("in the body")

    with pytest.raises(ZeroDivisionError):
        breaks.run(backend=backend)
    wait_until(lambda: not backend.load().running)
    assert len(backend.aborts) == 1
    assert len(backend.ended) == 1


def test_sync_text_variables_streams_and_iterators_end_with_that_same_error():
    state = asks_twice.run(backend=fails_on_second(EngineError("down")), stream=True)
    seen = []
    for read in (
        lambda: state.sync(),
        lambda: state.text(),
        lambda: state["b"],
        lambda: state.get_meta_info("b"),
        lambda: list(state.text_iter()),
        lambda: list(state.text_iter("b")),
        lambda: asyncio.run(drain(state.text_async_iter())),
        lambda: asyncio.run(drain(state.text_async_iter("b"))),
        lambda: state.messages(),
        lambda: state.fork(2),
    ):
        with pytest.raises(EngineError, match="down") as caught:
            read()
        seen.append(caught.value)
    assert all(error is seen[0] for error in seen)
    assert state.error() is seen[0]
    assert state["a"] == "fine"  # what was there before the failure stays


async def drain(pieces):
    return [piece async for piece in pieces]


def wait_until(true, seconds=60.0):
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.002)


def test_a_body_error_is_not_swallowed_under_stream():
    @function
    def breaks(s):
        s += "Q" + gen("a")
        s["a"]
        raise ZeroDivisionError("in the body")

    state = breaks.run(backend=ScriptedBackend("x"), stream=True)
    with pytest.raises(ZeroDivisionError):
        list(state.text_iter())
    with pytest.raises(ZeroDivisionError):
        state.sync()
    assert isinstance(state.error(), ZeroDivisionError)


def test_a_variable_that_never_comes_raises_instead_of_hanging_or_giving_none():
    @function
    def short(s):
        s += "Q" + gen("a")
        return s["nope"]

    with pytest.raises(UnknownVariableError, match=r"'nope'.*'a'") as caught:
        short.run(backend=ScriptedBackend())
    assert isinstance(caught.value, KeyError)

    @function
    def fine(s):
        s += "Q" + gen("a")

    state = fine.run(backend=ScriptedBackend(lambda t, r: Answer("x", delay=0.05)), stream=True)
    with pytest.raises(UnknownVariableError):
        state["nope"]
    with pytest.raises(UnknownVariableError):
        list(state.text_iter("nope"))


def test_a_failed_branch_that_nobody_looked_at_is_raised_from_run():
    def script(text, request):
        return Answer("", error=RequestError("branch two")) if text.endswith("2") else "x"

    @function
    def forks_and_forgets(s):
        s += "Q"
        forks = s.fork(3)
        forks += lambda i: f"{i}"
        forks += gen("a")

    with pytest.raises(RequestError, match="branch two"):
        forks_and_forgets.run(backend=ScriptedBackend(script))


def test_a_failed_branch_that_the_body_handled_is_not_raised_again():
    def script(text, request):
        return Answer("", error=RequestError("no")) if text.endswith("try ") else "other way"

    @function
    def recovers(s):
        s += "Q "
        attempt = s.copy()
        attempt += "try " + gen("a")
        try:
            return attempt["a"]
        except RequestError:
            s += "else " + gen("b")
            return s["b"]

    assert recovers.run(backend=ScriptedBackend(script)).ret_value == "other way"


def test_the_backend_failing_at_submit_from_a_completion_ends_the_program():
    class Broken(ScriptedBackend):
        def submit(self, request, sink):
            if len(self.requests) >= 1:
                raise EngineError("down at the second call")
            super().submit(request, sink)

    with pytest.raises(EngineError, match="second call"):
        asks_twice.run(backend=Broken("x"))
