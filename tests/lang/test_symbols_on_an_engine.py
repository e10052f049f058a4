"""Each symbol and parameter of the surface that `test_surface_on_an_engine.py` leaves, on both backends, and that none is left out."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import threading
from pathlib import Path
from typing import Literal

import pytest
from pydantic import BaseModel

import agentrt as sgl
from agentrt.backends.scripted import ScriptedBackend
from agentrt.errors import AbortedError

PROMPT = "the quick brown fox jumps over the lazy dog, and then "


def answer(backend, *, run=None, **options):
    """A gen's value and what is known of it."""

    @sgl.function
    def program(s):
        s += PROMPT + sgl.gen("x", **options)

    state = program.run(backend=backend, **(run or {}))
    return state["x"], state.get_meta_info("x"), state


class Thing(BaseModel):
    name: Literal["x", "y"]
    size: int


def test_gen_int_gen_string_choices_and_every_dtype(backend):
    @sgl.function
    def program(s):
        s += PROMPT + sgl.gen_int("int", max_tokens=8) + sgl.gen_string("string", max_tokens=40)
        s += sgl.gen("float", dtype=float, max_tokens=12) + sgl.gen("str", dtype=str, max_tokens=40)
        s += sgl.gen("choice", choices=[" a", " the"], choices_method=sgl.greedy_token_selection)
        return [type(s[name]) for name in ("int", "string", "float", "str", "choice")]

    # Numbers and strings end by the grammar's leave and the model's choice: a seed that comes to an end is looked for.
    for seed in range(30):
        try:
            state = program.run(backend=backend, seed=seed)
        except sgl.CutValueError:
            continue
        assert state.ret_value == [int, str, float, str, str]
        return
    raise AssertionError("no seed of 30 came to an end")


def test_ebnf_strict_and_a_schema_as_text_hold(backend):
    scripted = isinstance(backend, ScriptedBackend)
    value, _, _ = answer(
        ScriptedBackend("yes") if scripted else backend, ebnf='root ::= "yes" | "no"', strict=True, max_tokens=8, temperature=0
    )
    assert value in ("yes", "no")
    value, _, _ = answer(backend, json_schema='{"enum": [7]}', max_tokens=8, temperature=0)
    assert value == "7"


def test_select_is_drawn_above_temperature_zero_and_the_same_seed_draws_the_same(backend):
    @sgl.function
    def program(s):
        s += PROMPT + sgl.select("x", [" the", " fox", " a"], temperature=30.0, choices_method=sgl.token_length_normalized)
        s += sgl.gen("y", max_tokens=2, return_logprob=True, return_text_in_logprobs=True)
        s += sgl.select("z", choices=["x", "y"], choices_method=sgl.unconditional_likelihood_normalized)
        return s["x"], s["z"]

    drawn = [program.run(backend=backend, seed=seed).ret_value for seed in (1, 1, *range(2, 12))]
    assert drawn[0] == drawn[1]
    assert len({x for x, _ in drawn}) > 1


def test_roles_in_every_form_are_the_same_ids_with_special_and_without_media(backend):
    @sgl.function
    def forms(s, form):
        if form == 0:
            s += sgl.system("quick") + sgl.user("fox") + sgl.assistant("dog")
        elif form == 1:
            s += sgl.system_begin() + "quick" + sgl.system_end() + sgl.user_begin() + "fox" + sgl.user_end()
            s += sgl.assistant_begin() + "dog" + sgl.assistant_end()
        elif form == 2:
            s.system("quick")
            s.user("fox")
            s.assistant("dog")
        elif form == 3:
            for opened, text in ((s.system(), "quick"), (s.user(), "fox"), (s.assistant(), "dog")):
                with opened:
                    s += text
        else:
            s.system_begin()
            s += "quick"
            s.system_end()
            s.user_begin()
            s += "fox"
            s.user_end()
            s.assistant_begin()
            s += "dog"
            s.assistant_end()

    ids = [forms.run(form, backend=backend).token_ids() for form in range(5)]
    assert ids[1:] == ids[:1] * 4
    end = backend.tokenizer.decode(backend.tokenizer.eos_ids[:1], skip_special=False)
    program = sgl.function(lambda s: s.__iadd__("fox" + sgl.special(end)))
    assert program.run(backend=backend).token_ids()[-1] == backend.tokenizer.eos_ids[0]
    for medium in (sgl.image("cat.png"), sgl.video("cat.mp4", 4)):
        with pytest.raises(sgl.UserError, match="takes text only"):
            sgl.function(lambda s: s.__iadd__(sgl.user(medium))).run(backend=backend)  # noqa: B023


def test_separate_reasoning_splits_whatever_comes(backend):
    @sgl.function
    def program(s):
        s += PROMPT + "<think>" + sgl.separate_reasoning(sgl.gen("x", max_tokens=8), model_type="qwen3")

    state = program.run(backend=backend, seed=4)
    assert isinstance(state["x"], str)
    assert isinstance(state["x_reasoning_content"], str)
    assert state.text().startswith(PROMPT + "<think>")


