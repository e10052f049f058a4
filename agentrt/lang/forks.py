"""Groups of branches: append to all, gather what they set, take the first ones that do.

A group is made by ``s.fork(n)`` and holds states of the caller's own form, synchronous or asynchronous. Invariant: the
order of a group is the order of its branches, whatever the order in which they end, and a branch that was cancelled on
purpose is no failure.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Generator, Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar

from agentrt.errors import RequestError, UserError
from agentrt.lang.budget import Budget
from agentrt.lang.origin import caller
from agentrt.lang.waiting import Promise, await_future, wait

if TYPE_CHECKING:
    from agentrt.lang.interpreter import Branch
    from agentrt.lang.state import AsyncState, Face, State

S = TypeVar("S", bound="Face")


def fork_budget(parent: Branch, deadline: float | None, token_budget: int | None) -> Callable[[], Budget] | None:
    """Says how each branch's budget is made; None if it shares its parent's."""
    if deadline is None and token_budget is None:
        return None
    return lambda: Budget(parent.budget, token_budget, deadline)


class Joined:
    """A join that was appended; awaiting it waits for it, ignoring it does not."""

    def __init__(self, parent: Branch) -> None:
        self._parent = parent

    def __await__(self) -> Generator[Any, None, None]:
        yield from await_future(self._parent.mark()).__await__()


class Group(Generic[S]):
    """What both kinds of groups share."""

    def __init__(self, parent: Branch, states: Sequence[S]) -> None:
        self._parent = parent
        self._states = list(states)
        self._fork = parent.forks

    def __len__(self) -> int:
        return len(self._states)

    def __iter__(self) -> Iterator[S]:
        return iter(self._states)

    def __getitem__(self, place: int) -> S:
        return self._states[place]

    def __setitem__(self, place: int, state: S) -> None:  # the second half of ``forks[i] += x``
        if state is not self._states[place]:
            raise UserError("a branch of a fork cannot be replaced by another state; append to it with forks[i] += ...")

    def __iadd__(self, value: Any) -> Self:
        where = caller()
        if callable(value):
            values = [value(place) for place in range(len(self))]
        elif isinstance(value, list | tuple):
            values = list(value)
            if len(values) != len(self):
                raise UserError(f"forks += a list of {len(values)} for {len(self)} branches; give one for each")
        else:
            values = [value] * len(self)
        for state, own in zip(self._states, values, strict=True):
            state._branch.append(own, where)
        return self

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if error is None:
            self.join()

    def join(self, mode: str = "gather_variable", *, return_exceptions: bool = False) -> Joined:
        """Gathers: every variable that branches have set becomes, in the parent, the list of their values in the order of the branches.

        It never waits; reading the variables does. A second join gathers again. Branches that were cancelled are left out.

        Args:
            mode: "gather_variable", or "concate_and_append", which also appends the branches' texts one after another.
            return_exceptions: Put the error of a branch that failed in place of its value; without it, the error of the first such
                branch is the parent's.

        Raises:
            UserError: The mode is unknown.
        """
        if mode not in ("gather_variable", "concate_and_append"):
            raise UserError(f"join mode {mode!r} is neither 'gather_variable' nor 'concate_and_append'", param="mode")
        if mode == "concate_and_append":
            self._parent.run.warn_once(
                mode, "join('concate_and_append') appends the branches' texts, whose tokens are computed again", caller()
            )
        self._parent.join(
            [state._branch for state in self._states],
            caller(),
            keep_errors=return_exceptions,
            append_text=mode == "concate_and_append",
        )
        return Joined(self._parent)

    def cancel(self) -> None:
        """Ends every branch that is still going."""
        for state in self._states:
            state._branch.cancel()

    def _race(self) -> Race[S]:
        return Race(self._parent, self._fork, self._states)


class Race(Generic[S]):
    """Branches in the order in which they end; a replay follows the recorded order instead."""

    def __init__(self, parent: Branch, fork: int, states: list[S]) -> None:
        run = parent.run
        key = f"{parent.path}#{fork}"
        self._states = states
        self._ended: list[int] = []
        self._news: Future[None] = Promise()
        self._lock = run.lock
        self._order = run.recording.winners.setdefault(key, [])
        self._replayed = list(run.replay.winners.get(key, [])) if run.replay is not None else []
        for place, state in enumerate(states):
            state._branch.mark().add_done_callback(partial(self._end, place))

    def _end(self, place: int, _: Future[Any]) -> None:
        with self._lock:
            self._ended.append(place)
            news, self._news = self._news, Promise()
        news.set_result(None)

    def next(self, taken: set[int]) -> tuple[int | None, Future[None]]:
        """The next branch that ended and is not taken yet, or None and a future of news."""
        with self._lock:
            wanted = next((place for place in self._replayed if place not in taken), None)
            found = next((p for p in self._ended if p not in taken and (wanted is None or p == wanted)), None)
            return found, self._news

    def take(self, place: int, taken: set[int]) -> S:
        """Takes one."""
        taken.add(place)
        self._order.append(place)
        return self._states[place]


def _accepted(state: Face, where: Callable[[Any], Any] | None) -> bool:
    branch = state._branch
    if branch.error is not None:
        branch.seen = True
        return False
    return where is None or bool(where(state))


def _conclude(states: Sequence[Face], winners: list[Any], count: int) -> list[Any]:
    """Cancels the losers; returns the winners, or raises if there are too few."""
    for state in states:
        if not any(state is winner for winner in winners):
            state._branch.cancel("another branch won")
    if len(winners) < count:
        error = next((s._branch.error for s in states if s._branch.error is not None and not s._branch.cancelled), None)
        raise RequestError(f"first({count}): only {len(winners)} of {len(states)} branches ended as wanted") from error
    return winners


class Forks(Group["State"]):
    """The branches of a fork in a synchronous program."""

    def as_completed(self) -> Iterator[State]:
        """Yields the branches in the order in which everything appended to them so far has run; reading one that failed raises."""
        race, taken = self._race(), set[int]()
        while len(taken) < len(self):
            place, news = race.next(taken)
            if place is None:
                wait(news)
            else:
                yield race.take(place, taken)

    def first(self, k: int = 1, where: Callable[[State], Any] | None = None) -> list[State]:
        """Waits until `k` branches have ended of which `where` is true, cancels the others, and returns the k in the order they ended.

        Args:
            k: How many.
            where: Says of an ended branch's state whether it counts; None counts every branch that did not fail.

        Raises:
            RequestError: Fewer than k ended so; caused by the error of a branch, if one failed.
        """
        winners: list[State] = []
        for state in self.as_completed():
            if _accepted(state, where):
                winners.append(state)
            if len(winners) >= k:
                break
        return _conclude(self._states, winners, k)


class AsyncForks(Group["AsyncState"]):
    """The branches of a fork in an asynchronous program."""

    async def as_completed(self) -> AsyncIterator[AsyncState]:
        """See `Forks.as_completed`."""
        race, taken = self._race(), set[int]()
        while len(taken) < len(self):
            place, news = race.next(taken)
            if place is None:
                await await_future(news)
            else:
                yield race.take(place, taken)

    async def first(self, k: int = 1, where: Callable[[AsyncState], Any] | None = None) -> list[AsyncState]:
        """See `Forks.first`; `where` may be a coroutine function."""
        winners: list[AsyncState] = []
        async for state in self.as_completed():
            verdict: Any = (
                state._branch.error is None if where is None or state._branch.error is not None else where(state)
            )
            if isinstance(verdict, Awaitable):
                verdict = await verdict
            if verdict:
                winners.append(state)
            elif state._branch.error is not None:
                state._branch.seen = True
            if len(winners) >= k:
                break
        return _conclude(self._states, winners, k)
