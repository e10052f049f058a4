"""What stands in a branch's queue: nodes that a program appended, and the interpreter's own, each with who waits for it.

They hold and say what they are; what they do when their turn comes is in `agentrt.lang.steps`. Invariant: each of them ends whoever
waits for it with the branch's error when the branch fails before its turn.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from agentrt.lang import ir
from agentrt.lang.variables import Variable
from agentrt.lang.waiting import Promise

if TYPE_CHECKING:
    from agentrt.lang.interpreter import Branch


@dataclass(slots=True)
class Item:
    """A node in the queue: what, for which variables, appended where, and as which number of its branch."""

    node: Any
    variables: tuple[Variable, ...]
    where: ir.Where
    number: int
    state: Any = None  #: whatever the node's step keeps while it runs

    @property
    def variable(self) -> Variable | None:
        """The variable of the answer itself."""
        return self.variables[-1] if self.variables else None

    def fail(self, error: BaseException) -> None:
        """Ends everything that waits on this node."""
        for variable in self.variables:
            variable.fail(error)
        failing = getattr(self.node, "fail", None)
        if failing is not None:
            failing(error)


@dataclass(slots=True)
class Look:
    """Looks at the branch when everything before it has run, from the thread that drives it."""

    read: Callable[[Branch], Any]
    future: Future[Any] = field(default_factory=Promise)

    def fail(self, error: BaseException) -> None:
        """Ends the wait with an error."""
        if not self.future.done():
            self.future.set_exception(error)


@dataclass(slots=True)
class ForkPoint:
    """Where branches part: they begin when it is reached."""

    children: list[Branch]

    def fail(self, error: BaseException) -> None:
        """The parent failed before its branches began."""
        for child in self.children:
            child.inherited = True
            child.fail(error)


@dataclass(slots=True)
class JoinPoint:
    """Where a parent takes over what its branches set."""

    children: list[Branch]
    marks: list[Future[None]]
    gathered: list[tuple[Variable, list[Variable]]]  # each with those of the branches that it takes over
    keep_errors: bool
    append_text: bool

    def fail(self, error: BaseException) -> None:
        """The join cannot be reached."""
        for variable, _ in self.gathered:
            variable.fail(error)
