"""What each agent program asked over HTTP, kept so that `agentrt.observe.report` can say what was reused, computed anew, and why.

A call belongs to a program if it carries ``X-Agentrt-Program``, or a tag over /generate. Each prompt is compared with what the
program had fed before. Invariant: programs, the calls of each and all ids together are bounded; the oldest go first, and of a
program whose ids went the prompts count as new.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from agentrt.observe.report import Report, build_report, cost
from agentrt.request import ProgramTag, Usage

MAX_CALLS = 256

#: Ids of all programs together that are kept for comparing; 4 bytes each.
MAX_FED_TOKENS = 8_000_000


@dataclass(frozen=True, slots=True)
class Asked:
    """A call of a program that ended.

    Attributes:
        tag: Its place in the program.
        endpoint: Where it was made.
        prompt_ids: What was asked.
        answers: The ids of each sample.
        usage: What it cost.
        began, ended: Seconds, on one clock.
        finish_reason: Why it ended.
    """

    tag: ProgramTag
    endpoint: str
    prompt_ids: Sequence[int]
    answers: Sequence[Sequence[int]]
    usage: Usage
    began: float
    ended: float
    finish_reason: str


@dataclass(slots=True)
class _Branch:
    fed: array[int]
    shared_tokens: int


@dataclass(slots=True)
class _Program:
    began: float
    ended: float = 0.0
    asked: int = 0
    calls: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=MAX_CALLS))
    fed: deque[array[int]] = field(default_factory=deque)
    branches: OrderedDict[str, _Branch] = field(default_factory=OrderedDict)


class ProgramBook:
    """The programs that were seen lately; used from the event loop's thread alone."""

    def __init__(self, max_programs: int, max_fed_tokens: int = MAX_FED_TOKENS) -> None:
        """Makes an empty book for at most `max_programs`, which compares with at most `max_fed_tokens` of all of them."""
        self._max_programs = max_programs
        self._max_fed = max_fed_tokens
        self._fed = 0
        self._programs: OrderedDict[str, _Program] = OrderedDict()

    def __contains__(self, program: str) -> bool:
        return program in self._programs

    def note(self, asked: Asked) -> None:
        """Adds a call that ended."""
        book = self._programs.setdefault(asked.tag.program, _Program(asked.began))
        self._programs.move_to_end(asked.tag.program)
        prompt = array("i", asked.prompt_ids)
        known = _longest_known(prompt, book.fed)
        book.calls.append(_record(asked, book, prompt, known))
        book.ended, book.asked = max(book.ended, asked.ended), book.asked + 1
        for answer in asked.answers:
            book.fed.append(prompt + array("i", answer))
            self._fed += len(book.fed[-1])
        _grow_branch(book, asked.tag.branch, book.fed[-1] if asked.answers else prompt)
        self._shrink()

    def _shrink(self) -> None:
        while len(self._programs) > self._max_programs:
            _, oldest = self._programs.popitem(last=False)
            self._fed -= sum(map(len, oldest.fed))
        for book in self._programs.values():
            while book.fed and (self._fed > self._max_fed or len(book.fed) > MAX_CALLS):
                self._fed -= len(book.fed.popleft())
            if self._fed <= self._max_fed:
                return

    def report(self, program: str, model: str, decode: Callable[[list[int]], str]) -> Report:
        """The program's report.

        Args:
            program: Which.
            model: The name that the report shows.
            decode: Text of ids, for naming the first token that was new.

        Raises:
            KeyError: It is not known.
        """
        book = self._programs[program]
        calls = [call | {"first_new": None if call["first_new"] is None else decode([call["first_new"]])} for call in book.calls]
        branches = [
            {"path": path, "tokens": len(branch.fed), "shared_tokens": branch.shared_tokens, "error": None} for path, branch in book.branches.items()
        ]
        return build_report(program=program, model=model, seed=None, wall_seconds=book.ended - book.began, calls=calls, branches=branches)

    def names(self) -> list[str]:
        """The programs, the latest first."""
        return list(reversed(self._programs))


def _grow_branch(book: _Program, path: str, fed: array[int]) -> None:
    branch = book.branches.get(path)
    if branch is None:
        above = book.branches.get(path.rpartition("/")[0]) if path else None
        book.branches[path] = _Branch(fed, _common(fed, above.fed) if above else 0)
        while len(book.branches) > MAX_CALLS:
            book.branches.popitem(last=False)
    elif len(fed) > len(branch.fed):
        branch.fed = fed


def _longest_known(prompt: array[int], fed: deque[array[int]]) -> int:
    """Length of the longest beginning that `prompt` shares with what was fed; the latest, which is the likeliest, first."""
    best = 0
    for before in reversed(fed):
        if len(before) > best < len(prompt) and before[best] == prompt[best]:
            best = max(best, _common(prompt, before))
    return best


def _common(a: array[int], b: array[int]) -> int:
    low, high = 0, min(len(a), len(b))
    while low < high:  # a[:low] == b[:low]
        middle = (low + high + 1) // 2
        low, high = (middle, high) if a[low:middle] == b[low:middle] else (low, middle - 1)
    return low


def _record(asked: Asked, book: _Program, prompt: array[int], known: int) -> dict[str, Any]:
    usage = asked.usage
    new = max(known, usage.cached_tokens)
    return {
        "branch": asked.tag.branch,
        "number": book.asked,
        "name": asked.endpoint,
        "kind": "request",
        "where": f"call {book.asked + 1} over HTTP",
        **cost(usage),
        "known_tokens": known,
        "first_new": prompt[new] if new < len(prompt) else None,
        "began": max(asked.began - book.began, 0.0),
        "ended": max(asked.ended - book.began, 0.0),
        "finish_reason": asked.finish_reason,
    }
