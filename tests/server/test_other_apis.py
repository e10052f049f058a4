"""Responses, Anthropic's messages and the native endpoints, with the clients that people have."""

from __future__ import annotations

import json
from importlib import resources

import jsonschema
import openai
import pytest

from agentrt.backends.scripted import Answer
from agentrt.config import ServerConfig

TOOL = {"type": "function", "name": "look", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}}
PLAIN_TOOL = {"name": "look", "description": "Looks.", "input_schema": TOOL["parameters"]}
CALL = 'I look.\n<tool_call>\n{"name": "look", "arguments": {"city": "Oslo"}}\n</tool_call>'


def caller(prompt, request):
    return CALL if request.sampling.grammar is not None and "sunny" not in prompt else "It is sunny."


@pytest.fixture
def client_of(serving):
    clients = []

    def make(script=caller, config=None, **options):
        server = serving(script, config, **options)
        clients.append(openai.OpenAI(base_url=f"{server.url}/v1", api_key="k", max_retries=0))
        return clients[-1], server

    yield make
    for client in clients:
        client.close()


def test_a_response_streams_what_it_is(client_of):
    client, _ = client_of()
    whole = client.responses.create(model="scripted", input="weather", tools=[TOOL])
    assert [item.type for item in whole.output] == ["message", "function_call"]
    assert json.loads(whole.output[1].arguments) == {"city": "Oslo"}
    with client.responses.stream(model="scripted", input="weather", tools=[TOOL]) as stream:
        events = list(stream)
        final = stream.get_final_response()
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert "".join(event.delta for event in events if event.type == "response.function_call_arguments.delta") == whole.output[1].arguments
    assert [(item.type, getattr(item, "arguments", None)) for item in final.output] == [(item.type, getattr(item, "arguments", None)) for item in whole.output]
    assert final.output_text == whole.output_text == "I look."
    for item in final.output:
        assert item.status == "completed"


def test_a_response_is_continued_by_its_id_and_with_its_items(client_of):
    client, server = client_of()
    first = client.responses.create(model="scripted", input="weather", tools=[TOOL], instructions="Be brief.")
    result = {"type": "function_call_output", "call_id": first.output[1].call_id, "output": "sunny"}
    by_id = client.responses.create(model="scripted", input=[result], previous_response_id=first.id, tools=[TOOL], instructions="Be brief.")
    by_id_prompt = server.backend.requests[-1].prompt_ids
    items = [{"role": "user", "content": "weather"}, *[item.model_dump(exclude_none=True) for item in first.output], result]
    by_items = client.responses.create(model="scripted", input=items, tools=[TOOL], instructions="Be brief.")
    assert by_id.output_text == by_items.output_text == "It is sunny."
    assert server.backend.requests[-1].prompt_ids == by_id_prompt
    assert client.responses.retrieve(by_id.id).output_text == "It is sunny."
    client.responses.delete(by_id.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(by_id.id)


def test_the_store_is_bounded(client_of):
    client, _ = client_of("ok", ServerConfig(stored_responses=2))
    ids = [client.responses.create(model="scripted", input="x").id for _ in range(3)]
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(ids[0])
    assert client.responses.retrieve(ids[2]).id == ids[2]
    unstored = client.responses.create(model="scripted", input="x", store=False)
    with pytest.raises(openai.NotFoundError):
        client.responses.create(model="scripted", input="y", previous_response_id=unstored.id)


def test_a_response_in_the_background_is_polled_and_cancelled(client_of, wait_until):
    client, _ = client_of(lambda prompt, request: "x" * 20_000, step_seconds=0.002)
    begun = client.responses.create(model="scripted", input="x", background=True)
    assert begun.status == "in_progress"
    assert client.responses.retrieve(begun.id).status == "in_progress"
    client.responses.cancel(begun.id)
    wait_until(lambda: client.responses.retrieve(begun.id).status == "cancelled")


def test_what_was_cut_is_incomplete(client_of):
    client, _ = client_of("many words")
    cut = client.responses.create(model="scripted", input="x", max_output_tokens=3)
    assert (cut.status, cut.incomplete_details.reason) == ("incomplete", "max_output_tokens")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": [{"type": "computer_call"}]}, "input"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"conversation": "c"}, "conversation"),
        ({"previous_response_id": "resp_gone"}, "response_id"),
        ({"temperature": 1000}, "temperature"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
    ],
)
def test_a_bad_response_body_is_refused_by_name(plain_server, fields, param):
    with plain_server.client() as http:
        answer = http.post("/v1/responses", json={"input": "x"} | fields)
    assert answer.status_code in (400, 404), answer.text
    assert answer.json()["error"]["param"].startswith(param)


