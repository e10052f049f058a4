"""Chat and text completions with the openai client, on a scripted backend: streams, tools, schemas, scores, errors."""

from __future__ import annotations

import json

import openai
import pytest
from pydantic import BaseModel

from agentrt.backends.scripted import Answer
from agentrt.config import ServerConfig
from agentrt.errors import ConstraintError, GrammarError, NumericalError

HI = [{"role": "user", "content": "hi"}]
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}}
CALLS = (
    'I look.\n<tool_call>\n{"name": "look", "arguments": {"city": "Oslo \\"S\\""}}\n</tool_call>\n'
    '<tool_call>\n{"name": "look", "arguments": {"city": "Rome"}}\n</tool_call>'
)


@pytest.fixture
def client_of(serving):
    clients = []

    def make(script="ok", config=None, **options):
        server = serving(script, config, **options)
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="k", max_retries=0)
        clients.append(client)
        return client, server

    yield make
    for client in clients:
        client.close()


def chat(client, **options):
    return client.chat.completions.create(model="scripted", messages=HI, **options)


def test_a_stream_is_the_whole_answer_in_pieces(client_of):
    client, _ = client_of(lambda prompt, request: Answer("caf\u00e9 \U0001f680 done", forced=2))
    whole = chat(client, n=2, seed=3)
    assert [choice.message.content for choice in whole.choices] == ["caf\u00e9 \U0001f680 done"] * 2
    texts, reasons, usage = {0: "", 1: ""}, {}, None
    for chunk in chat(client, n=2, seed=3, stream=True, stream_options={"include_usage": True}):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            assert "\ufffd" not in texts[choice.index]
            reasons[choice.index] = choice.finish_reason or reasons.get(choice.index)
    assert texts == {0: "caf\u00e9 \U0001f680 done", 1: "caf\u00e9 \U0001f680 done"}
    assert reasons == {0: "stop", 1: "stop"}
    assert usage.completion_tokens == whole.usage.completion_tokens
    assert usage.prompt_tokens_details.cached_tokens == whole.usage.prompt_tokens - 1
    assert whole.system_fingerprint.startswith("scripted-agentrt-")


@pytest.mark.parametrize(
    ("choice", "config", "finish"),
    [
        ("auto", None, "tool_calls"),
        ("required", None, "tool_calls"),
        ({"type": "function", "function": {"name": "look"}}, None, "stop"),
        ({"type": "function", "function": {"name": "look"}}, ServerConfig(named_tool_finish="tool_calls"), "tool_calls"),
    ],
)
def test_calls_stream_as_they_are_whole(client_of, choice, config, finish):
    client, server = client_of(lambda prompt, request: CALLS, config)
    message = chat(client, tools=[TOOL], tool_choice=choice)
    whole = [(call.function.name, call.function.arguments) for call in message.choices[0].message.tool_calls]
    assert [json.loads(arguments) for _, arguments in whole] == [{"city": 'Oslo "S"'}, {"city": "Rome"}]
    assert message.choices[0].message.content == "I look."
    assert message.choices[0].finish_reason == finish
    grown, ids, last = {}, {}, None
    for chunk in chat(client, tools=[TOOL], tool_choice=choice, stream=True):
        last = chunk.choices[0].finish_reason or last
        for call in chunk.choices[0].delta.tool_calls or ():
            ids.setdefault(call.index, set()).add(call.id) if call.id else None
            name, arguments = grown.get(call.index, ("", ""))
            grown[call.index] = (name + (call.function.name or ""), arguments + (call.function.arguments or ""))
    assert [grown[index] for index in sorted(grown)] == whole
    assert sorted(grown) == [0, 1]
    assert all(len(each) == 1 for each in ids.values())
    assert ids[0] != ids[1]
    assert last == finish
    spec = server.backend.requests[-1].sampling.grammar
    assert spec.kind == "tools"
    assert spec.option("tool_choice") == (choice if isinstance(choice, str) else "look")
    assert json.loads(spec.source)[0]["parameters"]["additionalProperties"] is False


