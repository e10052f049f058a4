"""Conformance: what ``@function`` gives, the roles, and what newcomers get wrong, one test each, run as ``sgl``."""

from __future__ import annotations

import pytest

import agentrt as sgl
from agentrt.backends.scripted import Answer, ScriptedBackend
from agentrt.errors import UserError


@sgl.function
def plain_ask(s):
    s += "Q: " + sgl.gen("a")


@pytest.mark.parametrize("form", ["nodes", "begin_end", "methods", "with", "method_begin_end"])
def test_roles_in_all_their_forms_give_the_same_ids(form, scripted):
    @sgl.function
    def program(s):
        if form == "nodes":
            s += sgl.system("A") + sgl.user("B") + sgl.assistant(sgl.gen("x"))
        elif form == "begin_end":
            s += sgl.system_begin() + "A" + sgl.system_end()
            s += sgl.user_begin() + "B" + sgl.user_end()
            s += sgl.assistant_begin() + sgl.gen("x") + sgl.assistant_end()
        elif form == "methods":
            s.system("A")
            s += s.user("B")
            s.assistant(sgl.gen("x"))
        elif form == "with":
            with s.system():
                s += "A"
            with s.user():
                s += "B"
            with s.assistant():
                s += sgl.gen("x")
        else:
            s.system_begin()
            s += "A"
            s.system_end()
            s.user_begin()
            s += "B"
            s.user_end()
            s.assistant_begin()
            s += sgl.gen("x")
            s.assistant_end()

    state = program.run(backend=scripted)
    expected = scripted.tokenizer.encode_chat(
        [{"role": "system", "content": "A"}, {"role": "user", "content": "B"}, {"role": "assistant", "content": "ok"}],
        add_generation_prompt=False,
    )
    assert state.token_ids() == expected
    assert state.messages() == [
        {"role": "system", "content": "A"},
        {"role": "user", "content": "B"},
        {"role": "assistant", "content": "ok"},
    ]


def test_roles_out_of_order_are_an_error_with_their_line(scripted):
    @sgl.function
    def nested(s):
        s += sgl.user_begin() + sgl.system("x")

    @sgl.function
    def unopened(s):
        s += sgl.user_end()

    for program in (nested, unopened):
        with pytest.raises(UserError) as caught:
            program.run(backend=scripted)
        assert caught.value.__notes__


def test_function_with_and_without_parentheses_and_any_name_for_the_state(scripted):
    @sgl.function()
    def one(state, x):
        state += x + sgl.gen("a")

    @sgl.function
    def two(anything, x):
        anything += x + sgl.gen("a")

    assert one.run("Q", backend=scripted).text() == two.run(x="Q", backend=scripted).text() == "Qok"
    with pytest.raises(UserError, match="first parameter"):

        @sgl.function
        def none():
            pass


def test_run_batch_takes_dicts_or_tuples_and_keeps_their_order(scripted):
    @sgl.function
    def program(s, a, b="-"):
        s += a + b + sgl.gen("x")

    states = program.run_batch([{"a": "1", "b": "2"}, ("3", "4"), {"a": "5"}], backend=scripted)
    assert [state.text() for state in states] == ["12ok", "34ok", "5-ok"]
    assert program.run_batch([], backend=scripted) == []
    for wrong in ({"a": 1}, "abc", [3]):
        with pytest.raises(UserError):
            program.run_batch(wrong, backend=scripted)


@pytest.mark.parametrize("threads", ["auto", 1, 3])
def test_run_batch_num_threads_bounds_how_many_are_under_way(threads):
    most, now = [0], [0]

    @sgl.function
    def program(s, i):
        now[0] += 1
        most[0] = max(most[0], now[0])
        s += f"{i}" + sgl.gen("a")
        s["a"]
        now[0] -= 1

    states = program.run_batch(
        [{"i": i} for i in range(8)], num_threads=threads, backend=ScriptedBackend(lambda t, r: Answer("x", delay=0.01))
    )
    assert len(states) == 8
    assert most[0] <= (8 if threads == "auto" else threads)
    with pytest.raises(UserError, match="num_threads"):
        program.run_batch([{"i": 1}], num_threads=0)


def test_run_batch_progress_bar_and_generator_style(scripted, capsys):
    states = plain_ask.run_batch([{}, {}], progress_bar=True, backend=scripted)
    assert len(states) == 2
    one_by_one = plain_ask.run_batch([{}, {}], generator_style=True, backend=scripted)
    assert next(one_by_one)["a"] == "ok"
    assert len(list(one_by_one)) == 1


def test_bind_fixes_arguments(scripted):
    @sgl.function
    def program(s, a, b):
        s += a + b + sgl.gen("x")

    assert program.bind(b="2").run("1", backend=scripted).text() == "12ok"
    assert program.bind(b="2").run("1", b="3", backend=scripted).text() == "13ok"
    with pytest.raises(UserError, match="no parameter 'c'"):
        program.bind(c=1)


