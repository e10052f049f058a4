"""What frontends get wrong, each as a test whose name says it; all on the scripted backend."""

from __future__ import annotations

import asyncio
import inspect
import json
import threading
import time
import warnings
from typing import Literal

import pytest
from pydantic import BaseModel, field_validator

import agentrt as sgl  # noqa: F401  (a program written for sgl: text before a gen stays as it is)
from agentrt.backends.scripted import Answer, ScriptedBackend
from agentrt.errors import AbortedError, ConstraintError, EngineError, QueueFullError, RequestError, UserError
from agentrt.lang.budget import BudgetError
from agentrt.lang.expressions import assistant, gen, gen_int, select, special, system, user
from agentrt.lang.program import function
from agentrt.lang.values import CutValueError, InvalidValueError
from agentrt.lang.variables import UnknownVariableError
from agentrt.request import SamplingParams


def line_of(func, text):
    lines, start = inspect.getsourcelines(getattr(func, "func", func))
    return next(start + i for i, line in enumerate(lines) if text in line)


# ------------------------------------------------------------------------- errors


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


def wait_until(true, seconds=10.0):
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


# ---------------------------------------------------------------------- run_batch


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


# ---------------------------------------------------------------------------- join


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


# --------------------------------------------------------------------------- async


@function
async def native(s, question):
    s += "Q: " + question
    first = await s.gen("a")
    s += "R" + gen("b")
    pieces = [piece async for piece in s.text_iter("b")]
    forks = s.fork(2)
    forks += gen("c")
    await forks.join()
    return first, await s["b"], pieces, await s["c"]


def test_async_programs_work_natively_and_from_synchronous_code():
    backend = ScriptedBackend("hey")
    expected = ("hey", "hey", list("hey"), ["hey", "hey"])
    assert native.run("x", backend=backend).ret_value == expected

    async def main():
        one, two = await asyncio.gather(native.arun("x", backend=backend), native.arun("y", backend=backend))
        return one.ret_value, two.ret_value, native.run("z", backend=backend).ret_value

    assert asyncio.run(main()) == (expected, expected, expected)


def test_sync_programs_can_be_called_from_a_running_event_loop():
    @function
    def plain(s):
        s += "Q" + gen("a")
        return s["a"]

    backend = ScriptedBackend("x")

    async def main():
        return plain.run(backend=backend).ret_value, (await plain.arun(backend=backend)).ret_value

    assert asyncio.run(main()) == ("x", "x")


def test_awaiting_a_program_does_not_block_the_loop_and_cancelling_the_task_cancels_it():
    backend = ScriptedBackend(lambda t, r: Answer("x", delay=60))

    async def main(program):
        task = asyncio.create_task(program.arun(backend=backend))
        while not backend.requests or len(backend.requests) == len(backend.aborts):
            await asyncio.sleep(0.002)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    @function
    def plain(s):
        s += "Q" + gen("a")
        s["a"]

    @function
    async def native_one(s):
        s += "Q" + gen("a")
        await s["a"]

    for count, program in enumerate((plain, native_one), start=1):
        asyncio.run(main(program))
        wait_until(lambda: not backend.load().running)
        assert len(backend.aborts) == count


def test_streams_work_in_async_code():
    @function
    def plain(s):
        s += "Q" + gen("a")

    async def main():
        state = await plain.arun(backend=ScriptedBackend("añ🙂"), stream=True)
        return [pair async for pair in state.text_async_iter("a", return_meta_data=True)]

    pairs = asyncio.run(main())
    assert "".join(text for text, _ in pairs) == "añ🙂"


# --------------------------------------------------------------------------- trace


def test_trace_works_with_roles_with_blocks_and_var_scope_and_runs_the_body_once():
    ran = []

    @function
    def program(s, topic):
        ran.append(topic)
        s += system("Be brief.")
        with s.user():
            s += "About " + topic
        with s.assistant(), s.var_scope("whole"):
            s += gen("a", max_tokens=5)
            s += " and "
            s += select("b", ["x", "y"])
        s += user(f"You said {s['a']}")

    traced = program.trace("cats")
    assert ran == ["cats"]
    assert traced.complete
    assert traced.variables == ["whole", "a", "b"]
    kinds = [type(node).__name__ for node in traced.nodes]
    assert kinds == [
        "RoleBegin", "Text", "RoleEnd", "RoleBegin", "Text", "RoleEnd", "RoleBegin", "ScopeBegin", "Gen", "Text", "Select",
        "ScopeEnd", "RoleEnd", "RoleBegin", "Text", "RoleEnd",
    ]  # fmt: skip
    assert [type(node).__name__ for node in traced.prefix][-1] == "ScopeBegin"