def test_variables_errors_and_what_is_known_can_be_read_in_every_way(backend):
    @sgl.function
    def program(s):
        s += PROMPT + sgl.gen("x", max_tokens=3)
        s.set_var("y", s.get_var("x"))
        before = s.tokens_left
        s += "dog"
        s.sync()
        return before - s.tokens_left, "y" in s, "z" in s

    state = program.run(backend=backend)
    assert state.ret_value[0] > 0
    assert state.ret_value[1:] == (True, False)
    assert state["y"] == state["x"]
    assert state.error() is None
    assert state.pending_calls() == []
    with pytest.raises(sgl.UserError, match="no variable 'z' in this state"):
        state.get_meta_info("z")
    sgl.set_default_backend(backend)
    try:
        assert isinstance(program.run()["x"], str)
        assert sgl.get_server_info()["model"] == backend.capabilities.model
        assert sgl.flush_cache().freed_tokens > 0
    finally:
        sgl.set_default_backend(None)


def test_run_batch_with_every_parameter(backend, capsys):
    @sgl.function
    def program(s, number):
        if number == 1:
            raise KeyError("no")
        s += PROMPT + f"{number}" + sgl.gen("x", max_tokens=2)
        return number

    rows = [(0,), (1,), (2,)]
    states = program.run_batch(rows, num_threads=2, progress_bar=True, return_exceptions=True, backend=backend)
    assert [getattr(state, "ret_value", None) for state in states] == [0, None, 2]
    assert isinstance(states[1], KeyError)
    assert "100%" in capsys.readouterr().out
    one_by_one = program.run_batch([{"number": 3}, {"number": 4}], generator_style=True, backend=backend)
    assert [state.ret_value for state in one_by_one] == [3, 4]
    assert [type(node).__name__ for node in program.trace(5).nodes] == ["Text", "Gen"]


def test_forks_in_every_way(backend):
    @sgl.function
    def program(s):
        s += PROMPT
        forks = s.fork(3, position_ids_offset=[0, 0, 0], deadline=100.0, token_budget=50)
        forks += [f"{i}" for i in range(3)]
        forks += sgl.gen("x", max_tokens=2)
        forks[0] += "!"
        ended = [fork["x"] for fork in forks.as_completed()]
        forks.join(mode="concate_and_append", return_exceptions=True)
        others = s.fork(4)
        others += lambda i: f"{i}" + sgl.gen("y", max_tokens=2)
        (winner,) = others.first(k=1, where=lambda fork: isinstance(fork["y"], str))
        more = s.fork(2)
        more.cancel()
        return len(forks), sorted(ended) == sorted(s["x"]), len(winner["y"]) > 0

    with pytest.warns(UserWarning, match="accepted|appends"):
        state = program.run(backend=backend, seed=1)
    assert state.ret_value[:2] == (3, True)
    assert state.text().startswith(PROMPT + "0")


def test_what_an_async_state_can_do(backend):
    @sgl.function
    async def program(s):
        s += PROMPT + sgl.gen("x", max_tokens=4)
        pairs = [pair async for pair in s.text_async_iter("x", return_meta_data=True)]
        whole = "".join([piece async for piece in s.text_iter()])
        chosen = await s.select("c", ["a", "the"])
        s += sgl.gen("json", json_schema={"enum": [[7, 7]]}, temperature=0, max_tokens=20)
        seen = [value async for value in s.partial_iter("json")]
        forks = s.fork(2)
        forks += sgl.gen("y", max_tokens=1)
        await forks.join()
        first = await forks.first(1)
        ended = [fork async for fork in forks.as_completed()]
        other = s.copy()
        other += "!"
        await s.sync()
        assert await s.error() is None
        assert "".join(piece for piece, _ in pairs) == await s["x"] == await s.get_var("x")
        assert whole == PROMPT + await s["x"]
        assert pairs[-1][1].keys() >= {"completion_tokens"}
        assert (await s.get_meta_info("x"))["completion_tokens"] > 0
        assert chosen == await s["c"]
        assert seen[-1] == [7, 7]
        assert (len(ended), len(first), len(await s["y"])) == (2, 1, 2)
        assert await s.tokens_left() > 0
        assert (await other.text()).endswith("!")
        assert len(await s.token_ids()) > 8
        assert await s.messages() == []
        assert await s.wait_for_approval(timeout=0.01) == []
        return chosen

    if isinstance(backend, ScriptedBackend):
        backend = ScriptedBackend(lambda text, request: "[7, 7]" if request.sampling.json_schema is not None else "ok")
    assert program.run(backend=backend, seed=1).ret_value in ("a", "the")


