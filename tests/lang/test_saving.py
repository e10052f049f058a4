"""Suspend and resume, trajectories, and compaction."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
import time

import pytest

import agentrt as sgl  # noqa: F401  (a program written for sgl: text before a gen stays as it is)
from agentrt.backends.scripted import Answer, ScriptedBackend
from agentrt.errors import UserError
from agentrt.lang.agent import agent_loop, tool_call
from agentrt.lang.expressions import assistant, gen, system, user
from agentrt.lang.program import function
from agentrt.lang.saving import resume
from agentrt.lang.tools import tool


def call(name, **arguments):
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def wait_until(true, seconds=60.0):
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.002)


@function
def chat(s):
    s += system("Be brief.")
    s += user("Hello.")
    s += assistant(gen("a", return_logprob=True, stop="."))
    s["n"] = 5


def test_a_saved_state_goes_on_with_the_same_ids_variables_and_seeds(tmp_path):
    def script(text, request):
        return f"seed {request.sampling.seed}."

    backend = ScriptedBackend(script)
    state = chat.run(backend=backend, seed=3, top_p=0.9, stop=["END"])
    saved = state.save(tmp_path / "state.json")
    assert json.loads((tmp_path / "state.json").read_text()) == saved
    other = ScriptedBackend(script)
    twin = resume(tmp_path / "state.json", backend=other)
    assert twin.token_ids() == state.token_ids()
    assert (twin["a"], twin["n"], twin.text(), twin.messages()) == (state["a"], 5, state.text(), state.messages())
    assert twin.get_meta_info("a")["output_token_logprobs"]
    twin += user("And?")
    twin += assistant(gen("b"))

    @function
    def longer(s):
        chat(s)
        s += user("And?")
        s += assistant(gen("b"))

    whole = longer.run(backend=ScriptedBackend(script), seed=3, top_p=0.9, stop=["END"])
    assert twin["b"] == whole["b"]
    assert twin.token_ids() == whole.token_ids()
    assert other.requests[0].sampling.top_p == 0.9
    with pytest.raises(UserError, match="model"):
        resume(saved, backend=ScriptedBackend(model="another"))
    with pytest.raises(UserError, match="no state"):
        resume({"x": 1}, backend=backend)


def test_a_program_that_waits_for_approval_resumes_from_disk(tmp_path):
    ran = []

    @tool(approve=True)
    def launch(what: str) -> str:
        """Launches."""
        ran.append(what)
        return "launched"

    @tool
    def look() -> str:
        """Looks."""
        return "clear sky"

    @function
    def program(s):
        s += user("Launch it.")
        s += agent_loop("answer", [launch, look])

    texts = iter([call("look") + call("launch", what="rocket")])
    state = program.run(backend=ScriptedBackend(lambda t, r: next(texts)), stream=True)
    wait_until(state.pending_calls)
    path = str(tmp_path / "parked.json")
    state.save(path)
    state.cancel()
    assert not ran

    with pytest.raises(UserError, match="launch"):
        resume(path, backend=ScriptedBackend())
    again = ScriptedBackend("All done.")
    later = resume(path, backend=again, tools=[look, launch])
    wait_until(later.pending_calls)
    assert [c.name for c in later.pending_calls()] == ["launch"]
    later.approve()
    assert later["answer"] == "All done."
    assert ran == ["rocket"]
    assert [m["role"] for m in later.messages()] == ["user", "assistant", "tool", "tool", "assistant"]
    assert "launched" in again.tokenizer.decode(again.requests[0].prompt_ids)


def test_a_loop_that_comes_to_an_approval_again_is_saved_and_resumed_again(tmp_path):
    ran = []

    @tool(approve=True)
    def launch(what: str) -> str:
        """Launches."""
        ran.append(what)
        return f"launched {what}"

    @function
    def program(s):
        s += user("Launch both.")
        s += agent_loop("answer", [launch], max_steps=3)

    state = program.run(backend=ScriptedBackend(call("launch", what="first")), stream=True)
    path = str(tmp_path / "parked.json")
    assert [c.arguments for c in state.wait_for_approval()] == [{"what": "first"}]
    state.save(path)
    state.cancel()

    later = resume(path, backend=ScriptedBackend(call("launch", what="second")), tools=[launch])
    assert [c.arguments for c in later.wait_for_approval()] == [{"what": "first"}]
    later.approve()
    assert [c.arguments for c in later.wait_for_approval()] == [{"what": "second"}]
    assert ran == ["first"]
    later.save(path)
    later.cancel()

    last = resume(path, backend=ScriptedBackend("Both are up."), tools=[launch])
    decided = 0
    while last.wait_for_approval():
        last.approve()
        decided += 1
    assert (decided, ran, last["answer"]) == (1, ["first", "second"], "Both are up.")
    assert [c["result"] for c in last.get_meta_info("answer")["calls"]] == ["launched first", "launched second"]


def test_a_state_resumes_in_another_process(tmp_path):
    path = tmp_path / "state.json"
    state = chat.run(backend=ScriptedBackend("Hi there. x"), seed=1)
    state.save(path)
    script = textwrap.dedent(f"""
        from agentrt.backends.scripted import ScriptedBackend
        from agentrt.lang.saving import resume
        state = resume({str(path)!r}, backend=ScriptedBackend("x"))
        print(state.token_ids())
    """)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert json.loads(done.stdout) == state.token_ids()


def test_a_branch_of_a_fork_cannot_be_saved():
    @function
    def program(s):
        s += "Q"
        forks = s.fork(2)
        forks[0].save()

    with pytest.raises(UserError, match="join first"):
        program.run(backend=ScriptedBackend())


def test_trajectories_say_where_each_id_came_from(tmp_path):
    @function
    def program(s):
        s += "Q: " + gen("a", return_logprob=True, stop="g") + "!"
        forks = s.fork(2)
        forks += gen("b")

    backend = ScriptedBackend(lambda t, r: Answer("ring", forced=1))
    path = tmp_path / "out.jsonl"
    records = program.run(backend=backend).trajectory(str(path))
    assert [json.loads(line) for line in path.read_text().splitlines()] == records
    trunk, first, second = records
    assert (trunk["branch"], first["branch"], second["branch"]) == ("", "0.0", "0.1")
    assert backend.tokenizer.decode(trunk["ids"]) == "Q: ring!"
    assert trunk["mask"] == ["fed", "fed", "forced", "sampled", "fed"]  # "Q", ": ", "r", "ing", "!"
    assert trunk["cut"] == [3]
    assert [p is None for p in trunk["logprobs"]] == [True, True, False, False, True]
    assert first["shared"] == len(trunk["ids"])
    assert first["reward"] is None
    last = backend.requests[-1]
    assert tuple(first["ids"][: first["shared"]]) == last.prompt_ids


def test_compaction_keeps_call_and_result_together_and_makes_room():
    seen = []

    @tool
    def look() -> str:
        """Looks."""
        return "clear sky"

    def keep(groups):
        seen.append([[m["role"] for m in group] for group in groups])
        return [groups[0], *groups[-2:]]

    @function
    def program(s):
        s += system("Be brief.")
        s += user("First, a long story. " + "blah " * 40)
        s += tool_call("calls", [look])
        s += user("Second?")
        left = s.tokens_left
        s += assistant(gen("a", max_tokens=400))
        return left, s.tokens_left

    def backend_of(max_context):
        texts = iter([call("look"), "fine"])
        return ScriptedBackend(lambda t, r: next(texts), max_context=max_context)

    roomy = backend_of(100_000)
    program.run(backend=roomy, compact=keep)
    assert not seen  # nothing is touched while there is room
    backend = backend_of(len(roomy.requests[0].prompt_ids) + 300)
    state = program.run(backend=backend, compact=keep)
    assert seen == [[["system"], ["user"], ["assistant", "tool"], ["user"]]]
    before, after = state.ret_value
    assert after > before
    told = backend.tokenizer.messages(backend.requests[-1].prompt_ids)
    assert [m["role"] for m in told][-3:] == ["assistant", "tool", "user"]
    assert "blah" not in str(told)

    @function
    def by_hand(s):
        s += user("One.")
        s += assistant(gen("a"))
        s.compact(lambda groups: groups[-1:])
        return s.messages()

    assert [m["role"] for m in by_hand.run(backend=ScriptedBackend("x")).ret_value] == ["assistant"]


def test_calls_that_were_made_are_calls_again(tmp_path):
    @tool
    def look(place: str) -> str:
        """Looks at a place."""
        return f"{place} is quiet"

    @function
    def program(s):
        s += user("Look at the sea.")
        s += tool_call("calls", [look])

    backend = ScriptedBackend(call("look", place="the sea"))
    state = program.run(backend=backend)
    made = state["calls"]
    state.save(tmp_path / "state.json")
    assert [each.text() for each in made] == ["the sea is quiet"]
    assert resume(tmp_path / "state.json", backend=backend)["calls"] == made