def events_of(text):
    blocks = [block.splitlines() for block in text.strip().split("\n\n") if block.startswith("event: ")]
    return [(lines[0].removeprefix("event: "), json.loads(lines[1].removeprefix("data: "))) for lines in blocks]


def test_a_message_streams_what_it_is(serving):
    server = serving(caller)
    body = {"model": "scripted", "max_tokens": 200, "messages": [{"role": "user", "content": "weather"}], "tools": [PLAIN_TOOL]}
    with server.client() as http:
        whole = http.post("/v1/messages", json=body).json()
        events = events_of(http.post("/v1/messages", json=body | {"stream": True}).text)
        count = http.post("/v1/messages/count_tokens", json={key: body[key] for key in ("model", "messages", "tools")}).json()
    assert [block["type"] for block in whole["content"]] == ["text", "tool_use"]
    assert whole["content"][1]["input"] == {"city": "Oslo"}
    assert whole["stop_reason"] == "tool_use"
    usage = whole["usage"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == count["input_tokens"]
    kinds = [name for name, _ in events]
    assert (kinds[0], kinds[-2:]) == ("message_start", ["message_delta", "message_stop"])
    assert kinds.count("content_block_start") == kinds.count("content_block_stop") == 2
    deltas = [body["delta"] for name, body in events if name == "content_block_delta"]
    assert "".join(delta.get("text", "") for delta in deltas) == "I look."
    assert json.loads("".join(delta.get("partial_json", "") for delta in deltas)) == {"city": "Oslo"}


def test_a_conversation_of_blocks_is_a_chat(serving):
    server = serving(caller)
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "weather"}]},
        {"role": "assistant", "content": [{"type": "text", "text": "I look."}, {"type": "tool_use", "id": "t1", "name": "look", "input": {"city": "Oslo"}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "sunny"}]}]},
    ]
    body = {"model": "scripted", "max_tokens": 99999999, "messages": messages, "tools": [PLAIN_TOOL], "system": [{"type": "text", "text": "Brief."}]}
    with server.client() as http:
        answer = http.post("/v1/messages", json=body).json()
        prefilled = http.post("/v1/messages", json={"max_tokens": 5, "messages": [messages[0], {"role": "assistant", "content": "The"}]})
        refused = http.post("/v1/messages", json={"max_tokens": 5, "messages": [{"role": "user", "content": [{"type": "image"}]}]})
    assert answer["content"] == [{"type": "text", "text": "It is sunny."}]
    prompt = server.backend.tokenizer.decode(server.backend.requests[0].prompt_ids, skip_special=False)
    for part in ("Brief.", "weather", "I look.", "sunny"):
        assert part in prompt
    assert server.backend.requests[0].sampling.max_tokens < 99999999  # what a client must send is lowered to what fits
    assert prefilled.status_code == 200
    assert (refused.status_code, refused.json()["type"]) == (400, "error")


