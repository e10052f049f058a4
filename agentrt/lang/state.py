"""What a program's body holds in its hands: the state, in a synchronous and an asynchronous form, and groups of forks.

Both forms are thin faces of a `Branch`: appending never waits; reading does, by parking or blocking in the one and by
``await`` in the other. No semantics of nodes here. Invariant: whatever is read from a failed state raises that state's
own error.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, Self

from agentrt.errors import UserError
from agentrt.lang import expressions, ir
from agentrt.lang.agent import Turns
from agentrt.lang.forks import AsyncForks, Forks, fork_budget
from agentrt.lang.interpreter import Branch
from agentrt.lang.origin import caller
from agentrt.lang.recording import Recording, report_of
from agentrt.lang.run import Run
from agentrt.lang.tools import Call
from agentrt.lang.variables import UnknownVariableError, Variable
from agentrt.lang.waiting import after, await_future, first_of, wait
from agentrt.observe.report import Report


class Face:
    """What both forms of a state share: everything that does not wait."""

    __slots__ = ("_branch", "_inside", "_joins")

    def __init__(self, branch: Branch, *, inside: bool = True, joins: Callable[[], Any] | None = None) -> None:
        self._branch = branch
        self._inside = inside  # held by the body, which knows what it has appended; others wait for the body
        self._joins = joins

    def __iadd__(self, value: Any) -> Self:
        self._branch.append(value, caller())
        return self

    def __setitem__(self, name: str, value: Any) -> None:
        self._branch.assign(name, value)

    def __contains__(self, name: str) -> bool:
        return name in self._branch.variables

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if self._joins is not None and error is None:
            self._joins()

    def set_var(self, name: str, value: Any) -> None:
        """Sets a variable."""
        self._branch.assign(name, value)

    @property
    def ret_value(self) -> Any:
        """What the program's body returned."""
        return self._run.ret_value

    @property
    def _run(self) -> Run:
        return self._branch.run

    # Roles: ``s.user(expr)`` appends; ``with s.user():`` appends begin and end around what is appended inside.

    def system(self, expr: Any = None) -> Any:
        """Appends a system message, or, without `expr`, opens one for a with block."""
        return self._role("system", expr)

    def user(self, expr: Any = None) -> Any:
        """Appends a user message, or, without `expr`, opens one for a with block."""
        return self._role("user", expr)

    def assistant(self, expr: Any = None) -> Any:
        """Appends an assistant message, or, without `expr`, opens one for a with block."""
        return self._role("assistant", expr)

    def _role(self, role: str, expr: Any) -> Any:
        if expr is None:
            return self._around(ir.RoleBegin(role), ir.RoleEnd(role))
        self._branch.append(ir.as_series((ir.RoleBegin(role), expr, ir.RoleEnd(role))), caller())
        return ir.Appended()

    def system_begin(self) -> ir.Appended:
        """Begins a system message."""
        return self._appended(expressions.system_begin())

    def system_end(self) -> ir.Appended:
        """Ends a system message."""
        return self._appended(expressions.system_end())

    def user_begin(self) -> ir.Appended:
        """Begins a user message."""
        return self._appended(expressions.user_begin())

    def user_end(self) -> ir.Appended:
        """Ends a user message."""
        return self._appended(expressions.user_end())

    def assistant_begin(self) -> ir.Appended:
        """Begins an assistant message."""
        return self._appended(expressions.assistant_begin())

    def assistant_end(self) -> ir.Appended:
        """Ends an assistant message."""
        return self._appended(expressions.assistant_end())

    def _appended(self, node: ir.Expr) -> ir.Appended:
        self._branch.append(node, caller())
        return ir.Appended()

    def var_scope(self, name: str) -> Any:
        """Opens a with block; everything that is appended inside is also the value of variable `name`."""
        return self._around(ir.ScopeBegin(name), ir.ScopeEnd(name))

    @contextmanager
    def _around(self, begin: ir.Expr, end: ir.Expr) -> Iterator[Self]:
        self._branch.append(begin, caller())
        yield self
        self._branch.append(end, caller())

    def cancel(self) -> None:
        """Ends this state's branch; for the state of a whole run, the run. Its request is gone within a step."""
        if self._branch.path:
            self._branch.cancel()
        else:
            self._run.cancel("the program was cancelled")

    def compact(self, keep: Callable[[list[list[dict[str, Any]]]], list[list[dict[str, Any]]]]) -> None:
        """Writes the chat anew from the message groups that `keep` returns; a turn's tool calls and their results are one group."""
        self._look(lambda branch: branch.compact(keep))

    def trajectory(self, path: str | None = None) -> list[dict[str, Any]]:
        """The run's ids for training: where each came from, log-probabilities, a slot for a reward; a record per branch.

        Args:
            path: Also write them there, as JSON lines.
        """
        from agentrt.lang.saving import trajectory

        records = trajectory(self._run)
        if path is not None:
            with open(path, "w", encoding="utf-8") as file:
                file.writelines(json.dumps(record) + "\n" for record in records)
        return records

    def report(self) -> Report:
        """The run's report, as far as it has come: per call what was reused, computed and why; ``.save("out.html")`` draws it."""
        return report_of(self._run)

    def pending_calls(self) -> list[Call]:
        """Tool calls that wait for someone to `approve` or `deny` them, in this branch."""
        return [] if self._turns is None else self._turns.waiting

    def _approval_or_end(self, timeout: float | None) -> Future[None]:
        """A future of the moment when calls wait for approval, everything has run or failed, or the time is up."""
        branch, run = self._branch, self._run
        ends = [run.done] if not self._inside and not branch.path else [branch.mark(), run.done]
        return first_of(branch.parked(), *ends, *([after(timeout)] if timeout is not None else []))

    def _waiting_now(self) -> list[Call]:
        """The calls that wait.

        Raises:
            AgentrtError: The state's own error, if it failed.
        """
        if self._branch.error is not None:
            self._shown()
            raise self._branch.error
        return self.pending_calls()

    def approve(self, call_id: str | None = None, arguments: Mapping[str, Any] | None = None) -> None:
        """Lets a waiting call run; every waiting call if none is named.

        Args:
            call_id: Which.
            arguments: What to call it with instead.

        Raises:
            UserError: No such call waits.
        """
        for call in self._waiting_calls(call_id):
            if arguments is not None:
                call.arguments = dict(arguments)
            self._decide(call, True)

    def deny(self, call_id: str | None = None, reason: str = "the call was denied") -> None:
        """Ends a waiting call, or all of them, with an error that the model is told.

        Raises:
            UserError: No such call waits.
        """
        for call in self._waiting_calls(call_id):
            call.error = reason
            self._decide(call, False)

    @property
    def _turns(self) -> Turns | None:
        item = self._branch.item
        return item.state if item is not None and isinstance(item.state, Turns) else None

    def _waiting_calls(self, call_id: str | None) -> list[Call]:
        waiting = [call for call in self.pending_calls() if call_id in (None, call.id)]
        if not waiting:
            known_ids = [call.id for call in self.pending_calls()]
            raise UserError(f"no call {call_id or ''} waits for approval; waiting are {known_ids}", param="call_id")
        return waiting

    def _decide(self, call: Call, approved: bool) -> None:
        turns = self._turns
        call.approved = approved
        if turns is not None and not turns.waiting:
            self._branch.unpark()  # before the calls run: what follows them may park again
        told = None if turns is None else turns.decided.get(call.id)
        if told is not None:
            told.set_result(None)

    @property
    def recording(self) -> Recording:
        """What it takes to run the program again with the same tokens (``program.replay(recording, ...)``)."""
        return self._run.recording

    # What both forms read, as futures.

    def _variable(self, name: str) -> Future[Variable]:
        if self._inside and name not in self._branch.variables and self._branch.error is None:
            raise UnknownVariableError(name, self._branch.variables, in_branches=self._branch.has_below(name))
        return self._branch.expect(name)

    def _look(self, read: Callable[[Branch], Any]) -> Future[Any]:
        return self._branch.look(read)

    def _shown(self) -> None:
        """Notes that the body has been shown the branch's error: it is no longer the run's to raise."""
        if self._branch.error is not None:
            self._branch.seen = True

    def _made(self, expr: Any) -> Variable:
        variable = self._branch.append(expr, caller())
        if variable is None:
            raise UserError("this waits for a value, so it needs a name: s.gen('answer', ...)", param="name")
        return variable

    def _forked(
        self, size: int, position_ids_offset: Any, deadline: float | None, token_budget: int | None
    ) -> list[Branch]:
        if not isinstance(size, int) or size < 1:
            raise UserError(f"fork({size!r}): the number of branches must be at least 1", param="size")
        if position_ids_offset is not None:
            self._run.warn_once(
                "position_ids_offset",
                "position_ids_offset is accepted and changes nothing here: positions follow the text",
                caller(),
            )
        return self._branch.fork(size, caller(), fork_budget(self._branch, deadline, token_budget))


