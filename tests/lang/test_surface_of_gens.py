"""Conformance: every symbol and parameter that asks the model, one test each, run as ``sgl``."""

from __future__ import annotations

import inspect
import json
import typing

import pytest

import agentrt as sgl
from agentrt.backends.scripted import ScriptedBackend
from agentrt.errors import UserError


@sgl.function
def plain_ask(s):
    s += "Q: " + sgl.gen("a")


SAMPLING = [
    ("max_tokens", 3, "max_tokens", 3),
    ("max_new_tokens", 3, "max_tokens", 3),
    ("min_tokens", 2, "min_tokens", 2),
    ("n", 2, "n", 2),
    ("stop", "x", "stop", ("x",)),
    ("stop", ["x", "y"], "stop", ("x", "y")),
    ("stop_token_ids", [5], "stop_token_ids", (5,)),
    ("stop_regex", "x+", "stop_regex", ("x+",)),
    ("stop_regex", ["x+", "y"], "stop_regex", ("x+", "y")),
    ("temperature", 0.3, "temperature", 0.3),
    ("top_p", 0.4, "top_p", 0.4),
    ("top_k", 7, "top_k", 7),
    ("top_k", -1, "top_k", 0),
    ("min_p", 0.1, "min_p", 0.1),
    ("frequency_penalty", 0.2, "frequency_penalty", 0.2),
    ("presence_penalty", 0.2, "presence_penalty", 0.2),
    ("repetition_penalty", 1.1, "repetition_penalty", 1.1),
    ("ignore_eos", True, "ignore_eos", True),
    ("include_stop", True, "include_stop", True),
    ("seed", 11, "seed", 11),
    ("logit_bias", {3: 1.0}, "logit_bias", {3: 1.0}),
    ("logprobs", 2, "logprobs", 2),
    ("return_logprob", True, "logprobs", 0),
]


@pytest.mark.parametrize(("name", "given", "field", "value"), SAMPLING)
def test_gen_parameter(name, given, field, value, scripted):
    program = sgl.function(lambda s: s.__iadd__("Q: " + sgl.gen("a", **{name: given})))
    program.run(backend=scripted)
    assert getattr(scripted.requests[0].sampling, field) == value


@pytest.mark.parametrize(("name", "given", "field", "value"), [row for row in SAMPLING if row[0] != "seed"])
def test_run_parameter_is_a_default_and_a_gens_own_wins(name, given, field, value, scripted):
    plain_ask.run(backend=scripted, **{name: given})
    assert getattr(scripted.requests[0].sampling, field) == value
    own = sgl.function(lambda s: s.__iadd__("Q: " + sgl.gen("a", temperature=0.9, max_tokens=50)))
    own.run(backend=scripted, **{name: given})
    assert scripted.requests[1].sampling.temperature == 0.9
    assert scripted.requests[1].sampling.max_tokens == 50


def test_run_signature_names_sglangs_options():
    overloads = inspect.getsource(type(plain_ask))
    for name in (
        "max_new_tokens",
        "n",
        "stop",
        "stop_token_ids",
        "stop_regex",
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "frequency_penalty",
    ):
        assert f"{name}:" in overloads


def test_constraints_reach_the_backend():
    schema = {"type": "object", "properties": {"x": {"type": "integer"}}}
    backend = ScriptedBackend(['{"x": 1}', "abc", '{"x": 2}', "any"])

    @sgl.function
    def program(s):
        s += "Q" + sgl.gen("a", json_schema=schema) + sgl.gen("b", regex="[a-c]+")
        s += sgl.gen("c", json_schema='{"type": "object"}') + sgl.gen("d", ebnf='start: "any"')

    state = program.run(backend=backend)
    first, second, third, fourth = (request.sampling for request in backend.requests)
    assert (first.json_schema, second.regex, third.json_schema, fourth.ebnf) == (
        schema,
        "[a-c]+",
        {"type": "object"},
        'start: "any"',
    )
    assert (state["a"], state["b"]) == ('{"x": 1}', "abc")
    with pytest.raises(UserError, match="JSON"):
        sgl.gen("a", json_schema="{")


def test_n_above_one_gives_a_list_and_goes_on_from_the_first():
    backend = ScriptedBackend(["one", "two", "after"])

    @sgl.function
    def program(s):
        s += "Q" + sgl.gen("a", n=2) + "!" + sgl.gen("b")

    state = program.run(backend=backend)
    assert state["a"] == ["one", "two"]
    assert state.text() == "Qone!after"
    assert len(state.get_meta_info("a")) == 2


def test_return_logprob_and_its_companions():
    backend = ScriptedBackend("ab", score=lambda before, token: -1.5)

    @sgl.function
    def program(s):
        s += "QRS" + sgl.gen(
            "a", return_logprob=True, top_logprobs_num=2, logprob_start_len=1, return_text_in_logprobs=True
        )

    meta = program.run(backend=backend).get_meta_info("a")
    assert meta["output_token_logprobs"][0][0] == -1.5
    assert len(meta["output_top_logprobs"][0]) == 2
    assert [token for _, token, _ in meta["input_token_logprobs"]] == [ord("R"), ord("S")]


def test_dtype(scripted):
    for dtype, said, value in ((int, "5", 5), (float, "1.5", 1.5), (bool, "true", True), (str, '"x"', "x")):
        backend = ScriptedBackend(said)

        @sgl.function
        def program(s, dtype):
            s += "Q" + sgl.gen("a", dtype=dtype)

        assert program.run(dtype, backend=backend)["a"] == value


