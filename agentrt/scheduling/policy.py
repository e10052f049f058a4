"""In which order waiting requests are admitted: pure functions from a sequence and a view of it to a sort key.

Smaller keys go first. A key never looks at the tree or the queue itself; what it may know comes in a `View`, so that
the queue decides when to compute keys anew.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from agentrt.scheduling.sequence import Sequence


@dataclass(frozen=True, slots=True)
class View:
    """What a policy may know of a waiting sequence.

    Attributes:
        cached_tokens: Leading tokens that are in the tree now.
    """

    cached_tokens: int


Key = tuple[float, ...]
Policy = Callable[[Sequence, View], Key]


def fcfs(sequence: Sequence, view: View) -> Key:
    """First come, first served."""
    return (sequence.arrival, sequence.sequence_id)


def lpm(sequence: Sequence, view: View) -> Key:
    """Longest cached prefix first (SGLang's cache-aware order), then first come."""
    return (-view.cached_tokens, sequence.arrival, sequence.sequence_id)


POLICIES: dict[str, Policy] = {"fcfs": fcfs, "lpm": lpm}
