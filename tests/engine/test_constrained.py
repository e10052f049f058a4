"""Constraints in the step loop: what comes out satisfies them, jump-forward changes nothing but the number of passes."""

from __future__ import annotations

import itertools
import json
import random
import re
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Literal

import jsonschema
import numpy as np
import pydantic
import pytest

import agentrt
from agentrt import Engine, FinishReason, GrammarSpec, SamplingParams
from agentrt.grammar import GrammarCache, compile, json_schema_spec


@pytest.fixture(scope="module")
def engine(tiny_model):
    with Engine(str(tiny_model), process=False, check=True, dtype="float32", kv_tokens=8192, threads=1) as engine:
        yield engine


class Pet(pydantic.BaseModel, extra="forbid"):
    name: str = pydantic.Field(max_length=8)
    kind: Literal["cat", "dog"]
    age: int = pydantic.Field(ge=0, le=40)


def with_jump_forward(spec: GrammarSpec, mode: str) -> GrammarSpec:
    return GrammarSpec(spec.kind, spec.source, spec.options, spec.engine, spec.strict, mode)


def test_a_model_in_and_an_instance_out(engine):
    for seed in range(10):
        completion = engine.generate([5, 6], SamplingParams(json_schema=Pet, max_tokens=200, seed=seed))
        assert completion.finish_reason is FinishReason.STOP
        Pet.model_validate_json(completion.text)
        assert completion.usage.forced_tokens > 0
        assert completion.usage.forward_passes + completion.usage.passes_saved >= completion.usage.completion_tokens


def test_a_constraint_that_was_compiled_begins_at_once(engine, monkeypatch):
    """It waits for no thread that compiles, so requests that come together begin together."""
    asked = SamplingParams(regex="once(, twice)?", max_tokens=60, seed=1)
    first = engine.generate([5, 6], asked)

    def compile_anew(*_: object) -> None:
        raise AssertionError("it is compiled again")

    monkeypatch.setattr(GrammarCache, "compile", compile_anew)
    again = engine.generate([[5, 6]] * 4, [asked] * 4)
    assert [completion.text for completion in again] == [first.text] * 4
    assert engine.stats()["compiles"] >= 5


@pytest.mark.parametrize(
    ("constraint", "pattern"),
    [
        ({"regex": r"[a-f]{3}-\d{2}"}, r"[a-f]{3}-\d{2}"),
        ({"choices": ["yes", "no", "perhaps"]}, "yes|no|perhaps"),
        ({"choices": ["only this"]}, "only this"),
        ({"ebnf": 'start: "a"+ "b"\n'}, "a+b"),
        ({"regex": "é🙂?"}, "é🙂?"),
    ],
)
def test_regex_choices_and_lark(engine, constraint, pattern):
    for seed in range(6):
        completion = engine.generate([5, 6], SamplingParams(max_tokens=120, seed=seed, logit_bias=None, **constraint))
        if completion.finish_reason is FinishReason.STOP:
            assert re.fullmatch(pattern, completion.text), completion.text
        else:
            assert completion.finish_reason is FinishReason.LENGTH
    assert "regex" not in constraint or completion.text


def test_a_single_choice_needs_no_pass(engine):
    completion = engine.generate([5, 6], SamplingParams(choices=["only this"], logprobs=1))
    assert completion.text == "only this"
    assert completion.usage.forward_passes == 0
    assert all(entry.logprob == 0 for entry in completion.logprobs)


def forced_runs(sample) -> list[list[int]]:
    """The token ids of each run that was forced."""
    groups = itertools.groupby(zip(sample.token_ids, sample.forced, strict=True), key=lambda pair: pair[1])
    return [[token for token, _ in group] for forced, group in groups if forced]


def schemas(corpora, count: int) -> list[dict]:
    lines = (corpora / "structured" / "maskbench_sample.jsonl").read_text().splitlines()
    return [json.loads(line)["schema"] for line in random.Random(3).sample(lines, count)]


