"""Tracing: running a body once without a model, to see which nodes it appends.

A trace is asked for by the author (`Function.trace`, `Function.cache`); nothing else ever runs a body to look at it.
Variables read as placeholders, which may be written into text but not decided by: a body that does ends the trace there,
and the trace says so. Invariant: no request is made while tracing.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NoReturn, Self

from agentrt.backend import Backend, complete
from agentrt.errors import UserError
from agentrt.lang import expressions, ir
from agentrt.lang.interpreter import Branch
from agentrt.lang.options import Sampling
from agentrt.lang.run import Run
from agentrt.lang.waiting import on_loop, wait
from agentrt.request import ProgramTag, Request, SamplingParams

#: Placeholders begin with this while a trace runs, so that the constant text before them can be told apart.
_MARK = "\ue0ff"


class UndecidedError(UserError):
    """A body decides by something that is unknown while tracing."""


class Unknown(str):
    """A value that is not known yet; as text it is ``{name}``."""

    name: str

    def __new__(cls, name: str) -> Unknown:  # noqa: D102
        made = super().__new__(cls, f"{_MARK}{{{name}}}")
        made.name = name
        return made

    def _undecided(self, *_: Any) -> NoReturn:
        raise UndecidedError(f"the program decides by {self.name!r}, which is unknown while tracing")

    __bool__ = __eq__ = __ne__ = __lt__ = __gt__ = __le__ = __ge__ = __len__ = __int__ = __float__ = __index__ = (
        __contains__
    ) = _undecided
    __hash__ = str.__hash__

    def __iter__(self) -> NoReturn:
        self._undecided()

    def __getitem__(self, key: Any) -> Unknown:
        return Unknown(f"{self.name}[{key!r}]")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Unknown(f"{self.name}.{name}")

    def __await__(self) -> Iterator[Any]:
        return _ready(self).__await__()


async def _ready(value: Any) -> Any:
    return value


@dataclass(slots=True)
class Trace:
    """What a body appended.

    Attributes:
        nodes: In order.
        prefix: Those before the first one that asks the model or holds unknown text.
        forks: The traces of its branches, fork after fork.
        variables: Names that it set, in order.
        complete: The body ran to its end.
        why: Why it is not complete, or "".
        ret_value: What the body returned.
    """

    nodes: list[ir.Expr] = field(default_factory=list)
    prefix: list[ir.Expr] = field(default_factory=list)
    forks: list[list[Trace]] = field(default_factory=list)
    variables: list[str] = field(default_factory=list)
    complete: bool = True
    why: str = ""
    ret_value: Any = None

    def __str__(self) -> str:
        return "\n".join(map(repr, self.nodes)) + ("" if self.complete else f"\n... {self.why}")


class TraceState:
    """What a traced body gets for its state."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace

    def __iadd__(self, value: Any) -> Self:
        self._append(value)
        return self

    def _append(self, value: Any) -> Any:
        last: Any = ir.Appended()
        for node in ir.nodes(value):
            self._trace.nodes.append(node)
            name = getattr(node, "name", None)
            if name and not isinstance(node, ir.ScopeEnd):
                self._trace.variables.append(name)
                last = unknown(name)
        return last

    def __getitem__(self, name: str) -> Any:
        return unknown(name)

    def __setitem__(self, name: str, value: Any) -> None:
        self._trace.variables.append(name)

    def __contains__(self, name: str) -> bool:
        return name in self._trace.variables

    def get_var(self, name: str) -> Any:
        """A placeholder."""
        return unknown(name)

    def set_var(self, name: str, value: Any) -> None:
        """Notes the name."""
        self[name] = value

    def get_meta_info(self, name: str) -> Any:
        """A placeholder."""
        return unknown(f"meta of {name}")

    def gen(self, name: str, *args: Any, **options: Any) -> Any:
        """Notes the gen; a placeholder."""
        return self._append(expressions.gen(name, *args, **options))

    def select(self, name: str, choices: Any, *args: Any, **options: Any) -> Any:
        """Notes the select; a placeholder."""
        return self._append(expressions.select(name, choices, *args, **options))

    def _role(self, role: str, expr: Any) -> Any:
        if expr is None:
            return self._around(ir.RoleBegin(role), ir.RoleEnd(role))
        return self._append(ir.as_series((ir.RoleBegin(role), expr, ir.RoleEnd(role)))) and ir.Appended()

    def system(self, expr: Any = None) -> Any:
        """Notes a system message."""
        return self._role("system", expr)

    def user(self, expr: Any = None) -> Any:
        """Notes a user message."""
        return self._role("user", expr)

    def assistant(self, expr: Any = None) -> Any:
        """Notes an assistant message."""
        return self._role("assistant", expr)

    def var_scope(self, name: str) -> Any:
        """Notes a scope."""
        return self._around(ir.ScopeBegin(name), ir.ScopeEnd(name))

    @contextmanager
    def _around(self, begin: ir.Expr, end: ir.Expr) -> Iterator[Self]:
        self._append(begin)
        yield self
        self._append(end)

    def fork(self, size: int = 1, *_: Any, **__: Any) -> TraceForks:
        """Notes a fork."""
        traces = [Trace(variables=self._trace.variables.copy()) for _ in range(size)]
        self._trace.forks.append(traces)
        return TraceForks(self, [TraceState(trace) for trace in traces])

    def copy(self) -> TraceState:
        """Notes a fork of one."""
        return self.fork(1)[0]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def text(self) -> Any:
        """A placeholder."""
        return unknown("text")

    def messages(self) -> Any:
        """A placeholder."""
        return unknown("messages")

    def sync(self) -> Any:
        """Does nothing."""
        return _ready(None) if _in_async() else None

    def error(self) -> Any:
        """None."""
        return _ready(None) if _in_async() else None

    def text_iter(self, var_name: str | None = None) -> Any:
        """Ends the trace: what streams is unknown."""
        raise UndecidedError(f"the program streams {var_name or 'its text'!r}, which is unknown while tracing")

    text_async_iter = partial_iter = text_iter

    def __getattr__(self, name: str) -> Any:
        node = getattr(expressions, name, None) if name.endswith(("_begin", "_end")) else None
        if node is None:
            raise UndecidedError(f"the program uses s.{name}, which is unknown while tracing")
        return lambda: self._append(node()) and ir.Appended()


