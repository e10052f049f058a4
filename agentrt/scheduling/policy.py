"""In which order waiting requests are admitted: pure functions from a sequence and a view of it to a sort key.

Smaller keys go first. A key never looks at the tree, the queue or the clock itself: what it may know comes in a `View`, so
that the queue decides when to compute keys anew. Priorities and the bound on anybody's wait are the queue's, not a policy's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from agentrt.scheduling.sequence import Sequence


class View(Protocol):
    """What a policy may know of a waiting sequence; nothing is looked up before it is asked for."""

    @property
    def cached_tokens(self) -> int:
        """Leading tokens that are in the tree now."""
        ...

    @property
    def branch(self) -> tuple[tuple[int, int], ...]:
        """The matched nodes, from the root: how many waiting sequences go through each, and its id."""
        ...

    @property
    def program_tokens(self) -> int:
        """Tokens computed for the sequence's program so far; 0 without one."""
        ...


Key = tuple[float, ...]
Policy = Callable[[Sequence, View], Key]

CALL_TOKENS = 256
"""Work that `program` expects of a call that is still to come, in tokens to compute."""

OUTPUT_COST = 4
"""What `program` counts a token to generate as, in tokens of prompt: a decode is a pass of its own, though a shared one."""


def fcfs(sequence: Sequence, view: View) -> Key:
    """First come, first served."""
    return (sequence.arrival, sequence.sequence_id)


def lpm(sequence: Sequence, view: View) -> Key:
    """Longest cached prefix first (SGLang's cache-aware order), then first come."""
    return (-view.cached_tokens, sequence.arrival, sequence.sequence_id)


def dfs(sequence: Sequence, view: View) -> Key:
    """Depth-first over the tree, at each node the child that most wait for first; what ends at a node goes after its children.

    For a batch known in advance this order computes every shared prefix once in the smallest cache (SGLang's theorem 3.1).
    Weights count by powers of two, so that keys made at different times still agree.
    """
    steps = [part for weight, node in view.branch for part in (-weight.bit_length(), node)]
    return (*steps, 1, sequence.arrival, sequence.sequence_id)


def program(sequence: Sequence, view: View) -> Key:
    """The least work left in the whole program first: this call's uncached tokens, its output, and the calls still to come."""
    tag = sequence.request.program
    work = len(sequence.token_ids) - 2 * view.cached_tokens
    if tag is not None:
        work += tag.expected_calls * CALL_TOKENS * max(tag.will_fork, 1)
    return (work, sequence.arrival, sequence.sequence_id)


POLICIES: dict[str, Policy] = {"fcfs": fcfs, "lpm": lpm, "dfs": dfs, "program": program}
