"""Agent programs with prefix cache and jump-forward on and off: programs/s, tokens computed, forward passes, and whether outputs agree.

    python benchmarks/programs.py [--quick] [--only judge react] [--peers openvino vllm guidance] [--out programs.json]

The programs are those of `examples/`. On and off take turns on one engine, so that the ratios hold on a noisy machine ("off": every
request has a cache salt of its own, and jump-forward is off); absolute figures are this machine's. Greedy or seeded, so both engines are asked for the same tokens.

With ``--peers``, the same programs run on other engines too, each installed into an environment of its own on first use and asked over
HTTP by `agentrt.OpenAI`, as texts. A peer that cannot be installed, and a program that asks for what a peer cannot do (selects by score,
tools), are left out by name. Peers' outputs differ, and so may the number of tokens: the table gives both.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

import agentrt
from agentrt import Engine
from agentrt.cli.demo import Unaided
from agentrt.errors import AgentrtError
from agentrt.hub import resolve_model
from agentrt.observe.report import joined

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
sys.path.insert(0, str(Path(__file__).resolve().parent / "peers"))

from environments import PeerError
from peer import PEERS, Peer

SMALL, LARGER = "smollm2-135m", "qwen2.5-coder-0.5b"
SEED = 7
States = Sequence[agentrt.State]


@agentrt.function
def call_tools(s: Any, question: str, tools: list[Any]) -> Any:
    s += agentrt.user(question)
    s += agentrt.tool_call("calls", tools, choice="required", parallel=False, max_tokens=80)
    return [(call.name, call.arguments) for call in s["calls"]]


def tree_of_thought(quick: bool) -> States:
    import tree_of_thought as example

    depth = 2 if quick else 3
    return [example.tree_of_thought.run(example.TASK, depth=depth, width=3, keep=1 if quick else 2, seed=SEED, temperature=0.8)]


def judge(quick: bool) -> States:
    import judge as example

    essays = [f"{example.ESSAY} ({number})" for number in range(1 if quick else 4)]
    return list(example.judge.run_batch([{"essay": essay} for essay in essays]))


def chat(quick: bool) -> States:
    import chat as example

    turns = example.TURNS * (1 if quick else 2)
    return list(example.chat.run_batch([{"turns": turns}] * (1 if quick else 4), temperature=0))


def few_shot(quick: bool) -> States:
    import few_shot as example

    countries = example.COUNTRIES * (1 if quick else 3)
    return list(example.describe.run_batch([{"country": country} for country in countries], temperature=0))


def react(quick: bool) -> States:
    import react_agent as example

    places = (7, 14) if quick else range(0, len(example.QUESTIONS), 3)
    return asyncio.run(example.live([example.QUESTIONS[place] for place in places]))


def tool_calling(quick: bool) -> States:
    from react.tools import calculator, query_database, search_notes
    from react_agent import QUESTIONS

    asked = [item["question"] for item in QUESTIONS if item["tool"] != "convert_units"][:: 5 if quick else 1]
    tools = [calculator, search_notes, query_database]
    return list(call_tools.run_batch([{"question": question, "tools": tools} for question in asked], temperature=0))


WORK: dict[str, tuple[str, Callable[[bool], States]]] = {
    "tree_of_thought": (SMALL, tree_of_thought),
    "judge": (SMALL, judge),
    "chat": (SMALL, chat),
    "few_shot": (SMALL, few_shot),
    "tool_calling": (LARGER, tool_calling),
    "react": (LARGER, react),
}


@dataclass(frozen=True)
class Measured:
    seconds: float
    programs: int
    prompt: int
    computed: int
    passes: int
    generated: int
    outputs: list[str]


def measure(engine: Any, work: Callable[[bool], States], quick: bool) -> Measured:
    """Runs the work once, from an empty cache."""
    agentrt.set_default_backend(engine)
    engine.flush_cache()
    before, started = engine.stats()["computed_tokens"], time.perf_counter()
    states = work(quick)
    seconds = time.perf_counter() - started
    totals = joined([state.report() for state in states], program="all").values["totals"]
    computed = engine.stats()["computed_tokens"] - before
    return Measured(seconds, len(states), totals["prompt_tokens"], computed, totals["forward_passes"], totals["completion_tokens"], [repr(s.ret_value) for s in states])


def compare(names: Sequence[str], quick: bool, repeats: int) -> dict[str, Any]:
    figures: dict[str, Any] = {}
    for model in (SMALL, LARGER):
        chosen = [name for name in names if WORK[name][0] == model]
        if not chosen:
            continue
        with Engine(model) as ours:
            plain = Unaided(ours)
            ours.generate("warm up", agentrt.SamplingParams(max_tokens=4, temperature=0))
            for name in chosen:
                pairs = [(measure(ours, WORK[name][1], quick), measure(plain, WORK[name][1], quick)) for _ in range(repeats)]
                figures[name] = {"model": model} | _figures(pairs)
            agentrt.set_default_backend(None)
    return figures


def ask_peer(peer: Peer, names: Sequence[str], quick: bool, figures: dict[str, Any]) -> None:
    """Runs the programs on a peer, and puts what it took beside our own figures; says by name what is left out, and why."""
    for model in (SMALL, LARGER):
        chosen = [name for name in names if WORK[name][0] == model]
        if not chosen:
            continue
        try:
            with peer.serving(resolve_model(model)) as address:
                backend = agentrt.OpenAI("model", address, api_key="none")
                agentrt.set_default_backend(backend)
                for name in chosen:
                    figures[name].setdefault("peers", {})[peer.name] = _ask_once(WORK[name][1], quick)
                agentrt.set_default_backend(None)
                backend.close()
        except PeerError as error:
            print(f"{peer.name} with {model} is left out: {error}")


def _ask_once(work: Callable[[bool], States], quick: bool) -> dict[str, Any]:
    started = time.perf_counter()
    try:
        states = work(quick)
    except (AgentrtError, ExceptionGroup) as error:
        reason = _first(error)
        if not isinstance(reason, AgentrtError):
            raise
        return {"left_out": f"{type(reason).__name__}: {reason}"}
    seconds = time.perf_counter() - started
    totals = joined([state.report() for state in states], program="all").values["totals"]
    return {"programs_per_s": len(states) / seconds, "prompt_tokens": totals["prompt_tokens"], "generated": totals["completion_tokens"]}


def _first(error: Exception) -> Exception:
    """What failed, out of the groups that task groups wrap it in."""
    while isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    return error


def show_peers(figures: dict[str, Any]) -> None:
    table = Table(title="the same programs on peers", title_justify="left", box=None, pad_edge=False)
    for column in ("program", "peer", "programs/s", "ours are so many times as fast", "tokens generated, ours / theirs"):
        table.add_column(column, justify="left" if column in ("program", "peer") else "right")
    for name, f in figures["programs"].items():
        for peer, told in f.get("peers", {}).items():
            if "left_out" in told:
                table.add_row(name, peer, "left out", told["left_out"][:60], "")
                continue
            rate = told["programs_per_s"]
            table.add_row(name, peer, f"{rate:.3f}", f"{f['programs_per_s'][0] / rate:.1f}", f"{f['generated']:,} / {told['generated']:,}")
    if table.row_count:
        Console().print(table, highlight=False)


def _figures(pairs: Sequence[tuple[Measured, Measured]]) -> dict[str, Any]:
    ours, plain = pairs[0]
    return {
        "programs": ours.programs,
        "programs_per_s": [statistics.median(m.programs / m.seconds for m in side) for side in zip(*pairs, strict=True)],
        "faster": statistics.median(b.seconds / a.seconds for a, b in pairs),
        "prompt_tokens": ours.prompt,
        "computed_tokens": [ours.computed, plain.computed],
        "forward_passes": [ours.passes, plain.passes],
        "generated": ours.generated,
        "same_outputs": all(a.outputs == b.outputs for a, b in pairs),
    }


def show(figures: dict[str, Any]) -> None:
    table = Table(title=f"{figures['machine']}; cache and jump-forward on / off", title_justify="left", box=None, pad_edge=False)
    for column in ("program", "runs", "programs/s", "tokens computed", "forward passes of calls", "faster", "same outputs"):
        table.add_column(column, justify="left" if column == "program" else "right")
    for name, f in figures["programs"].items():
        rates, tokens, passes = f["programs_per_s"], f["computed_tokens"], f["forward_passes"]
        table.add_row(
            name, str(f["programs"]), f"{rates[0]:.3f} / {rates[1]:.3f}", f"{tokens[0]:,} / {tokens[1]:,}",
            f"{passes[0]:,} / {passes[1]:,}", f"{f['faster']:.1f}", "yes" if f["same_outputs"] else "NO",
        )  # fmt: skip
    Console().print(table, highlight=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small work, once")
    parser.add_argument("--only", nargs="+", choices=list(WORK), default=list(WORK))
    parser.add_argument("--peers", nargs="+", choices=list(PEERS), default=[], help="engines to run the same programs on")
    parser.add_argument("--out", type=Path, help="write the figures as JSON")
    args = parser.parse_args()
    figures = {"machine": f"{platform.machine()}, {os.cpu_count()} cores", "seed": SEED}
    figures["programs"] = compare(args.only, args.quick, 1 if args.quick else 3)
    for name in args.peers:
        ask_peer(PEERS[name], args.only, args.quick, figures["programs"])
    show(figures)
    show_peers(figures)
    if args.out:
        args.out.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
