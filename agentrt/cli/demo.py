"""``agentrt demo``: the default model answers real prompts, and what was reused is shown beside what was computed."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from agentrt.backend import stream
from agentrt.cli.start import start_engine
from agentrt.request import Request, SamplingParams
from agentrt.runtime import Engine

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
    """Asks, streams, and sums up."""
    out = Console()
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
