"""Clients that mean no good: what they send slowly, without end, too deep, in the wrong form, or never read."""

from __future__ import annotations

import contextlib
import json
import socket

import pytest
from pydantic import ValidationError

from agentrt.backends.byte_tokenizer import ByteTokenizer
from agentrt.backends.scripted import Answer
from agentrt.config import ServerConfig
from agentrt.server.bodies import check_shape
from agentrt.server.native_types import GenerateBody
from agentrt.server.openai_types import ChatBody, CompletionBody
from agentrt.server.turns import TurnMemory

CHAT = {"messages": [{"role": "user", "content": "hi"}]}
HASTE = ServerConfig(read_seconds=0.3, stall_seconds=0.4, header_bytes=8000)


def head(length: int | None, path="/v1/chat/completions", more=b"") -> bytes:
    size = b"Transfer-Encoding: chunked" if length is None else b"Content-Length: %d" % length
    return b"POST %s HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n%s\r\n%s\r\n" % (path.encode(), size, more)


def request(body=CHAT, **options) -> bytes:
    text = json.dumps(body).encode()
    return head(len(text), **options) + text


@contextlib.contextmanager
def wire(server):
    with socket.create_connection(("127.0.0.1", server.port)) as raw:
        raw.settimeout(60)
        yield raw


def all_of(raw: socket.socket) -> bytes:
    """What comes until the server closes."""
    got = b""
    with contextlib.suppress(ConnectionError):
        while piece := raw.recv(65536):
            got += piece
    return got


def status(answer: bytes) -> int:
    return int(answer.split(b" ", 2)[1])


# ---- slow, and without end


@pytest.mark.slow
@pytest.mark.parametrize("said", [b"", b"POST /v1/chat/comp", b"\r\n", head(5, more=b"X-Slow: ")[:-4]], ids=["nothing", "half a line", "blanks", "half a header"])
def test_who_says_no_request_is_told_and_left(serving, said):
    with wire(serving(config=HASTE)) as raw:
        raw.sendall(said)
        answer = all_of(raw)
    assert status(answer) == 408
    assert json.loads(answer.split(b"\r\n\r\n")[1])["error"]["code"] == "request_timeout"


def test_a_body_that_does_not_come_is_a_408_and_holds_nothing(serving, wait_until):
    server = serving(config=HASTE)
    with wire(server) as raw:
        raw.sendall(head(5000) + b'{"messages"')
        answer = all_of(raw)
    assert status(answer) == 408
    assert json.loads(answer.split(b"\r\n\r\n")[1])["error"]["code"] == "request_timeout"
    wait_until(lambda: server.bodies() == 0)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["one header", "many headers", "chunk extension", "trailers"])
def test_a_head_without_end_is_cut_off(serving, kind):
    begun = {
        "one header": b"GET /health HTTP/1.1\r\nX: ",
        "many headers": b"GET /health HTTP/1.1\r\n",
        "chunk extension": head(None) + b"1;",
        "trailers": head(None) + b"0\r\n",
    }[kind]
    piece = b"X-Many: yyyyyyyy\r\n" * 1000 if kind in ("many headers", "trailers") else b"y" * 16_000
    sent = len(begun)
    with wire(serving(config=ServerConfig(header_bytes=8000, read_seconds=60))) as raw, contextlib.suppress(ConnectionError):
        raw.sendall(begun)
        while sent < 100_000_000:
            raw.sendall(piece)
            sent += len(piece)
    assert sent < 100_000_000


@pytest.mark.slow
def test_a_body_that_goes_on_after_its_answer_is_not_read_for_ever(serving):
    with wire(serving(config=ServerConfig(body_bytes=1000))) as raw:
        raw.sendall(head(900_000_000))
        with contextlib.suppress(ConnectionError):
            while True:
                raw.sendall(b"y" * 65536)  # ends because the server closes
        answer = b""
        with contextlib.suppress(ConnectionError):
            answer = raw.recv(65536)
    assert not answer or status(answer) == 413


@pytest.mark.slow
def test_an_answer_that_nobody_reads_ends_with_its_connection(serving, wait_until):
    server = serving(lambda prompt, request: "x" * 300_000, ServerConfig(stall_seconds=0.4), tokens_per_delta=50_000)
    with socket.socket() as raw:
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        raw.connect(("127.0.0.1", server.port))
        raw.sendall(request(CHAT | {"n": 40}))
        wait_until(lambda: len(server.backend.requests) == 1)
        wait_until(lambda: server.connections() == 0, 60)


def test_no_more_connections_than_allowed(serving, wait_until):
    server = serving(config=ServerConfig(connections=3))
    with contextlib.ExitStack() as open_ones:
        for _ in range(3):
            open_ones.enter_context(wire(server))
        wait_until(lambda: server.connections() == 3)
        with wire(server) as raw:
            answer = all_of(raw)
        assert status(answer) == 503
        assert b"Retry-After: 1" in answer
    wait_until(lambda: server.connections() == 0)
    with server.client() as http:
        assert http.get("/health").status_code == 200