def _text(branch: Branch) -> str:
    return branch.feed.text


def _messages(branch: Branch) -> list[dict[str, Any]]:
    return [{"role": message.role, "content": message.content(branch.feed.pieces)} for message in branch.messages]


def _length(branch: Branch) -> int:
    return len(branch.feed.pieces)


def _ids(branch: Branch) -> list[int]:
    branch.transcript.settle(branch.run.tokenizer)
    return list(branch.transcript.ids)


def _tokens_left(branch: Branch) -> int:
    return branch.run.backend.capabilities.max_context - len(_ids(branch))


class _Fuller:
    """Reads JSON that grows; says when there is more of it to see."""

    def __init__(self) -> None:
        self._text = ""
        self._last: Any = None

    def read(self, piece: str) -> Iterator[Any]:
        from pydantic_core import from_json

        self._text += piece
        try:
            value = from_json(self._text, allow_partial="trailing-strings")
        except ValueError:
            return
        if value != self._last and isinstance(value, dict | list):
            self._last = value
            yield value


class State(Face):
    """A program's state. ``s += ...`` appends and never waits; reading waits."""

    __slots__ = ()

    def __getitem__(self, name: str) -> Any:
        return self.get_var(name)

    def get_var(self, name: str) -> Any:
        """Returns a variable's value, waiting for it.

        Raises:
            UnknownVariableError: The program has not set it.
            AgentrtError: The error that the state failed with.
        """
        variable = self._branch.variables.get(name) or self._wait(self._variable(name))
        return variable.value if variable.closed and variable.error is None else self._wait(variable.future)

    def get_meta_info(self, name: str) -> Any:
        """Returns what is known about how a variable's value came to be: tokens, log-probabilities, why it ended."""
        variable = self._wait(self._variable(name))
        self._wait(variable.future)
        return variable.meta

    def text(self) -> str:
        """Returns the whole text, waiting for everything that was appended."""
        self.sync()
        return str(self._wait(self._look(_text)))

    def messages(self) -> list[dict[str, Any]]:
        """Returns the chat messages, waiting for everything that was appended."""
        self.sync()
        found: list[dict[str, Any]] = self._wait(self._look(_messages))
        return found

    def token_ids(self) -> list[int]:
        """Returns the ids of the whole text; text that waits is tokenised now."""
        self.sync()
        found: list[int] = self._wait(self._look(_ids))
        return found

    @property
    def tokens_left(self) -> int:
        """How many tokens the model's context has left."""
        self.sync()
        return int(self._wait(self._look(_tokens_left)))

    def save(self, path: Any = None) -> dict[str, Any]:
        """Returns the state as plain values, for `agentrt.resume`: once everything appended has run, or while calls wait for approval.

        Args:
            path: Also write it there, as JSON.
        """
        from agentrt.lang.saving import snapshot

        values: dict[str, Any] = snapshot(self._branch) if self.pending_calls() else self._saved()
        if path is not None:
            with open(path, "w", encoding="utf-8") as file:
                json.dump(values, file)
        return values

    def _saved(self) -> dict[str, Any]:
        from agentrt.lang.saving import snapshot

        self.sync()
        values: dict[str, Any] = self._wait(self._look(snapshot))
        return values

    def wait_for_approval(self, timeout: float | None = None) -> list[Call]:
        """Waits until tool calls wait for approval, and returns them; an empty list if everything ran without any.

        A loop may come to calls that need approval again and again, so ask until there are none::

            while calls := state.wait_for_approval():
                state.approve()

        Args:
            timeout: Most seconds to wait; the list is then empty too. None waits as long as it takes.

        Raises:
            AgentrtError: The error that the state failed with.
        """
        self._wait(self._approval_or_end(timeout))
        return self._waiting_now()

    def sync(self) -> None:
        """Waits for everything that was appended (from outside the body: for the run's end); raises the state's error."""
        if not self._inside and not self._branch.path:
            self._wait(self._run.done)
        self._wait(self._branch.mark())

    def error(self) -> BaseException | None:
        """Waits as `sync` does, and returns the error that the state failed with, or None."""
        try:
            self.sync()
        except BaseException as error:
            return self._branch.error or error
        return None

    def gen(self, name: str, *args: Any, **options: Any) -> Any:
        """Appends ``gen(name, ...)`` and returns its value."""
        return self._wait(self._made(expressions.gen(name, *args, **options)).future)

    def select(self, name: str, choices: Sequence[str], *args: Any, **options: Any) -> Any:
        """Appends ``select(name, choices, ...)`` and returns its value."""
        return self._wait(self._made(expressions.select(name, choices, *args, **options)).future)

    def text_iter(self, var_name: str | None = None) -> Iterator[str]:
        """Yields the text of a variable, or of the whole state, as it comes; ends with the state's error if it fails."""
        try:
            if var_name is not None:
                yield from self._wait(self._variable(var_name)).read()
            elif not self._inside:
                yield from self._branch.feed.read()
            else:  # the body itself reads: what it has appended so far
                yield from self._branch.feed.read(until=self._look(_length))
        finally:
            self._shown()

    async def text_async_iter(self, var_name: str | None = None, return_meta_data: bool = False) -> AsyncIterator[Any]:
        """The asynchronous twin of `text_iter`; with `return_meta_data`, yields (text, what is known) pairs, of which the last knows all."""
        variable: Variable | None = None
        if var_name is not None:
            variable = await await_future(self._variable(var_name))
        feed = self._branch.feed if variable is None else variable
        try:
            async for piece in feed.aread():
                yield (piece, {} if variable is None else variable.meta) if return_meta_data else piece
            if return_meta_data and variable is not None:
                yield "", variable.meta
        finally:
            self._shown()

    def partial_iter(self, name: str) -> Iterator[Any]:
        """Yields what can be read of a JSON answer while it streams: ever fuller Python values, each different from the last."""
        fuller = _Fuller()
        for piece in self.text_iter(name):
            yield from fuller.read(piece)

    def fork(
        self,
        size: int = 1,
        position_ids_offset: Any = None,
        *,
        deadline: float | None = None,
        token_budget: int | None = None,
    ) -> Forks:
        """Parts the program into branches that go on from here at the same time.

        Args:
            size: How many.
            position_ids_offset: Accepted for SGLang's sake; changes nothing.
            deadline: Seconds that each branch may take.
            token_budget: Tokens that each branch may generate.
        """
        branches = self._forked(size, position_ids_offset, deadline, token_budget)
        return Forks(self._branch, [State(branch) for branch in branches])

    def copy(self) -> State:
        """Returns a state that goes on from here on its own; as a with block, its variables are joined at the end."""
        forks = self.fork(1)
        return State(forks[0]._branch, joins=forks.join)

    def _wait(self, future: Future[Any]) -> Any:
        try:
            return wait(future)
        except BaseException:
            self._shown()
            raise


