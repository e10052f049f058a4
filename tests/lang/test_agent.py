"""Tools in the language: schemas, one call, loops, errors, approval, and what the model is shown."""

from __future__ import annotations

import asyncio
import json
import sys
import threading
import time
from pathlib import Path

import pytest
from pydantic import BaseModel, field_validator

import agentrt as sgl  # noqa: F401  (a program written for sgl: text before a gen stays as it is)
from agentrt.backends.byte_tokenizer import ByteTokenizer
from agentrt.backends.scripted import Answer, ScriptedBackend
from agentrt.errors import AbortedError, RequestError, UserError
from agentrt.lang.agent import StepsError, agent_loop, tool_call
from agentrt.lang.expressions import assistant, gen, system, user
from agentrt.lang.program import function
from agentrt.lang.tools import Call, ToolError, ToolRetry, mcp_tools, tool


@tool
def add(a: int, b: int = 0) -> int:
    """Adds two numbers.

    Args:
        a: The first
            of them.
        b: The second.

    Returns:
        Their sum.
    """
    return a + b


@tool
async def shout(text: str) -> str:
    """Says it loud."""
    await asyncio.sleep(0)
    return text.upper()


def calls(*items):
    return "\n".join(f"<tool_call>\n{json.dumps({'name': n, 'arguments': a})}\n</tool_call>" for n, a in items)


def turns(*texts):
    given = iter(texts)
    return ScriptedBackend(lambda text, request: next(given))


@function
def once(s, tools, **options):
    s += system("You help.")
    s += user("What is 1 + 2?")
    s += tool_call("calls", tools, **options)
    s += assistant(gen("answer"))
    return s["calls"]


def test_a_typed_function_becomes_a_json_schema_with_its_docstring():
    assert add.schema == {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Adds two numbers.",
            "parameters": {
                "type": "object",
                "additionalProperties": False,
                "properties": {
                    "a": {"type": "integer", "title": "A", "description": "The first of them."},
                    "b": {"type": "integer", "title": "B", "description": "The second.", "default": 0},
                },
                "required": ["a"],
            },
        },
    }
    assert add(1, 2) == 3


def test_ctx_is_ours_and_not_the_schemas():
    seen = []

    @tool
    def whoami(ctx, name: str) -> str:
        """Tells."""
        seen.append(ctx)
        return name

    assert "ctx" not in whoami.parameters["properties"]
    once.run([whoami], backend=turns(calls(("whoami", {"name": "x"})), "done"))
    assert seen[0].program.startswith("once-")
    assert seen[0].step == 0


def test_a_function_that_cannot_be_described_is_refused():
    with pytest.raises(UserError, match="'b'"):

        @tool
        def untyped(a: int, b):
            return a

    with pytest.raises(UserError, match="'more'"):

        @tool
        def star(**more: int):
            return more

    with pytest.raises(UserError, match="two tools"):
        tool_call("c", [add, add])
    with pytest.raises(UserError, match="choice"):
        tool_call("c", [add], choice="nope")
    with pytest.raises(UserError, match="at least one"):
        agent_loop("a", [])


def test_tool_call_runs_the_calls_in_parallel_and_shows_the_model_their_results():
    barrier = threading.Barrier(2, timeout=10)

    @tool
    def meet(who: str) -> str:
        """Waits for the other."""
        barrier.wait()
        return f"met {who}"

    backend = turns(
        "Let me see." + calls(("meet", {"who": "a"}), ("meet", {"who": "b"}), ("shout", {"text": "hey"})), "fine"
    )
    state = once.run([meet, shout], backend=backend)
    assert [(c.name, c.arguments, c.result, c.error) for c in state.ret_value] == [
        ("meet", {"who": "a"}, "met a", None),
        ("meet", {"who": "b"}, "met b", None),
        ("shout", {"text": "hey"}, "HEY", None),
    ]
    assert [m["role"] for m in state.messages()] == ["system", "user", "assistant", "tool", "tool", "tool", "assistant"]
    assert [m["content"] for m in state.messages() if m["role"] == "tool"] == ["met a", "met b", "HEY"]
    first, second = backend.requests
    assert second.prompt_ids[: len(first.prompt_ids)] == first.prompt_ids  # results are appended, nothing is rewritten
    assert "Adds" not in backend.tokenizer.decode(first.prompt_ids)
    assert "Waits for the other." in backend.tokenizer.decode(first.prompt_ids)  # the model was told of the tools
    assert first.sampling.grammar.kind == "tools"
    wait_until(lambda: backend.holds == [(state._run.id, 60.0)])
    assert state.get_meta_info("calls")["completion_tokens"] > 0


