"""Agent workloads made from a seed: each is a small program, written as one, and run many times with other words.

A `Script` stands in for the runtime: it takes a prompt, makes up an answer of the asked length, and notes the call. What a program
says to it is what the frontend would know: which calls come before, how many are still to come, how long a tool takes.
Token ids are random; two texts are equal only where a program uses one twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

import numpy as np

from agentrt.errors import UserError
from agentrt.request import ProgramTag
from agentrt.simulation.trace import Call, Trace

END = 2
"""The id that ends every answer; no text has it elsewhere."""

VOCAB = 32_000

Text = tuple[int, ...]


@dataclass(slots=True)
class Writer:
    """Makes up texts, and gathers the calls of all programs of a workload."""

    random: np.random.Generator
    calls: list[Call] = field(default_factory=list)

    def text(self, tokens: float) -> Text:
        """A new text of that many tokens."""
        return tuple(self.random.integers(3, VOCAB, max(int(tokens), 1)).tolist())

    def about(self, mean: float) -> int:
        """A length around `mean`: from half to twice as much, most often less than more."""
        return max(2, int(mean * 2 ** self.random.triangular(-1, 0, 1)))

    def pause(self, mean: float) -> float:
        """How long a tool takes, in seconds: exponential, so some take long."""
        return float(self.random.exponential(mean))


@dataclass(slots=True)
class Script:
    """One run of a program.

    Attributes:
        writer: Makes up texts.
        name: The program's.
        start: Seconds at which it begins.
        calls_left: Calls on its critical path that are still to come, as it knows.
        hold: Seconds for which it asks for a hold while it waits on a tool; 0: it does not.
    """

    writer: Writer
    name: str
    start: float
    calls_left: int
    hold: float = 60.0

    def call(
        self, prompt: Text, output: float, *, after: Iterable[Call] = (), branch: str = "", pause: float = 0.0, left: int | None = None, fork: int = 0, holds: bool = False
    ) -> Call:
        """Makes one call.

        Args:
            prompt: Its whole prompt.
            output: Mean length of the answer.
            after: Calls whose answers it needs.
            branch: The fork that makes it.
            pause: Seconds between the end of those and this call.
            left: Calls that are still to come on the critical path after it.
            fork: Into how many branches its prefix is about to part.
            holds: Whether the program waits on a tool when it ends.
        """
        before = tuple(call.call_id for call in after)
        answer = (*self.writer.text(self.writer.about(output) - 1), END)
        tag = ProgramTag(self.name, branch, left or 0, fork)
        call = Call(
            len(self.writer.calls), pause if before else self.start, prompt, answer, before, 512, program=tag, hold=self.hold if holds else 0.0
        )
        self.writer.calls.append(call)
        return call

    def end(self) -> None:
        """Marks the last call as the program's last."""
        self.writer.calls[-1] = replace(self.writer.calls[-1], last=True)


def _after(call: Call, more: Text = ()) -> Text:
    """The text so far: a call's prompt, its answer, and more."""
    return (*call.prompt, *call.output, *more)


# -- the programs ----------------------------------------------------------------------------------------------------------


def few_shot(script: Script, shared: Text) -> None:
    """One question after a long list of examples that all programs share."""
    script.call((*shared, *script.writer.text(40)), 30)


def chat(script: Script, shared: Text) -> None:
    """A conversation of 8 turns; the user reads and writes for some 8 seconds in between."""
    writer, turns = script.writer, 8
    call = script.call((*shared, *writer.text(writer.about(60))), 120, left=turns - 1)
    for turn in range(1, turns):
        prompt = _after(call, writer.text(writer.about(60)))
        call = script.call(prompt, 120, after=[call], pause=writer.pause(8), left=turns - 1 - turn)


def react(script: Script, shared: Text) -> None:
    """Thought, tool, observation, up to 14 times; tools take a second and a half, and some much longer."""
    writer = script.writer
    rounds = int(writer.random.integers(2, 15))
    call = script.call((*shared, *writer.text(writer.about(120))), 60, left=rounds - 1, holds=rounds > 1)
    for turn in range(1, rounds):
        left = rounds - 1 - turn
        observation = writer.text(writer.about(200))
        call = script.call(_after(call, observation), 60, after=[call], pause=writer.pause(1.5), left=left, holds=left > 0)


def tree_of_thought(script: Script, shared: Text) -> None:
    """From the 3 best of the thoughts so far, 5 new ones each; a vote after each level, until one solves it: 1 to 8 levels."""
    writer = script.writer
    depth = min(int(writer.random.geometric(0.35)), 8)
    root = (*shared, *writer.text(writer.about(200)))
    frontier: list[tuple[Text, list[Call]]] = [(root, [])]
    for level in range(depth):
        left = 2 * (depth - level) - 1
        thoughts = [
            script.call(text, 80, after=before, branch=f"{level}.{number}", left=left, fork=5)
            for number, (text, before) in enumerate(one for one in frontier for _ in range(5))
        ]
        ballot = (*root, *(token for thought in thoughts for token in thought.output))
        vote = script.call(ballot, 10, after=thoughts, branch=f"{level}.vote", left=left - 1, fork=5)
        best = writer.random.permutation(len(thoughts))[:3]
        frontier = [(_after(thoughts[number]), [vote]) for number in best]


