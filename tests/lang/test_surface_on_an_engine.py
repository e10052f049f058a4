"""The surface once more, on the scripted backend and on the engine with a tiny model: what must hold whatever the answers are.

`test_surface_of_*.py` say what each symbol asks of a backend; here is what a program gets of it: a test for each part of the language.
"""

from __future__ import annotations

import asyncio
import gc
import inspect
import json
import threading
import tracemalloc
from typing import Literal

import pytest
from pydantic import BaseModel

import agentrt as sgl
from agentrt.backends.scripted import ScriptedBackend
from agentrt.errors import AbortedError
from agentrt.lang.budget import BudgetError

PROMPT = "the quick brown fox jumps over the lazy dog, and then "


def answer(backend, *, run=None, **options):
    """A gen's value and what is known of it."""

    @sgl.function
    def program(s):
        s += PROMPT + sgl.gen("x", **options)

    state = program.run(backend=backend, **(run or {}))
    return state["x"], state.get_meta_info("x"), state


def most_three(backend, value, meta, state):
    assert 0 < len(meta["output_ids"]) <= 3


def two_samples(backend, value, metas, state):
    assert len(value) == len(metas) == 2


def no_e(backend, value, meta, state):
    assert "e" not in value


def stopped_at_e(backend, value, meta, state):
    assert value.endswith("e") or "e" not in value


def sixteen(backend, value, meta, state):
    ids = meta["output_ids"]
    assert len(ids) <= 16
    assert meta["finish_reason"]["type"] == "length" or len(ids) < 16 or ids[-1] in backend.tokenizer.eos_ids


def scored(backend, value, meta, state):
    assert [token for _, token, _ in meta["output_token_logprobs"]] == meta["output_ids"]
    assert all(logprob <= 0 for logprob, _, _ in meta["output_token_logprobs"])
    assert all(len(top) == 2 for top in meta["output_top_logprobs"])


def prompt_scored(backend, value, meta, state):
    ids = state.token_ids()[: meta["prompt_tokens"]]
    assert [token for _, token, _ in meta["input_token_logprobs"]] == ids[2:]


def anything(backend, value, meta, state):
    assert isinstance(value, str)
    assert meta["completion_tokens"] == len(meta["output_ids"]) > 0


PARAMETERS = [
    ({"max_tokens": 3}, most_three),
    ({"max_new_tokens": 3}, most_three),
    ({"n": 2, "max_tokens": 4}, two_samples),
    ({"stop": "e", "max_tokens": 16}, no_e),
    ({"stop": ["zzz", "e"], "max_tokens": 16}, no_e),
    ({"stop_regex": "[e]", "max_tokens": 16}, no_e),
    ({"stop": "e", "include_stop": True, "max_tokens": 16}, stopped_at_e),
    ({"ignore_eos": True, "max_tokens": 16}, sixteen),
    ({"min_tokens": 2, "max_tokens": 16}, sixteen),
    ({"return_logprob": True, "top_logprobs_num": 2, "max_tokens": 4}, scored),
    ({"return_logprob": True, "logprob_start_len": 2, "max_tokens": 4}, prompt_scored),
    ({"logprobs": 2, "prompt_logprobs": 0, "prompt_logprobs_start": 2, "max_tokens": 4}, prompt_scored),
    ({"temperature": 0.3, "max_tokens": 8}, anything),
    ({"top_p": 0.4, "max_tokens": 8}, anything),
    ({"top_k": 7, "max_tokens": 8}, anything),
    ({"top_k": -1, "max_tokens": 8}, anything),
    ({"min_p": 0.1, "max_tokens": 8}, anything),
    ({"frequency_penalty": 0.2, "max_tokens": 8}, anything),
    ({"presence_penalty": 0.2, "max_tokens": 8}, anything),
    ({"repetition_penalty": 1.1, "max_tokens": 8}, anything),
]


