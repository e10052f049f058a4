"""Running the server: limits, key, queue, lost clients, aborts, a silent engine, a dead one, draining, metrics."""

from __future__ import annotations

import contextlib
import json
import random
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import httpx
import pytest

from agentrt.backends.scripted import Answer, ScriptedBackend
from agentrt.config import ServerConfig

CHAT = {"messages": [{"role": "user", "content": "hi"}]}
LONG = {"step_seconds": 0.002}


def post(server, body=CHAT, path="/v1/chat/completions", **options):
    with server.client() as http:
        return http.post(path, json=body, **options)


def endless(prompt, request):
    return "x" * 5000


@pytest.mark.slow
def test_the_key_guards_every_route_but_two(serving):
    server = serving(config=ServerConfig(api_key="s3cret"))
    with server.client() as http:
        for path in ("/health", "/ready"):
            assert http.get(path).status_code == 200
        wrong = ({}, {"Authorization": "Bearer wrong"}, {"x-api-key": "wrong"})
        paths = [*server.app.openapi()["paths"], "/openapi.json"]
        assert {"/", "/metrics", "/v1/models", "/generate"} <= set(paths)
        for path in paths:
            if path not in ("/health", "/ready"):
                assert http.request("POST" if len(path) % 2 else "GET", path, headers=wrong[len(path) % 3]).status_code == 401, path
        assert http.get("/v1/models", headers={"Authorization": "Bearer s3cret"}).status_code == 200
        assert http.get("/v1/models", headers={"x-api-key": "s3cret"}).status_code == 200
        assert http.get("/").headers["www-authenticate"].startswith("Basic")  # so that a browser asks for the key
        assert http.get("/", auth=("", "s3cret")).status_code == 200
        assert http.get("/", auth=("s3cret", "")).status_code == 401


def test_it_binds_to_this_machine_alone_unless_told():
    assert ServerConfig().host == "127.0.0.1"
    assert "s3cret" not in repr(ServerConfig(api_key="s3cret"))


def test_what_is_too_big_is_refused_with_its_bound(serving):
    server = serving(config=ServerConfig(body_bytes=2000, header_bytes=8000, messages=3, tools=1, n=2))
    assert post(server, {"messages": [{"role": "user", "content": "x" * 3000}]}).status_code == 413
    assert post(server, CHAT, headers={"x-long": "y" * 9000}).status_code == 431
    many = {"messages": CHAT["messages"] * 4}
    tools = [{"type": "function", "function": {"name": name}} for name in "ab"]
    for body, bound in ((many, "3"), (CHAT | {"tools": tools}, "1"), (CHAT | {"n": 3}, "2")):
        answer = post(server, body)
        assert (answer.status_code, bound in answer.json()["error"]["message"]) == (400, True), answer.text
    assert post(server).status_code == 200


def test_a_prompt_beyond_the_context_is_refused_with_both_numbers(serving):
    server = serving(max_context=100)
    for stream in (False, True):
        answer = post(server, {"messages": [{"role": "user", "content": "w " * 300}], "stream": stream})
        assert answer.status_code == 400
        assert answer.json()["error"]["code"] == "context_length_exceeded"
        assert "100" in answer.json()["error"]["message"]


def test_a_text_that_cannot_fit_whatever_its_tokens_are_is_not_tokenised(serving):
    server = serving(max_context=100)
    with server.client() as http:
        for path, body in (
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "w" * 300_000}]}),
            ("/v1/completions", {"prompt": "w" * 300_000}),
            ("/generate", {"text": "w" * 300_000}),
            ("/v1/messages", {"messages": [{"role": "user", "content": "w" * 300_000}], "max_tokens": 4}),
        ):
            answer = http.post(path, json=body)
            assert (answer.status_code, "characters" in answer.json()["error"]["message"]) == (400, True), answer.text