def test_a_backend_whose_hold_waits_for_the_thread_that_brings_answers_hangs_nothing():
    class Waits(ScriptedBackend):
        def hold(self, program, seconds):
            assert threading.current_thread().name != "agentrt-scripted"
            super().hold(program, seconds)

    backend = Waits(calls(("add", {"a": 1})))
    once.run([add], backend=backend)
    wait_until(lambda: backend.holds)


def test_a_model_whose_template_knows_no_tools_is_told_of_them_in_words_with_one_warning():
    from agentrt.text.chat_messages import tools_in_words

    class KnowsNone(ByteTokenizer):
        def encode_chat(self, messages, *, tools=None, **options):
            return super().encode_chat(tools_in_words([dict(m) for m in messages], tools), **options)

    said = iter([calls(("add", {"a": 1, "b": 2})), "three"])
    backend = ScriptedBackend(lambda text, request: next(said), tokenizer=KnowsNone())
    with pytest.warns(UserWarning, match="knows no tools") as caught:
        state = once.run([add], backend=backend)
    assert len(caught) == 1
    assert state.ret_value[0].result == 3
    told, asked_again = (backend.tokenizer.decode(request.prompt_ids, skip_special=False) for request in backend.requests)
    assert '"Adds two numbers.' in told
    assert "<tool_response>\n3\n</tool_response>" in asked_again


def test_choice_and_parallel_reach_the_grammar():
    backend = turns(calls(("add", {"a": 1})), "x")
    once.run([add, shout], backend=backend, choice="add", parallel=False)
    spec = backend.requests[0].sampling.grammar
    assert (spec.option("tool_choice"), spec.option("parallel")) == ("add", False)


def test_calls_are_empty_when_the_model_answered_in_text():
    state = once.run([add], backend=turns("I would rather not.", "x"))
    assert state.ret_value == []
    assert state.messages()[2]["content"] == "I would rather not."


def test_a_tools_exception_goes_to_the_model_as_an_error_result():
    @tool
    def broken() -> str:
        """Breaks."""
        raise KeyError("the drawer")

    @tool
    def picky(x: int) -> int:
        """Wants more."""
        raise ToolRetry("x must be even.")

    state = once.run(
        [broken, picky], backend=turns(calls(("broken", {}), ("picky", {"x": 1}), ("picky", {"x": "no"})), "ok")
    )
    assert [c.error for c in state.ret_value][:2] == ["KeyError: 'the drawer'", "x must be even. Call again."]
    assert "the arguments are not valid: x: " in state.ret_value[2].error
    assert state.messages()[3]["content"] == "Error: KeyError: 'the drawer'"


def test_a_fatal_tool_error_ends_the_program():
    @tool
    def fatal() -> str:
        """Ends it."""
        raise ToolError("no more", fatal=True)

    with pytest.raises(ToolError, match="no more") as caught:
        once.run([fatal], backend=turns(calls(("fatal", {})), "x"))
    assert "tool_call" in caught.value.__notes__[0]


def test_a_tool_that_takes_too_long_is_an_error_result():
    @tool(timeout=0.05)
    def slow() -> str:
        """Sleeps."""
        time.sleep(1)
        return "late"

    @tool(timeout=0.05)
    async def aslow() -> str:
        """Sleeps."""
        await asyncio.sleep(30)
        return "late"

    state = once.run([slow, aslow], backend=turns(calls(("slow", {}), ("aslow", {})), "ok"))
    assert all("longer than 0.05 s" in c.error for c in state.ret_value)


def test_a_call_that_was_cut_is_an_error_not_a_missing_call():
    with pytest.raises(RequestError, match="cut"):
        once.run([add], backend=turns('<tool_call>\n{"name": "add", "arguments": {"a": 1', "x"))


