"""What each agent program asked over HTTP: for every call what was reused, what was computed anew, and why.

A call belongs to a program if it carries ``X-Agentrt-Program``. To say why tokens were computed, each prompt is compared
with what the program had fed before. Invariant: programs, calls of each and their ids are bounded; the oldest go first.
"""

from __future__ import annotations

import time
from array import array
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from agentrt.request import Usage

MAX_CALLS = 256


@dataclass(frozen=True, slots=True)
class CallRecord:
    """One call of a program.

    Attributes:
        endpoint: Where it was made.
        at: Unix time of its end.
        prompt_tokens, cached_tokens, computed_tokens: Of its prompt.
        known_tokens: Leading tokens of the prompt that the program had fed before.
        why: Why the computed tokens were computed.
        completion_tokens, forced_tokens, forward_passes, passes_saved, queue_seconds, run_seconds: As in `Usage`.
    """

    endpoint: str
    at: float
    prompt_tokens: int
    cached_tokens: int
    computed_tokens: int
    known_tokens: int
    why: str
    completion_tokens: int
    forced_tokens: int
    forward_passes: int
    passes_saved: int
    queue_seconds: float
    run_seconds: float


@dataclass(slots=True)
class _Program:
    calls: deque[CallRecord] = field(default_factory=lambda: deque(maxlen=MAX_CALLS))
    fed: deque[array[int]] = field(default_factory=lambda: deque(maxlen=MAX_CALLS))


class ProgramBook:
    """The programs that were seen lately."""

    def __init__(self, max_programs: int) -> None:
        """Makes an empty book for at most `max_programs`."""
        self._max_programs = max_programs
        self._programs: OrderedDict[str, _Program] = OrderedDict()

    def __contains__(self, program: str) -> bool:
        return program in self._programs

    def note(self, program: str, endpoint: str, prompt_ids: Sequence[int], answer_ids: Sequence[int], usage: Usage) -> None:
        """Adds a call that ended."""
        book = self._programs.setdefault(program, _Program())
        self._programs.move_to_end(program)
        while len(self._programs) > self._max_programs:
            self._programs.popitem(last=False)
        prompt = array("q", prompt_ids)
        known = max((_common(prompt, before) for before in book.fed), default=0)
        book.fed.append(prompt + array("q", answer_ids))
        book.calls.append(_record(endpoint, known, usage))

    def report(self, program: str) -> dict[str, Any]:
        """The program's calls, and their sums.

        Raises:
            KeyError: It is not known.
        """
        calls = [asdict(call) for call in self._programs[program].calls]
        summed = ("prompt_tokens", "cached_tokens", "computed_tokens", "completion_tokens", "forced_tokens", "forward_passes", "passes_saved")
        return {"program": program, "calls": calls, "total": {name: sum(call[name] for call in calls) for name in summed}}

    def names(self) -> list[str]:
        """The programs, the latest first."""
        return list(reversed(self._programs))


def _common(a: array[int], b: array[int]) -> int:
    low, high = 0, min(len(a), len(b))
    while low < high:  # a[:low] == b[:low]
        middle = (low + high + 1) // 2
        low, high = (middle, high) if a[low:middle] == b[low:middle] else (low, middle - 1)
    return low


def _record(endpoint: str, known: int, usage: Usage) -> CallRecord:
    return CallRecord(
        endpoint=endpoint,
        at=time.time(),
        prompt_tokens=usage.prompt_tokens,
        cached_tokens=usage.cached_tokens,
        computed_tokens=usage.prompt_tokens - usage.cached_tokens,
        known_tokens=known,
        why=_why(known, usage),
        completion_tokens=usage.completion_tokens,
        forced_tokens=usage.forced_tokens,
        forward_passes=usage.forward_passes,
        passes_saved=usage.passes_saved,
        queue_seconds=usage.queue_seconds,
        run_seconds=usage.run_seconds,
    )


def _why(known: int, usage: Usage) -> str:
    cached, prompt = usage.cached_tokens, usage.prompt_tokens
    if cached >= prompt - 1:
        return "all of it was cached; its last token is always computed"
    if cached + 1 < known:
        return f"tokens {cached} to {known - 1} had been fed before, and were evicted"
    if known == 0 and cached == 0:
        return "never seen"
    return f"new from token {max(cached, known)} on"