def test_a_cut_call_ends_with_length(client_of):
    client, _ = client_of(CALLS)
    answer = chat(client, tools=[TOOL], max_tokens=60).choices[0]
    assert answer.finish_reason == "length"
    assert answer.message.tool_calls[0].function.name == "look"


def test_no_tools_with_choice_none_are_told_but_not_constrained(client_of):
    client, server = client_of("plain <tool_call> text")
    assert chat(client, tools=[TOOL], tool_choice="none").choices[0].message.content == "plain <tool_call> text"
    request = server.backend.requests[-1]
    assert request.sampling.grammar is None
    assert "look" in server.backend.tokenizer.decode(request.prompt_ids)


class Inner(BaseModel):
    size: int
    unit: str | None = None


class Outer(BaseModel):
    name: str
    inner: Inner
    more: list[Inner] = []


def test_parse_gives_nested_and_optional_models(client_of):
    client, server = client_of('{"name": "a", "inner": {"size": 3, "unit": null}, "more": []}')
    parsed = client.chat.completions.parse(model="scripted", messages=HI, response_format=Outer).choices[0].message.parsed
    assert parsed == Outer(name="a", inner=Inner(size=3))
    assert server.backend.requests[-1].sampling.json_schema["properties"].keys() == {"name", "inner", "more"}


def test_tools_beside_a_schema_constrain_both(client_of):
    client, server = client_of(CALLS)
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}
    chat(client, tools=[TOOL], response_format=schema)
    assert json.loads(server.backend.requests[-1].sampling.grammar.option("answer_schema")) == {"type": "object"}


def test_scores_have_a_token_each(client_of):
    client, _ = client_of("abcd")
    choice = chat(client, logprobs=True, top_logprobs=3).choices[0]
    spelled = b"".join(bytes(score.bytes or ()) for score in choice.logprobs.content)
    assert spelled == b"abcd"
    assert all(score.logprob <= 0 and len(score.top_logprobs) <= 3 for score in choice.logprobs.content)
    streamed = [
        score
        for chunk in chat(client, logprobs=True, top_logprobs=3, stream=True)
        for score in (chunk.choices[0].logprobs.content if chunk.choices[0].logprobs else ())
    ]
    assert streamed == choice.logprobs.content


def test_text_completions_echo_batch_and_score(client_of):
    client, _ = client_of(lambda prompt, request: prompt.upper())
    answer = client.completions.create(model="scripted", prompt=["one", "two"], n=2, max_tokens=20, echo=True, logprobs=1)
    assert [choice.text for choice in answer.choices] == ["oneONE", "oneONE", "twoTWO", "twoTWO"]
    assert answer.choices[2].logprobs.token_logprobs[0] is None
    assert "".join(answer.choices[0].logprobs.tokens).startswith("oneONE")
    streamed = {0: "", 1: ""}
    for chunk in client.completions.create(model="scripted", prompt=["one", "two"], max_tokens=20, echo=True, stream=True):
        streamed[chunk.choices[0].index] += chunk.choices[0].text
    assert streamed == {0: "oneONE", 1: "twoTWO"}
    ids = client.completions.create(model="scripted", prompt=[104, 105], max_tokens=0, echo=True, logprobs=0)
    assert ids.choices[0].text == "hi"


BAD = [
    ({"temperature": -1}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"n": 0}, "n"),
    ({"n": 1000}, "n"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_completion_tokens": 1.5}, "max_completion_tokens"),
    ({"stop": ""}, "stop"),
    ({"stop": [1]}, "stop"),
    ({"logit_bias": {"x": 1}}, "logit_bias"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"frequency_penalty": 9}, "frequency_penalty"),
    ({"tools": [TOOL, TOOL]}, "tools"),
    ({"tools": [{"type": "web_search"}]}, "tools"),
    ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "gone"}}}, "tool_choice"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tools": [TOOL], "regex": "a+"}, "regex"),
    ({"tools": [{"type": "function", "function": {"name": "auto"}}]}, "tools"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema"),
    ({"response_format": {"type": "xml"}}, "response_format.type"),
    ({"regex": "a", "guided_choice": ["b"]}, "guided_choice"),
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"functions": []}, "functions"),
    ({"flavour": "mint"}, "flavour"),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
    ({"continue_final_message": True}, "messages"),
    ({"cache_salt": "x" * 300}, "cache_salt"),
    ({"stream_options": {"include_usage": 3}}, "stream_options.include_usage"),
    ({"seed": "a"}, "seed"),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("fields", "param"), BAD, ids=lambda value: str(value)[:40])
