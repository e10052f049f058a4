"""Remote backends: an agentrt server with programs on it, and text endpoints spoken to in their own form."""

from __future__ import annotations

import asyncio
import json
import queue
import threading
import time

import httpx
import pytest
import uvicorn

from agentrt.backends.remote import Anthropic, OpenAI, RuntimeEndpoint
from agentrt.backends.scripted import Answer, ScriptedBackend
from agentrt.errors import AbortedError, EngineError, GrammarError, QueueFullError, UserError
from agentrt.lang.expressions import assistant, gen, select, system, user
from agentrt.lang.program import function
from agentrt.request import FinishReason, Request
from agentrt.server.app import create_app


def script(text, request):
    if request.sampling.grammar is not None or request.sampling.regex is not None:
        return "42"
    return Answer("slow", delay=60) if "slow" in text else "the answer é🙂."


@pytest.fixture(scope="module")
def served():
    backend = ScriptedBackend(script)
    server = uvicorn.Server(uvicorn.Config(create_app(backend), port=0, log_level="error", lifespan="on"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    end = time.monotonic() + 60
    while not server.started:
        assert time.monotonic() < end
        time.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    yield backend, f"http://127.0.0.1:{port}"
    server.should_exit = True
    thread.join(10)
    backend.close()


@function
def program(s):
    s += system("Be brief.")
    s += user("Hello")
    s += assistant(gen("a", stop="."))
    s += user("Again")
    s += assistant(gen("b"))
    forks = s.fork(2)
    forks += user("More") + assistant(gen("c", max_tokens=3))
    forks.join()
    s += user("A number?") + assistant(gen("n", dtype=int))
    s += " Is it " + select("x", ["yes", "no", "abc"])
    return s["a"], s["b"], s["c"], s["n"], s["x"]


@pytest.mark.slow
def test_a_program_gives_on_a_server_what_it_gives_in_process(served):
    backend, url = served
    remote = RuntimeEndpoint(url)
    try:
        there = program.run(backend=remote, temperature=0)
        before = len(backend.requests)
        here = program.run(backend=ScriptedBackend(script), temperature=0)
        assert there.ret_value == here.ret_value
        assert there.token_ids() == here.token_ids()
        assert there.text() == here.text()
        assert there.get_meta_info("b")["cached_tokens"] > 20
        tags = {request.program.branch for request in list(backend.requests)[:before] if request.program}
        assert tags == {"", "0.0", "0.1"}
        assert remote.capabilities.model == "scripted"
        assert remote.flush_cache().freed_tokens > 0
        assert "version" in remote.stats()
        assert program.run(backend=remote, stream=True)["c"] == here["c"]
    finally:
        remote.close()
    end = time.monotonic() + 60
    while there._run.id not in backend.ended and time.monotonic() < end:
        time.sleep(0.01)
    assert there._run.id in backend.ended


def test_errors_and_deadlines_come_through(served):
    _, url = served

    @function
    def slow(s, **options):
        s += "slow" + gen("a", **options)

    remote = RuntimeEndpoint(url)
    try:
        with pytest.raises(AbortedError):
            slow.run(backend=remote, deadline=0.1)
        with pytest.raises(UserError, match="HTTP 4"):
            slow.run(backend=remote, n=100_000)
    finally:
        remote.close()
        remote.close()
    with pytest.raises(EngineError, match="closed"):
        slow.run(backend=remote)
    with pytest.raises(EngineError, match="reached"):
        RuntimeEndpoint("http://127.0.0.1:9")


def test_any_openai_server_works_with_text(served):
    _, url = served
    remote = OpenAI("scripted", f"{url}/v1", "key")

    @function
    def chat(s):
        s += (
            system("Be brief.") + user("Hello") + assistant(gen("a")) + user("More") + assistant(gen("b", max_tokens=3))
        )

    @function
    def plain(s):
        s += "Q" + gen("a", stop="w") + "!" + gen("b")
        return s["a"], s["b"]

    try:
        state = chat.run(backend=remote, temperature=0)
        assert (state["a"], state["b"]) == ("the answer é🙂.", "the a"[:3] if state["b"] == "the" else state["b"])
        assert state.get_meta_info("b")["finish_reason"]["type"] == "length"
        assert [m["role"] for m in state.messages()] == ["system", "user", "assistant", "user", "assistant"]
        assert plain.run(backend=remote, temperature=0).ret_value == ("the ans", "the answer é🙂.")
    finally:
        remote.close()


def endpoint(events, seen, status=200):
    def answer(request):
        seen.append((request.url.path, json.loads(request.content), request.headers))
        text = "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"
        return httpx.Response(
            status,
            text=text if status == 200 else json.dumps({"error": {"message": "no", "param": "model"}}),
            headers={"retry-after": "3"},
        )

    return httpx.MockTransport(answer)


def test_what_openai_is_asked():
    seen = []
    events = [
        {"choices": [{"index": 0, "delta": {"content": '{"x":'}}]},
        {"choices": [{"index": 0, "delta": {"content": " 1}"}, "finish_reason": "stop"}]},
        {
            "choices": [],
            "usage": {"prompt_tokens": 9, "completion_tokens": 4, "prompt_tokens_details": {"cached_tokens": 5}},
        },
    ]
    remote = OpenAI("gpt", api_key="secret", transport=endpoint(events, seen))

    @function
    def chat(s):
        s += user("Hello") + assistant(gen("a", json_schema={"type": "object"}, max_tokens=7, seed=3))

    state = chat.run(backend=remote, temperature=0.5, stop=["END"])
    remote.close()
    ((path, body, headers),) = seen
    assert path == "/v1/chat/completions"
    assert headers["authorization"] == "Bearer secret"
    assert body["messages"] == [{"role": "user", "content": "Hello"}]
    assert (body["max_tokens"], body["seed"], body["stop"], body["temperature"]) == (7, 3, ["END"], 0.5)
    assert body["response_format"]["json_schema"]["schema"] == {"type": "object"}
    assert state["a"] == '{"x": 1}'
    meta = state.get_meta_info("a")
    assert (meta["prompt_tokens"], meta["cached_tokens"]) == (9, 5)


def test_what_anthropic_is_asked():
    seen = []
    events = [
        {"type": "message_start", "message": {"usage": {"input_tokens": 11}}},
        {"type": "content_block_delta", "delta": {"type": "text_delta", "text": "Hi"}},
        {
            "type": "message_delta",
            "delta": {"stop_reason": "stop_sequence", "stop_sequence": "X"},
            "usage": {"output_tokens": 2},
        },
    ]
    remote = Anthropic("claude", api_key="secret", transport=endpoint(events, seen))

    @function
    def chat(s):
        s += system("Be brief.") + user("Hello") + assistant(gen("a", stop="X"))

    state = chat.run(backend=remote)
    ((path, body, headers),) = seen
    assert (path, headers["x-api-key"]) == ("/v1/messages", "secret")
    assert (body["system"], body["messages"], body["stop_sequences"]) == (
        "Be brief.",
        [{"role": "user", "content": "Hello"}],
        ["X"],
    )
    assert state["a"] == "Hi"
    assert state.get_meta_info("a")["finish_reason"] == {"type": "stop", "matched": "X"}

    @function
    def plain(s):
        s += "no roles" + gen("a")

    with pytest.raises(UserError, match="chats only"):
        plain.run(backend=remote)
    remote.close()


def test_what_a_text_endpoint_cannot_do_is_refused():
    remote = OpenAI("gpt", transport=endpoint([], []))

    @function
    def asks(s, **options):
        s += user("Q") + assistant(gen("a", **options))

    for options, error in (
        ({"regex": "x+"}, GrammarError),
        ({"return_logprob": True}, UserError),
        ({"dtype": int}, GrammarError),
        ({"min_tokens": 2}, UserError),
    ):
        with pytest.raises(error):
            asks.run(backend=remote, **options)
    remote.close()


def test_refusals_become_the_errors_that_they_stand_for():
    @function
    def asks(s):
        s += user("Q") + assistant(gen("a"))

    for status, kind in ((400, UserError), (503, QueueFullError), (500, Exception)):
        remote = OpenAI("gpt", transport=endpoint([], [], status))
        with pytest.raises(kind, match=str(status)) as caught:
            asks.run(backend=remote)
        if status == 503:
            assert caught.value.retry_after == 3.0
        remote.close()


def test_select_without_log_probabilities_asks_for_one_of_the_choices():
    events = [{"choices": [{"index": 0, "delta": {"content": "Rome, of course."}, "finish_reason": "stop"}]}]
    remote = OpenAI("gpt", transport=endpoint(events, []))

    @function
    def asks(s):
        s += user("Which?") + assistant(select("x", ["Paris", "Rome"]))
        return s["x"]

    assert asks.run(backend=remote).ret_value == "Rome"
    remote.close()


def waiting_endpoint():
    async def answer(request):
        await asyncio.Event().wait()

    return httpx.MockTransport(answer)


def asked(remote, sink, **options):
    request = Request(prompt_ids=tuple(remote.tokenizer.encode("Q")), **options)
    remote.submit(request, sink)
    return request


def test_an_abort_right_behind_its_request_ends_it():
    """Cancelled before its first step, a coroutine runs none of its own."""
    remote, got, busy = OpenAI("gpt", transport=waiting_endpoint()), queue.Queue(), threading.Event()
    remote._loop.call_soon_threadsafe(busy.wait)
    request = asked(remote, got.put)
    remote.abort(request.request_id)
    busy.set()
    assert got.get(timeout=20).finish_reason is FinishReason.ABORT
    under_way = asked(remote, got.put)
    remote.close()
    last = got.get(timeout=20)
    assert (last.request_id, last.finish_reason) == (under_way.request_id, FinishReason.ABORT)
    assert remote.load().running == 0


HI = [{"choices": [{"index": 0, "text": "Hi", "finish_reason": "stop"}]}]


@pytest.mark.parametrize("make", [lambda: OpenAI("gpt", transport=endpoint(HI, [])), lambda: ScriptedBackend("Hi")], ids=["remote", "scripted"])
def test_a_sink_that_raises_loses_its_own_request_only(make):
    remote, got = make(), queue.Queue()

    def bad(delta):
        raise RuntimeError("on purpose")

    asked(remote, bad)
    asked(remote, got.put)
    deltas = [got.get(timeout=20)]
    while not deltas[-1].last:
        deltas.append(got.get(timeout=20))
    assert "".join(delta.text for delta in deltas) == "Hi"
    remote.close()


@pytest.mark.parametrize("make", [lambda: OpenAI("gpt", transport=waiting_endpoint()), ScriptedBackend], ids=["remote", "scripted"])
def test_a_stream_that_is_lost_while_its_backend_is_busy_can_still_abort(make):
    """Its finalizer runs wherever memory is collected, so also where this thread holds the backend's lock."""
    backend, aborted = make(), threading.Event()

    def collected_inside():
        with backend._lock:
            backend.abort("lost")
        aborted.set()

    threading.Thread(target=collected_inside, daemon=True).start()
    assert aborted.wait(20)
    backend.close()