def test_a_full_queue_is_a_503_every_time(serving, wait_until):
    server = serving(lambda prompt, request: Answer("late", delay=30.0), ServerConfig(queued=2))
    with server.client() as http:
        threads = [threading.Thread(target=lambda: post(server), daemon=True) for _ in range(2)]
        for thread in threads:
            thread.start()
        wait_until(lambda: server.service.flights.waiting == 2)
        for _ in range(5):
            answer = http.post("/v1/chat/completions", json=CHAT)
            assert answer.status_code == 503
            assert int(answer.headers["retry-after"]) >= 1
            assert answer.json()["error"]["code"] == "queue_full"
        assert http.post("/abort", json={"abort_all": True}).json() == {"aborted": 2}
        for thread in threads:
            thread.join(20)
        assert len(server.service.flights) == 0


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_hangs_up_frees_its_slots(serving, wait_until, stream):
    server = serving(endless, **LONG)
    raw = socket.create_connection(("127.0.0.1", server.port))
    body = json.dumps(CHAT | {"stream": stream}).encode()
    raw.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
    wait_until(lambda: any(flight.generated_tokens > 3 for flight in server.service.flights))
    (flight,) = server.service.flights
    raw.close()
    wait_until(lambda: len(server.service.flights) == 0)
    wait_until(lambda: server.backend.aborts == [flight.requests[0].request_id])
    wait_until(lambda: server.backend.load().running == 0)
    assert post(serving("ok")).status_code == 200


def test_an_abort_ends_a_stream_and_marks_it(serving, wait_until):
    server = serving(endless, **LONG)
    with server.client() as http, http.stream("POST", "/v1/chat/completions", json=CHAT | {"stream": True}) as answer:
        lines = answer.iter_lines()
        call_id = json.loads(next(lines).removeprefix("data: "))["id"]
        assert post(server, {"request_id": call_id}, "/abort").json() == {"aborted": 1}
        events = [line for line in lines if line.startswith("data: ")]
    assert events[-1] == "data: [DONE]"
    assert json.loads(events[-2].removeprefix("data: "))["choices"][0]["finish_reason"] == "abort"


def test_streams_are_kept_alive_while_nothing_comes(serving):
    server = serving(lambda prompt, request: Answer("ab", delay=0), ServerConfig(keep_alive_seconds=0.05), step_seconds=0.3)
    with server.client() as http, http.stream("POST", "/v1/chat/completions", json=CHAT | {"stream": True}) as answer:
        text = "".join(answer.iter_text())
    assert ": ping" in text
    assert text.rstrip().endswith("data: [DONE]")


def test_a_client_that_does_not_read_is_taken_for_lost(serving, wait_until):
    server = serving(lambda prompt, request: "x" * 200_000, ServerConfig(stall_seconds=0.3), tokens_per_delta=2000)
    raw = socket.socket()
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    raw.connect(("127.0.0.1", server.port))
    body = json.dumps(CHAT | {"stream": True, "n": 64, "return_token_ids": True}).encode()
    raw.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
    wait_until(lambda: any(flight.generated_tokens for flight in server.service.flights))
    wait_until(lambda: len(server.service.flights) == 0)
    raw.close()
    assert post(server, CHAT | {"max_tokens": 1}).status_code == 200


class SilentBackend(ScriptedBackend):
    """An engine whose step does not return, as if it had been stopped."""

    def __init__(self, *args):
        super().__init__(*args)
        self.go = threading.Event()

    def load(self):
        self.go.wait(60)
        return super().load()


def test_an_engine_that_is_silent_is_told_of_and_forgiven(live, wait_until):
    backend = SilentBackend("ok")
    with live(backend, ServerConfig(silence_seconds=0.2)) as server, server.client() as http:
        wait_until(lambda: http.get("/health").status_code == 503)
        assert "not answered" in http.get("/health").json()["status"]
        assert http.get("/ready").status_code == 503
        backend.go.set()
        wait_until(lambda: http.get("/health").status_code == 200)
    backend.close()


def test_a_dead_engine_fails_what_is_pending_and_says_so(serving, wait_until):
    server = serving(endless, **LONG)
    answers = []
    thread = threading.Thread(target=lambda: answers.append(post(server)))
    thread.start()
    wait_until(lambda: any(flight.generated_tokens for flight in server.service.flights))
    server.backend.close()
    thread.join(20)
    assert answers[0].status_code == 503
    assert post(server).status_code == 503
    with server.client() as http:
        assert http.get("/health").status_code == 503
        assert http.get("/metrics").status_code == 200


def test_metrics_follow_the_fields_names(serving):
    server = serving(lambda prompt, request: Answer("abc def", forced=2))
    for _ in range(2):
        post(server)
    post(server, {"messages": []})
    with server.client() as http:
        text = http.get("/metrics").text
    values = {line.split("{")[0]: float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line.startswith("agentrt:")}
    for name in (
        "num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "prompt_tokens_total", "cached_tokens_total",
        "generation_tokens_total", "forced_tokens_total", "forward_passes_total", "time_to_first_token_seconds_count",
        "inter_token_latency_seconds_count", "e2e_request_latency_seconds_count", "queue_time_seconds_count",
    ):  # fmt: skip
        assert f"agentrt:{name}" in values, name
    assert values["agentrt:forced_tokens_total"] == 4
    assert values["agentrt:e2e_request_latency_seconds_count"] == 2
    assert 'agentrt:request_success_total{finish_reason="stop",model_name="scripted"} 2.0' in text
    assert 'agentrt:request_failure_total{code="invalid_value",model_name="scripted"} 1.0' in text