def test_ids_in_and_ids_out(serving):
    server = serving(lambda prompt, request: Answer("abc", forced=1))
    tokenizer = server.backend.tokenizer
    with server.client() as http:
        ids = http.post("/tokenize", json={"prompt": "hello the"}).json()["tokens"]
        assert http.post("/detokenize", json={"tokens": ids}).json()["prompt"] == "hello the"
        body = {"input_ids": ids, "sampling_params": {"max_tokens": 5, "logprobs": 1}, "program": {"program": "p", "branch": "b"}}
        answer = http.post("/generate", json=body).json()
        assert tokenizer.decode(answer["output_ids"]) == "abc"
        assert answer["usage"]["forced_tokens"] == 1
        assert len(answer["logprobs"]) == len(answer["output_ids"])
        lines = http.post("/generate", json=body | {"stream": True}).text.split("\n\n")
        pieces = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
        assert [token for piece in pieces for token in piece["output_ids"]] == answer["output_ids"]
        assert http.get("/programs/p/report").json()["totals"]["prompt_tokens"] == 2 * len(ids)
        assert http.get("/programs/gone/report").status_code == 404
        for bad in ({}, {"text": ""}, {"text": "a", "input_ids": [1]}, {"input_ids": [-1]}, {"text": "a", "sampling_params": {"warmth": 1}}):
            assert http.post("/generate", json=bad).status_code == 400
        assert http.post("/detokenize", json={"tokens": [10**9]}).status_code == 400
        assert http.post("/flush_cache").json().keys() == {"freed_tokens", "kept_tokens"}


def test_a_program_on_a_remote_engine_is_healed_as_on_one_in_process(serving):
    import agentrt
    from agentrt.backends.remote import RuntimeEndpoint
    from agentrt.backends.scripted import ScriptedBackend

    @agentrt.function
    def plain(s):
        s += "He went to a" + agentrt.gen("word", max_tokens=8)

    server = serving("bc. d")
    here = ScriptedBackend("bc. d")
    remote = RuntimeEndpoint(server.url)
    assert remote.tokenizer.token_bytes(0xC3) == b"\xc3"  # a part of a character, exactly
    assert remote.tokenizer.token_bytes(remote.tokenizer.encode("abc")[0]) == b"abc"
    assert plain.run(backend=remote)["word"] == plain.run(backend=here)["word"]
    asked, own = server.backend.requests[-1], here.requests[-1]
    assert asked.prompt_tail == own.prompt_tail != b""
    assert asked.prompt_ids == own.prompt_ids
    remote.close()
    with server.client() as http:
        answer = http.post("/generate", json={"text": "a", "prompt_tail": "not base64!"})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "prompt_tail")


def test_a_program_is_told_why_tokens_were_computed(serving):
    server = serving("ok")
    schema = json.loads((resources.files("agentrt.schemas") / "program_report.json").read_text())
    with server.client(headers={"X-Agentrt-Program": "p <b>"}) as http:
        for text in ("a b c", "a b c", "a b d"):
            http.post("/v1/completions", json={"prompt": text})
        report = http.get("/programs/p <b>/report").json()
        page = http.get("/programs/p <b>/report", headers={"accept": "text/html,*/*;q=0.8"})
    jsonschema.validate(report, schema)
    reasons = [[(reason["why"], reason["tokens"], reason.get("first")) for reason in call["recomputed"]] for call in report["calls"]]
    prompt = len(server.backend.tokenizer.encode("a b c"))
    assert reasons == [[("new", prompt, "a")], [("last", 1, None)], [("new", 1, "d")]]
    assert [call["cached_tokens"] for call in report["calls"]] == [0, prompt - 1, prompt - 1]
    assert [request.program.program for request in server.backend.requests] == ["p <b>"] * 3
    assert page.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in page.headers["content-security-policy"]
    assert "<h1>p &lt;b&gt;</h1>" in page.text


def test_a_programs_branches_are_told_apart(serving):
    server = serving("ok")
    with server.client() as http:
        for branch, text in (("", "the trunk "), ("0.1", "the trunk and one"), ("odd name", "other")):
            http.post("/generate", json={"text": text, "program": {"program": "p", "branch": branch}})
        branches = {each["path"]: each for each in http.get("/programs/p/report").json()["branches"]}
        assert http.get("/programs/p/report", headers={"accept": "text/html"}).status_code == 200
    shared = len(server.backend.tokenizer.encode("the trunk"))
    assert [branches[path]["shared_tokens"] for path in ("", "0.1", "odd name")] == [0, shared, 0]