@pytest.mark.slow
def test_jump_forward_changes_no_token_over_100_real_schemas(engine, corpora):
    saved = compared = 0
    for schema in schemas(corpora, 130):
        try:
            spec = json_schema_spec(schema)
            on = engine.generate([7, 8, 9], SamplingParams(grammar=spec, temperature=0, max_tokens=60, max_resamples=0))
            off = engine.generate([7, 8, 9], SamplingParams(grammar=with_jump_forward(spec, "off"), temperature=0, max_tokens=60, max_resamples=0))
        except (agentrt.GrammarError, agentrt.ConstraintError):
            continue  # refused, or checked and failed: both by name
        compared += 1
        assert on.token_ids == off.token_ids
        assert off.usage.forced_tokens == 0
        saved += on.usage.passes_saved
        for run in forced_runs(on.samples[0]):
            assert engine.tokenizer.encode(engine.tokenizer.decode(run)) == run, "forced, but not how the tokenizer spells it"
    assert compared >= 100
    assert saved > 5 * compared


def test_exact_masked_draws_what_plain_masking_draws(engine):
    """Drafts change nothing: the tokens are those of asking for one token at a time under the same mask and seed."""
    spec = with_jump_forward(json_schema_spec(Pet), "exact_masked")
    grammar = compile(spec, engine.tokenizer)
    saved = 0
    for seed in range(3):
        exact = engine.generate([5, 6], SamplingParams(grammar=spec, seed=seed, max_tokens=60))
        saved += exact.usage.passes_saved
        cursor, ids = grammar.cursor(), [5, 6]
        for token in exact.token_ids:
            bits = np.unpackbits(cursor.allowed().view(np.uint8), bitorder="little", count=engine.facts.vocab_size)
            banned = {int(i): -1e9 for i in np.flatnonzero(bits == 0)}
            one = engine.generate(ids, SamplingParams(logit_bias=banned, seed=seed, max_tokens=1))
            assert one.token_ids == (token,)
            ids.append(token)
            cursor.advance(token)
    assert saved > 0


def test_everything_acts_inside_a_forced_run(engine):
    spec = {"type": "object", "properties": {"a_rather_long_name": {"enum": [1, 2]}}, "required": ["a_rather_long_name"], "additionalProperties": False}
    whole = engine.generate([5], SamplingParams(json_schema=spec, temperature=0))
    assert json.loads(whole.text)["a_rather_long_name"] in (1, 2)
    stopped = engine.generate([5], SamplingParams(json_schema=spec, temperature=0, stop="long"))
    assert stopped.text == '{"a_rather_'
    assert stopped.finish_reason is FinishReason.STOP
    cut = engine.generate([5], SamplingParams(json_schema=spec, temperature=0, max_tokens=3))
    assert cut.finish_reason is FinishReason.LENGTH
    assert cut.token_ids == whole.token_ids[:3]
    deltas = list(engine.stream([5], SamplingParams(json_schema=spec, temperature=0, logprobs=0)))
    assert "".join(delta.text for delta in deltas) == whole.text
    flags = [flag for delta in deltas for flag in delta.forced]
    logprobs = [entry for delta in deltas for entry in delta.logprobs or ()]
    assert all(entry.logprob == 0 for entry, forced in zip(logprobs, flags, strict=True) if forced)


UNIQUE = {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 30}, "minItems": 2, "maxItems": 2, "contains": {"multipleOf": 2, "minimum": 8}}


def test_what_needs_a_final_check_is_held_back_and_resampled(engine):
    resamples = 0
    for seed in range(12):
        request = engine.request([5, 6], SamplingParams(json_schema=UNIQUE, seed=seed, temperature=5, max_resamples=20, max_tokens=60))
        deltas = list(agentrt.backend.stream(engine, request))
        completion = agentrt.backend.collect(request, deltas)
        if completion.finish_reason is FinishReason.STOP:
            jsonschema.validate(json.loads(completion.text), UNIQUE)
        resamples += completion.usage.resamples
        told = [delta for delta in deltas if delta.text or delta.token_ids]
        assert len(told) == 1, "something was told before the check"
    assert resamples > 0