@function
def asks(s, tools, **options):
    s += user("Go.")
    s += agent_loop("answer", tools, **options)
    return s["answer"]


def test_agent_loop_repeats_until_the_model_answers():
    events = []
    backend = turns(calls(("add", {"a": 1, "b": 2})), "Hmm. " + calls(("add", {"a": 3, "b": 4})), "It is 7.")
    state = asks.run([add], on_event=events.append, backend=backend)
    assert state.ret_value == "It is 7."
    meta = state.get_meta_info("answer")
    assert meta["steps"] == 3
    assert [call["result"] for call in meta["calls"]] == [3, 7]
    assert [e.kind for e in events] == ["call", "result", "text", "call", "result", "answer"]
    last = backend.requests[-1].prompt_ids
    for earlier in backend.requests:
        assert last[: len(earlier.prompt_ids)] == earlier.prompt_ids
    assert meta["cached_tokens"] > 0.6 * meta["prompt_tokens"]


def test_agent_loop_gives_a_typed_answer_and_asks_again_if_it_is_not_valid():
    class Sum(BaseModel):
        total: int

        @field_validator("total")
        @classmethod
        def positive(cls, value: int) -> int:
            if value < 0:
                raise ValueError("must not be negative")
            return value

    backend = turns(calls(("add", {"a": 1, "b": 2})), '{"total": -3}', '{"total": 3}')
    assert asks.run([add], output_type=Sum, backend=backend).ret_value == Sum(total=3)
    assert "must not be negative" in backend.tokenizer.decode(backend.requests[-1].prompt_ids)
    assert "total" in backend.requests[0].sampling.grammar.option("answer_schema")


def test_agent_loop_stops_after_max_steps():
    backend = ScriptedBackend(calls(("add", {"a": 1})))
    with pytest.raises(StepsError, match="max_steps=3") as caught:
        asks.run([add], max_steps=3, backend=backend)
    assert len(caught.value.calls) == 3
    assert len(backend.requests) == 3


def test_on_event_may_block_or_be_a_coroutine_and_its_error_ends_the_program():
    seen = []

    async def listen(event):
        await asyncio.sleep(0)
        seen.append(event.kind)

    asks.run([add], on_event=listen, backend=turns(calls(("add", {"a": 1})), "done"))
    assert seen == ["call", "result", "answer"]

    def refuse(event):
        raise ValueError("not in my house")

    with pytest.raises(ValueError, match="my house"):
        asks.run([add], on_event=refuse, backend=turns(calls(("add", {"a": 1})), "done"))


def test_tools_work_in_async_programs_and_in_forks():
    @function
    async def program(s):
        s += user("Go.")
        forks = s.fork(2)
        forks += tool_call("calls", [add])
        await forks.join()
        return [branch[0].result for branch in await s["calls"]]

    assert program.run(backend=ScriptedBackend(calls(("add", {"a": 2, "b": 2})))).ret_value == [4, 4]


def test_tools_offered_after_something_was_fed_come_in_a_message_of_their_own():
    @function
    def program(s):
        s += user("Hi.")
        s += assistant(gen("a"))
        s += user("Now add.")
        s += tool_call("calls", [add])

    backend = turns("Hello.", calls(("add", {"a": 1})))
    state = program.run(backend=backend)
    first, second = backend.requests
    assert second.prompt_ids[: len(first.prompt_ids)] == first.prompt_ids
    assert "Adds two numbers." in state.messages()[3]["content"]


# ----------------------------------------------------------------------- approval


def wait_until(true, seconds=60.0):
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.002)


@pytest.mark.parametrize("approved", [True, False])
def test_a_tool_that_needs_approval_parks_the_program_until_it_is_decided(approved):
    ran = []

    @tool(approve=True)
    def launch(what: str) -> str:
        """Launches."""
        ran.append(what)
        return f"launched {what}"

    state = asks.run([launch], backend=turns(calls(("launch", {"what": "it"})), "done"), stream=True)
    wait_until(state.pending_calls)
    (call,) = state.pending_calls()
    assert isinstance(call, Call)
    assert not ran
    with pytest.raises(UserError, match="waits for approval"):
        state.approve("another")
    if approved:
        state.approve(call.id, arguments={"what": "something else"})
    else:
        state.deny(call.id, "not today")
    assert state["answer"] == "done"
    assert ran == (["something else"] if approved else [])
    assert state.messages()[2]["content"] == ("launched something else" if approved else "Error: not today")