def test_run_runs_the_body_once_and_prefix_extraction_only_when_asked():
    ran = []

    @function
    def program(s, topic):
        ran.append(topic)
        s += "A constant beginning of some length. About " + topic
        s += gen("a")

    backend = ScriptedBackend("x")
    program.run("cats", backend=backend)
    assert ran == ["cats"]
    tokens = program.cache(backend=backend)
    assert len(ran) == 2
    assert tokens == len(backend.tokenizer.encode("A constant beginning of some length. About "))
    assert backend.requests[-1].sampling.max_tokens == 0


def test_a_trace_says_where_the_body_decides_by_what_is_unknown():
    @function
    def program(s):
        s += "Q" + gen("a")
        if s["a"] == "yes":
            s += "more" + gen("b")

    traced = program.trace()
    assert not traced.complete
    assert "'a'" in traced.why
    assert traced.variables == ["a"]


# ----------------------------------------------------------------------- arguments


def test_a_program_whose_arguments_are_called_n_stop_temperature_receives_them():
    @function
    def program(s, n, stop, temperature, backend="mine", stream=None):
        s += "Q" + gen("a", max_tokens=3)
        return n, stop, temperature, backend, stream

    default = ScriptedBackend("x")
    bound = program.bind(temperature="hot")
    from agentrt import backend as backends

    backends.set_default_backend(default)
    try:
        assert program.run(n=5, stop="END", temperature="hot", stream=1).ret_value == (5, "END", "hot", "mine", 1)
        assert bound.run(7, "END").ret_value == (7, "END", "hot", "mine", None)
        (state,) = program.run_batch([{"n": 1, "stop": 2, "temperature": 3, "backend": 4}])
        assert state.ret_value == (1, 2, 3, 4, None)
    finally:
        backends.set_default_backend(None)
    assert all(request.sampling.stop == () for request in default.requests)


def test_sampling_can_be_given_as_one_object_and_both_names_of_max_tokens_work():
    @function
    def program(s):
        s += "Q" + gen("a") + gen("b", max_tokens=2) + gen("c", max_new_tokens=3)

    backend = ScriptedBackend("abcdefgh")
    program.run(backend=backend, sampling=SamplingParams(temperature=0.5, top_p=0.9, max_tokens=4))
    assert [(r.sampling.max_tokens, r.sampling.top_p, r.sampling.temperature) for r in backend.requests] == [
        (4, 0.9, 0.5), (2, 0.9, 0.5), (3, 0.9, 0.5),
    ]  # fmt: skip
    program.run(backend=backend, max_tokens=7)
    assert backend.requests[-3].sampling.max_tokens == 7
    program.run(backend=backend, max_new_tokens=6)
    assert backend.requests[-3].sampling.max_tokens == 6
    program.run(backend=backend)
    assert backend.requests[-3].sampling.max_tokens == 128


def test_an_option_that_means_nothing_is_refused():
    with pytest.raises(UserError, match="temprature"):
        gen("a", temprature=1)
    with pytest.raises(UserError, match="temprature"):
        numbered.run(1, temprature=1)
    with pytest.raises(UserError, match="same option"):
        gen("a", max_tokens=1, max_new_tokens=2)


# --------------------------------------------------------------------------- types


class City(BaseModel):
    name: str
    people: int

    @field_validator("people")
    @classmethod
    def some_people(cls, value: int) -> int:
        if value <= 0:
            raise ValueError("a city has people")
        return value


@function
def typed(s, **kinds):
    s += "Q"
    for name, kind in kinds.items():
        s += gen(name, type=kind)
    return {name: s[name] for name in kinds}


