"""The words of the language: immutable nodes that a program appends to its state.

A node says what is wanted and nothing about how it is done: it holds no state, no backend and no token ids, so the same
node may be appended many times, to many branches, and be looked at by the tracer. Nodes add up with ``+`` into a
`Series`, also with plain strings. Invariant: nothing here changes after it was made.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from agentrt.errors import UserError
from agentrt.lang.values import ValueType

ChoicesMethod = Literal["token_length_normalized", "greedy_token_selection", "unconditional_likelihood_normalized"]
Where = tuple[str, int]  #: file name and line of the statement that appended a node


class Expr:
    """Base of every node; ``+`` joins nodes and strings into a series."""

    __slots__ = ()

    def __add__(self, other: Any) -> Series:
        return Series((*nodes(self), *nodes(other)))

    def __radd__(self, other: Any) -> Series:
        return Series((*nodes(other), *nodes(self)))


@dataclass(frozen=True, slots=True)
class Text(Expr):
    """Text as it is; what spells a control token in it is text too."""

    text: str


@dataclass(frozen=True, slots=True)
class Special(Expr):
    """One control token, by its spelling."""

    text: str


@dataclass(frozen=True, slots=True)
class Gen(Expr):
    """Ask the model.

    Attributes:
        name: Variable that gets the answer; None for none.
        sampling: The `SamplingParams` fields that were given here; the program's own defaults fill the rest.
        value: How the text becomes a Python value; None leaves it text.
        retries: How often a value that fails its validation is asked for again.
        reasoning: Model family whose thinking is split from the answer; None for none.
        healing: Let the answer complete the last bytes of the text before it; None follows the program.
        deadline: Seconds after which this call is aborted.
    """

    name: str | None = None
    sampling: Mapping[str, Any] = field(default_factory=dict)
    value: ValueType | None = None
    retries: int = 0
    reasoning: str | None = None
    healing: bool | None = None
    deadline: float | None = None


@dataclass(frozen=True, slots=True)
class Select(Expr):
    """Score every choice and append the best."""

    name: str | None
    choices: tuple[str, ...]
    method: ChoicesMethod = "token_length_normalized"
    temperature: float = 0.0


@dataclass(frozen=True, slots=True)
class RoleBegin(Expr):
    """A message of this role begins."""

    role: str


@dataclass(frozen=True, slots=True)
class RoleEnd(Expr):
    """The message of this role is complete."""

    role: str


@dataclass(frozen=True, slots=True)
class ScopeBegin(Expr):
    """What follows is also the value of variable `name`."""

    name: str


@dataclass(frozen=True, slots=True)
class ScopeEnd(Expr):
    """The scope of `name` ends."""

    name: str


@dataclass(frozen=True, slots=True)
class Media(Expr):
    """An image or a video, for models that take them."""

    kind: Literal["image", "video"]
    source: Any
    frames: int = 0


@dataclass(frozen=True, slots=True)
class ToolCall(Expr):
    """Let the model call tools, once; see `agentrt.lang.tools`."""

    name: str
    tools: tuple[Any, ...]
    choice: str = "auto"
    parallel: bool = True
    sampling: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class AgentLoop(Expr):
    """Call tools until the model answers; see `agentrt.lang.agent`."""

    name: str
    tools: tuple[Any, ...]
    value: ValueType | None = None
    max_steps: int = 10
    on_event: Callable[[Any], Any] | None = None
    choice: str = "auto"
    parallel: bool = True
    sampling: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Series(Expr):
    """Nodes in order."""

    parts: tuple[Expr, ...]


class Appended:
    """What ``s.user(...)`` returns: it is in the state already, so ``s += s.user(...)`` adds nothing a second time."""


def nodes(value: Any) -> tuple[Expr, ...]:
    """Returns the plain nodes of anything that can be appended: a string, a node, or a list of them.

    Raises:
        UserError: It is something else.
    """
    if isinstance(value, str):
        return (Text(str(value)),) if value else ()
    if isinstance(value, Series):
        return value.parts
    if isinstance(value, Expr):
        return (value,)
    if isinstance(value, list | tuple):
        return tuple(node for item in value for node in nodes(item))
    if isinstance(value, Appended):
        return ()
    raise UserError(f"{value!r:.60} ({type(value).__name__}) cannot be appended to a program's state; {_instead(value)}")


def _instead(value: Any) -> str:
    if inspect.isawaitable(value):
        return "in an async program, what is read is awaited: (await s['name'])"
    if callable(value):
        return f"call it: {getattr(value, '__name__', 'it')}(...)"
    return "append a string (str(value), or an f-string), gen(...), select(...), a role, or a list of these"


def generations(expr: Any) -> Iterator[Gen]:
    """Yields the gen nodes of `expr`."""
    return (node for node in nodes(expr) if isinstance(node, Gen))


def as_series(parts: Sequence[Any]) -> Series:
    """Joins anything that can be appended into one series."""
    return Series(tuple(node for part in parts for node in nodes(part)))