def test_calling_a_program_nests_it_in_the_callers_state_or_runs_it(scripted):
    @sgl.function
    def inner(s, x):
        s += x + sgl.gen("inner")
        return s["inner"]

    @sgl.function
    def outer(s):
        s += "A"
        got = inner(s, "B")
        s += "C" + sgl.gen("outer")
        return got

    state = outer.run(backend=scripted)
    assert state.text() == "ABokCok"
    assert state.ret_value == "ok"
    assert {r.program.program for r in scripted.requests} == {state._run.id}
    sgl.set_default_backend(scripted)
    try:
        assert inner("Q").text() == "Qok"
    finally:
        sgl.set_default_backend(None)


def test_nesting_across_sync_and_async(scripted):
    @sgl.function
    def plain(s, x):
        s += x + sgl.gen("p")
        return s["p"]

    @sgl.function
    async def native(s, x):
        s += x + sgl.gen("n")
        return await s["n"]

    @sgl.function
    async def outer(s):
        return await plain(s, "a"), await native(s, "b")

    @sgl.function
    def sync_outer(s):
        return plain(s, "a"), native(s, "b")

    assert outer.run(backend=scripted).text() == sync_outer.run(backend=scripted).text() == "aokbok"


def test_trace_and_cache(scripted):
    @sgl.function
    def program(s, x):
        s += "Before. " + x + sgl.gen("a")

    assert [type(n).__name__ for n in program.trace("y").nodes] == ["Text", "Gen"]
    assert program.cache(backend=scripted) == len(scripted.tokenizer.encode("Before. "))


def test_default_backend_flush_cache_and_server_info(scripted):
    sgl.set_default_backend(scripted)
    try:
        plain_ask.run()
        assert sgl.get_server_info()["model"] == "scripted"
        assert sgl.get_server_info()["requests"] == 1
        assert sgl.flush_cache().freed_tokens > 0
    finally:
        sgl.set_default_backend(None)


@pytest.mark.parametrize(
    "name",
    [
        "Runtime",
        "RuntimeEndpoint",
        "Engine",
        "OpenAI",
        "Anthropic",
        "set_default_backend",
        "flush_cache",
        "get_server_info",
    ],
)
def test_backends_are_public(name):
    assert name in sgl.__all__
    assert callable(getattr(sgl, name))


@pytest.mark.parametrize(
    ("body", "options", "words"),
    [
        (lambda s: sgl.gen("a", max_token=5), {}, "did you mean 'max_tokens'"),
        (lambda s: sgl.gen(["a", "b"]), {}, "the variable's name"),
        (lambda s: sgl.select(["a", "b"]), {}, "the variable's name"),
        (lambda s: sgl.select("a", "yes"), {}, "a list of at least one"),
        (lambda s: s.__iadd__(sgl.user), {}, r"call it: user\(\.\.\.\)"),
        (lambda s: s.__iadd__("Q" + sgl.gen("a", stop=5)), {}, "stop is 5; it must be a non-empty string"),
        (lambda s: s.__iadd__(sgl.assistant_begin() + sgl.user("a")), {}, r"end that one first: assistant_end\(\)"),
        (lambda s: [s.fork(2).__iadd__("Q" + sgl.gen("a")), s["a"]], {}, "branches of its fork have it: join"),
        (lambda s: None, {"temprature": 0}, "did you mean 'temperature'"),
        (lambda s: None, {"sampling": {"temperature": 0}}, "it must be SamplingParams"),
        (lambda s: None, {"backend": "http://localhost:30000"}, "RuntimeEndpoint"),
    ],
)
def test_what_was_meant_is_said(body, options, words, scripted):
    with pytest.raises(UserError, match=words):
        sgl.function(body).run(**{"backend": scripted} | options)


def test_arguments_that_do_not_fit_are_told_with_the_programs_name_and_signature(scripted):
    @sgl.function
    def ask(s, question):
        s += question

    with pytest.raises(TypeError, match=r"ask\(s, question\): missing a required argument"):
        ask.run(backend=scripted)
    with pytest.raises(TypeError, match=r"ask\(s, question\): missing a required argument"):
        ask.run_batch([{"q": "?"}], backend=scripted)


def test_a_value_that_an_async_program_did_not_await_is_told(scripted):
    @sgl.function
    async def program(s):
        s += "Q" + sgl.gen("a")
        unawaited = s["a"]
        try:
            s += unawaited
        finally:
            unawaited.close()

    with pytest.raises(UserError, match="awaited"):
        program.run(backend=scripted)


def test_what_is_not_here_says_what_to_use_instead():
    with pytest.raises(AttributeError, match="OpenAI"):
        _ = sgl.LiteLLM
