"""The engine on the real models: reuse and chunks change no token, and tool calls always parse, validate and name an offered tool."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import re

import jsonschema
import pytest

from agentrt import ConstraintError, Engine, FinishReason, SamplingParams
from agentrt.grammar.verify import verifier_of

pytestmark = [pytest.mark.model, pytest.mark.slow]

TOPICS = ("rivers", "bread", "the moon", "clocks", "foxes", "violins", "salt", "bridges", "snow", "maps")


def prompts(engine, count: int) -> list[list[int]]:
    """Chats that share a system message, in pairs that share more."""
    chats = []
    for n in range(count):
        topic = TOPICS[n // 2 % len(TOPICS)]
        question = f"Tell me {'one fact' if n % 2 else 'a short story'} about {topic}." + " Please." * (n // 20)
        chats.append([{"role": "system", "content": "You are brief, kind and exact."}, {"role": "user", "content": question}])
    return [engine.tokenizer.encode_chat(chat) for chat in chats]


def first_difference_is_a_tie(engine, prompt, one, other) -> bool:
    """Whether two greedy answers part where the two best logits are within 1e-4: sums in another order may decide there."""
    at = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), None)
    if at is None:
        return one == other
    best = engine.generate([*prompt, *one[:at]], SamplingParams(max_tokens=1, temperature=0, logprobs=2)).logprobs[0].top
    return best[0][1] - best[1][1] < 1e-4


@pytest.mark.parametrize("count", [8, pytest.param(50, marks=pytest.mark.proof)])
def test_greedy_answers_of_the_default_model_do_not_depend_on_how_they_are_computed(count):
    sampling = SamplingParams(temperature=0, max_tokens=10)
    with Engine(dtype="float32", process=False, prefix_cache=False, step_tokens=4096) as alone:
        asked = prompts(alone, count)
        answers = [alone.generate(prompt, sampling).token_ids for prompt in asked]
        longest = max(map(len, asked)) + 10
        for options in ({}, {"step_tokens": 16}, {"page_size": 16}, {"kv_tokens": longest + 20, "max_running": 8}):
            with Engine(dtype="float32", process=False, check=True, **options) as engine:
                together = [completion.token_ids for completion in engine.generate(asked, sampling)]
            for prompt, one, other in zip(asked, answers, together, strict=True):
                assert first_difference_is_a_tie(alone, prompt, one, other), options


@pytest.mark.parametrize("model", ["smollm2-135m", "qwen2.5-coder-0.5b"])
@pytest.mark.parametrize("count", [3, pytest.param(300, marks=pytest.mark.proof)])
def test_required_tool_calls_always_parse_validate_and_name_an_offered_tool(corpora, model, count):
    lines = [json.loads(line) for line in (corpora / "bfcl_tools.jsonl").read_text().splitlines()]
    sample = random.Random(4).sample(lines, count)
    with Engine(model, process=False) as engine:
        sampling = [SamplingParams(tools=line["tools"], tool_choice="required", temperature=1, seed=n, max_tokens=300, parallel_tool_calls=False) for n, line in enumerate(sample)]
        asked = [engine.tokenizer.encode_chat(line["messages"], tools=line["tools"]) for line in sample]
        completions = engine.generate(asked, sampling)
    forced = total = 0
    for line, completion in zip(sample, completions, strict=True):
        forced += completion.usage.forced_tokens
        total += completion.usage.completion_tokens
        if completion.finish_reason is FinishReason.LENGTH:
            continue  # says so itself; whatever is whole must be right
        call = json.loads(completion.text.removeprefix("<tool_call>\n").removesuffix("\n</tool_call>"))
        tools = {tool["function"]["name"]: tool["function"]["parameters"] for tool in line["tools"]}
        assert call["name"] in tools
        jsonschema.validate(call["arguments"], tools[call["name"]])
    assert sum(c.finish_reason is FinishReason.LENGTH for c in completions) <= max(count // 10, 1)
    assert forced / total > 0.15


async def answers(engine, requests):
    """Completions, or the errors of those that failed; none hurts the others."""
    return await asyncio.gather(*(engine.agenerate(prompt, sampling) for prompt, sampling in requests), return_exceptions=True)


@pytest.mark.parametrize("model", ["smollm2-135m", "qwen2.5-coder-0.5b"])
@pytest.mark.parametrize(("count", "bound"), [(5, 60), pytest.param(234, 400, marks=pytest.mark.proof)])
def test_real_schemas_at_temperature_1_every_document_validates_or_says_that_it_was_cut(corpora, model, count, bound):
    lines = [json.loads(line) for line in (corpora / "structured" / "maskbench_sample.jsonl").read_text().splitlines()]
    sample = random.Random(7).sample(lines, count)
    with Engine(model, process=False) as engine:
        prompt = engine.tokenizer.encode("An example of a document with this schema, in JSON: ")
        requests = [(prompt, SamplingParams(json_schema=line["schema"], temperature=1, seed=n, max_tokens=bound)) for n, line in enumerate(sample)]
        answered = asyncio.run(answers(engine, requests))
    finished = 0
    for line, answer in zip(sample, answered, strict=True):
        if isinstance(answer, ConstraintError):
            assert "final check" in str(answer), line["id"]  # checked, tried again within its bound, and refused by name
            continue
        assert not isinstance(answer, BaseException), (line["id"], answer)
        if answer.finish_reason is FinishReason.LENGTH:
            assert answer.usage.completion_tokens == bound
            continue
        assert answer.finish_reason is FinishReason.STOP
        finished += 1
        document = json.loads(answer.text)
        assert verifier_of(line["schema"]).violations(document) == [], line["id"]
        with contextlib.suppress(re.error):  # patterns that only ECMA-262 has
            jsonschema.validators.validator_for(line["schema"])(line["schema"]).validate(document)
    assert finished >= count // 5