@pytest.mark.parametrize(("options", "check"), PARAMETERS, ids=lambda value: "+".join(value) if isinstance(value, dict) else "")
@pytest.mark.parametrize("given_to", ["gen", "run"])
def test_a_parameter_means_the_same_on_a_gen_and_on_a_run(backend, options, check, given_to):
    given = answer(backend, **options) if given_to == "gen" else answer(backend, run=options)
    check(backend, *given)


def test_stop_token_ids_end_an_answer_and_logit_bias_makes_them_come(backend):
    (token,) = backend.tokenizer.encode("q")
    if isinstance(backend, ScriptedBackend):
        backend = ScriptedBackend("aqa")
    value, meta, _ = answer(backend, stop_token_ids=[token], logit_bias={token: 100.0}, temperature=0, max_tokens=8)
    assert meta["finish_reason"] == {"type": "stop", "matched": token}
    assert "q" not in value
    assert meta["output_ids"][-1] == token


def test_a_seed_gives_the_same_answer_and_another_seed_another(backend):
    values = [answer(backend, seed=seed, temperature=1.0, max_tokens=12)[0] for seed in (1, 1, 2)]
    assert values[0] == values[1] != values[2]
    runs = [answer(backend, run={"seed": seed}, max_tokens=12)[0] for seed in (1, 1, 2)]
    assert runs[0] == runs[1] != runs[2]


class Thing(BaseModel):
    name: Literal["x", "y"]
    size: int


@pytest.mark.parametrize(
    ("options", "kind"),
    [({"dtype": int}, int), ({"dtype": bool}, bool), ({"type": Thing}, Thing), ({"type": Literal["red", "blue"]}, str)],
    ids=["int", "bool", "model", "literal"],
)
def test_a_typed_gen_gives_a_value_of_its_type(backend, options, kind):
    value, _, _ = answer(backend, temperature=0, **options)
    assert type(value) is kind


def test_regex_and_json_schema_hold(backend):
    value, _, _ = answer(backend, regex="[0-9]{1,3}", max_tokens=8, temperature=0)
    assert value.isdigit()
    schema = {"type": "object", "properties": {"name": {"enum": ["x"]}, "size": {"enum": [7]}}, "required": ["name", "size"]}
    value, _, _ = answer(backend, json_schema=schema | {"additionalProperties": False}, max_tokens=60, temperature=0)
    assert json.loads(value) == {"name": "x", "size": 7}


def test_a_grammar_error_is_raised_from_run_with_the_programs_line(backend):
    for wrong in ({"regex": "("}, {"json_schema": {"type": "objekt"}}):
        with pytest.raises((sgl.GrammarError, sgl.EngineError, sgl.ConstraintError)) as caught:
            answer(backend, **wrong)
        assert f"{__file__}:{inspect.getsourcelines(answer)[1] + 5}" in caught.value.__notes__[0]
    assert answer(backend, max_tokens=2)[1]["completion_tokens"] > 0  # and the next program runs, whatever it says


def test_unicode_streams_in_whole_characters(backend):
    if isinstance(backend, ScriptedBackend):
        backend = ScriptedBackend("🙂é漢🙂")

    @sgl.function
    def program(s):
        s += PROMPT + sgl.gen("x", regex="[🙂é漢]{4}", max_tokens=60)
        s += sgl.gen("y", regex=r"\w{2}", max_tokens=20, logit_bias=dict.fromkeys(range(128), -100.0))

    pieces = list(program.run(backend=backend, stream=True, seed=3).text_iter("x"))
    assert len("".join(pieces)) == 4
    assert set("".join(pieces)) <= set("🙂é漢")


@pytest.mark.parametrize(
    "method", ["token_length_normalized", "greedy_token_selection", "unconditional_likelihood_normalized"]
)
def test_select_takes_one_of_its_choices_and_feeds_exactly_its_ids(backend, method):
    @sgl.function
    def program(s):
        s += PROMPT + sgl.select("x", [" the fox", " the dog", " a"], choices_method=method)
        return s["x"]

    state = program.run(backend=backend)
    encode = backend.tokenizer.encode
    assert state.token_ids() == encode(PROMPT) + encode(state["x"])
    assert state.text() == PROMPT + state["x"]
    meta = state.get_meta_info("x")
    assert len(meta["normalized_prompt_logprobs"]) == 3
    assert all(value < 0 for value in meta["normalized_prompt_logprobs"])


