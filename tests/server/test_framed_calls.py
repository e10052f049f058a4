"""A call that lacks its frame, where more may follow or its tool is not there, is begun anew inside it, and nothing else is."""

from __future__ import annotations

import json

import pytest

from agentrt.backends.scripted import Answer, ScriptedBackend
from agentrt.errors import EngineError, NumericalError, QueueFullError
from agentrt.request import FinishReason, Request, SamplingParams, TokenDelta
from agentrt.server.framed_calls import FramedCalls, Unframed
from agentrt.text.tool_format import HERMES
from agentrt.text.tool_format import Choice as CallChoice

TOOL = {"type": "function", "function": {"name": "play", "parameters": {"type": "object", "properties": {"artist": {"type": "string"}}}}}
BODY = {"messages": [{"role": "user", "content": "Play two artists."}], "tools": [TOOL]}
CALL = '{"name": "play", "arguments": {"artist": "%s"}}'
FENCED = "```json\n" + CALL % "A" + "\n```"
FRAMED = "\n".join(f"<tool_call>\n{CALL % artist}\n</tool_call>" for artist in "AB")
MISNAMED = "```json\n" + CALL.replace("play", "music.play") % "A" + "\n```"
TEXTS = ["Hello.", '{"name": "Anna"}', '{"name": "Anna", "arguments": ["for", "against"]}', "```json\n[1, 2]\n```", "```json\n{", "", f"So: {FENCED}"]


def caller(prompt: str, request: Request) -> str:
    """Forgets the frame, unless it must not."""
    return FENCED if request.sampling.grammar.option("tool_choice") == "auto" else FRAMED


def unframed() -> Unframed:
    functions = [TOOL["function"]]
    bare = HERMES.bare_calls(functions)
    assert bare is not None
    return Unframed((bare.offered, bare.misnamed), HERMES.grammar(functions, CallChoice("required")))


def ask(**sampling) -> Request:
    return Request(prompt_ids=(65, 66), sampling=SamplingParams(grammar=HERMES.grammar([TOOL["function"]], CallChoice()), **sampling))


def test_over_http_two_calls_come_where_the_model_forgot_the_frame(serving):
    server = serving(caller)
    with server.client() as http:
        whole = http.post("/v1/chat/completions", json=BODY).json()
        alone = http.post("/v1/chat/completions", json=BODY | {"parallel_tool_calls": False}).json()
        lines = http.post("/v1/chat/completions", json=BODY | {"stream": True}).text.split("\n\n")
    calls = [json.loads(call["function"]["arguments"])["artist"] for call in whole["choices"][0]["message"]["tool_calls"]]
    assert calls == ["A", "B"]
    assert whole["choices"][0]["finish_reason"] == "tool_calls"
    assert whole["choices"][0]["message"]["content"] is None
    assert whole["usage"]["completion_tokens"] <= len(FRAMED) + 1  # what was dropped is not the caller's
    assert [json.loads(call["function"]["arguments"]) for call in alone["choices"][0]["message"]["tool_calls"]] == [{"artist": "A"}]
    choices = [json.loads(line[6:])["choices"] for line in lines if line.startswith("data: {")]
    deltas = [choice["delta"] for each in choices for choice in each]
    assert [c["function"]["name"] for d in deltas for c in d.get("tool_calls", ()) if "name" in c["function"]] == ["play", "play"]
    assert not any(delta.get("content") for delta in deltas)


@pytest.mark.parametrize("parallel", [True, False])
def test_a_call_of_a_tool_that_is_not_there_becomes_one_of_those_that_are(serving, parallel):
    def mistaken(prompt: str, request: Request) -> str:
        if request.sampling.grammar.option("tool_choice") == "auto":
            return MISNAMED
        assert request.sampling.grammar.option("parallel") is parallel
        return FRAMED if parallel else FRAMED.partition("\n<tool_call>\n{")[0]

    server = serving(mistaken)
    with server.client() as http:
        answer = http.post("/v1/chat/completions", json=BODY | {"parallel_tool_calls": parallel}).json()
    message = answer["choices"][0]["message"]
    assert [call["function"]["name"] for call in message["tool_calls"]] == (["play", "play"] if parallel else ["play"])
    assert message["content"] is None


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("size", [1, 3, 1000])
def test_an_answer_that_begins_otherwise_is_what_it_was(text, size):
    backend = ScriptedBackend(text, inline=True, tokens_per_delta=size)
    told: list[list[TokenDelta]] = []
    for runway in (backend, FramedCalls(backend, unframed())):
        deltas: list[TokenDelta] = []
        runway.submit(ask(), deltas.append)
        told.append(deltas)
    plain, through = ([(d.text, d.token_ids, d.finish_reason) for d in deltas] for deltas in told)
    assert through == plain
    assert len(backend.requests) == 2
    assert sum(delta.last for delta in told[1]) == 1


