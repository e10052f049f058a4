"""How often a model's calls of tools are right: free text, auto and required, at any OpenAI-compatible address.

Sends BFCL's requests to the address, greedy, and scores the calls against their answers: the name and every argument must
match (strings without case, spaces and punctuation; "" among the allowed values means that the argument may be left
out). Differences between two ways of asking are paired, with a bootstrap interval.

    python benchmarks/tool_accuracy.py http://127.0.0.1:8000 --model qwen2.5-coder-0.5b --limit 60

With ``--json FILE`` a run that was stopped, or had a smaller limit, goes on where it stopped.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx
import jsonschema

CHECKOUT = Path(__file__).resolve().parent.parent
MODES = ("none", "auto", "required")


@dataclass(frozen=True)
class Result:
    """One answer: the calls that are whole in it, whether there are any, fit their tools and are right, and what they cost.

    `cut` is an answer that its bound on tokens ended.
    """

    row: str
    calls: list[dict[str, Any]]
    parsed: bool
    valid: bool
    right: bool
    tokens: int
    seconds: float
    cut: bool = False


def corpus(limit: int | None, rows: str) -> list[dict[str, Any]]:
    folder = Path(os.environ.get("AGENTRT_CORPORA", CHECKOUT.parent / "shared" / "data"))
    lines = (folder / "bfcl_tools.jsonl").read_text().splitlines()
    chosen = {"all": lines, "even": lines[::2], "odd": lines[1::2]}[rows]
    return [json.loads(line) for line in chosen[:limit]]


def plain(value: Any) -> Any:
    """A value as it is compared."""
    if isinstance(value, str):
        return re.sub(r"[\s\W_]+", "", value).lower()
    if isinstance(value, list):
        return [plain(each) for each in value]
    if isinstance(value, dict):
        return {key: plain(each) for key, each in value.items()}
    return value


def same(given: Any, allowed: Any) -> bool:
    """Whether a value is an allowed one; an allowed object may itself list what is allowed for each of its keys."""
    if isinstance(allowed, dict) and isinstance(given, dict):
        return all(_argument(given, key, options) for key, options in allowed.items()) and set(given) <= set(allowed)
    return plain(given) == plain(allowed)


def _argument(arguments: Mapping[str, Any], key: str, options: Any) -> bool:
    options = options if isinstance(options, list) else [options]
    if key not in arguments:
        return "" in options
    return any(same(arguments[key], option) for option in options)


def right_call(call: Mapping[str, Any], answer: Mapping[str, Any]) -> bool:
    (name, arguments), given = next(iter(answer.items())), call.get("arguments")
    if call.get("name") != name or not isinstance(given, dict):
        return False
    return all(_argument(given, key, options) for key, options in arguments.items()) and set(given) <= set(arguments)


def right_calls(calls: Sequence[Mapping[str, Any]], answers: Sequence[Mapping[str, Any]]) -> bool:
    """Whether each answer has a call of its own, in any order, and there are no others."""
    if len(calls) != len(answers):
        return False
    left = list(calls)
    for answer in answers:
        found = next((call for call in left if right_call(call, answer)), None)
        if found is None:
            return False
        left.remove(found)
    return not left


def valid_call(call: Mapping[str, Any], tools: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a call names a tool and its arguments satisfy that tool's schema."""
    schema = next((tool["function"]["parameters"] for tool in tools if tool["function"]["name"] == call["name"]), None)
    return schema is not None and jsonschema.Draft202012Validator(schema).is_valid(call["arguments"])


def calls_in_text(text: str, wanted: int) -> list[dict[str, Any]]:
    """The first JSON objects of a free text that look like calls."""
    calls, at = [], 0
    while len(calls) < wanted and (at := text.find("{", at)) >= 0:
        try:
            value, at = json.JSONDecoder().raw_decode(text, at)
        except ValueError:
            at += 1
            continue
        if isinstance(value, dict) and "name" in value:
            calls.append({"name": value["name"], "arguments": value.get("arguments", value.get("parameters"))})
    return calls


def calls_of(message: Mapping[str, Any], mode: str, wanted: int) -> list[dict[str, Any]]:
    if mode == "none":
        return calls_in_text(message.get("content") or "", wanted)
    calls = []
    for call in message.get("tool_calls") or ():
        with contextlib.suppress(ValueError):  # cut
            calls.append({"name": call["function"]["name"], "arguments": json.loads(call["function"]["arguments"])})
    return calls


async def ask(http: httpx.AsyncClient, model: str, row: Mapping[str, Any], mode: str, max_tokens: int, extra: Mapping[str, Any]) -> Result:
    wanted = len(row["answers"])
    body = {"model": model, "messages": row["messages"], "tools": row["tools"], "tool_choice": mode, "temperature": 0, "max_tokens": max_tokens * wanted}
    if mode != "none":
        body["parallel_tool_calls"] = wanted > 1
    begun = time.perf_counter()
    answer = await http.post("/v1/chat/completions", json=body | dict(extra))
    answer.raise_for_status()
    whole = answer.json()
    calls = calls_of(whole["choices"][0]["message"], mode, wanted)
    right, valid = right_calls(calls, row["answers"]), bool(calls) and all(valid_call(call, row["tools"]) for call in calls)
    cut = whole["choices"][0]["finish_reason"] == "length"
    return Result(row["id"], calls, bool(calls), valid, right, whole["usage"]["completion_tokens"], time.perf_counter() - begun, cut)