def test_a_greedy_retry_excludes_what_failed(engine):
    """Greedy decoding would say the same again; each retry must be another document, until one passes."""
    failures = 0
    for prompt in range(12):
        sampling = SamplingParams(json_schema=UNIQUE, temperature=0, max_resamples=30, max_tokens=60)
        try:
            completion = engine.generate([prompt, 6], sampling)
        except agentrt.ConstraintError:
            failures += 1
            continue
        if completion.finish_reason is FinishReason.STOP:
            jsonschema.validate(json.loads(completion.text), UNIQUE)
        assert engine.generate([prompt, 6], sampling).text == completion.text
    assert failures <= 6


def test_an_output_that_never_passes_fails_and_names_the_keyword(engine):
    impossible = UNIQUE | {"contains": {"const": 99}}
    with pytest.raises((agentrt.ConstraintError, agentrt.GrammarError), match="contains"):
        engine.generate([5, 6], SamplingParams(json_schema=impossible, seed=1, max_resamples=1, max_tokens=60))
    with pytest.raises(agentrt.UserError, match="contains"):
        engine.generate([5, 6], SamplingParams(json_schema=UNIQUE, strict=True))


TWO_CIRCLES = {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}
ENDLESS = {"type": "object", "properties": {"self": {"$ref": "#"}}, "required": ["self"]}
BAD = {
    "doubled repeat": ({"regex": "foo**"}, "regex", r"repeat of a repeat at offset 4"),
    "repeat of a repeat": ({"regex": "(a{1,1000}){1,1000}"}, "regex", "1,000,000 copies.*20,000"),
    "look-around": ({"regex": "a(?!b)c"}, "regex", "lookaround.*offset 1"),
    "empty pattern": ({"regex": "a$b"}, "regex", "nothing can match"),
    "nowhere": ({"json_schema": {"$ref": "#/nowhere"}}, "json_schema", "nowhere"),
    "network": ({"json_schema": {"$ref": "https://example.org/schema"}}, "json_schema", "example.org.*nothing is fetched"),
    "circle": ({"json_schema": TWO_CIRCLES}, "json_schema", r"/\$defs/b.*in a circle"),
    "endless": ({"json_schema": ENDLESS}, "json_schema", "requires itself"),
    "deep": ({"json_schema": '{"items":' * 900 + "{}" + "}" * 900}, "json_schema", "deeper than"),
    "empty text": ({"json_schema": ""}, "json_schema", "empty"),
    "no such type": ({"json_schema": {"type": "strin"}}, "json_schema", "strin"),
    "half a character": ({"json_schema": {"type": "\ud800"}}, "json_schema", "type"),
    "no choices": ({"choices": []}, "choices", "choice"),
    "no such rule": ({"ebnf": "start: nothing"}, "ebnf", "nothing"),
    "strict": ({"json_schema": {"pattern": "a(?=b)"}, "strict": True}, "json_schema", "pattern"),
}
LARGE = {
    "enum of 10 MB": ({"json_schema": {"enum": [f"value number {n:07}" for n in range(420_000)]}}, "json_schema", "bytes; at most 2000000"),
    "explosion": ({"regex": "[ab]*a[ab]{24}"}, "regex", "needs more than 4 s"),
}


