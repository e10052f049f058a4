"""Who uses which cached prefix: the programs, the one owner of a node if it has one, and holds.

A *hold* asks to keep a program's prefixes while it waits on a tool or a sibling. It is soft in three ways: it ends at its
deadline, all holds together keep at most a share of the pool (the oldest yield to the newest), and under pressure, when
nothing else can be evicted, the oldest yields branch by branch. So holds cannot block an allocation.

Invariant: a node's owner is the one living program that uses it, if there is only one, or a finished one that nobody
followed; else `ANYONE`. What holds a descendant's end holds its path, so only the ends of leases are remembered.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Callable

from agentrt.cache.radix_tree import Node, RadixTree

MAX_PROGRAMS = 16_384
"""Programs remembered: one whose end was never told is forgotten when so many newer ones came; about 1 kB each."""

MAX_ENDS = 256
"""Branch ends remembered a program, the latest ones."""


class Program:
    """One program, as the cache sees it.

    Attributes:
        name: Its name.
        finished: It will make no more calls.
        ends: The nodes in which its leases ended, latest last.
        held: Those that its hold keeps, latest last.
        deadline: When its hold ends; None: it has none.
    """

    __slots__ = ("deadline", "ends", "finished", "held", "name")

    def __init__(self, name: str) -> None:
        self.name = name
        self.finished = False
        self.ends: OrderedDict[Node, None] = OrderedDict()
        self.held: OrderedDict[Node, None] = OrderedDict()
        self.deadline: float | None = None


ANYONE = Program("")
"""Owner of what more than one program, or a request without one, has used."""


class Programs:
    """The programs that use a tree, and their holds.

    Args:
        tree: The tree whose nodes they use.
        hold_tokens: Most tokens that all holds together may keep; 0: holds do nothing.
        clock: Seconds.
    """

    def __init__(self, tree: RadixTree, hold_tokens: int, clock: Callable[[], float]) -> None:
        self._tree = tree
        self._hold_tokens = hold_tokens
        self._clock = clock
        self._programs: OrderedDict[str, Program] = OrderedDict()  # least recently heard of first
        self._holding: OrderedDict[str, Program] = OrderedDict()  # oldest hold first
        self._deadlines: list[tuple[float, str]] = []

    @property
    def holding(self) -> tuple[str, ...]:
        """Names of the programs whose hold is on, oldest first."""
        return tuple(self._holding)

    def use(self, name: str | None, node: Node, before: Node | None = None) -> None:
        """Notes that a lease of the program (None: of no program) ends at `node` now, and at `before` until now."""
        program = ANYONE if name is None else self._program(name)
        self._own(program, node)
        if program is ANYONE:
            return
        program.ends[node] = None
        program.ends.move_to_end(node)
        if program.deadline is not None:
            self._hold_end(program, node)
        if before is not None and before is not node:
            self._drop_end(program, before)
        while len(program.ends) > MAX_ENDS:
            self._drop_end(program, next(iter(program.ends)))
        self.keep_bound()

    def forget(self, node: Node, parent: Node | None) -> None:
        """Notes that `node` has left the tree, from below `parent`."""
        owner = node.owner
        if (
            isinstance(owner, Program)
            and owner.ends.pop(node, True) is None
            and parent is not None
            and parent.owner is owner
        ):
            owner.ends[parent] = None

    def hold(self, name: str, seconds: float) -> None:
        """Begins, or renews, a hold on all the program uses and will use until the hold ends."""
        if not self._hold_tokens:
            return
        self.expire()  # also while nothing is evicted, or the deadlines would add up
        program = self._program(name)
        self._let_go(program)
        program.deadline = self._clock() + seconds
        heapq.heappush(self._deadlines, (program.deadline, name))
        self._holding[name] = program
        for node in program.ends:
            self._hold_end(program, node)
        self.keep_bound()

    def end(self, name: str) -> None:
        """Ends a program and its hold; leaves that only it could use are ranked anew."""
        program = self._programs.pop(name, None)
        if program is None:
            return
        program.finished = True
        self._let_go(program)
        for node in program.ends:
            if node.owner is program and node.evictable:
                self._tree.on_leaf(node)
        program.ends.clear()

    def expire(self) -> None:
        """Ends the holds whose deadline has passed."""
        now = self._clock()
        while self._deadlines and self._deadlines[0][0] <= now:
            deadline, name = heapq.heappop(self._deadlines)
            program = self._holding.get(name)
            if program is not None and program.deadline == deadline:
                self._let_go(program)

    def keep_bound(self) -> None:
        """Lets the oldest holds yield until all together keep no more than they may."""
        while self._tree.held_tokens > self._hold_tokens and self.yield_oldest():
            pass

    def yield_oldest(self) -> bool:
        """Gives up the oldest branch of the oldest hold; False if nothing is held."""
        while self._holding:
            program = next(iter(self._holding.values()))
            if program.held:
                node, _ = program.held.popitem(last=False)
                self._tree.unhold(node)
                return True
            self._let_go(program)
        return False

    def _program(self, name: str) -> Program:
        program = self._programs.get(name)
        if program is None:
            program = self._programs[name] = Program(name)
            if len(self._programs) > MAX_PROGRAMS:
                self.end(next(iter(self._programs)))
        else:
            self._programs.move_to_end(name)
        return program

    def _own(self, program: Program, node: Node) -> None:
        """Makes the program an owner of the path to `node`.

        Whoever uses a node uses its ancestors, so these have at least its users: from the first node on whose owner
        is the program already, or anyone, nothing changes.
        """
        current: Node | None = node
        while current is not None and current.ids and current.owner is not program and current.owner is not ANYONE:
            alone = current.owner is None or current.owner.finished
            current.owner = program if alone else ANYONE
            current = current.parent

    def _hold_end(self, program: Program, node: Node) -> None:
        if node.parent is not None and node not in program.held:
            program.held[node] = None
            self._tree.hold(node)

    def _drop_end(self, program: Program, node: Node) -> None:
        program.ends.pop(node, None)
        if program.held.pop(node, True) is None:
            self._tree.unhold(node)

    def _let_go(self, program: Program) -> None:
        program.deadline = None
        self._holding.pop(program.name, None)
        while program.held:
            node, _ = program.held.popitem(last=False)
            self._tree.unhold(node)