def test_a_type_may_be_a_typed_dict_of_any_python():
    class Place(typing.TypedDict):
        name: str
        near: typing.NotRequired[list[str]]

    @sgl.function
    def program(s):
        s += "Q" + sgl.gen("a", type=list[Place])

    said = '[{"name": "Lindau", "near": ["Bregenz"]}, {"name": "Skagen"}]'
    assert program.run(backend=ScriptedBackend(said))["a"] == json.loads(said)


def test_gen_int_and_gen_string():
    @sgl.function
    def program(s):
        s += "Q" + sgl.gen_int("a", max_tokens=5) + sgl.gen_string("b", stop="!")

    state = program.run(backend=ScriptedBackend(["12", '"hey"']))
    assert (state["a"], state["b"]) == (12, "hey")


def test_choices_makes_a_gen_a_select(scripted):
    @sgl.function
    def program(s):
        s += "Q" + sgl.gen("a", choices=["x", "y"], choices_method="greedy_token_selection")

    state = program.run(backend=scripted)
    assert state["a"] in ("x", "y")
    assert state.get_meta_info("a")["choices_method"] == "greedy_token_selection"


def scores(table, default=-1.0):
    tokenizer = ScriptedBackend().tokenizer
    by_id = {tokenizer.encode(text)[0]: value for text, value in table.items()}
    return lambda before, token: by_id.get(token, default)


def picks(method, choices, score, temperature=0.0, **options):
    @sgl.function
    def program(s):
        s += "Q" + sgl.select("x", choices, temperature=temperature, choices_method=method)

    return program.run(backend=ScriptedBackend(score=score), **options)["x"]


def test_select_by_token_length_normalized():
    # "ca" has the mean -2, "aaaa" the mean -1: the sum alone would prefer "ca"
    assert picks("token_length_normalized", ["ca", "aaaaaaa"], scores({"a": -1.0, "c": -3.0})) == "aaaaaaa"


def test_select_by_greedy_token_selection():
    assert picks("greedy_token_selection", ["xc", "ya"], scores({"x": -0.1, "y": -0.2, "c": -9.0, "a": -0.1})) == "xc"
    assert picks("token_length_normalized", ["xc", "ya"], scores({"x": -0.1, "y": -0.2, "c": -9.0, "a": -0.1})) == "ya"


def test_select_by_unconditional_likelihood_normalized():
    @sgl.function
    def program(s):
        s += "Q" + sgl.select("x", ["zx", "zy"], choices_method="unconditional_likelihood_normalized")

    def bare_or_not(before, token):  # "x" is always likely; the prompt speaks for "y"
        prompted = before and before[0] == ord("Q")
        return {ord("x"): -0.1, ord("y"): -0.5 if prompted else -5.0}.get(token, -1.0)

    assert program.run(backend=ScriptedBackend(score=bare_or_not))["x"] == "zy"


def test_select_draws_above_temperature_zero_with_the_seed():
    flat = scores({}, -1.0)
    drawn = [picks("token_length_normalized", ["x", "y", "z"], flat, temperature=1.0, seed=seed) for seed in range(30)]
    assert len(set(drawn)) == 3
    assert drawn == [
        picks("token_length_normalized", ["x", "y", "z"], flat, temperature=1.0, seed=seed) for seed in range(30)
    ]


def test_select_refuses_what_is_no_choice():
    for choices in ([], None, [""], [1]):
        with pytest.raises(UserError, match="choices"):
            sgl.select("x", choices)
    with pytest.raises(UserError, match="choices_method"):
        sgl.select("x", ["a"], choices_method="best")


@pytest.mark.parametrize("make", [lambda: sgl.image("cat.png"), lambda: sgl.video("cat.mp4", 4)])
def test_images_and_videos_are_refused_clearly_where_the_model_takes_text_only(make, scripted):
    @sgl.function
    def program(s):
        s += sgl.user(make() + "What is this?")

    with pytest.raises(UserError, match="takes text only"):
        program.run(backend=scripted)


@pytest.mark.parametrize(
    ("family", "said", "reasoning", "answer"),
    [
        ("qwen3", "<think>\nhmm, 1\n</think>\n\nIt is 1.", "hmm, 1\n", "It is 1."),
        ("qwen3", "No thinking.", "", "No thinking."),
        ("deepseek-r1", "hmm</think>yes", "hmm", "yes"),
        ("deepseek-r1", "<think>hmm</think>yes", "hmm", "yes"),
        ("kimi", "◁think▷hm◁/think▷ok", "hm", "ok"),
        ("qwen3", "<think>cut off", "cut off", ""),
        ("qwen3", "a < b <thin", "", "a < b <thin"),
    ],
)
def test_separate_reasoning_splits_and_streams_both(family, said, reasoning, answer):
    @sgl.function
    def program(s):
        s += "Q" + sgl.separate_reasoning(sgl.gen("a"), model_type=family)

    backend = ScriptedBackend(said)
    state = program.run(backend=backend)
    assert (state["a"], state["a_reasoning_content"]) == (answer, reasoning)
    streamed = program.run(backend=backend, stream=True)
    assert "".join(streamed.text_iter("a")) == answer
    assert "".join(streamed.text_iter("a_reasoning_content")) == reasoning
    assert streamed.text() == "Q" + said


def test_separate_reasoning_refuses_what_it_cannot_split():
    with pytest.raises(UserError, match="model_type"):
        sgl.separate_reasoning(sgl.gen("a"), model_type="nobody")
    with pytest.raises(UserError, match="named gen"):
        sgl.separate_reasoning("text")
