"""``agentrt demo``: an agent with real tools at work, and what reuse and jump-forward were worth to it.

The agent is `examples/react_agent.py`, run twice in one go: as it is, and without prefix cache and jump-forward. Where the examples
are not at hand (an installed package), the default model answers a few questions on one system prompt instead. Invariant: every
figure shown was measured in this run.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

import agentrt
from agentrt.backend import Sink, set_default_backend, stream
from agentrt.cli.start import resolve_shown, start_engine
from agentrt.observe.report import Report, joined
from agentrt.request import Request, SamplingParams
from agentrt.runtime import Engine

EXAMPLES = Path(agentrt.__file__).parent.parent / "examples"

#: Which of the example's questions are asked: of the database and of the MCP server.
ASKED = (14, 19)


class Unaided:
    """A running engine without what it does for programs: no request finds another's prefix, and no forced token is appended."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def submit(self, request: Request, sink: Sink) -> None:
        """As `Engine.submit`; a salt of its own keeps a request's KV to itself."""
        sampling = request.sampling
        if sampling.grammar is not None:
            sampling = sampling.replace(grammar=replace(sampling.grammar, jump_forward="off"))
        self._engine.submit(replace(request, sampling=sampling, cache_salt=request.request_id), sink)


SYSTEM = """You are the librarian of a small town. You answer in one or two short sentences, kindly and exactly.
These are the rules of the library, which you know by heart:
1. The library opens at nine in the morning and closes at six in the evening, every day but Monday.
2. A reader may borrow six books at a time, and keep each for three weeks.
3. A book that nobody waits for may be renewed twice, by telephone or at the desk.
4. Children under ten may borrow picture books without a card, if a grown-up comes with them.
5. Maps, atlases and newspapers are read in the reading room and are not lent.
6. A lost book is replaced by a copy of the same book, or by one that the librarian chooses.
7. The cellar holds the town's archive; ask at the desk, and somebody will go down with you.
8. There is a cat. Its name is Index. It may be stroked, but it is not to be fed in the reading room.
9. On Saturday afternoons there are stories for children, in the room with the blue door.
10. Dogs wait outside, where there is a bowl of water and, most days, some shade."""

QUESTIONS = (
    "When does the library open?",
    "How many books may I borrow, and for how long?",
    "What is the cat called?",
    "Can I take an atlas home?",
)


@dataclass(slots=True)
class Shown:
    """One question's figures."""

    question: str
    prompt: int = 0
    reused: int = 0
    first_token: float = 0.0
    answer: str = ""


def run() -> None:
    """Runs the agent, or, where there are no examples, the questions."""
    if (EXAMPLES / "react_agent.py").is_file():
        agent(Console())
    else:
        questions(Console())


def agent(out: Console) -> None:
    """The ReAct agent, live; then once more without what the runtime does for it, and both side by side."""
    sys.path.insert(0, str(EXAMPLES))
    react = import_module("react_agent")
    asked = [react.QUESTIONS[place] for place in ASKED]
    out.print(f"[bold]An agent with a calculator, notes, a database and an MCP server[/], on {react.MODEL}\n")
    resolve_shown(react.MODEL)
    with out.status("loading"):
        engine = Engine(react.MODEL)
    with engine:
        ours, answers = _measure(react, asked, engine)
        out.print("\n[bold]The same again, with prefix cache and jump-forward off[/]\n")
        plain, others = _measure(react, asked, Unaided(engine))
    out.print(_comparison(ours, plain))
    faster = plain.values["wall_seconds"] / ours.values["wall_seconds"]
    same = "the same answers" if answers == others else "[bold red]not the same answers[/]"
    out.print(f"\n{faster:.1f} times as fast, {same}.", highlight=False)


def _measure(react: Any, asked: Sequence[Any], backend: Any) -> tuple[Report, list[Any]]:
    set_default_backend(backend)
    try:
        states = asyncio.run(react.live(asked))
    finally:
        set_default_backend(None)
    return joined((state.report() for state in states), program="react"), [state.ret_value for state in states]