def test_a_chat_is_what_the_template_renders_and_turn_two_reuses_turn_one(backend):
    @sgl.function
    def chat(s):
        s += sgl.system("quick") + sgl.user("fox")
        with s.assistant():
            s += sgl.gen("a", max_tokens=6)
        s.user("dog")
        s += sgl.assistant_begin() + sgl.gen("b", max_tokens=6) + sgl.assistant_end()

    state = chat.run(backend=backend, temperature=0)
    roles = ["system", "user", "assistant", "user", "assistant"]
    assert [message["role"] for message in state.messages()] == roles
    assert state.messages()[2]["content"] == state["a"]
    first, second = state.get_meta_info("a"), state.get_meta_info("b")
    assert second["cached_tokens"] >= first["prompt_tokens"] + first["completion_tokens"] - 2
    assert state.token_ids()[: first["prompt_tokens"]] == backend.tokenizer.encode_chat(state.messages()[:2])


def test_var_scope_text_and_streams_say_the_same(backend):
    @sgl.function
    def program(s):
        s += PROMPT
        with s.var_scope("whole"):
            s += "[" + sgl.gen("x", max_tokens=8) + "]"

    state = program.run(backend=backend, stream=True, seed=3)
    pieces = list(state.text_iter("x"))
    assert "".join(pieces) == state["x"]
    assert state["whole"] == f"[{state['x']}]"
    assert "".join(state.text_iter()) == state.text() == PROMPT + state["whole"]

    async def read():
        streamed = await program.arun(backend=backend, stream=True, seed=3)
        return [piece async for piece in streamed.text_async_iter("x")]

    assert "".join(asyncio.run(read())) == state["x"]


def test_forks_share_their_prompt_and_join_in_order(backend):
    @sgl.function
    def program(s):
        s += PROMPT * 4
        forks = s.fork(4)
        forks += lambda i: f"{i}: "
        forks += sgl.gen("x", max_tokens=4)
        forks.join()
        return [fork["x"] for fork in forks], s["x"]

    backend.flush_cache()
    state = program.run(backend=backend, seed=5)
    each, joined = state.ret_value
    assert each == joined
    totals = state.report().values["totals"]
    assert totals["computed_tokens"] <= len(backend.tokenizer.encode(PROMPT * 4)) + 4 * 8


def test_copy_nested_programs_variables_and_bind(backend):
    @sgl.function
    def inner(s, word):
        s += word + sgl.gen("inner", max_tokens=3)
        return s["inner"]

    @sgl.function
    def outer(s, word, mark):
        s["mark"] = mark
        s += PROMPT
        got = inner(s, word)
        with s.copy() as other:
            other += "!" + sgl.gen("other", max_tokens=3)
        return got, s["other"][0], "mark" in s, s["mark"]

    state = outer.bind(mark=1).run(" fox", backend=backend, seed=1)
    assert state.ret_value == (state["inner"], state["other"][0], True, 1)
    assert state.text() == PROMPT + " fox" + state["inner"]


def test_run_batch_computes_the_common_prefix_once_and_keeps_the_order(backend):
    @sgl.function
    def program(s, number):
        s += PROMPT * 4 + f"{number}: " + sgl.gen("x", max_tokens=4)

    backend.flush_cache()
    states = program.run_batch([{"number": n} for n in range(5)], backend=backend, seed=2)
    assert [state.text().startswith(PROMPT * 4 + f"{n}: ") for n, state in enumerate(states)] == [True] * 5
    prefix = len(backend.tokenizer.encode(PROMPT * 4))
    assert all(state.get_meta_info("x")["cached_tokens"] >= prefix - 2 for state in states)


