"""Variables and streams: what a program reads, with an implicit wait.

A `Feed` is text that grows and that any number of readers follow, each at its own pace. A `Variable` is one that ends with
a value; it exists from the moment its gen is appended, so that reading it waits instead of failing. Both are written by
whichever thread brings the answer and read from any other. Invariant: each ends exactly once, with a value or with the
error that its program ends with; a reader that waits is always told.
"""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from concurrent.futures import Future
from typing import Any

from agentrt.errors import UserError
from agentrt.lang.waiting import Promise, await_future, wait


class Feed:
    """Growing text, as the pieces in which it came."""

    __slots__ = ("_waiting", "closed", "error", "pieces")

    _lock = threading.Lock()  #: of all feeds: it is held for an assignment at a time, and a lock each would cost every gen one

    def __init__(self, begin: str = "") -> None:
        self.pieces: list[str] = [begin] if begin else []
        self.closed = False
        self.error: BaseException | None = None
        self._waiting: Future[None] | None = None

    def push(self, piece: str) -> None:
        """Adds a piece."""
        if piece:
            self.pieces.append(piece)
            if self._waiting is not None:  # without the lock: who is about to wait looks again after it has said so
                self._tell()

    def close(self, error: BaseException | None = None) -> None:
        """Ends it; a second call does nothing."""
        if not self.closed:
            self.error = error
            self.closed = True
            if self._waiting is not None:
                self._tell()

    def _tell(self) -> None:
        with self._lock:
            waiting, self._waiting = self._waiting, None
        if waiting is not None:
            waiting.set_result(None)

    def _news(self, seen: int) -> Future[None] | None:
        """A future of the next change, or None if there is something beyond `seen` already."""
        with self._lock:
            if len(self.pieces) > seen or self.closed:
                return None
            waiting = self._waiting = self._waiting or Promise()
            return None if len(self.pieces) > seen or self.closed else waiting

    def read(self, seen: int = 0, until: Future[int] | None = None) -> Iterator[str]:
        """Yields the pieces from number `seen` on, waiting for more until it ends; raises its error.

        Args:
            seen: Where to begin.
            until: Of the number of pieces at which to stop; None goes on to the end of the feed.
        """
        self._watch(until)
        while not self._read(seen, until):
            if len(self.pieces) > seen:
                yield self.pieces[seen]
                seen += 1
            elif (news := self._news(seen)) is not None and not self._read(seen, until):
                wait(news)

    async def aread(self, seen: int = 0, until: Future[int] | None = None) -> AsyncIterator[str]:
        """The asynchronous twin of `read`."""
        self._watch(until)
        while not self._read(seen, until):
            if len(self.pieces) > seen:
                yield self.pieces[seen]
                seen += 1
            elif (news := self._news(seen)) is not None and not self._read(seen, until):
                await await_future(news)

    def _watch(self, until: Future[int] | None) -> None:
        if until is not None:
            until.add_done_callback(lambda _: self._tell())

    def _read(self, seen: int, until: Future[int] | None) -> bool:
        """Whether a reader that has seen so many pieces is at the end; raises the feed's error if that is how it ends."""
        if self.closed and len(self.pieces) == seen:
            if self.error is not None:
                raise self.error
            return True
        return until is not None and until.done() and seen >= until.result()

    @property
    def text(self) -> str:
        """All of it so far."""
        return "".join(self.pieces)


class Variable(Feed):
    """One named value of a branch: text that grows, and a value at its end.

    Attributes:
        name: Its name.
        value: Its value, once it is closed without an error.
    """

    __slots__ = ("_explain", "_future", "_meta", "name", "value")

    def __init__(self, name: str) -> None:
        self.pieces = []
        self.closed = False
        self.error = None
        self._waiting = None
        self.name = name
        self.value: Any = None
        self._meta: Any = None
        self._explain: Callable[[Any], Any] | None = None
        self._future: Promise[Any] | None = None  # made for the first who must wait

    @property
    def future(self) -> Future[Any]:
        """The future of its value."""
        with self._lock:
            future = self._future
            if future is not None:
                return future
            future = self._future = Promise()
            if not self.closed:
                return future
        if self.error is None:
            future.set_result(self.value)
        else:
            future.set_exception(self.error)
        return future

    @property
    def meta(self) -> Any:
        """What is known about how it came to be: tokens, log-probabilities, why it ended."""
        explain = self._explain
        if explain is not None:
            self._meta = explain(self._meta)
            self._explain = None
        return {} if self._meta is None else self._meta

    def settle(self, value: Any, meta: Any = None, explain: Callable[[Any], Any] | None = None) -> None:
        """Gives it its value, unless it has ended already.

        Args:
            value: The value.
            meta: What is known of it.
            explain: Makes that of `meta` when somebody asks for it.
        """
        with self._lock:
            if self.closed:  # cancelled meanwhile
                return
            self.value, self._meta, self._explain = value, meta, explain
            self.closed = True
            future = self._future
        if self._waiting is not None:
            self._tell()
        if future is not None:
            future.set_result(value)

    def fail(self, error: BaseException) -> None:
        """Ends it with an error; does nothing if it has a value."""
        with self._lock:
            if self.closed:
                return
            self.error = error
            self.closed = True
            future = self._future
        if self._waiting is not None:
            self._tell()
        if future is not None:
            future.set_exception(error)


def known(name: str, value: Any, meta: Any = None) -> Variable:
    """Returns a variable that has its value already."""
    variable = Variable(name)
    if isinstance(value, str):
        variable.push(value)
    variable.settle(value, meta)
    return variable


class UnknownVariableError(UserError, KeyError):
    """A variable is read that the program has not set."""

    def __init__(self, name: str, known_names: Iterable[str], *, in_branches: bool = False) -> None:
        names = ", ".join(map(repr, known_names)) or "none yet"
        hint = "; branches of its fork have it: join() them first, or read forks[i][...]" if in_branches else ""
        super().__init__(f"no variable {name!r} in this state; it has {names}{hint}", param=name)

    def __str__(self) -> str:  # KeyError would show the message's repr
        return str(self.args[0])
