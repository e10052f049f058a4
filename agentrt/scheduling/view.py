"""What the policy sees of a waiting sequence, looked up when it is first asked for.

A policy that never asks for the match costs no match, and the queue need not listen to the tree for it: `places` says
where in the tree the answer came from. `Crowd` counts how many waiting sequences go through each node.
"""

from __future__ import annotations

from collections import Counter, OrderedDict

from agentrt.cache.prefix_cache import PrefixCache
from agentrt.cache.radix_tree import Match, Place
from agentrt.scheduling.sequence import Sequence

MAX_PROGRAMS = 16_384
"""Programs whose work is remembered: the latest heard of."""


class Crowd:
    """How many waiting sequences go through each node of the tree, as of when each was last looked at."""

    def __init__(self) -> None:
        self._counts: Counter[int] = Counter()
        self._paths: dict[int, tuple[int, ...]] = {}

    def __getitem__(self, node: int) -> int:
        return self._counts[node]

    def enter(self, sequence: Sequence, path: tuple[int, ...]) -> None:
        """Says which nodes, by uid, the sequence goes through now."""
        self.leave(sequence)
        self._paths[sequence.sequence_id] = path
        self._counts.update(path)

    def leave(self, sequence: Sequence) -> None:
        """Says that the sequence waits no longer."""
        for node in self._paths.pop(sequence.sequence_id, ()):
            self._counts[node] -= 1
            if not self._counts[node]:
                del self._counts[node]


class ProgramWork:
    """Tokens computed for each program so far."""

    def __init__(self) -> None:
        self._tokens: OrderedDict[str, int] = OrderedDict()

    def __getitem__(self, program: str | None) -> int:
        return 0 if program is None else self._tokens.get(program, 0)

    def add(self, program: str, tokens: int) -> None:
        """Counts tokens that were computed for it."""
        self._tokens[program] = self._tokens.pop(program, 0) + tokens
        if len(self._tokens) > MAX_PROGRAMS:
            self._tokens.popitem(last=False)


class LiveView:
    """One sequence, as the policy sees it now.

    Attributes:
        lasting: Whether only a change at `places` can change what was seen; not so if the crowd or the program was looked at.
    """

    __slots__ = ("_cache", "_crowd", "_match", "_sequence", "_work", "lasting")

    def __init__(self, sequence: Sequence, cache: PrefixCache, crowd: Crowd, work: ProgramWork) -> None:
        self._sequence = sequence
        self._cache = cache
        self._crowd = crowd
        self._work = work
        self._match: Match | None = None
        self.lasting = True

    @property
    def match(self) -> Match:
        """What is in the tree of it now."""
        if self._match is None:
            self._match = self._cache.match(self._sequence.key, self._sequence.reuse_limit)
        return self._match

    @property
    def cached_tokens(self) -> int:
        """Leading tokens that are in the tree now."""
        return self.match.length

    @property
    def branch(self) -> tuple[tuple[int, int], ...]:
        """The matched nodes from the root: how many waiting sequences go through each, and its id."""
        self.lasting = False
        node = self.match.node
        path = () if node is None else tuple(node.uid for node in node.path())
        self._crowd.enter(self._sequence, path)
        return tuple((self._crowd[node], node) for node in path)

    @property
    def program_tokens(self) -> int:
        """Tokens computed for the sequence's program so far."""
        self.lasting = False
        return self._work[self._sequence.program]

    @property
    def places(self) -> tuple[Place, ...]:
        """Where in the tree a change would change what was seen; nowhere if nobody looked."""
        return () if self._match is None else self._match.places
