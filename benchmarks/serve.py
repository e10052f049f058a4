"""A server under load, at any OpenAI-compatible address: latencies, goodput and errors, open-loop or closed-loop.

    python benchmarks/serve.py http://127.0.0.1:8000 --workload few-shot --rate 2 --requests 60
    python benchmarks/serve.py http://127.0.0.1:8000 --workload multi-turn --clients 8 --requests 60

Open-loop (``--rate``) sends at Poisson arrivals whatever happens, as users do; closed-loop (``--clients``) sends the next one
when the last has ended. Goodput counts only what was answered within both bounds. Run it against peers one after another
on the same machine, with the same seed.

    python benchmarks/serve.py --overhead --streams 32

measures the server's own cost instead: the same streams straight from the engine and through HTTP. The engine is a script at
a real one's pace, or a real one (``--model smollm2-135m``).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import platform
import random
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import httpx
import uvicorn

from agentrt.backend import acomplete
from agentrt.backends.scripted import ScriptedBackend
from agentrt.config import ServerConfig
from agentrt.request import Request, SamplingParams
from agentrt.server.app import create_app
from agentrt.server.wire import wire_config

Body = dict[str, Any]

RULES = "You classify reviews as good or bad. Examples follow.\n" + "\n".join(
    f"Review: the {thing} was {word}. Verdict: {verdict}"
    for thing in ("food", "room", "service", "view", "pool", "bar")
    for word, verdict in (("lovely", "good"), ("awful", "bad"), ("superb", "good"), ("dirty", "bad"))
)
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"Looks up the {what} of a city.",
            "parameters": {"type": "object", "properties": {"city": {"type": "string", "maxLength": 20}, "days": {"type": "integer", "minimum": 1, "maximum": 7}}, "required": ["city"]},
        },
    }
    for name, what in (("get_weather", "weather"), ("get_events", "events"), ("get_hotels", "hotels"))
]
CITIES = ("Oslo", "Rome", "Lima", "Cairo", "Kyoto", "Quito", "Porto", "Accra")


@dataclass
class Outcome:
    """What became of one request; times in seconds from when it was sent."""

    status: int = 0
    first: float | None = None
    end: float = 0.0
    gaps: list[float] = field(default_factory=list)
    tokens: int = 0
    cached: int = 0
    prompt: int = 0


@dataclass(frozen=True)
class Bounds:
    first: float
    gap: float


def conversation(workload: str, number: int, draw: random.Random) -> list[Body]:
    """The requests of one user, one after another; what the assistant said is put in between them."""
    city, tail = draw.choice(CITIES), draw.randint(0, 999)
    if workload == "few-shot":
        return [{"messages": [{"role": "system", "content": RULES}, {"role": "user", "content": f"Review: the {city} tour {tail} was fine. Verdict:"}]}]
    if workload == "tools":
        return [{"messages": [{"role": "user", "content": f"How is the weather in {city} for {draw.randint(1, 7)} days?"}], "tools": TOOLS, "tool_choice": "required"}]
    turns = (f"I am user {number}. Tell me of {city}.", "And what do people eat there?", "What would you see first?")
    return [{"messages": [{"role": "user", "content": turn}]} for turn in turns]


async def send(http: httpx.AsyncClient, args: argparse.Namespace, body: Body) -> tuple[Outcome, str]:
    """Sends one request and reads its stream; returns what became of it and what was said."""
    outcome, said, begun, last = Outcome(), "", time.perf_counter(), 0.0
    fields = {"model": args.model, "max_tokens": args.max_tokens, "temperature": 0, "stream": True, "stream_options": {"include_usage": True}}
    try:
        async with http.stream("POST", "/v1/chat/completions", json=fields | body) as answer:
            outcome.status = answer.status_code
            async for line in answer.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                now, chunk = time.perf_counter() - begun, json.loads(line[6:])
                if usage := chunk.get("usage"):
                    outcome.tokens, outcome.prompt = usage["completion_tokens"], usage["prompt_tokens"]
                    outcome.cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
                delta = chunk["choices"][0]["delta"] if chunk.get("choices") else {}
                if delta.get("content") or delta.get("tool_calls"):
                    said += delta.get("content") or ""
                    outcome.gaps += [now - last] if outcome.first is not None else []
                    outcome.first, last = outcome.first or now, now
    except httpx.HTTPError:
        outcome.status = outcome.status if outcome.status not in (0, 200) else -1
    outcome.end = time.perf_counter() - begun
    return outcome, said


async def converse(http: httpx.AsyncClient, args: argparse.Namespace, bodies: Sequence[Body], outcomes: list[Outcome]) -> None:
    history: list[Body] = []
    for body in bodies:
        history = [*history, *body["messages"]]
        outcome, said = await send(http, args, {**body, "messages": history})
        outcomes.append(outcome)
        history.append({"role": "assistant", "content": said})


async def load(args: argparse.Namespace) -> tuple[list[Outcome], float]:
    draw, outcomes = random.Random(args.seed), list[Outcome]()
    users, asked = [], 0
    while asked < args.requests:
        users.append(conversation(args.workload, len(users), draw))
        asked += len(users[-1])
    limits = httpx.Limits(max_connections=None)
    headers = {"Authorization": f"Bearer {args.api_key}"}
    async with httpx.AsyncClient(base_url=args.url, timeout=600, limits=limits, headers=headers) as http:
        begun = time.perf_counter()
        if args.rate:
            tasks = []
            for user in users:
                tasks.append(asyncio.create_task(converse(http, args, user, outcomes)))
                await asyncio.sleep(draw.expovariate(args.rate))
            await asyncio.gather(*tasks)
        else:
            gate = asyncio.Semaphore(args.clients)

            async def in_turn(user: list[Body]) -> None:
                async with gate:
                    await converse(http, args, user, outcomes)

            await asyncio.gather(*map(in_turn, users))
        return outcomes, time.perf_counter() - begun


def quantiles(values: Sequence[float]) -> dict[str, float]:
    ordered = sorted(values)
    if not ordered:
        return {"p50": float("nan"), "p99": float("nan")}
    return {"p50": ordered[len(ordered) // 2], "p99": ordered[min(len(ordered) - 1, int(len(ordered) * 0.99))]}


def summary(outcomes: Sequence[Outcome], seconds: float, bounds: Bounds) -> dict[str, Any]:
    well = [o for o in outcomes if o.status == 200 and o.first is not None]
    gaps = [gap for o in well for gap in o.gaps]
    good = [o for o in well if o.first is not None and o.first <= bounds.first and (not o.gaps or statistics.fmean(o.gaps) <= bounds.gap)]
    return {
        "requests": len(outcomes),
        "errors": len(outcomes) - len(well),
        "seconds": seconds,
        "requests_per_second": len(well) / seconds,
        "tokens_per_second": sum(o.tokens for o in well) / seconds,
        "hit_rate": sum(o.cached for o in well) / max(1, sum(o.prompt for o in well)),
        "goodput_per_second": len(good) / seconds,
        "first_token": quantiles([o.first for o in well if o.first is not None]),
        "inter_token": quantiles(gaps),
        "end_to_end": quantiles([o.end for o in well]),
    }


def show(result: dict[str, Any]) -> None:
    for name in ("requests", "errors", "seconds", "requests_per_second", "tokens_per_second", "hit_rate", "goodput_per_second"):
        print(f"{name:<22}{result[name]:>10.2f}")
    print(f"{'':<22}{'p50 ms':>10}{'p99 ms':>10}")
    for name in ("first_token", "inter_token", "end_to_end"):
        print(f"{name:<22}{1000 * result[name]['p50']:>10.1f}{1000 * result[name]['p99']:>10.1f}")


# ---- the server's own cost


def overhead(args: argparse.Namespace) -> dict[str, Any]:
    """Seconds that the same streams take straight from the engine and through HTTP, one after the other.

    The engine is a real one in its own process (``--model``), or a script at a real one's pace. The client is a process that
    reads bytes and nothing else, so that what is measured is the server and not the client.
    """
    backend, named = _engine(args)
    listening = socket.create_server(("127.0.0.1", 0))
    app = create_app(backend)
    server = uvicorn.Server(wire_config(app, ServerConfig(), lifespan="on", log_config=None, log_level="error"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
    thread.start()
    prompts = [f"{number} is a number, and what follows it is" for number in range(args.streams)]
    bodies = [{"prompt": prompt, "max_tokens": args.max_tokens, "temperature": 0, "ignore_eos": True, "stream": True} for prompt in prompts]
    sampling = SamplingParams(max_tokens=args.max_tokens, temperature=0, ignore_eos=True)

    async def straight() -> float:
        asks = [Request(prompt_ids=tuple(backend.tokenizer.encode(prompt, bos=True)), sampling=sampling) for prompt in prompts]
        begun = time.perf_counter()
        await asyncio.gather(*(acomplete(backend, ask) for ask in asks))
        return time.perf_counter() - begun

    with _reader(listening.getsockname()[1], bodies) as through:
        asyncio.run(straight()), through()  # warm
        clock = time.pthread_getcpuclockid(thread.ident or 0)
        pairs, cpu = [], 0.0
        for _ in range(args.rounds):
            alone, before = asyncio.run(straight()), time.clock_gettime(clock)
            pairs.append((alone, through()))
            cpu += time.clock_gettime(clock) - before
    server.should_exit = True
    thread.join(10)
    backend.close()
    engine, http = (statistics.median(times) for times in zip(*pairs, strict=True))
    tokens = args.rounds * args.streams * args.max_tokens
    return {
        "engine": named,
        "streams": args.streams,
        "tokens": args.max_tokens,
        "engine_seconds": engine,
        "http_seconds": http,
        "overhead": statistics.median(each / alone for alone, each in pairs) - 1,
        "server_cpu_us_a_token": 1e6 * cpu / tokens,
    }


def _engine(args: argparse.Namespace) -> tuple[Any, str]:
    if args.model is None:
        return ScriptedBackend("word " * args.max_tokens, step_seconds=args.step_ms / 1000), f"a script, {args.step_ms:g} ms a step"
    import agentrt

    return agentrt.Engine(args.model, threads=args.threads), f"{args.model}, {args.threads} thread(s)"


@contextlib.contextmanager
def _reader(port: int, bodies: Sequence[Body]) -> Iterator[Callable[[], float]]:
    """A process that sends the bodies at once and reads their streams, each time it is asked to; gives the seconds."""
    child = subprocess.Popen([sys.executable, __file__, "--read", str(port)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert child.stdin is not None
    assert child.stdout is not None
    to, back = child.stdin, child.stdout

    def ask() -> float:
        to.write(json.dumps(bodies) + "\n")
        to.flush()
        return float(back.readline())

    yield ask
    to.close()
    child.wait(10)


async def read_streams(port: int, bodies: Sequence[Body]) -> float:
    """Sends every body on a connection of its own and reads to the ends; returns the seconds."""
    pipes = [await asyncio.open_connection("127.0.0.1", port) for _ in bodies]

    async def one(pipe: tuple[asyncio.StreamReader, asyncio.StreamWriter], body: Body) -> None:
        text = json.dumps(body).encode()
        pipe[1].write(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(text) + text)
        tail = b""
        while b"data: [DONE]" not in tail:
            piece = await pipe[0].read(65536)
            if not piece:
                raise SystemExit("a stream broke off")
            tail = (tail + piece)[-64:]
        pipe[1].close()

    begun = time.perf_counter()
    await asyncio.gather(*map(one, pipes, bodies))
    return time.perf_counter() - begun


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url", nargs="?")
    parser.add_argument("--model")
    parser.add_argument("--api-key", default="none")
    parser.add_argument("--workload", choices=("few-shot", "multi-turn", "tools"), default="few-shot")
    parser.add_argument("--rate", type=float, help="users a second, Poisson (open loop)")
    parser.add_argument("--clients", type=int, default=8, help="users at a time (closed loop, if no rate is given)")
    parser.add_argument("--requests", type=int, default=60)
    parser.add_argument("--max-tokens", type=int, default=32)
    parser.add_argument("--good-first-ms", type=float, default=2000)
    parser.add_argument("--good-gap-ms", type=float, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--overhead", action="store_true")
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--step-ms", type=float, default=40.0, help="the scripted engine's step, for --overhead")
    parser.add_argument("--threads", type=int, default=1, help="of the real engine, for --overhead with --model")
    parser.add_argument("--rounds", type=int, default=5, help="for --overhead; the median counts")
    parser.add_argument("--read", type=int, metavar="PORT", help=argparse.SUPPRESS)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.read:
        for line in sys.stdin:
            print(asyncio.run(read_streams(args.read, json.loads(line))), flush=True)
        return
    if args.overhead:
        result = overhead(args)
        print("\n".join(f"{name:<22}{value if isinstance(value, str) else format(value, '.3f')}" for name, value in result.items()))
    elif args.url:
        outcomes, seconds = asyncio.run(load(args))
        result = summary(outcomes, seconds, Bounds(args.good_first_ms / 1000, args.good_gap_ms / 1000))
        print(f"{args.workload}, {f'{args.rate:g} users/s' if args.rate else f'{args.clients} users'}, seed {args.seed}, {platform.processor() or platform.machine()}")
        show(result)
        result["outcomes"] = [asdict(outcome) for outcome in outcomes]
    else:
        parser.error("give an address, or --overhead")
    if args.json:
        args.json.write_text(json.dumps(result | {"seed": args.seed, "machine": platform.platform()}, indent=1))


if __name__ == "__main__":
    main()
