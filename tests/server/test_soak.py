"""Mixed load with lost clients, aborts, bad requests and bursts over the queue's limit: nothing leaks, everything ends once.

Ten seconds on the scripted backend here; `python tests/server/test_soak.py --seconds 600 [--model NAME]` runs as long as
told, on a real engine if one is named.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib.util
import random
import socket
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import httpx
import psutil
import pytest

CHAT = {"messages": [{"role": "user", "content": "hi"}]}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}}


def hang_up(server, draw: random.Random) -> str:
    """Begins a stream and leaves it."""
    import json

    body = json.dumps(CHAT | {"stream": True, "max_tokens": 40}).encode()
    with socket.create_connection(("127.0.0.1", server.port)) as raw:
        raw.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        raw.settimeout(draw.random())
        with contextlib.suppress(TimeoutError):
            raw.recv(draw.choice((1, 100, 2000)))
    return "left"


def one(server, http: httpx.Client, draw: random.Random) -> str:
    """One act of a client, chosen at random; returns what became of it."""
    act = draw.randrange(8)
    if act == 0:
        return hang_up(server, draw)
    if act == 1:
        return str(http.post("/v1/chat/completions", json=CHAT | {"temperature": -1}).status_code)
    if act == 2:
        return str(http.post("/abort", json={"abort_all": True}).status_code)
    if act == 3:
        return str(http.post("/v1/completions", json={"prompt": "a", "regex": "x**"}).status_code)
    if act == 4:
        return str(http.post("/v1/chat/completions", json=CHAT | {"tools": [TOOL], "max_tokens": 8}).status_code)
    if act == 5:
        return str(http.post("/v1/chat/completions", json=CHAT | {"n": 3, "max_tokens": 4, "seed": draw.randrange(99)}).status_code)
    stream = act == 6
    return str(http.post("/v1/completions", json={"prompt": f"{draw.random()}", "max_tokens": 12, "stream": stream}).status_code)


def soak(server, seconds: float, clients: int = 12) -> Counter[str]:
    """Runs clients for a while; returns how often what happened."""
    seen: Counter[str] = Counter()
    end = time.monotonic() + seconds

    def client(seed: int) -> None:
        draw = random.Random(seed)
        with server.client() as http:
            while time.monotonic() < end:
                seen[one(server, http, draw)] += 1

    threads = [threading.Thread(target=client, args=(seed,)) for seed in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return seen


def idle(server) -> bool:
    return len(server.service.flights) == 0 and server.backend.load().running == 0


def held() -> dict[str, int]:
    """What this process and the engine's hold."""
    gc.collect()
    process = psutil.Process()
    memory = [each.memory_info().rss // 1_000_000 for each in (process, *process.children(recursive=True))]
    threads = [thread for thread in threading.enumerate() if thread.name != "agentrt-pulse"]  # every server feels one now and then
    return {"files": process.num_fds(), "threads": len(threads), "megabytes": sum(memory), "of them here": memory[0]}


def count_ends(backend) -> Counter[str]:
    """How often each request that the backend takes from now on has ended."""
    ended: Counter[str] = Counter()
    submit = backend.submit

    def counting(request, sink):
        def count(delta):
            ended[request.request_id] += delta.last
            sink(delta)

        submit(request, count)
        ended[request.request_id] += 0

    backend.submit = counting
    return ended


def check(server, seconds: float, wait_until) -> Counter[str]:
    """Soaks twice; the second time must not hold more than the first did."""
    ended = count_ends(server.backend)
    seen = soak(server, max(seconds / 4, 2))
    wait_until(lambda: idle(server))
    before = held()
    seen += soak(server, seconds)
    wait_until(lambda: idle(server))
    wait_until(lambda: held()["files"] <= before["files"] + 8)
    after = held()
    print(f"{len(ended)} requests; held before {before}, after {after}")
    assert after["threads"] <= before["threads"] + 16, (before, after)  # each of 12 clients may have had one at work at the same time
    assert after["megabytes"] <= before["megabytes"] + 64, (before, after)
    wait_until(lambda: 0 not in ended.copy().values())  # an end is counted a moment before it is told
    assert set(ended.values()) == {1}, Counter(ended.values())
    assert set(seen) <= {"200", "400", "503", "left"}, seen
    with server.client() as http:
        text = http.get("/metrics").text
        assert http.post("/v1/completions", json={"prompt": "a", "max_tokens": 1}).status_code == 200
    assert "agentrt:request_success_total" in text
    return seen


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_ten_seconds_of_everything_leak_nothing(live, wait_until):
    from agentrt.backends.scripted import ScriptedBackend
    from agentrt.config import ServerConfig

    backend = ScriptedBackend(lambda prompt, request: "some words of an answer", step_seconds=0.001)
    with live(backend, ServerConfig(queued=6)) as server:
        seen = check(server, 8, wait_until)
        assert seen["503"] > 0, seen
        assert seen["left"] > 0, seen
    backend.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    spec = importlib.util.spec_from_file_location("servers", Path(__file__).with_name("conftest.py"))
    servers = importlib.util.module_from_spec(spec)
    sys.modules["servers"] = servers
    spec.loader.exec_module(servers)
    import agentrt
    from agentrt.config import ServerConfig

    # A small pool is full, and all its memory touched, before the first count: what grows after it is a leak.
    with agentrt.Engine(args.model, threads=args.threads, kv_tokens=4096) as engine, servers.live(engine, ServerConfig(queued=6)) as server:
        print(dict(check(server, args.seconds, servers.until)))
        engine.flush_cache()
        stats = engine.stats()
        print({name: stats[name] for name in ("requests", "steps", "cached_tokens_now", "locked_tokens_now")})


if __name__ == "__main__":
    main()
