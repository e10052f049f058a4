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


def check(server, seconds: float, wait_until) -> Counter[str]:
    """Soaks twice; the second time must not hold more than the first did."""
    process = psutil.Process()
    seen = soak(server, max(seconds / 4, 2))
    wait_until(lambda: idle(server))
    gc.collect()
    before = (process.num_fds(), threading.active_count(), process.memory_info().rss)
    seen += soak(server, seconds)
    wait_until(lambda: idle(server))
    wait_until(lambda: process.num_fds() <= before[0] + 8)
    gc.collect()
    after = (process.num_fds(), threading.active_count(), process.memory_info().rss)
    assert after[1] <= before[1] + 8, (before, after)
    assert after[2] <= before[2] + 64_000_000, (before, after)
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
    ended: Counter[str] = Counter()
    submit = backend.submit

    def counting(request, sink):
        def count(delta):
            ended[request.request_id] += delta.last
            sink(delta)

        submit(request, count)

    backend.submit = counting
    with live(backend, ServerConfig(queued=6)) as server:
        seen = check(server, 8, wait_until)
        assert seen["503"] > 0, seen
        assert seen["left"] > 0, seen
        assert set(ended.values()) == {1}
    backend.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--model", default="smollm2-135m")
    args = parser.parse_args()
    spec = importlib.util.spec_from_file_location("servers", Path(__file__).with_name("conftest.py"))
    servers = importlib.util.module_from_spec(spec)
    sys.modules["servers"] = servers
    spec.loader.exec_module(servers)
    import agentrt
    from agentrt.config import ServerConfig

    with agentrt.Engine(args.model) as engine, servers.live(engine, ServerConfig(queued=6)) as server:
        print(dict(check(server, args.seconds, servers.until)))
        engine.flush_cache()
        stats = engine.stats()
        print({name: stats[name] for name in ("requests", "steps", "cached_tokens_now", "locked_tokens_now")})


if __name__ == "__main__":
    main()
