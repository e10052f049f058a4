"""Conformance: every symbol and parameter of the frontend that programs bring along, one test each, run as ``sgl``."""

from __future__ import annotations

import asyncio
import inspect
import json
import typing

import pytest

import agentrt as sgl
from agentrt.backends.scripted import Answer, ScriptedBackend
from agentrt.errors import UserError


@sgl.function
def plain_ask(s):
    s += "Q: " + sgl.gen("a")


# --------------------------------------------------------- sampling parameters

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


# --------------------------------------------------------------------- select


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


# ---------------------------------------------------------------------- roles


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


# --------------------------------------------------------- image, video, reasoning


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


# ----------------------------------------------------------------- program methods


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


# ------------------------------------------------------------------ state methods


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


def test_the_engine_is_told_program_branch_and_what_will_be_forked(scripted):
    @sgl.function
    def program(s):
        s += "Q" + sgl.gen("a") + sgl.gen("b")
        forks = s.fork(3)
        forks += sgl.gen("c")

    slow = ScriptedBackend(lambda t, r: Answer("x", delay=0.02))
    state = program.run(backend=slow)
    tags = [request.program for request in slow.requests]
    assert {tag.program for tag in tags} == {state._run.id}
    assert [tag.branch for tag in tags[:2]] == ["", ""]
    assert (tags[0].expected_calls, tags[1].expected_calls) == (1, 0)
    assert tags[1].will_fork == 3
    assert slow.ended == [state._run.id]


# ------------------------------------------------------------ what newcomers get wrong


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