class Answers:
    """The answers so far, by mode and row, and the seconds that each mode took; on disk after every answer, if there is a file."""

    def __init__(self, path: Path | None) -> None:
        earlier = json.loads(path.read_text()) if path and path.exists() else {"answers": {}, "seconds": {}}
        self.path = path
        self.by_mode = {mode: {each["row"]: Result(**each) for each in answers} for mode, answers in earlier["answers"].items()}
        self.seconds: dict[str, float] = earlier["seconds"]

    def save(self, **more: Any) -> None:
        if self.path:
            answers = {mode: [asdict(result) for result in rows.values()] for mode, rows in self.by_mode.items()}
            self.path.write_text(json.dumps({"answers": answers, "seconds": self.seconds, **more}, indent=1))


async def run_mode(args: argparse.Namespace, rows: Sequence[Mapping[str, Any]], mode: str, answers: Answers) -> list[Result]:
    """Asks what has no answer yet; gives all answers in the order of the rows."""
    gate = asyncio.Semaphore(args.concurrency)
    headers = {"Authorization": f"Bearer {args.api_key}"}
    known = answers.by_mode.setdefault(mode, {})
    before, begun = answers.seconds.get(mode, 0.0), time.perf_counter()
    async with httpx.AsyncClient(base_url=args.url, headers=headers, timeout=None) as http:

        async def one(row: Mapping[str, Any]) -> None:
            async with gate:
                known[row["id"]] = await ask(http, args.model, row, mode, args.max_tokens, args.extra)
                answers.seconds[mode] = before + time.perf_counter() - begun
                answers.save()

        await asyncio.gather(*(one(row) for row in rows if row["id"] not in known))
    return [known[row["id"]] for row in rows]


def paired(one: Sequence[Result], other: Sequence[Result], seed: int) -> tuple[float, float, float]:
    """Mean difference of being right, and the 95% interval of 10,000 bootstrap samples."""
    differences = [a.right - b.right for a, b in zip(one, other, strict=True)]
    draw, size = random.Random(seed), len(differences)
    means = sorted(sum(draw.choices(differences, k=size)) / size for _ in range(10_000))
    return sum(differences) / size, means[250], means[9749]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url")
    parser.add_argument("--model", required=True)
    parser.add_argument("--api-key", default="none")
    parser.add_argument("--modes", nargs="+", default=MODES, choices=MODES)
    parser.add_argument("--rows", default="all", choices=("all", "even", "odd"), help="choose on the odd ones, report the even ones")
    parser.add_argument("--limit", type=int)
    parser.add_argument("--max-tokens", type=int, default=200, help="for each call that the request wants")
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--extra", type=json.loads, default={"repetition_penalty": 1.0}, help="further fields of every request, as JSON")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--beside", type=Path, help="another server's --json: differences to it, and the quotient of seconds")
    args = parser.parse_args()
    rows = corpus(args.limit, args.rows)
    results: dict[str, list[Result]] = {}
    answers = Answers(args.json)
    table = []
    print(f"{len(rows)} requests ({args.rows} rows), greedy, {args.concurrency} at a time, bootstrap seed {args.seed}")
    print(f"{'tool_choice':<12}{'parsed':>8}{'cut':>6}{'valid':>8}{'right':>8}{'share':>9}{'tokens':>9}{'seconds':>9}", flush=True)
    for mode in args.modes:
        results[mode] = asyncio.run(run_mode(args, rows, mode, answers))
        seconds = answers.seconds.get(mode, 0.0)
        line = {name: sum(getattr(result, name) for result in results[mode]) for name in ("parsed", "cut", "valid", "right", "tokens")}
        line |= {"mode": mode, "seconds": round(seconds, 1)}
        table.append(line)
        print(f"{mode:<12}{line['parsed']:>8}{line['cut']:>6}{line['valid']:>8}{line['right']:>8}{line['right'] / len(rows):>9.1%}{line['tokens']:>9}{seconds:>9.1f}", flush=True)
    differences = {}
    for one, other in (("required", "none"), ("auto", "none"), ("auto", "required")):
        if one in results and other in results:
            differences[f"{one} - {other}"] = paired(results[one], results[other], args.seed)
            mean, low, high = differences[f"{one} - {other}"]
            print(f"{one} - {other}: {mean:+.1%}, 95% from {low:+.1%} to {high:+.1%}")
    if args.beside:
        beside(results, answers, Answers(args.beside), args.seed)
    answers.save(rows=len(rows), table=table, differences=differences)


def beside(results: Mapping[str, Sequence[Result]], answers: Answers, others: Answers, seed: int) -> None:
    """Prints how another server did with the same rows."""
    for mode, mine in results.items():
        theirs = [others.by_mode.get(mode, {}).get(result.row) for result in mine]
        if all(theirs):
            mean, low, high = paired(mine, [other for other in theirs if other], seed)
            times = answers.seconds[mode] / others.seconds[mode]
            print(f"{mode}, this - {others.path}: {mean:+.1%}, 95% from {low:+.1%} to {high:+.1%}; {times:.2f} of its seconds")


if __name__ == "__main__":
    main()
