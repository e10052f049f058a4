"""Conformance: every method of a state and of a group of forks, one test each, run as ``sgl``."""

from __future__ import annotations

import asyncio
import threading

import pytest

import agentrt as sgl
from agentrt.backends.scripted import ScriptedBackend
from agentrt.errors import UserError


@sgl.function
def plain_ask(s):
    s += "Q: " + sgl.gen("a")


def test_variables(scripted):
    @sgl.function
    def program(s):
        s += "Q" + sgl.gen("a")
        s["b"] = [1]
        s.set_var("c", None)
        return s["a"], s.get_var("b"), s["c"], "a" in s, "z" in s

    state = program.run(backend=scripted)
    assert state.ret_value == ("ok", [1], None, True, False)
    assert state["b"] == [1]
    assert "c" in state


def test_text_messages_sync_error_ret_value_and_meta_info(scripted):
    state = plain_ask.run(backend=scripted)
    state.sync()
    assert state.text() == "Q: ok"
    assert state.messages() == []
    assert state.error() is None
    assert state.ret_value is None
    meta = state.get_meta_info("a")
    assert meta["finish_reason"] == {"type": "stop", "matched": None}
    assert meta["prompt_tokens"] == len(scripted.tokenizer.encode("Q: "))
    assert scripted.tokenizer.decode(meta["output_ids"]) == "ok"


def test_var_scope_gathers_everything_inside(scripted):
    @sgl.function
    def program(s):
        s += "A"
        with s.var_scope("whole"):
            s += "B" + sgl.gen("a") + "C"
        s += "D"
        return s["whole"]

    assert program.run(backend=scripted).ret_value == "BokC"


def test_expressions_add_up_in_any_order_and_lists_are_flattened(scripted):
    @sgl.function
    def program(s):
        s += "a" + sgl.gen("x") + "b"
        s += sgl.gen("y") + ("c" + sgl.gen("z"))
        s += ["d", sgl.gen("w"), ["e"]]

    assert program.run(backend=scripted).text() == "aokbokcokdoke"


@pytest.mark.parametrize("value", [3, None, {"a": 1}, object()])
def test_appending_what_is_no_expression_is_an_error_at_its_line(value, scripted):
    @sgl.function
    def program(s):
        s += value

    with pytest.raises(UserError, match="cannot be appended"):
        program.run(backend=scripted)


def test_text_iter_of_a_variable_and_of_everything():
    backend = ScriptedBackend("one two")
    state = plain_ask.run(backend=backend, stream=True)
    assert "".join(state.text_iter("a")) == "one two"
    assert "".join(state.text_iter()) == "Q: one two"

    @sgl.function
    def reads_itself(s):
        s += "Q: " + sgl.gen("a")
        first = "".join(s.text_iter())
        s += "!" + sgl.gen("b")
        return first, list(s.text_iter("b"))

    first, pieces = reads_itself.run(backend=backend).ret_value
    assert first == "Q: one two"
    assert len(pieces) > 3


def test_text_async_iter_with_and_without_meta_data():
    async def main():
        state = await plain_ask.arun(backend=ScriptedBackend("hey"), stream=True)
        texts = [text async for text in state.text_async_iter()]
        pairs = [pair async for pair in state.text_async_iter("a", return_meta_data=True)]
        return texts, pairs

    texts, pairs = asyncio.run(main())
    assert "".join(texts) == "Q: hey"
    assert "".join(text for text, _ in pairs) == "hey"
    assert pairs[-1][1].keys() >= {"completion_tokens"}


def test_fork_copies_text_ids_and_variables(scripted):
    @sgl.function
    def program(s):
        s += "A" + sgl.gen("a")
        left, right = s.fork(2)
        left += "L" + sgl.gen("x")
        right += "R"
        return left["a"], left.text(), right.text(), s.text()

    assert program.run(backend=scripted).ret_value == ("ok", "AokLok", "AokR", "Aok")
    with pytest.raises(UserError, match="at least 1"):
        sgl.function(lambda s: s.fork(0)).run(backend=scripted)


def test_copy_goes_on_alone_and_joins_as_a_with_block(scripted):
    @sgl.function
    def program(s):
        s += "A"
        with s.copy() as other:
            other += "B" + sgl.gen("x")
        return s["x"], s.text()

    assert program.run(backend=scripted).ret_value == (["ok"], "A")


@pytest.mark.parametrize("value", ["same", lambda i: f"number {i}", ["number 0", "number 1"]])
def test_fork_groups_take_one_expression_a_function_or_a_list(value, scripted):
    @sgl.function
    def program(s):
        forks = s.fork(2)
        forks += value
        return [fork.text() for fork in forks]

    expected = ["same"] * 2 if value == "same" else ["number 0", "number 1"]
    assert program.run(backend=scripted).ret_value == expected


def test_fork_groups_are_indexed_iterated_counted_and_joined_by_with(scripted):
    @sgl.function
    def program(s):
        s += "Q"
        with s.fork(3) as forks:
            forks[0] += "zero"
            for number, fork in enumerate(forks):
                fork += f" {number} " + sgl.gen("a")
            assert len(forks) == 3
        return s["a"], forks[0].text()

    assert program.run(backend=scripted).ret_value == (["ok"] * 3, "Qzero 0 ok")
    with pytest.raises(UserError, match="one for each"):
        sgl.function(lambda s: s.fork(2).__iadd__(["a"])).run(backend=scripted)


def test_forks_can_be_forked(scripted):
    @sgl.function
    def program(s):
        s += "Q"
        forks = s.fork(2)
        for fork in forks:
            inner = fork.fork(2)
            inner += sgl.gen("a")
            inner.join()
        forks.join()
        return s["a"]

    assert program.run(backend=scripted).ret_value == [["ok", "ok"], ["ok", "ok"]]
    assert {r.program.branch for r in scripted.requests} == {"0.0/0.0", "0.0/0.1", "0.1/0.0", "0.1/0.1"}


def test_join_refuses_an_unknown_mode(scripted):
    with pytest.raises(UserError, match="mode"):
        sgl.function(lambda s: s.fork(2).join("sideways")).run(backend=scripted)


def test_the_engine_is_told_program_branch_and_what_will_be_forked():
    forked = threading.Event()

    @sgl.function
    def program(s):
        s += "Q" + sgl.gen("a") + sgl.gen("b")
        forks = s.fork(3)
        forks += sgl.gen("c")
        forked.set()

    def script(text, request):  # the first answer waits until the body has said what it will do
        assert forked.wait(60)
        return "x"

    backend = ScriptedBackend(script)
    state = program.run(backend=backend)
    tags = [request.program for request in backend.requests]
    assert {tag.program for tag in tags} == {state._run.id}
    assert [tag.branch for tag in tags[:2]] == ["", ""]
    assert (tags[0].expected_calls, tags[1].expected_calls) == (1, 0)
    assert tags[1].will_fork == 3
    assert backend.ended == [state._run.id]