@pytest.mark.filterwarnings("ignore:.*knows no tools")
def test_a_loop_of_tools_an_approval_a_retry_and_a_compaction(backend):
    @sgl.tool(approve=True)
    def double(number: Literal[7, 8]) -> int:
        """Doubles."""
        return 2 * number

    @sgl.function
    def program(s):
        s += sgl.user("double it")
        s += sgl.agent_loop(
            "answer", [double], output_type=Thing, max_steps=3, choice="required", parallel=False, on_event=events.append, max_tokens=120
        )
        return s["answer"]

    events = []
    if isinstance(backend, ScriptedBackend):
        call = '<tool_call>\n{"name": "double", "arguments": {"number": 7}}\n</tool_call>'
        backend = ScriptedBackend([call, '{"name": "x", "size": 7}'])
    state = program.run(backend=backend, seed=2, stream=True)
    try:
        while calls := state.wait_for_approval():
            state.approve(call_id=calls[0].id, arguments={"number": 8})
        state.sync()
    except (sgl.StepsError, sgl.CutValueError, sgl.RequestError):  # a random model need not come to an answer
        assert not isinstance(backend, ScriptedBackend)
    else:
        assert isinstance(state.ret_value, Thing)
    results = [event.call for event in events if event.kind == "result"]
    assert [(call.result, call.error) for call in results[:1]] == [(16, None)]
    assert [event.kind for event in events[:2]] == ["approval", "result"]


def test_a_chat_is_compacted_when_asked_and_what_was_cut_is_gone(backend):
    @sgl.function
    def program(s):
        s += sgl.user("quick") + sgl.assistant(sgl.gen("a", max_tokens=3)) + sgl.user("lazy dog")
        s.compact(lambda groups: groups[-1:])
        s += sgl.assistant(sgl.gen("b", max_tokens=3, deadline=100.0, token_healing=False))

    state = program.run(backend=backend, seed=1, compact=lambda groups: groups, token_healing=False)
    assert [message["role"] for message in state.messages()] == ["user", "assistant"]


def test_retries_ask_again_for_what_the_type_refuses():
    """A real model's grammar leaves nothing to refuse here; what asks again is the language's own."""
    said = ScriptedBackend(['{"name": "x", "size": 7}'])
    value, _, _ = answer(said, type=Thing, retries=1)
    assert value == Thing(name="x", size=7)


def test_a_program_that_is_cancelled_and_a_call_that_is_denied(backend, monkeypatch):
    @sgl.function
    def program(s):
        s += PROMPT + sgl.gen("x", max_tokens=400, ignore_eos=True)

    if isinstance(backend, ScriptedBackend):
        backend = ScriptedBackend("a" * 1000)
    cancelled, submit = threading.Event(), backend.submit

    def told(sink, delta):  # so that no engine is too fast for it: the first text waits for the cancel
        sink(delta)
        if delta.text:
            cancelled.wait(60)

    monkeypatch.setattr(backend, "submit", lambda request, sink: submit(request, lambda delta: told(sink, delta)))
    state = program.run(backend=backend, stream=True)
    next(state.text_iter("x"))
    state.cancel()
    cancelled.set()
    with pytest.raises(AbortedError):
        state.sync()
    with pytest.raises(sgl.UserError, match="no call"):
        state.deny("none", reason="not now")


def _named_in_these_files() -> set[str]:
    """Every attribute, keyword and quoted name in this file and in its siblings on the engine."""
    files = Path(__file__).parent.glob("test_*_on_an_engine.py")
    found = set()
    for node in (node for file in files for node in ast.walk(ast.parse(file.read_text()))):
        if isinstance(node, ast.Attribute):
            found.add(node.attr)
        elif isinstance(node, ast.keyword) and node.arg:
            found.add(node.arg)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.add(node.value)
    return found


def _parameters(function):
    skipped = {"self", "args", "kwargs", "options", "name", "choices", "expr", "func", "recording", "var_name", "batch_arguments"}
    return {name for name in inspect.signature(function).parameters if name not in skipped}


def test_every_symbol_and_every_parameter_of_the_surface_is_used_on_an_engine():
    from agentrt.lang.forks import AsyncForks, Forks
    from agentrt.lang.options import ALIASES, RUN_FIELDS
    from agentrt.lang.program import RUN_OPTIONS, Function
    from agentrt.request import SamplingParams

    home = {name for name, module in sgl._HOME.items() if module.startswith("agentrt.lang.")}
    elsewhere = {"Tool", "Call", "ToolRetry", "ToolError", "ToolContext", "mcp_tools", "AgentEvent", "Recording", "BudgetError",
                 "InvalidValueError", "State", "AsyncState"}  # test_agent.py, and classes that are met by their objects  # fmt: skip
    methods = {name for face in (sgl.State, sgl.AsyncState, Forks, AsyncForks, Function) for name in dir(face) if not name.startswith("_")}
    inner = {"plan", "plan_options", "begin", "perform", "aperform", "in_background", "is_async", "name"}
    wanted = (home - elsewhere) | (methods - inner)
    wanted |= {f.name for f in dataclasses.fields(SamplingParams)}
    wanted |= RUN_FIELDS | ALIASES | RUN_OPTIONS
    wanted -= {"grammar", "choices", "max_resamples", "tool_choice", "parallel_tool_calls", "tools"}  # of a request, not of a program
    for function in (sgl.gen, sgl.select, sgl.State.fork, Forks.join, Forks.first, Function.run_batch, sgl.State.text_async_iter,
                     sgl.agent_loop, sgl.tool_call, sgl.separate_reasoning, sgl.State.approve, sgl.State.deny):  # fmt: skip
        wanted |= _parameters(function)
    assert sorted(wanted - _named_in_these_files()) == []