class AsyncState(Face):
    """The state of an ``async def`` program: ``s += ...`` appends as ever, and everything that reads is awaited."""

    __slots__ = ()

    def __getitem__(self, name: str) -> Awaitable[Any]:
        return self.get_var(name)

    async def get_var(self, name: str) -> Any:
        """Returns a variable's value; see `State.get_var`."""
        return await self._wait((await self._wait(self._variable(name))).future)

    async def get_meta_info(self, name: str) -> Any:
        """See `State.get_meta_info`."""
        variable = await self._wait(self._variable(name))
        await self._wait(variable.future)
        return variable.meta

    async def text(self) -> str:
        """See `State.text`."""
        return str(await self._wait(self._look(_text)))

    async def messages(self) -> list[dict[str, Any]]:
        """See `State.messages`."""
        found: list[dict[str, Any]] = await self._wait(self._look(_messages))
        return found

    async def token_ids(self) -> list[int]:
        """See `State.token_ids`."""
        found: list[int] = await self._wait(self._look(_ids))
        return found

    async def tokens_left(self) -> int:
        """See `State.tokens_left`."""
        return int(await self._wait(self._look(_tokens_left)))

    async def wait_for_approval(self, timeout: float | None = None) -> list[Call]:
        """See `State.wait_for_approval`."""
        await self._wait(self._approval_or_end(timeout))
        return self._waiting_now()

    async def sync(self) -> None:
        """See `State.sync`."""
        await self._wait(self._branch.mark())

    async def error(self) -> BaseException | None:
        """See `State.error`."""
        try:
            await self.sync()
        except Exception as error:
            return self._branch.error or error
        return None

    async def gen(self, name: str, *args: Any, **options: Any) -> Any:
        """Appends ``gen(name, ...)`` and returns its value."""
        return await self._wait(self._made(expressions.gen(name, *args, **options)).future)

    async def select(self, name: str, choices: Sequence[str], *args: Any, **options: Any) -> Any:
        """Appends ``select(name, choices, ...)`` and returns its value."""
        return await self._wait(self._made(expressions.select(name, choices, *args, **options)).future)

    async def text_iter(self, var_name: str | None = None) -> AsyncIterator[str]:
        """Yields the text of a variable, or of what was appended so far, as it comes."""
        try:
            if var_name is None:
                pieces = self._branch.feed.aread(until=self._look(_length))
            else:
                pieces = (await self._wait(self._variable(var_name))).aread()
            async for piece in pieces:
                yield piece
        finally:
            self._shown()

    async def text_async_iter(self, var_name: str | None = None, return_meta_data: bool = False) -> AsyncIterator[Any]:
        """As `text_iter`; with `return_meta_data`, yields (text, what is known) pairs, of which the last knows all."""
        variable = None if var_name is None else await self._wait(self._variable(var_name))
        async for piece in self.text_iter(var_name):
            yield (piece, {} if variable is None else variable.meta) if return_meta_data else piece
        if return_meta_data and variable is not None:
            yield "", variable.meta

    async def partial_iter(self, name: str) -> AsyncIterator[Any]:
        """See `State.partial_iter`."""
        fuller = _Fuller()
        async for piece in self.text_iter(name):
            for value in fuller.read(piece):
                yield value

    def fork(
        self,
        size: int = 1,
        position_ids_offset: Any = None,
        *,
        deadline: float | None = None,
        token_budget: int | None = None,
    ) -> AsyncForks:
        """See `State.fork`."""
        branches = self._forked(size, position_ids_offset, deadline, token_budget)
        return AsyncForks(self._branch, [AsyncState(branch) for branch in branches])

    def copy(self) -> AsyncState:
        """See `State.copy`."""
        forks = self.fork(1)
        return AsyncState(forks[0]._branch, joins=forks.join)

    async def _wait(self, future: Future[Any]) -> Any:
        try:
            return await await_future(future)
        except BaseException:
            self._shown()
            raise
