"""The surface once more, on the scripted backend and on the engine with a tiny model: what must hold whatever the answers are.

`test_surface.py` says what each symbol asks of a backend; here is what a program gets of it, one test per symbol and parameter.
"""

from __future__ import annotations

import ast
import asyncio
import dataclasses
import gc
import inspect
import json
import re
import threading
import tracemalloc
from pathlib import Path
from typing import Literal

import pytest
from pydantic import BaseModel

import agentrt as sgl
from agentrt.backends.scripted import ScriptedBackend
from agentrt.errors import AbortedError
from agentrt.lang.budget import BudgetError

PROMPT = "the quick brown fox jumps over the lazy dog, and then "


@pytest.fixture(scope="module")
def tiny(tiny_model):
    with sgl.Engine(str(tiny_model), process=False, dtype="float32") as engine:
        yield engine


def scripted_answer(text, request):
    """An answer that fits what the request asks for."""
    sampling = request.sampling
    spec = sampling.grammar
    if spec is not None and spec.kind == "tools":
        return '<tool_call>\n{"name": "double", "arguments": {"number": 7}}\n</tool_call>'
    pattern = spec.source if spec is not None and spec.kind == "regex" else sampling.regex
    if pattern is not None:
        return next(text for text in ("7", "1.5", "true", '"x"') if re.fullmatch(pattern, text))
    if sampling.json_schema is not None:
        return _fitting(sampling.json_schema)
    return f"over {sampling.seed} lazy dogs "


def _fitting(schema):
    for text in ('{"name": "x", "size": 7}', "7", "1.5", "true", '"x"', '"red"', "[1, 2]"):
        if _fits(text, schema):
            return text
    raise AssertionError(schema)


def _fits(text, schema):
    import jsonschema

    try:
        jsonschema.validate(json.loads(text), schema)
    except jsonschema.ValidationError:
        return False
    return True


@pytest.fixture(params=["scripted", "engine"])
def backend(request):
    return request.getfixturevalue("tiny") if request.param == "engine" else ScriptedBackend(scripted_answer)


def answer(backend, *, run=None, **options):
    """A gen's value and what is known of it."""

    @sgl.function
    def program(s):
        s += PROMPT + sgl.gen("x", **options)

    state = program.run(backend=backend, **(run or {}))
    return state["x"], state.get_meta_info("x"), state


# --------------------------------------------------------- parameters of a gen, and of a run


def most_three(backend, value, meta, state):
    assert 0 < len(meta["output_ids"]) <= 3


def two_samples(backend, value, metas, state):
    assert len(value) == len(metas) == 2


def no_e(backend, value, meta, state):
    assert "e" not in value


def stopped_at_e(backend, value, meta, state):
    assert value.endswith("e") or "e" not in value


def sixteen(backend, value, meta, state):
    assert len(meta["output_ids"]) <= 16
    assert meta["finish_reason"]["type"] == "length" or len(meta["output_ids"]) < 16


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


# ------------------------------------------------------------------------ typed values


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
    assert answer(backend, max_tokens=2)[0]  # and the next program runs


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


# -------------------------------------------------------------------------- text and chat


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


# --------------------------------------------------------------------------- many at once


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

    def once():
        state = program.run(backend=backend, seed=1)
        assert state.ret_value == 1000
        return state.report().values["totals"]

    backend.flush_cache()
    totals = once()
    prompt = totals["prompt_tokens"] // 1000
    assert 490 <= prompt <= 510
    assert totals["computed_tokens"] <= prompt + 1000  # every request computes its last token
    threads = threading.active_count()
    assert threads < 20
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
    assert threading.active_count() <= threads


# ------------------------------------------------------------- tools, and a state's afterlife


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


# ------------------------------------------------------- what is left of the surface, symbol by symbol


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


def test_a_program_that_is_cancelled_and_a_call_that_is_denied(backend):
    @sgl.function
    def program(s):
        s += PROMPT + sgl.gen("x", max_tokens=100_000 if isinstance(backend, ScriptedBackend) else 400, ignore_eos=True)

    slow = ScriptedBackend(sgl.Answer("a" * 1000), step_seconds=0.01) if isinstance(backend, ScriptedBackend) else backend
    state = program.run(backend=slow, stream=True)
    next(state.text_iter("x"))
    state.cancel()
    with pytest.raises(AbortedError):
        state.sync()
    with pytest.raises(sgl.UserError, match="no call"):
        state.deny("none", reason="not now")


def _named_in_this_file() -> set[str]:
    """Every attribute, keyword and quoted name in this file."""
    tree = ast.parse(Path(__file__).read_text())
    found = set()
    for node in ast.walk(tree):
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


def test_every_symbol_and_every_parameter_of_the_surface_is_used_above():
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
    assert sorted(wanted - _named_in_this_file()) == []