def _comparison(ours: Report, plain: Report) -> Table:
    table = Table(title="\nwhat it took", title_justify="left", title_style="bold", box=None, pad_edge=False)
    for column in ("", "agentrt", "cache and jump-forward off"):
        table.add_column(column, justify="right" if column else "left")
    for label, name in (
        ("prompt tokens", "prompt_tokens"),
        ("of them reused", "cached_tokens"),
        ("of them computed", "computed_tokens"),
        ("tokens generated", "completion_tokens"),
        ("of them forced by a grammar", "forced_tokens"),
        ("forward passes", "forward_passes"),
        ("forward passes saved", "passes_saved"),
    ):
        table.add_row(label, *(f"{report.values['totals'][name]:,}" for report in (ours, plain)))
    table.add_row("seconds", *(f"{report.values['wall_seconds']:.1f}" for report in (ours, plain)))
    return table


def questions(out: Console) -> None:
    """Asks the default model, streams, and sums up."""
    sampling = SamplingParams(max_tokens=48, temperature=0)
    with start_engine(None) as engine:
        out.print(f"[bold]{engine.capabilities.model}[/] on {engine.facts.device}, {engine.facts.dtype}, {engine.facts.threads} threads\n")
        out.print("[bold]One system prompt, four questions, one after the other[/]")
        shown = [_ask(out, engine, [question], sampling) for question in QUESTIONS]
        out.print("\n[bold]A second turn, which finds the first turn's own answer in the tree[/]")
        shown.append(_ask(out, engine, [QUESTIONS[0], shown[0].answer, "And on Monday?"], sampling))
        _table(out, shown)
        _together(out, engine, sampling)


def _ask(out: Console, engine: Engine, turns: Sequence[str], sampling: SamplingParams) -> Shown:
    roles = ("user", "assistant")
    chat = [{"role": "system", "content": SYSTEM}]
    chat += [{"role": roles[index % 2], "content": text} for index, text in enumerate(turns)]
    shown = Shown(turns[-1])
    out.print(f"\n[cyan]> {turns[-1]}[/]")
    started = time.perf_counter()
    parts: list[str] = []
    for delta in stream(engine, engine.request(chat, sampling)):
        if not parts:
            shown.first_token = time.perf_counter() - started
        parts.append(delta.text)
        out.print(delta.text, end="", highlight=False, markup=False)
        if delta.usage is not None:
            shown.prompt, shown.reused = delta.usage.prompt_tokens, delta.usage.cached_tokens
    out.print()
    shown.answer = "".join(parts)
    return shown


def _table(out: Console, shown: Sequence[Shown]) -> None:
    table = Table(title="\nwhat was computed", title_justify="left", title_style="bold", box=None, pad_edge=False)
    for column in ("question", "prompt tokens", "reused", "computed", "first token"):
        table.add_column(column, justify="left" if column == "question" else "right")
    for one in shown:
        table.add_row(one.question, str(one.prompt), str(one.reused), str(one.prompt - one.reused), f"{one.first_token * 1000:.0f} ms")
    out.print(table)


def _together(out: Console, engine: Engine, sampling: SamplingParams) -> None:
    """The same questions at once, against a cache that has been emptied."""
    engine.flush_cache()
    before = engine.stats()
    chats = [[{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}] for question in QUESTIONS]
    requests: list[Request] = [engine.request(chat, sampling) for chat in chats]
    started = time.perf_counter()
    completions = engine.generate([request.prompt_ids for request in requests], sampling)
    seconds = time.perf_counter() - started
    after = engine.stats()
    prompts = sum(completion.usage.prompt_tokens for completion in completions)
    generated = sum(completion.usage.completion_tokens for completion in completions)
    computed = after["computed_tokens"] - before["computed_tokens"]
    out.print("\n[bold]The same four at once, from an empty cache[/]")
    out.print(
        f"{prompts} prompt tokens asked, {max(computed - generated, 0)} computed: they waited for the one system prompt instead of each "
        f"computing it.\n{generated} tokens generated in {seconds:.1f} s ({generated / seconds:.0f} a second).",
        highlight=False,
    )