@pytest.mark.parametrize(
    ("kind", "said", "value"),
    [
        (int, "42", 42),
        (float, "-2.50", -2.5),
        (bool, "true", True),
        (bool, "false", False),
        (str, '"é \\"x\\" 🙂"', 'é "x" 🙂'),
        (City, '{"name": "Rome", "people": 3}', City(name="Rome", people=3)),
        (list[int], "[1, 2]", [1, 2]),
        (Literal["a", "b"], '"b"', "b"),
    ],
)
def test_typed_results_are_python_values(kind, said, value):
    got = typed.run(x=kind, backend=ScriptedBackend(said)).ret_value["x"]
    assert got == value
    assert type(got) is type(value)


def test_gen_int_is_an_int_and_dtype_int_too():
    @function
    def program(s):
        s += "Q" + gen_int("a") + gen("b", dtype=int) + gen("c", dtype="int")
        return s["a"], s["b"], s["c"]

    assert program.run(backend=ScriptedBackend("-7")).ret_value == (-7, -7, -7)


def test_partial_objects_stream_and_the_final_value_is_validated():
    @function
    def program(s):
        s += "Q" + gen("city", type=City)

    state = program.run(backend=ScriptedBackend('{"name": "Rome", "people": 3}'), stream=True)
    partial = list(state.partial_iter("city"))
    assert partial[0] == {}
    assert {"name": "Ro"} in partial
    assert partial[-1] == {"name": "Rome", "people": 3}
    assert state["city"] == City(name="Rome", people=3)


def test_typed_gens_may_use_the_remaining_context_not_128_tokens():
    backend = ScriptedBackend("42")

    @function
    def program(s):
        s += "Q" + gen("a", dtype=int) + gen("b") + gen("c", type=int, max_tokens=5)

    program.run(backend=backend)
    assert [r.sampling.max_tokens for r in backend.requests] == [None, 128, 5]


def test_a_typed_value_that_was_cut_raises_with_the_partial_attached():
    @function
    def program(s, kind, limit):
        s += "Q" + gen("a", type=kind, max_tokens=limit)

    with pytest.raises(CutValueError, match="max_tokens") as caught:
        program.run(City, 12, backend=ScriptedBackend('{"name": "Rome", "people": 3}'))
    assert caught.value.text.startswith('{"name": "R')
    assert caught.value.partial["name"].startswith("R")
    with pytest.raises(CutValueError):
        program.run(int, 2, backend=ScriptedBackend("12345"))


def test_re_ask_feeds_the_validators_message_back_on_the_same_prefix():
    answers = iter(['{"name": "Rome", "people": 0}', '{"name": "Rome", "people": 3}'])
    backend = ScriptedBackend(lambda t, r: next(answers), inline=True)

    @function
    def program(s):
        s += user("Which city?")
        s += assistant(gen("city", type=City, retries=2))

    state = program.run(backend=backend)
    assert state["city"].people == 3
    first, second = backend.requests
    assert second.prompt_ids[: len(first.prompt_ids)] == first.prompt_ids
    assert "a city has people" in backend.tokenizer.decode(second.prompt_ids)
    assert [m["role"] for m in state.messages()] == ["user", "assistant", "user", "assistant"]
    assert "".join(state.text_iter("city")) == '{"name": "Rome", "people": 3}'


def test_a_value_that_was_cut_is_asked_for_again_while_the_context_has_room():
    whole, long = '{"name": "Rome", "people": 3}', '{"name": "Rome, the city of'
    answers = iter([long, whole, long])

    @function
    def program(s):
        s += "Q" + gen("city", type=City, retries=1, max_tokens=40)

    backend = ScriptedBackend(lambda t, r: Answer(said := next(answers), ends=said == whole), inline=True)
    assert program.run(backend=backend)["city"].people == 3
    assert "cut after" in backend.tokenizer.decode(backend.requests[1].prompt_ids)
    small = ScriptedBackend(lambda t, r: Answer(next(answers), ends=False), inline=True, max_context=64)
    with pytest.raises(CutValueError, match="max_length"):
        program.run(backend=small)
    assert len(small.requests) == 1


def test_re_ask_gives_up_after_its_retries():
    @function
    def program(s):
        s += "Q" + gen("city", type=City, retries=2)

    backend = ScriptedBackend('{"name": "Rome", "people": 0}')
    with pytest.raises(InvalidValueError, match="a city has people"):
        program.run(backend=backend)
    assert len(backend.requests) == 3


# -------------------------------------------------------------------------- select


