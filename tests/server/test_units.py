"""The pure parts: fields and finish reasons, closing of schemas, thinking told apart, remembered turns, programs, refusals."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrt.backend import collect
from agentrt.backends.byte_tokenizer import ByteTokenizer
from agentrt.backends.scripted import Answer, ScriptedBackend
from agentrt.errors import AbortedError, EngineError, GrammarError, QueueFullError, TooLongError
from agentrt.request import FinishReason, ProgramTag, Request, SamplingParams, TokenDelta, Usage
from agentrt.server import openai_convert as convert
from agentrt.server.answers import SampleAnswer
from agentrt.server.openai_types import ChatBody, CompletionBody
from agentrt.server.programs import MAX_CALLS, Asked, ProgramBook
from agentrt.server.refusals import refusal_of
from agentrt.server.think_first import ThinkFirst
from agentrt.server.thinking import KNOWN_MARKS, ThinkingSplitter, guess_marks
from agentrt.server.turns import TurnMemory
from agentrt.text.tool_format import HERMES

MARKS = KNOWN_MARKS[0]


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, {}),
        ({"temperature": 0, "top_k": -1}, {"temperature": 0, "top_k": 0}),
        ({"stop": "a"}, {"stop": ("a",)}),
        ({"stop": ["a", "b"], "stop_token_ids": [3]}, {"stop": ("a", "b"), "stop_token_ids": (3,)}),
        ({"logit_bias": {"5": -1}}, {"logit_bias": {5: -1}}),
        ({"max_tokens": 4, "max_completion_tokens": 7}, {"max_tokens": 7}),
        ({"logprobs": True}, {"logprobs": 0}),
        ({"logprobs": True, "top_logprobs": 4}, {"logprobs": 4}),
        ({"include_stop_str_in_output": True, "min_p": 0.1}, {"include_stop": True, "min_p": 0.1}),
    ],
)
def test_a_bodys_fields_become_sampling(fields, expected):
    from agentrt.server.asks import CallOptions

    ask = convert.chat_ask(ChatBody(messages=[{"role": "user", "content": "x"}], **fields), CallOptions())
    assert ask.sampling == expected
    SamplingParams(**ask.sampling)


@pytest.mark.parametrize(
    ("prompt", "expected"), [("a", ["a"]), (["a", "b"], ["a", "b"]), ([1, 2], [[1, 2]]), ([[1], [2, 3]], [[1], [2, 3]])]
)
def test_prompts_come_in_four_forms(prompt, expected):
    assert convert.prompts_of(CompletionBody(prompt=prompt)) == expected


@pytest.mark.parametrize(
    ("reason", "called", "named", "expected"),
    [
        (FinishReason.STOP, False, False, "stop"),
        (FinishReason.STOP, True, False, "tool_calls"),
        (FinishReason.STOP, True, True, "stop"),
        (FinishReason.LENGTH, True, False, "length"),
        (FinishReason.ABORT, False, False, "abort"),
    ],
)
def test_finish_reasons_are_openais(reason, called, named, expected):
    assert convert.finish_reason(reason, called=called, named=named, named_finish="stop") == expected


@settings(max_examples=60, deadline=None)
@given(thought=st.text("ab<\n ", max_size=12), said=st.text("xy<\n ", max_size=12), cuts=st.lists(st.integers(0, 60)), inside=st.booleans())
def test_thinking_is_told_apart_however_it_is_cut(thought, said, cuts, inside):
    text = ("" if inside else f"{MARKS.open}\n") + f"{thought}\n{MARKS.close}\n\n{said}"
    splitter, thoughts, answer = ThinkingSplitter(MARKS, inside=inside), "", ""
    ends = sorted({min(cut, len(text)) for cut in cuts} | {len(text)})
    for start, end in zip([0, *ends], ends, strict=False):
        more, told = splitter.feed(text[start:end])
        thoughts, answer = thoughts + more, answer + told
    more, told = splitter.finish()
    assert (thoughts + more, answer + told) == (thought.strip("\n"), said.lstrip("\n"))


def test_what_does_not_begin_with_thinking_is_the_answer():
    splitter = ThinkingSplitter(MARKS, inside=False)
    fed = [splitter.feed(char) for char in "<thing> </think>"] + [splitter.finish()]
    assert ("".join(thought for thought, _ in fed), "".join(said for _, said in fed)) == ("", "<thing> </think>")
    assert guess_marks("<|im_start|>assistant\n<think>\n") == MARKS
    assert guess_marks("<|im_start|>assistant\n") is None


# ---- thinking first, and then the constraint


def thinker(prompt: str, request: Request) -> str:
    if request.sampling.json_schema is None:
        return "Let me think about it.</think>\n\nignored"
    assert "</think>" in prompt
    return '{"a": 1}'


@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize(("budget", "thought"), [(None, "Let me think about it."), (6, "Let me")])
def test_a_constraint_holds_for_what_follows_the_thinking(inside, budget, thought):
    backend = ScriptedBackend(thinker, inline=True)
    runway = ThinkFirst(backend, MARKS, inside=inside, budget=budget)
    sampling = SamplingParams(json_schema={"type": "object"}, max_tokens=200, n=2, seed=4)
    request = Request(prompt_ids=tuple(backend.tokenizer.encode("ask")), sampling=sampling)
    deltas: list[TokenDelta] = []
    runway.submit(request, deltas.append)
    completion = collect(request, deltas)
    assert sum(delta.last for delta in deltas) == 1
    for sample in completion.samples:
        answer = SampleAnswer(thinking=ThinkingSplitter(MARKS, inside=inside))
        answer.add(TokenDelta("x", text=sample.text, finish_reason=FinishReason.STOP))
        assert (answer.thoughts, json.loads(answer.text)) == (thought, {"a": 1})
        assert sample.finish_reason is FinishReason.STOP
    assert completion.usage.prompt_tokens == len(request.prompt_ids)
    # The answer's prompt begins with the thinking's, and with what was thought.
    for first, second in zip(list(backend.requests)[::2], list(backend.requests)[1::2], strict=True):
        assert second.prompt_ids[: len(first.prompt_ids)] == first.prompt_ids
        assert first.sampling.json_schema is None
        assert second.sampling.json_schema is not None


def test_thinking_that_fails_or_uses_everything_up_ends_once():
    failing = ScriptedBackend(lambda prompt, request: Answer("a", error=AbortedError("gone")), inline=True)
    long = ScriptedBackend(lambda prompt, request: "word " * 50, inline=True)
    for backend, check in ((failing, lambda d: d.error is not None), (long, lambda d: d.finish_reason is FinishReason.LENGTH)):
        deltas: list[TokenDelta] = []
        sampling = SamplingParams(json_schema={}, max_tokens=5)
        ThinkFirst(backend, MARKS, inside=True).submit(Request(prompt_ids=(65,), sampling=sampling), deltas.append)
        assert [check(delta) for delta in deltas if delta.last] == [True]


def test_thinking_that_closes_with_the_last_token_leaves_no_answer_and_says_so():
    backend = ScriptedBackend(f"hm{MARKS.close}", inline=True)
    room = len(backend.tokenizer.encode(f"hm{MARKS.close}"))
    deltas: list[TokenDelta] = []
    sampling = SamplingParams(json_schema={"type": "object"}, max_tokens=room)
    ThinkFirst(backend, MARKS, inside=True).submit(Request(prompt_ids=(65,), sampling=sampling), deltas.append)
    assert (deltas[-1].last, deltas[-1].finish_reason, deltas[-1].stop_match) == (True, FinishReason.LENGTH, None)


def test_over_http_a_reasoning_model_gives_thoughts_and_then_json(serving):
    class ThinkingTokenizer(ByteTokenizer):
        def encode_chat(self, messages, *, tools=None, add_generation_prompt=True, **arguments):
            ids = super().encode_chat(messages, tools=tools, add_generation_prompt=add_generation_prompt)
            return [*ids, *self.encode("<think>\n")] if add_generation_prompt else ids

    server = serving(thinker, tokenizer=ThinkingTokenizer())
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}
    body = {"messages": [{"role": "user", "content": "hi"}], "response_format": form}
    with server.client() as http:
        message = http.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]
        lines = http.post("/v1/chat/completions", json=body | {"stream": True}).text.split("\n\n")
    assert (message["reasoning_content"], message["content"]) == ("Let me think about it.", '{"a": 1}')
    deltas = [json.loads(line[6:])["choices"][0]["delta"] for line in lines if line.startswith("data: {")]
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == message["reasoning_content"]
    assert "".join(delta.get("content", "") for delta in deltas) == message["content"]


# ---- remembered turns


PIECES = ["a", "b", " the", "ab", "abc", "t", "he", " "]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.text("ab the", max_size=6), st.lists(st.sampled_from(PIECES), min_size=1, max_size=6)), min_size=1, max_size=4))
def test_history_comes_back_as_it_was_fed(turns):
    tokenizer = ByteTokenizer()
    memory = TurnMemory(tokenizer, 10_000)
    text, fed = "", []
    for asked, pieces in turns:
        text += f"[{asked}]"
        prompt = memory.recall(tokenizer.encode(text))
        assert tokenizer.decode(prompt) == text
        assert prompt[: len(fed)] == fed  # brackets are tokens of their own: nothing straddles what was answered
        answer = [token for piece in pieces for token in piece.encode()]  # byte by byte: seldom how it would be split
        memory.remember(prompt, [*answer, *tokenizer.eos_ids])
        text += "".join(pieces)
        fed = [*prompt, *answer]


def test_turns_are_bounded_and_other_texts_are_left_alone():
    tokenizer = ByteTokenizer()
    memory = TurnMemory(tokenizer, 12)
    prompt, odd = tokenizer.encode("q:"), list(b"the")
    memory.remember(prompt, odd)
    assert memory.recall(tokenizer.encode("q:the!")) == [*prompt, *odd, *tokenizer.encode("!")]
    for other in ("q:then", "q:thx", "p:the!"):
        assert tokenizer.decode(memory.recall(tokenizer.encode(other))) == other
    memory.remember(tokenizer.encode("another"), odd)  # the first one has to go
    assert memory.recall(tokenizer.encode("q:the!")) == tokenizer.encode("q:the!")
    memory.remember(prompt, [])
    memory.remember(list(range(20)), odd)  # too big to be kept at all


def note(book, name, prompt, answer, cached=0):
    usage = Usage(prompt_tokens=len(prompt), cached_tokens=cached)
    book.note(Asked(ProgramTag(name), "chat", prompt, [answer], usage, 1.0, 2.0, "stop"))


def reasons(book, name):
    calls = book.report(name, "m", lambda ids: f"<{ids[0]}>").values["calls"]
    return [[(reason["why"], reason["tokens"], reason.get("first")) for reason in call["recomputed"]] for call in calls]


def test_programs_are_told_why_and_are_bounded():
    book = ProgramBook(2)
    note(book, "p", [1, 2, 3, 4], [5])
    note(book, "p", [1, 2, 3, 4, 5, 6], [7], cached=4)
    note(book, "p", [1, 2, 3, 4, 5, 6, 8], [7], cached=2)
    note(book, "p", [1, 2, 9, 9, 9], [7], cached=2)
    assert reasons(book, "p") == [[("new", 4, "<1>")], [("last", 1, None), ("new", 1, "<6>")], [("evicted", 4, None), ("new", 1, "<8>")], [("new", 3, "<9>")]]
    for name in ("q", "r"):
        note(book, name, [1], [1])
    assert book.names() == ["r", "q"]
    assert "p" not in book


def test_a_programs_calls_and_ids_are_bounded():
    book = ProgramBook(4, max_fed_tokens=10)
    note(book, "p", [1, 2, 3, 4], [5])
    note(book, "q", [1, 2, 3, 4], [5])
    note(book, "q", [1, 2, 3, 4], [5])  # p's ids had to go
    note(book, "p", [1, 2, 3, 4], [5])
    assert reasons(book, "p")[1] == [("new", 4, "<1>")]
    assert reasons(book, "q")[1] == [("evicted", 4, None)]
    for number in range(MAX_CALLS + 5):
        note(book, "p", [number], [])
    assert len(reasons(book, "p")) == MAX_CALLS


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (TooLongError("a", needed=2, limit=1), 400, "context_length_exceeded"),
        (GrammarError("a", pointer="/b"), 400, "invalid_constraint"),
        (QueueFullError("a", retry_after=2.5), 503, "queue_full"),
        (EngineError("a"), 503, "engine_down"),
        (ValueError("secret"), 500, "internal"),
    ],
)
def test_errors_have_a_status_and_a_word(error, status, code):
    refusal = refusal_of(error)
    assert (refusal.status, refusal.code) == (status, code)
    assert "secret" not in refusal.message
    assert refusal.openai()["error"].keys() == {"message", "type", "param", "code"}
    assert refusal.anthropic()["type"] == "error"


def test_an_answer_streamed_and_whole_is_the_same():
    text = 'Hm.\n<tool_call>\n{"name": "f", "arguments": {"a": [1, 2]}}\n</tool_call>'
    whole, pieces = SampleAnswer(reader=HERMES.reader([{"name": "f"}])), SampleAnswer(reader=HERMES.reader([{"name": "f"}]))
    whole.add(TokenDelta("x", text=text, finish_reason=FinishReason.STOP))
    for char in text:
        pieces.add(TokenDelta("x", text=char))
    pieces.add(TokenDelta("x", finish_reason=FinishReason.STOP))
    assert (whole.text, [(c.name, c.arguments) for c in whole.calls]) == (pieces.text, [(c.name, c.arguments) for c in pieces.calls])
