"""Programs on the engine with the default model: what only a real one can show."""

from __future__ import annotations

import json
import math
import threading

import pytest
from pydantic import BaseModel

import agentrt as sgl
from agentrt.errors import AbortedError

pytestmark = [pytest.mark.model, pytest.mark.slow]


@sgl.function
def chat(s):
    s += sgl.system("You are brief.")
    s += sgl.user("What is the capital of France?")
    s += sgl.assistant(sgl.gen("a", max_tokens=12))
    s += sgl.user("And of Italy?")
    s += sgl.assistant(sgl.gen("b", max_tokens=12))


def test_turn_two_reuses_turn_one_and_is_what_the_template_renders(engine):
    state = chat.run(backend=engine, temperature=0)
    first, second = state.get_meta_info("a"), state.get_meta_info("b")
    assert second["cached_tokens"] >= first["prompt_tokens"] + first["completion_tokens"] - 1
    messages = state.messages()
    rendered = engine.tokenizer.encode_chat(messages, add_generation_prompt=False)
    assert engine.tokenizer.decode(state.token_ids(), skip_special=False) == engine.tokenizer.decode(
        rendered, skip_special=False
    )
    (report_a, report_b) = state.report().values["calls"]
    assert [r["why"] for r in report_a["recomputed"]] == ["new"]
    assert {r["why"] for r in report_b["recomputed"]} <= {"last", "new"}


def test_forks_share_one_prompt(engine):
    @sgl.function
    def program(s):
        s += "A prompt that every branch shares, word for word. " * 12
        forks = s.fork(20)
        forks += sgl.gen("a", max_tokens=1)
        forks.join()
        return len(s["a"])

    engine.flush_cache()
    before = threading.active_count()  # other tests' servers and engines may be there
    state = program.run(backend=engine, temperature=0)
    assert state.ret_value == 20
    prompt = state.report().values["calls"][0]["prompt_tokens"]
    assert state.report().values["totals"]["computed_tokens"] <= prompt + 19
    assert threading.active_count() - before < 19


def test_select_is_exact(engine):
    @sgl.function
    def program(s):
        s += "The capital of France is" + sgl.select("x", [" Berlin", " Paris", " Rome"])

    state = program.run(backend=engine)
    assert state["x"] == " Paris"
    encode, choices = engine.tokenizer.encode, (" Berlin", " Paris", " Rome")
    exact = engine.score(encode("The capital of France is", bos=True), [encode(choice) for choice in choices])
    means = state.get_meta_info("x")["normalized_prompt_logprobs"]
    for mean, score in zip(means, exact, strict=True):
        assert math.isclose(mean, score.logprob / len(score.tokens), abs_tol=1e-4)


def test_typed_values(engine):
    class Point(BaseModel):
        x: int
        y: bool

    @sgl.function
    def program(s):
        s += "Water is wet: " + sgl.gen("wet", dtype=bool)
        s += "\nA point as JSON: " + sgl.gen("point", type=Point, max_tokens=80)
        s += "\nIn three letters: " + sgl.gen("letters", regex="[a-z]{3}")
        return s["wet"], s["point"], s["letters"]

    wet, point, letters = program.run(backend=engine, temperature=0).ret_value
    assert isinstance(wet, bool)
    assert isinstance(point, Point)
    assert len(letters) == 3


def test_seeds_give_the_same_program_whatever_else_runs(engine):
    @sgl.function
    def program(s):
        s += "Once upon a time" + sgl.gen("a", max_tokens=8)
        forks = s.fork(2)
        forks += sgl.gen("b", max_tokens=4)
        forks.join()
        return s["a"], s["b"]

    alone = program.run(backend=engine, temperature=1.0, seed=7).ret_value
    beside = program.run_batch([{}] * 3, backend=engine, temperature=1.0, seed=7)
    assert [state.ret_value for state in beside] == [alone] * 3


def test_cancelling_frees_the_engine(engine):
    @sgl.function
    def program(s):
        s += "Count for ever: 1, 2," + sgl.gen("a", max_tokens=2000, ignore_eos=True)

    with pytest.raises(AbortedError):
        program.run(backend=engine, deadline=0.5)
    state = program.run(backend=engine, stream=True)
    next(state.text_iter("a"))
    state.cancel()
    with pytest.raises(AbortedError):
        state.sync()
    end = threading.Event()
    for _ in range(200):
        if engine.load().running == 0:
            end.set()
            break
        end.wait(0.05)
    assert end.is_set()


@pytest.mark.filterwarnings("ignore:.*knows no tools")
def test_tools_are_offered_called_and_answered_through_the_template(engine):
    @sgl.tool
    def add(a: int, b: int) -> int:
        """Adds two numbers."""
        return a + b

    @sgl.function
    def program(s):
        s += sgl.user("What is 17 + 25?")
        s += sgl.tool_call("calls", [add], choice="add", max_tokens=60)
        s += sgl.assistant(sgl.gen("a", max_tokens=8))
        return s["calls"]

    (call,) = program.run(backend=engine, temperature=0).ret_value
    assert call.name == "add"
    assert call.error is None
    assert call.result == call.arguments["a"] + call.arguments["b"]


def test_a_saved_chat_goes_on_where_it_stood(engine, tmp_path):
    state = chat.run(backend=engine, temperature=0)
    path = tmp_path / "chat.json"
    state.save(path)
    assert json.loads(path.read_text())["model"] == engine.capabilities.model
    again = sgl.resume(path, backend=engine)
    assert again.token_ids() == state.token_ids()
    again += sgl.user("Thanks.")
    again += sgl.assistant(sgl.gen("c", max_tokens=4))
    assert again.get_meta_info("c")["cached_tokens"] >= len(state.token_ids()) - 3


def test_token_healing_completes_the_text_in_the_models_own_tokens(engine):
    @sgl.function
    def program(s):
        s += "My favourite site is http:" + sgl.gen("a", max_tokens=6, temperature=0)

    healed = program.run(backend=engine, token_healing=True)
    plain = program.run(backend=engine)
    text = "My favourite site is http:"
    assert engine.tokenizer.decode(healed.token_ids()) == text + healed["a"] == healed.text()
    fed = healed.get_meta_info("a")["prompt_tokens"]
    assert fed < plain.get_meta_info("a")["prompt_tokens"]
    assert healed["a"].startswith("//")