def test_all_bodies_together_have_a_bound(serving, wait_until):
    server = serving(config=ServerConfig(bodies_bytes=3000))
    with server.client() as http:
        for _ in range(4):  # what was given back counts no more
            assert http.post("/v1/chat/completions", json=CHAT | {"user": "u" * 2000}).status_code == 200
        with wire(server) as raw:
            raw.sendall(head(2500) + b" " * 2400)
            wait_until(lambda: server.bodies() == 2400)
            answer = http.post("/v1/chat/completions", json=CHAT | {"user": "u" * 2000})
            assert (answer.status_code, answer.json()["error"]["code"], answer.headers["retry-after"]) == (503, "overloaded", "1")
        wait_until(lambda: server.bodies() == 0)
        assert http.post("/v1/chat/completions", json=CHAT | {"user": "u" * 2000}).status_code == 200


@pytest.mark.parametrize("announced", [True, False])
def test_a_body_that_is_too_big_is_told_in_the_errors_form(serving, announced):
    text = json.dumps(CHAT | {"user": "u" * 3000}).encode()
    with serving(config=ServerConfig(body_bytes=2000)).client() as http:
        answer = http.post("/v1/chat/completions", content=text if announced else iter([text]), headers={"Content-Type": "application/json"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (413, "body_too_large")


# ---- gone, half or whole


@pytest.mark.slow
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("how", ["half-closed", "gone with a second request in the pipe"])
def test_who_hangs_up_in_whatever_way_frees_its_slots(serving, wait_until, how, stream):
    server = serving(lambda prompt, request: "x" * 50_000, step_seconds=0.002)
    ask = request(CHAT | {"stream": stream})
    with wire(server) as raw:
        raw.sendall(ask if how == "half-closed" else ask + ask)
        wait_until(lambda: any(flight.generated_tokens for flight in server.service.flights))
        raw.shutdown(socket.SHUT_WR) if how == "half-closed" else raw.close()
        wait_until(lambda: len(server.service.flights) == 0)
        wait_until(lambda: server.backend.load().running == 0)
    assert len(server.backend.requests) == 1


def test_pipelined_requests_are_answered_in_turn(serving):
    server = serving(lambda prompt, asked: Answer(f"answer {asked.sampling.max_tokens}"))
    with wire(server) as raw:
        raw.sendall(b"".join(request(CHAT | {"max_tokens": n}) for n in (11, 12, 13)) + request(CHAT | {"max_tokens": 14}, more=b"Connection: close\r\n"))
        answers = all_of(raw)
    assert [answers.find(b"answer %d" % n) > 0 for n in (11, 12, 13, 14)] == [True] * 4
    assert sorted(range(11, 15), key=lambda n: answers.find(b"answer %d" % n)) == [11, 12, 13, 14]


def test_an_id_names_one_request_at_a_time(serving, wait_until):
    server = serving(lambda prompt, request: Answer("late", delay=20.0))
    with wire(server) as raw, server.client() as http:
        raw.sendall(request({"text": "a", "request_id": "mine"}, path="/generate"))
        wait_until(lambda: len(server.service.flights) == 1)
        second = http.post("/generate", json={"text": "b", "request_id": "mine"})
        assert (second.status_code, second.json()["error"]["param"]) == (400, "request_id")
        assert len(server.service.flights) == 1  # the first one is still there to be aborted
        assert http.post("/abort", json={"request_id": "mine"}).json() == {"aborted": 1}


# ---- in the wrong form

DEEP = b"[" * 900 + b"]" * 900
WORDS = b'{"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2, %s}'


@pytest.mark.parametrize(
    ("body", "code", "word"),
    [
        (b'{"messages": %s}' % DEEP, 400, "128"),
        (WORDS % (b'"temperature": %s' % DEEP), 400, "128"),
        (WORDS % (b'"metadata": {"x": %s}' % DEEP), 400, "128"),
        (b"[" * 100_000, 400, "128"),
        (b'{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "tool_calls": [{"id": "1", "type": "function", "function": '
         b'{"name": "f", "arguments": "%s"}}]}, {"role": "tool", "content": "b", "tool_call_id": "1"}], "max_tokens": 2}' % (b"[" * 5000), 200, ""),
        (WORDS % b'"temperature": NaN', 400, "JSON"),
        (WORDS % b'"temperature": 1e999', 400, "JSON"),
        (WORDS % b'"temperature": "nan"', 400, "temperature"),
        (WORDS % b'"temperature": true', 400, "temperature"),
        (WORDS % b'"logit_bias": {"1_0": 1}', 400, "logit_bias"),
        (WORDS % '"logit_bias": {"\u0661": 1}'.encode(), 400, "logit_bias"),
        (WORDS % (b'"logit_bias": {"%s": 1}' % (b"9" * 5000)), 400, "logit_bias"),
        (WORDS % b'"seed": 18446744073709551615', 200, ""),
        (WORDS % b'"thinking_budget": -1', 400, "thinking_budget"),
        (WORDS % b'"max_tokens": 1', 200, ""),  # twice: the last one holds, as JSON's readers have it
        (b'{"messages": [{"role": "user", "content": "a\\ud800b"}]}', 400, "JSON"),
        (b'{"messages": [{"role": "user", "content": "\\ud83d\\ude00\\u0000\\u202e\\ufeff"}], "max_tokens": 2}', 200, ""),
        (b'{"messages": [{"role": "user", "content": "\xff\xfe"}]}', 400, "JSON"),
        (b"\xef\xbb\xbf{}", 400, "JSON"),
        (b"", 400, "body"),
        (b"null", 400, "body"),
    ],
    ids=lambda value: repr(value)[:50],
)  # fmt: skip
def test_a_body_in_the_wrong_form_is_told_and_nothing_breaks(plain_server, body, code, word):
    with plain_server.client() as http:
        answer = http.post("/v1/chat/completions", content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code == code, answer.text
    assert code == 200 or word in answer.json()["error"]["message"], answer.text


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", "a/b/c;;;=", None])
def test_another_content_type_is_told_which_one_is_wanted(plain_server, kind):
    with plain_server.client() as http:
        answer = http.post("/v1/chat/completions", content=json.dumps(CHAT), headers={"Content-Type": kind} if kind else {})
    assert (answer.status_code, "application/json" in answer.json()["error"]["message"]) == (415, True)


def test_what_is_wrong_a_million_times_is_told_once():
    many = 200_000
    for body, kind in (
        ({"messages": [1] * many}, ChatBody),
        (CHAT | {"stop": [1] * many}, ChatBody),
        (CHAT | {"logit_bias": dict.fromkeys(map(str, range(many)), "x")}, ChatBody),
        (CHAT | {f"field{n}": n for n in range(many)}, ChatBody),
        ({"prompt": [1] * many + ["x"]}, CompletionBody),
        ({"input_ids": [1.5] * many}, GenerateBody),
        ({"text": "a", "sampling_params": {f"field{n}": n for n in range(many)}}, GenerateBody),
    ):
        with pytest.raises(ValidationError) as caught:
            kind.model_validate(body)
        assert caught.value.error_count() <= 4  # one for each form that the field may have


def test_the_shape_of_json_is_bounded_and_strings_have_none():
    check_shape(json.dumps({"a": '[[[{{,,,"\\' * 1000, "b": [{"c": [1]}] * 40}).encode(), max_values=200, max_depth=4)
    for text in (b"[" * 5 + b"]" * 5, b'{"a":[{"b":[{"c":1}]}]}', b"[" * 9):
        with pytest.raises(Exception, match="4 deep"):
            check_shape(text, max_values=100, max_depth=4)
    for text in (b"[" + b"1," * 100 + b"1]", b"[" + b"{}," * 60 + b"{}]", b'["' + b'","' * 300 + b'"]'):
        with pytest.raises(Exception, match="at most 100 are"):
            check_shape(text, max_values=100, max_depth=4)


# ---- from where they should not


@pytest.mark.parametrize(
    ("headers", "code"),
    [
        ({}, 200),
        ({"Host": "localhost:8000"}, 200),
        ({"Host": "[::1]:8000"}, 200),
        ({"Host": "host.docker.internal"}, 200),
        ({"Host": "workstation:8000"}, 200),
        ({"Host": "evil.example.com:8000"}, 403),
        ({"Host": "127.0.0.1.evil.example"}, 403),
        ({"Origin": "http://evil.example.com"}, 403),
        ({"Origin": "null"}, 403),
        ({"Host": "localhost:8000", "Origin": "http://localhost:8000"}, 200),
    ],
    ids=str,
)
def test_web_pages_cannot_use_a_server_without_a_key(plain_server, headers, code):
    with plain_server.client() as http:
        assert http.post("/flush_cache", headers=headers).status_code == code
        assert http.get("/health", headers=headers).status_code == 200  # a load balancer's own names


def test_a_server_with_a_key_is_asked_by_any_name(serving):
    with serving(config=ServerConfig(api_key="k")).client(headers={"Authorization": "Bearer k", "Host": "llm.example.com"}) as http:
        assert http.get("/v1/models").status_code == 200


def test_head_is_get_without_a_body_and_other_methods_say_what_is_taken(plain_server):
    with plain_server.client() as http:
        for path in ("/health", "/", "/v1/models"):
            answer = http.head(path)
            assert (answer.status_code, answer.content) == (200, b"")
        answer = http.options("/v1/chat/completions")
    assert (answer.status_code, answer.headers["allow"], answer.json()["error"]["code"]) == (405, "POST", "method_not_allowed")


def test_what_one_tenant_was_answered_is_not_recalled_for_another():
    tokenizer = ByteTokenizer()
    turns = TurnMemory(tokenizer, 1000)
    prompt, odd = tokenizer.encode("q:"), list(b"the")  # bytes of what is one token
    turns.remember(prompt, odd, "anna")
    assert turns.recall(tokenizer.encode("q:the!"), "anna") == [*prompt, *odd, *tokenizer.encode("!")]
    for other in ("bert", ""):
        assert turns.recall(tokenizer.encode("q:the!"), other) == tokenizer.encode("q:the!")