class TraceForks(list[TraceState]):
    """The branches of a traced fork."""

    def __init__(self, parent: TraceState, states: list[TraceState]) -> None:
        super().__init__(states)
        self._parent = parent

    def __iadd__(self, value: Any) -> Self:  # type: ignore[override,misc]
        for place, state in enumerate(self):
            state._append(
                value(place) if callable(value) else value[place] if isinstance(value, list | tuple) else value
            )
        return self

    def join(self, *_: Any, **__: Any) -> Any:
        """Notes the names that the branches set."""
        for state in self:
            for name in state._trace.variables:
                if name not in self._parent._trace.variables:
                    self._parent._trace.variables.append(name)
        return _ready(None) if _in_async() else None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.join()

    def first(self, *_: Any, **__: Any) -> Any:
        """Ends the trace: who is first is unknown."""
        raise UndecidedError("the program waits for its first branches, which are unknown while tracing")

    as_completed = first


def _in_async() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def unknown(name: str) -> Unknown:
    """A placeholder that a trace can find again in text."""
    return Unknown(name)


def trace(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], is_async: bool) -> Trace:
    """Runs a body on a trace state and returns what it appended."""
    made = Trace()
    try:
        result = func(TraceState(made), *args, **kwargs)
        made.ret_value = wait(on_loop(result)) if is_async and inspect.iscoroutine(result) else result
    except UndecidedError as error:
        made.complete, made.why = False, str(error)
    _conclude(made)
    return made


def _conclude(traced: Trace) -> None:
    """Finds the constant prefix, and takes the marks out of the text."""
    traced.prefix = _constant(traced.nodes)
    traced.nodes = [ir.Text(n.text.replace(_MARK, "")) if isinstance(n, ir.Text) else n for n in traced.nodes]
    for branch in (branch for fork in traced.forks for branch in fork):
        _conclude(branch)


def _constant(appended: list[ir.Expr]) -> list[ir.Expr]:
    known: list[ir.Expr] = []
    for node in appended:
        if isinstance(node, ir.Gen | ir.Select | ir.ToolCall | ir.AgentLoop | ir.Media):
            break
        if isinstance(node, ir.Text) and _MARK in node.text:
            known.append(ir.Text(node.text.partition(_MARK)[0]))
            break
        known.append(node)
    return known


def cache_prefix(traced: Trace, backend: Backend, name: str) -> int:
    """Computes the prefix of a trace on a backend; returns its tokens."""
    prefix = traced.prefix
    if not prefix:
        return 0
    trunk = Branch(Run(backend, Sampling({}), name=name))
    trunk.append(list(prefix), ("", 0))
    wait(trunk.mark())
    trunk.transcript.settle(backend.tokenizer)
    ids = trunk.transcript.ids
    trunk.run.close()
    if ids:
        complete(
            backend,
            Request(
                prompt_ids=ids, sampling=SamplingParams(max_tokens=0, temperature=0.0), program=ProgramTag(trunk.run.id)
            ),
        )
    return len(ids)