def test_each_sample_begins_anew_and_the_request_ends_once(wait_until):
    backend = ScriptedBackend(caller, step_seconds=0.0005)
    deltas: list[TokenDelta] = []
    request = ask(n=2, seed=5)
    FramedCalls(backend, unframed()).submit(request, deltas.append)
    wait_until(lambda: any(delta.last for delta in deltas))
    for index in range(2):
        assert "".join(d.text for d in deltas if d.index == index) == FRAMED
        assert [d.finish_reason for d in deltas if d.index == index and d.finish_reason] == [FinishReason.STOP]
    assert {delta.request_id for delta in deltas} == {request.request_id}
    assert [r.sampling.grammar.option("tool_choice") for r in backend.requests].count("required") == 2
    assert len({r.sampling.seed for r in backend.requests}) == 2
    usage = deltas[-1].usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (2, sum(len(d.token_ids) for d in deltas))
    backend.close()


@pytest.mark.parametrize("moment", [1, len(FENCED) // 2, len(FENCED) + 20])
def test_an_abort_in_either_part_ends_it_once(moment, wait_until):
    backend = ScriptedBackend(caller, step_seconds=0.002)
    runway, deltas, request = FramedCalls(backend, unframed()), [], ask()
    runway.submit(request, deltas.append)
    wait_until(lambda: backend.stats()["generated_tokens"] >= moment)
    runway.abort(request.request_id)
    wait_until(lambda: any(delta.last for delta in deltas))
    assert sum(delta.last for delta in deltas) == 1
    assert deltas[-1].finish_reason in (FinishReason.ABORT, FinishReason.STOP)
    assert FENCED[:20] not in "".join(delta.text for delta in deltas)
    wait_until(lambda: backend.load().running == 0)
    backend.close()


def test_where_one_sample_fails_the_others_do_not_run_on(wait_until):
    def unlucky(prompt: str, request: Request) -> Answer:
        return Answer("Hello " * 100_000) if request.sampling.seed != 5 else Answer("Hi", error=NumericalError("on purpose"))

    backend, deltas = ScriptedBackend(unlucky, step_seconds=0.001), []
    FramedCalls(backend, unframed()).submit(ask(n=3, seed=5), deltas.append)
    wait_until(lambda: backend.load().running == 0)
    assert isinstance(deltas[-1].error, NumericalError)
    assert sum(delta.last for delta in deltas) == 1
    backend.close()


def test_where_one_sample_is_refused_the_others_do_not_run_on(wait_until):
    backend, deltas = ScriptedBackend("Hello " * 100_000, step_seconds=0.001, max_queued=2), []
    with pytest.raises(QueueFullError):
        FramedCalls(backend, unframed()).submit(ask(n=3), deltas.append)
    wait_until(lambda: backend.load().running == 0)
    assert not any(delta.last for delta in deltas)
    backend.close()


def test_an_engine_that_goes_while_a_call_begins_anew_ends_it(monkeypatch):
    """The abort of what is dropped fails first, inside the sink."""
    backend, deltas, parts = ScriptedBackend(FENCED), [], []
    monkeypatch.setattr(backend, "submit", lambda request, sink: parts.append((request, sink)))

    def gone(request_id: str) -> None:
        raise EngineError("on purpose")

    monkeypatch.setattr(backend, "abort", gone)
    FramedCalls(backend, unframed()).submit(ask(), deltas.append)
    ((part, sink),) = parts
    sink(TokenDelta(part.request_id, text=FENCED))
    sink(TokenDelta(part.request_id, error=EngineError("on purpose")))
    assert [type(delta.error) for delta in deltas] == [EngineError]