@pytest.mark.parametrize("name", [*BAD, *(pytest.param(name, marks=pytest.mark.slow) for name in LARGE)])
def test_a_bad_constraint_hurts_nobody_else(engine, name):
    """The error names the field and the place, soon; what runs beside it goes on, and what comes after it is answered."""
    constraint, field, words = (BAD | LARGE)[name]
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(engine.generate, [4, 5], SamplingParams(max_tokens=40, ignore_eos=True, seed=1))
        begun = time.perf_counter()
        with pytest.raises(agentrt.UserError, match=words) as caught:
            engine.generate([5], SamplingParams(max_tokens=10, **constraint))
        assert time.perf_counter() - begun < 60  # what explodes is given up after 4 s; the machine may be busy elsewhere
        assert caught.value.param == field
        assert len(str(caught.value)) < 700
        assert len(other.result(60).token_ids) == 40
    assert engine.generate([5], SamplingParams(choices=["yes"])).text == "yes"


@pytest.mark.slow
def test_bad_constraints_hurt_nobody_in_an_engine_process_either(tiny_model):
    """One that explodes, one that nests without end, one that would end the process, and one whose check would: a stream runs on beside them."""
    link = {"type": "object", "required": ["n"], "additionalProperties": False}
    chain = {"$ref": "#/$defs/d0", "$defs": {f"d{n}": link | {"properties": {"n": {"$ref": f"#/$defs/d{n + 1}"}}} for n in range(1500)} | {"d1500": {"type": "integer"}}}
    endless_check = {"const": "a" * 40, "pattern": "^(?=(a|a)*$)(?=((a|a)(a|a))*b)"}
    asked = [*((constraint, True) for constraint, _, _ in [*BAD.values(), LARGE["explosion"]]), ({"json_schema": chain}, False), ({"json_schema": endless_check}, True)]
    with Engine(str(tiny_model), process=True, dtype="float32", kv_tokens=8192, threads=1) as engine, ThreadPoolExecutor(4) as pool:
        other = pool.submit(engine.generate, [4, 5], SamplingParams(max_tokens=300, ignore_eos=True, seed=1))
        tried = [pool.submit(engine.generate, [5], SamplingParams(max_tokens=60, max_resamples=1, **constraint)) for constraint, _ in asked]
        for (constraint, refused), future in zip(asked, tried, strict=True):
            assert isinstance(future.exception(60), agentrt.AgentrtError) == refused, (str(constraint)[:100], future.exception())
        assert len(other.result(60).token_ids) == 300
        assert engine.generate([5], SamplingParams(choices=["yes"])).text == "yes"


def test_a_pattern_that_only_the_end_can_judge_fails_by_its_name(engine):
    """Look-around in a schema's pattern is checked; what never passes says which pattern, as its author wrote it."""
    pattern = "^(?=.*b)a{1,3}$"
    with pytest.raises(agentrt.ConstraintError, match=re.escape(repr(pattern))):
        engine.generate([5], SamplingParams(json_schema={"type": "string", "pattern": pattern}, seed=1, max_resamples=2, max_tokens=40))


def test_samples_share_the_compiled_grammar_and_differ(engine):
    completion = engine.generate([5, 6], SamplingParams(json_schema=Pet, n=6, seed=5, max_tokens=200))
    pets = {Pet.model_validate_json(sample.text).name for sample in completion.samples}
    assert len(pets) > 1


def test_a_prompts_tail_is_completed_in_the_models_own_tokens(engine):
    """The answer's ids spell the tail first, its text does not repeat it; with a grammar the grammar begins after it."""
    prompt, tail = engine.tokenize("the quick br"), "own "
    for seed in range(5):
        completion = engine.generate(prompt, SamplingParams(max_tokens=12, seed=seed, ignore_eos=True), prompt_tail=tail.encode())
        assert engine.detokenize(completion.token_ids) == tail + completion.text
        choice = engine.generate(prompt, SamplingParams(choices=["fox", "dog"], seed=seed), prompt_tail=tail.encode())
        assert choice.text in ("fox", "dog")
        assert engine.detokenize(choice.token_ids) == tail + choice.text
    healed = engine.generate(engine.tokenize("naïve "), SamplingParams(max_tokens=6, seed=1), prompt_tail="🙂".encode())
    assert engine.detokenize(healed.token_ids).startswith("🙂")
    assert "\ufffd" not in healed.text[:1]