def debate(script: Script, shared: Text) -> None:
    """Three debaters, 3 rounds; each hears what the others said in the round before."""
    writer, rounds = script.writer, 3
    topic = (*shared, *writer.text(writer.about(150)))
    minds = [(*topic, *writer.text(30)) for _ in range(3)]
    spoken: list[Call] = []
    for turn in range(rounds):
        heard = tuple(token for call in spoken for token in call.output)
        minds = [(*mind, *heard) for mind in minds]
        spoken = [
            script.call(mind, 100, after=spoken, branch=str(number), left=rounds - turn) for number, mind in enumerate(minds)
        ]
        minds = [_after(call) for call in spoken]
    script.call((*topic, *(token for call in spoken for token in call.output)), 60, after=spoken)


def map_reduce(script: Script, shared: Text) -> None:
    """Three questions on each of 6 documents, then one answer from all the notes."""
    writer = script.writer
    task = writer.text(writer.about(80))
    notes: list[Call] = []
    for number in range(6):
        document = (*shared, *writer.text(writer.about(700)))
        notes += [script.call((*document, *task, *writer.text(12)), 50, branch=f"{number}.{n}", left=1, fork=3) for n in range(3)]
    script.call((*shared, *task, *(token for note in notes for token in note.output)), 150, after=notes)


@dataclass(frozen=True, slots=True)
class Workload:
    """A program, and what all its runs share.

    Attributes:
        program: The program.
        shared_tokens: Length of the text that all begin with.
        programs: How many runs, if not said.
    """

    program: Callable[[Script, Text], None]
    shared_tokens: int
    programs: int


WORKLOADS = {
    "few-shot": Workload(few_shot, 1500, 300),
    "chat": Workload(chat, 300, 60),
    "react": Workload(react, 800, 80),
    "tree-of-thought": Workload(tree_of_thought, 300, 60),
    "debate": Workload(debate, 200, 60),
    "map-reduce": Workload(map_reduce, 100, 40),
}


def workload(name: str, *, seed: int = 0, programs: int | None = None, rate: float | None = None) -> Trace:
    """Makes a workload.

    Args:
        name: One of `WORKLOADS`.
        seed: Equal seeds give equal workloads.
        programs: How many runs of the program.
        rate: Programs that begin each second, at random times (a Poisson process); None: all begin at once.

    Raises:
        UserError: There is no such workload.
    """
    if name not in WORKLOADS:
        raise UserError(f"workload is {name!r}; it must be one of {', '.join(WORKLOADS)}", param="trace")
    kind = WORKLOADS[name]
    writer = Writer(np.random.default_rng([seed, *name.encode()]))
    shared = writer.text(kind.shared_tokens)
    start = 0.0
    for number in range(kind.programs if programs is None else programs):
        script = Script(writer, f"{name}-{number}", start, 0)
        kind.program(script, shared)
        script.end()
        start += float(writer.random.exponential(1 / rate)) if rate else 0.0
    return Trace(name, tuple(writer.calls), page_size=16)


def shared_prefixes(
    *, seed: int = 0, groups: int = 64, members: int = 32, prefix: int = 1900, suffix: int = 40, output: int = 8, rate: float | None = None
) -> Trace:
    """Requests of `groups` long prefixes, `members` each, in random order: what shows the worth of a cache-aware order."""
    writer = Writer(np.random.default_rng([seed, groups, members]))
    prefixes = [writer.text(prefix) for _ in range(groups)]
    order = writer.random.permutation(np.repeat(np.arange(groups), members))
    start, calls = 0.0, []
    for number, group in enumerate(order):
        calls.append(Call(number, start, (*prefixes[group], *writer.text(suffix)), (*writer.text(output - 1), END)))
        start += float(writer.random.exponential(1 / rate)) if rate else 0.0
    return Trace("shared-prefixes", tuple(calls), page_size=16)


def known_in_advance(trace: Trace, seed: int = 0) -> Trace:
    """The prompts of a trace as one batch: all submitted at once, in random order, each with an answer that no other prompt has in it."""
    writer = Writer(np.random.default_rng(seed))
    order = writer.random.permutation(len(trace.calls)).tolist()
    calls = [trace.calls[old] for old in order]
    batch = [Call(number, 0.0, call.prompt, (*writer.text(len(call.output) - 1), END), salt=call.salt) for number, call in enumerate(calls)]
    return Trace(f"{trace.name}, known in advance", tuple(batch), trace.page_size)