def test_select_scores_only_the_choices_own_tokens_exactly_at_the_text_boundary():
    asked = []
    backend = ScriptedBackend(score=lambda before, token: asked.append((tuple(before), token)) or -1.0)

    @function
    def program(s):
        s += "is it a" + select("x", ["b", "bc"])  # "ab" and "abc" are tokens of their own

    program.run(backend=backend)
    prompt = tuple(backend.tokenizer.encode("is it a"))
    assert asked == [(prompt, ord("b")), (prompt, ord("b")), ((*prompt, ord("b")), ord("c"))]


@pytest.mark.parametrize(
    "method", ["token_length_normalized", "greedy_token_selection", "unconditional_likelihood_normalized"]
)
def test_a_zero_log_probability_never_divides_by_zero(method):
    backend = ScriptedBackend(score=lambda before, token: 0.0)

    @function
    def program(s):
        s += "Q" + select("x", ["aa", "b"], choices_method=method)
        return s["x"]

    assert program.run(backend=backend).ret_value in ("aa", "b")


def test_choices_that_share_a_prefix_are_scored_from_one_shared_prefill():
    backend = ScriptedBackend()

    @function
    def program(s):
        s += "A prompt that is long enough to matter. " + select("x", ["red apple", "red pear", "red plum"])

    program.run(backend=backend)
    computed = backend.stats()["prompt_tokens"] - backend.stats()["cached_tokens"]
    prompt = len(backend.tokenizer.encode("A prompt that is long enough to matter. "))
    assert computed <= prompt + len("red apple") + 3 * len("pear")


# ------------------------------------------------------------------------- unicode


def test_streamed_emoji_never_yields_a_replacement_character():
    @function
    def program(s):
        s += "Q" + gen("a")

    text = "🙂👩‍👩‍👧 é ñ 漢字 ok"
    state = program.run(backend=ScriptedBackend(text), stream=True)
    pieces = list(state.text_iter("a"))
    assert "".join(pieces) == text
    assert not any("�" in piece for piece in pieces)
    assert len(pieces) > 5


def test_regex_classes_are_unicode():
    @function
    def program(s):
        s += "Q" + gen("a", regex=r"\w+")
        return s["a"]

    assert program.run(backend=ScriptedBackend("Grüße漢字")).ret_value == "Grüße漢字"


# --------------------------------------------------------------------------- seeds


@function
def drawn(s):
    s += "Q" + gen("a")
    forks = s.fork(3)
    forks += gen("b")
    forks.join()
    s += gen("c", seed=77)
    return s["a"], s["b"], s["c"]


def says_its_seed(text, request):
    return str(request.sampling.seed)


def test_the_same_seed_gives_the_same_output_whatever_else_runs_and_each_fork_its_own():
    backend = ScriptedBackend(says_its_seed)
    alone = drawn.run(backend=backend, seed=5).ret_value
    together = numbered.run_batch([(n,) for n in range(20)], backend=backend, generator_style=True)
    beside = drawn.run(backend=backend, seed=5).ret_value
    list(together)
    other = drawn.run(backend=backend, seed=6).ret_value
    assert alone == beside
    assert alone[2] == "77"
    assert len({alone[0], *alone[1]}) == 4
    assert other[0] != alone[0]
    unseeded = {drawn.run(backend=backend).ret_value[0] for _ in range(3)}
    assert len(unseeded) == 3


def test_reading_a_state_does_not_change_its_seeds():
    @function
    def looks(s, much):
        s += "Q"
        if much:
            s.text(), s.sync(), s.token_ids(), s.messages()
        s += gen("a")
        return s["a"]

    backend = ScriptedBackend(says_its_seed)
    assert looks.run(True, backend=backend, seed=1).ret_value == looks.run(False, backend=backend, seed=1).ret_value


# ----------------------------------------------------------------------- token ids


def test_two_appends_give_the_ids_of_one_string():
    @function
    def program(s):
        s += "He said a"
        s += "b"
        s += "c and t" + "he rest"
        s += gen("a")

    backend = ScriptedBackend("x")
    program.run(backend=backend)
    assert list(backend.requests[0].prompt_ids) == backend.tokenizer.encode("He said abc and the rest")


def test_generated_ids_are_appended_as_they_are_and_fed_prefixes_never_change():
    @function
    def program(s):
        s += "is it a" + gen("a") + "c" + gen("b")

    backend = ScriptedBackend("b")
    state = program.run(backend=backend)
    first, second = backend.requests
    assert second.prompt_ids == (*first.prompt_ids, ord("b"), ord("c"))  # not the token "bc" or "abc"
    assert state.text() == "is it abcb"