def test_waiting_for_an_approval_ends_when_none_is_needed_when_the_program_fails_and_when_the_time_is_up():
    @tool(approve=True)
    def launch(what: str) -> str:
        """Launches."""
        return what

    assert asks.run([launch], backend=turns("Nothing to do."), stream=True).wait_for_approval() == []
    slow = asks.run([launch], backend=ScriptedBackend(lambda t, r: Answer("x", delay=60)), stream=True)
    assert slow.wait_for_approval(timeout=0.02) == []
    slow.cancel()
    with pytest.raises(AbortedError):
        slow.wait_for_approval()

    @function
    async def native(s):
        s += user("Go.")
        s += agent_loop("answer", [launch])
        seen = []
        while waiting := await s.wait_for_approval():
            seen += [call.name for call in waiting]
            s.approve()
        return seen, await s["answer"]

    again = [calls(("launch", {"what": "1"})), calls(("launch", {"what": "2"})), "done"]
    assert native.run(backend=turns(*again)).ret_value == (["launch", "launch"], "done")


# ------------------------------------------------------------------------- replay


def test_replay_uses_recorded_seeds_and_tool_results_and_calls_no_tool():
    ran = []

    @tool
    def dice() -> int:
        """Throws."""
        ran.append(1)
        return len(ran) * 100

    def script(text, request):
        return (
            calls(("dice", {}))
            if "tool_response" not in text and "100" not in text
            else f"seed {request.sampling.seed}"
        )

    backend = ScriptedBackend(script)
    first = asks.run([dice], backend=backend)
    again = asks.replay(first.recording, [dice], backend=backend)
    assert again["answer"] == first["answer"]
    assert again.token_ids() == first.token_ids()
    assert ran == [1]
    assert json.loads(json.dumps(first.recording.to_json()))["results"]


# ---------------------------------------------------------------------------- mcp


def test_an_mcp_servers_tools_join():
    class Part:
        text = "from the server"

    class Answer:
        content = (Part(),)
        isError = False

    class Listed:
        class Item:
            name = "remote"
            description = "Far away."
            inputSchema = {"type": "object", "properties": {"q": {"type": "string"}}}  # noqa: RUF012

        tools = (Item(),)

    class Session:
        async def call_tool(self, name, arguments):
            return Answer() if arguments == {"q": "x"} else None

    async def main():
        tools = mcp_tools(Session(), Listed(), asyncio.get_running_loop())
        state = await once.arun(tools, backend=turns(calls(("remote", {"q": "x"})), "ok"))
        return state.ret_value

    (call,) = asyncio.run(main())
    assert (call.name, call.result, call.error) == ("remote", "from the server", None)


@pytest.mark.slow
def test_the_tools_of_a_real_mcp_server_join_with_its_schemas_results_and_errors():
    mcp = pytest.importorskip("mcp")
    script = Path(__file__).parents[2] / "examples" / "react" / "mcp_server.py"
    server = mcp.StdioServerParameters(command=sys.executable, args=[str(script)])
    good = {"value": 3, "from_unit": "mile", "to_unit": "km"}
    bad = {"value": 3, "from_unit": "mile", "to_unit": "kg"}
    backend = turns(calls(("convert_units", good), ("convert_units", bad)), "done")

    async def main():
        async with mcp.Client(server) as client:
            tools = mcp_tools(client, await client.list_tools(), asyncio.get_running_loop())
            return await once.arun(tools, backend=backend)

    state = asyncio.run(main())
    first, second = state.ret_value
    assert first.error is None
    assert "4.83" in first.text()
    assert "convert_units" in second.error  # what a server says of its own errors is its affair
    offered = backend.tokenizer.decode(backend.requests[0].prompt_ids)
    assert "Converts a quantity into another unit" in offered
    assert '"mile"' in offered  # the schema, with its choices