def test_cache_computes_what_comes_before_the_first_gen(backend):
    @sgl.function
    def program(s, number):
        s += PROMPT * 2 + f"{number}" + sgl.gen("x", max_tokens=2)

    backend.flush_cache()
    known = program.cache(backend=backend)
    assert known > 5
    state = program.run(7, backend=backend)
    assert state.get_meta_info("x")["cached_tokens"] >= known - 2


def test_async_programs_deadlines_and_budgets(backend):
    @sgl.function
    async def native(s):
        s += PROMPT
        return await s.gen("x", max_tokens=3)

    async def main():
        return await asyncio.gather(*(native.arun(backend=backend, seed=n) for n in range(3)))

    assert all(isinstance(state.ret_value, str) for state in asyncio.run(main()))

    @sgl.function
    def long(s):
        s += PROMPT
        for _ in range(3):
            s += sgl.gen("x", max_tokens=6, ignore_eos=True)

    with pytest.raises(BudgetError, match="10"):
        long.run(backend=backend, token_budget=10)
    with pytest.raises(AbortedError):
        sgl.function(lambda s: s.__iadd__(PROMPT + sgl.gen("x", max_tokens=9))).run(backend=backend, deadline=1e-9)


@pytest.mark.slow
def test_1000_forks_of_one_500_token_prompt_compute_it_once_and_leave_memory_and_threads_as_they_were(backend):
    word = next(w for w in (" the", "the ", "fox") if len(backend.tokenizer.encode(w * 20)) % 20 == 0)
    each = len(backend.tokenizer.encode(word * 20)) // 20

    @sgl.function
    def program(s):
        s += word * (500 // each)
        forks = s.fork(1000)
        forks += sgl.gen("x", max_tokens=1)
        forks.join()
        return len(s["x"])

    others = set(threading.enumerate())  # of other tests' servers and engines; a server that is left feels its engine's pulse now and then

    def started():
        return [thread for thread in threading.enumerate() if thread not in others and thread.name != "agentrt-pulse"]

    def once():
        state = program.run(backend=backend, seed=1)
        assert state.ret_value == 1000
        return state.report().values["totals"]

    backend.flush_cache()
    totals = once()
    prompt = totals["prompt_tokens"] // 1000
    assert 490 <= prompt <= 510
    assert totals["computed_tokens"] <= prompt + 1000  # every request computes its last token
    assert len(started()) <= 2
    tracemalloc.start()
    held = []
    for _ in range(3):
        once()
        getattr(backend, "requests", []).clear()  # the scripted one remembers what it was asked
        gc.collect()
        held.append(tracemalloc.get_traced_memory()[0])
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert held[2] - held[1] < 2_000_000  # a run that has ended is gone
    assert peak < 100_000_000
    assert len(started()) <= 2  # as many as after the first run: what runs leave behind would be thousands


@pytest.mark.filterwarnings("ignore:.*knows no tools")
def test_tools_are_called_within_their_schema_and_their_results_come_back(backend):
    @sgl.tool
    def double(number: Literal[7, 8]) -> int:
        """Doubles."""
        return 2 * number

    @sgl.function
    def program(s):
        s += sgl.user("double it")
        s += sgl.tool_call("calls", [double], choice="required", parallel=False, max_tokens=120)
        return s["calls"]

    state = program.run(backend=backend, temperature=0)
    (call,) = state.ret_value
    assert (call.name, call.error, call.result) == ("double", None, 2 * call.arguments["number"])
    assert str(call.result) in state.messages()[-1]["content"]


def test_a_state_is_saved_resumed_replayed_and_told_as_a_trajectory(backend):
    @sgl.function
    def program(s):
        s += PROMPT + sgl.gen("x", max_tokens=6)

    state = program.run(backend=backend, seed=9)
    again = sgl.resume(state.save(), backend=backend)
    assert again.token_ids() == state.token_ids()
    assert program.replay(state.recording, backend=backend)["x"] == state["x"]
    (record,) = state.trajectory()
    assert record["ids"] == state.token_ids()
    meta = state.get_meta_info("x")
    fed = [kind == "fed" for kind in record["mask"]]
    assert fed == [place < meta["prompt_tokens"] for place in range(len(fed))]