def test_turn_two_of_a_chat_reuses_every_token_of_turn_one_generated_ones_included():
    @function
    def chat(s):
        s += system("You are brief.")
        s += user("Hello")
        s += assistant(gen("a"))
        s += user("And now?")
        s += assistant(gen("b"))

    backend = ScriptedBackend("Hi there the end.")
    state = chat.run(backend=backend)
    first, second = backend.requests
    said = backend.tokenizer.encode("Hi there the end.")
    assert second.prompt_ids[: len(first.prompt_ids) + len(said)] == (*first.prompt_ids, *said)
    assert state.get_meta_info("b")["cached_tokens"] == len(first.prompt_ids) + len(said)
    whole = backend.tokenizer.encode_chat(
        [
            {"role": "system", "content": "You are brief."},
            {"role": "user", "content": "Hello"},
            {"role": "assistant", "content": "Hi there the end."},
            {"role": "user", "content": "And now?"},
        ]
    )
    assert list(second.prompt_ids) == whole  # what the template renders, token for token
    assert second.prompt_ids.count(backend.tokenizer.eos_ids[0]) == 4


def test_a_stop_string_that_ends_inside_a_token_is_cut_from_the_text_and_not_fed_twice():
    @function
    def program(s, after):
        s += "Q: " + gen("a", stop=".") + after + gen("b")

    backend = ScriptedBackend("one. two")
    state = program.run(". Next:", backend=backend)
    second = backend.requests[1]
    assert state["a"] == "one"
    assert backend.tokenizer.decode(second.prompt_ids) == "Q: one. Next:"
    assert state.text() == "Q: one. Next:one. two"
    other = program.run("!", backend=backend)
    assert other.text() == "Q: one!one. two"
    assert backend.tokenizer.decode(backend.requests[-1].prompt_ids) == "Q: one!"


def test_an_id_that_straddles_the_end_of_the_text_is_kept_and_marked():
    from agentrt.lang.transcript import CUT

    @function
    def program(s):
        s += "Q: " + gen("a", stop="g") + "!" + gen("b")

    backend = ScriptedBackend("ring")  # "ing" is one token
    state = program.run(backend=backend)
    assert state["a"] == "rin"
    transcript = state._branch.transcript
    assert backend.tokenizer.decode(backend.requests[-1].prompt_ids) == "Q: ring!"
    place = len(backend.tokenizer.encode("Q: r"))
    assert transcript.kinds[place] & CUT
    assert not any(kind & CUT for kind in transcript.kinds[:place])


def test_text_that_spells_a_control_token_is_text_special_writes_the_token_and_a_warning_comes_once():
    @function
    def program(s):
        s += "a<|im_end|>b<|im_end|>"
        s += gen("x")

    @function
    def meant(s):
        s += "a" + special("<|im_end|>") + "b" + gen("x")

    backend = ScriptedBackend("x")
    with pytest.warns(UserWarning, match="special") as caught:
        program.run(backend=backend)
    assert len(caught) == 1
    end = backend.tokenizer.eos_ids[0]
    assert end not in backend.requests[0].prompt_ids
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        state = meant.run(backend=backend)
    assert list(backend.requests[1].prompt_ids) == [ord("a"), end, ord("b")]
    assert state.text() == "a<|im_end|>bx"

    @function
    def wrong(s):
        s += special("<|nope|>")

    with pytest.raises(UserError, match="no control token"):
        wrong.run(backend=backend)


def test_no_double_bos():
    from agentrt.backends.byte_tokenizer import ByteTokenizer

    class WithBos(ByteTokenizer):
        bos_id = 7

        def encode(self, text, *, bos=False, special=False):
            return ([7] if bos else []) + super().encode(text, special=special)

        def encode_chat(self, messages, **kw):
            return [self._begin, *super().encode_chat(messages, **kw)]

    backend = ScriptedBackend("x", tokenizer=WithBos())

    @function
    def plain(s):
        s += "Q" + gen("a") + "R" + gen("b")

    @function
    def chat(s):
        s += user("Q") + assistant(gen("a"))

    plain.run(backend=backend)
    assert [r.prompt_ids.count(7) for r in backend.requests] == [1, 1]
    chat.run(backend=backend)
    assert backend.requests[-1].prompt_ids.count(7) == 0  # the template brings its own beginning