def test_a_bad_value_is_refused_by_name_before_the_stream(plain_server, fields, param, stream):
    with plain_server.client() as http:
        answer = http.post("/v1/chat/completions", json={"model": "scripted", "messages": HI, "stream": stream} | fields)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"].startswith(param), answer.text
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}


def test_harmless_fields_and_nulls_are_ignored(plain_server):
    harmless = {"user": "u", "metadata": {"a": "b"}, "store": True, "service_tier": "auto", "prompt_cache_key": "k", "verbosity": "low"}
    nulls = dict.fromkeys(["stop", "tools", "tool_choice", "functions", "response_format", "logit_bias", "seed", "top_p", "regex", "audio"])
    with plain_server.client() as http:
        answer = http.post("/v1/chat/completions", json={"messages": HI} | harmless | nulls)
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'{"messages": [{"role": "user", "content": "\\ud800"}]}', b'{"messages": NaN}', b"[" * 100_000])
def test_what_is_no_json_is_a_400(plain_server, body):
    with plain_server.client() as http:
        answer = http.post("/v1/chat/completions", content=body, headers={"content-type": "application/json"})
        assert answer.status_code == 400, answer.text
        assert http.post("/v1/chat/completions", json={"messages": HI}).status_code == 200


def test_an_unknown_model_is_a_404(client_of):
    client, _ = client_of()
    with pytest.raises(openai.NotFoundError, match="scripted"):
        client.chat.completions.create(model="gpt-x", messages=HI)
    assert [model.id for model in client.models.list()] == ["scripted"]
    assert client.models.retrieve("scripted").id == "scripted"
    with pytest.raises(openai.APIStatusError) as error:
        client.embeddings.create(model="scripted", input="x")
    assert error.value.status_code == 501


@pytest.mark.parametrize(
    ("error", "status"),
    [(GrammarError("no", pointer="/a", param="json_schema"), 400), (ConstraintError("never fits"), 422), (NumericalError("nan"), 500)],
)
def test_what_fails_before_the_first_token_has_a_status_even_in_a_stream(client_of, error, status):
    def script(prompt, request):
        raise error

    client, _ = client_of(script)
    for stream in (False, True):
        with pytest.raises(openai.APIStatusError) as caught:
            chat(client, stream=stream)
        assert caught.value.status_code == status
        assert str(error) in str(caught.value)


def test_what_fails_in_mid_stream_is_the_last_event(client_of):
    client, _ = client_of(lambda prompt, request: Answer("some text", error=NumericalError("nan came")))
    with pytest.raises(openai.APIError, match="nan came"):
        for _ in chat(client, stream=True):
            pass


def test_guided_names_become_constraints(client_of):
    client, server = client_of("red")
    for fields, key, value in (
        ({"guided_choice": ["red"]}, "choices", ["red"]),
        ({"guided_regex": "r.d"}, "regex", "r.d"),
        ({"structured_outputs": {"choice": ["red"]}}, "choices", ["red"]),
        ({"grammar": 'start: "red"'}, "ebnf", 'start: "red"'),
    ):
        chat(client, extra_body=fields)
        assert getattr(server.backend.requests[-1].sampling, key) == value


def test_a_prefill_is_continued(client_of):
    client, server = client_of(" is blue")
    messages = [*HI, {"role": "assistant", "content": "The sky"}]
    client.chat.completions.create(model="scripted", messages=messages, extra_body={"continue_final_message": True})
    assert server.backend.tokenizer.decode(server.backend.requests[-1].prompt_ids, skip_special=False).endswith("assistant\nThe sky")