#: Its answers take more than two minutes; at a line on its standard input it does what `AT_A_LINE` says.
SERVED = """
    import sys, threading
    from agentrt.backends.scripted import ScriptedBackend
    from agentrt.config import ServerConfig
    from agentrt.server.serve import serve
    backend = ScriptedBackend("x" * 3000, step_seconds=0.05)
    def listen():
        sys.stdin.readline()
        AT_A_LINE
    threading.Thread(target=listen, daemon=True).start()
    sys.exit(serve(lambda: backend, ServerConfig(port=int(sys.argv[1]), drain_seconds=float(sys.argv[2]), log_format="json")))
"""


HURRY = "backend._step_seconds = 0.0"


def port_that_nobody_is_given() -> int:
    """A free one outside those that the system gives to whoever asks for any, so that it is still free when the server has started."""
    lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0]) if sys.platform == "linux" else 32_768
    while True:
        port = random.SystemRandom().randrange(lowest - 10_000, lowest)
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


@pytest.fixture
def process():
    """Starts `serve` in a process; gives (process, url)."""
    started = []

    def start(drain_seconds: float, at_a_line: str = HURRY):
        port = port_that_nobody_is_given()
        code = textwrap.dedent(SERVED).replace("AT_A_LINE", at_a_line)
        child = subprocess.Popen([sys.executable, "-c", code, str(port), str(drain_seconds)], stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        started.append(child)
        url = f"http://127.0.0.1:{port}"
        end = time.monotonic() + 60
        while True:
            try:
                if httpx.get(f"{url}/ready").status_code == 200:
                    return child, url
            except httpx.TransportError:
                assert child.poll() is None, child.stderr.read()
            assert time.monotonic() < end
            time.sleep(0.05)

    yield start
    for child in started:
        if child.poll() is None:
            child.kill()
        child.wait()
        child.stderr.close()
        child.stdin.close()


def tell(child):
    child.stdin.write("\n")
    child.stdin.flush()


def drains(url) -> bool:
    return httpx.get(f"{url}/ready").status_code == 503


def begin_stream(url):
    http = httpx.Client(timeout=30)
    stream = http.stream("POST", f"{url}/v1/chat/completions", json=CHAT | {"stream": True})
    answer = stream.__enter__()
    lines = answer.iter_lines()
    next(lines)
    return http, stream, lines


@pytest.mark.slow
def test_sigterm_drains_and_exits_with_0(process, wait_until):
    child, url = process(120)
    http, stream, lines = begin_stream(url)
    child.send_signal(signal.SIGTERM)
    wait_until(lambda: drains(url))
    refused = httpx.post(f"{url}/v1/chat/completions", json=CHAT)
    assert (refused.status_code, "retry-after" in refused.headers) == (503, True)
    tell(child)  # the stream goes on to its end
    text = [line for line in lines if line]
    assert text[-1] == "data: [DONE]"
    assert '"finish_reason":"stop"' in text[-2]
    stream.__exit__(None, None, None)
    http.close()
    assert child.wait(60) == 0
    assert all(json.loads(line)["level"] for line in child.stderr.read().splitlines())


@pytest.mark.slow
@pytest.mark.parametrize("signals", [1, 2])
def test_a_drain_ends_with_its_time_or_a_second_signal(process, wait_until, signals):
    child, url = process(0.3 if signals == 1 else 120)
    http, stream, _ = begin_stream(url)  # held: a stream that nobody holds is a client that hung up
    child.send_signal(signal.SIGTERM)
    if signals == 2:
        wait_until(lambda: drains(url))
        child.send_signal(signal.SIGTERM)
    child.wait(60)
    stream.__exit__(None, None, None)
    http.close()


@pytest.mark.slow
def test_the_process_exits_with_an_error_when_the_engine_dies(process):
    child, url = process(60, "backend.close()")
    tell(child)
    end = time.monotonic() + 60
    while child.poll() is None:  # whoever asks finds out
        with contextlib.suppress(httpx.TransportError):
            httpx.post(f"{url}/v1/chat/completions", json=CHAT | {"max_tokens": 1})
        assert time.monotonic() < end
        time.sleep(0.1)
    assert child.returncode == 1