def test_an_empty_prompt_is_an_error_with_its_line():
    @function
    def program(s):
        s += gen("a")

    with pytest.raises(UserError, match="empty") as caught:
        program.run(backend=ScriptedBackend())
    assert caught.value.__notes__


# ------------------------------------------------------------------------- threads


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
        most.append(threading.active_count())
        return "x" if text.endswith("first ") else "y"

    @function
    def program(s, number):
        s += f"{number} first " + gen("a")
        assert s["a"] == "x"
        s += " second " + gen("b")
        return s["b"]

    others = threading.active_count()
    backend = AnswersWhenAllHaveAsked(script, 2000)
    states = program.run_batch([{"number": n} for n in range(2000)], backend=backend)
    assert [s.ret_value for s in states] == ["y"] * 2000
    assert max(most) < min(20, others + 10)


def test_1000_forks_of_one_prompt_compute_it_once_and_start_no_threads():
    @function
    def program(s):
        s += "word " * 100
        forks = s.fork(1000)
        forks += gen("a", max_tokens=1)
        forks.join()
        return len(s["a"])

    backend = ScriptedBackend("x")
    threads = threading.active_count()
    assert program.run(backend=backend).ret_value == 1000
    stats = backend.stats()
    assert stats["prompt_tokens"] - stats["cached_tokens"] <= 500 + 1000
    assert threading.active_count() <= threads + 2


# ------------------------------------------------- deadlines, budgets, cancelling


def test_deadlines_reach_the_backend_and_end_the_program():
    @function
    def program(s):
        s += "Q" + gen("a")

    backend = ScriptedBackend(lambda t, r: Answer("x", delay=60))
    with pytest.raises(AbortedError):
        program.run(backend=backend, deadline=0.05)
    assert 0 < backend.requests[0].deadline <= 0.05

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
    """Answers "x" to prompts by their last letters, in this order, each when the one before has ended."""

    def __init__(self, order):
        super().__init__("x")
        self.order, self.held, self.guard = list(order), {}, threading.Lock()

    def submit(self, request, sink):
        with self.guard:
            self.held[self.tokenizer.decode(request.prompt_ids)[-1]] = (request, sink)
            complete = len(self.held) == len(self.order)
        if complete:
            self.answer_next()

    def answer_next(self):
        if self.order:
            request, sink = self.held[self.order.pop(0)]

            def told(delta):
                sink(delta)
                if delta.last:
                    self.answer_next()

            super().submit(request, told)


def test_a_replay_takes_the_winners_that_were_recorded_whoever_is_first_now():
    @function
    def program(s):
        s += "Q"
        forks = s.fork(3)
        forks += lambda i: str(i)
        forks += gen("a")
        (winner,) = forks.first(1)
        return winner.text()[1]

    state = program.run(backend=OneAfterTheOther("102"))
    assert state.ret_value == "1"
    assert program.run(backend=OneAfterTheOther("201")).ret_value == "2"
    assert program.replay(state.recording, backend=OneAfterTheOther("201")).ret_value == "1"


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


def test_as_completed_yields_in_the_order_of_ending():
    @function
    def program(s):
        s += "Q"
        forks = s.fork(3)
        forks += lambda i: str(i)
        forks += gen("a")
        return [s.text()[-2] for s in forks.as_completed()]

    assert program.run(backend=OneAfterTheOther("120")).ret_value == ["1", "2", "0"]


# ------------------------------------------------------ accepted with one warning


def test_what_only_sglangs_surface_asks_for_is_accepted_with_one_warning():
    with pytest.warns(UserWarning, match="num_api_spec_tokens"):

        @function(num_api_spec_tokens=64)
        def program(s):
            s += "Q"
            forks = s.fork(2, position_ids_offset=[0, 1])
            forks += gen("a")
            forks.join("concate_and_append")

    with pytest.warns(UserWarning, match=r"accepted|appends") as caught:
        state = program.run(backend=ScriptedBackend("x"))
    assert sorted(str(w.message).split()[0] for w in caught) == ["join('concate_and_append')", "position_ids_offset"]
    assert state.text() == "Qxx"
    assert json.dumps(state.recording.to_json())
