"""The interpreter: branches that run their nodes one after another, driven by completions, not by threads.

A `Branch` is a queue of nodes and a transcript. Appending a node never waits: the node runs at once if the branch is
idle, else when the answer before it is there. Whoever makes it possible drives it on: the body that appends, or the backend's
thread that brings an answer. Steps that must wait are generators that yield futures. Variables are known from the moment their
node is appended (body time); ids exist only when the node has run (run time).

                 append                      request
    body  ------------------>  queue  ------------------>  backend
      ^                          |                            |
      | wait(variable)           | run next node              | deltas
      +------  variables  <------+-----  transcript  <--------+

Invariants: one thread at a time drives a branch; nodes of a branch run in the order they were appended; a branch that
failed fails everything that waits on it with that same error.
"""

from __future__ import annotations

import linecache
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from agentrt.errors import AbortedError, PromptError
from agentrt.lang import ir
from agentrt.lang.budget import Budget
from agentrt.lang.conversation import Conversation
from agentrt.lang.items import ForkPoint, Item, JoinPoint, Look
from agentrt.lang.options import derive_seed
from agentrt.lang.recording import Call
from agentrt.lang.run import Asking, Run, made_request
from agentrt.lang.steps import STEPS, Step
from agentrt.lang.variables import UnknownVariableError, Variable, known
from agentrt.lang.waiting import Promise
from agentrt.request import Completion, ProgramTag, Request, SamplingParams, Usage

#: Nodes that ask the model, and nodes that set a variable, if they are named.
_CALLS = frozenset({ir.Gen, ir.Select, ir.ToolCall, ir.AgentLoop})
_NAMED = _CALLS | {ir.ScopeBegin}

_DONE: Promise[Any] = Promise()  #: the mark of a branch that has run everything
_DONE.set_result(None)


class Branch(Conversation):
    """One thread of a program's text; see the module's text.

    Attributes:
        path: "" for the trunk, "0.2" for the third branch of the first fork, and so on.
        variables: By name, the inherited ones included.
        own: Names that this branch itself has set, in order.
        error: What it failed with, or None.
        inherited: The error is its parent's.
        seen: The body has been shown the error.
        cancelled: It was cancelled on purpose.
    """

    __slots__ = (
        "_asking", "_busy", "_calls_waiting", "_expected", "_item", "_parking", "_queue", "_step", "_tag", "budget", "cancelled",
        "error", "fork_text", "forks", "inherited", "number", "offered", "own", "path", "scopes", "seen", "variables",
    )  # fmt: skip

    def __init__(self, run: Run, path: str = "", budget: Budget | None = None, *, started: bool = True) -> None:
        super().__init__(run)
        self.path = path
        self.budget = budget or run.budget
        self.variables: dict[str, Variable] = {}
        self.own: dict[str, None] = {}
        self.scopes: tuple[tuple[Variable, int], ...] = ()
        self.offered: tuple[str, ...] | None = None  # names of the tools that the model has been told of
        self.fork_text = 0  # pieces of the feed that came from the parent
        self.error: BaseException | None = None
        self.inherited = self.seen = self.cancelled = False
        self.forks = 0
        self._parking: Promise[None] | None = None  # done while tool calls wait for approval
        self._expected: dict[str, Future[Variable]] | None = None
        self._queue: deque[Item] = deque()
        self.number = 0
        self._calls_waiting = 0
        self._busy = not started
        self._item: Item | None = None
        self._step: Step | None = None
        self._asking: Asking | None = None
        self._tag: ProgramTag | None = None
        run.branches.append(self)

    # ------------------------------------------------------------------ body time

    def append(self, value: Any, where: ir.Where) -> Variable | None:
        """Appends anything that can be appended; returns the variable of its last named node.

        Raises:
            UserError: It cannot be appended.
            AgentrtError: The branch has failed; its own error.
        """
        if self.error is not None:
            self._check()
        variables: tuple[Variable, ...] = ()
        last, items = variables, []
        for node in ir.nodes(value):  # all of it is looked at before any of it is declared
            variables = self._declare(node) if type(node) in _NAMED else ()
            items.append(Item(node, variables, where, self.number))
            self.number += 1
            last = variables or last
        if items:
            self._enqueue(items)
        return last[-1] if last else None

    def enqueue(self, node: Any, where: ir.Where) -> None:
        """Appends one of the interpreter's own nodes."""
        self._check()
        self._enqueue([Item(node, (), where, self.number)])
        self.number += 1

    def assign(self, name: str, value: Any, meta: Any = None) -> None:
        """Sets a variable."""
        self._check()
        self._register(known(name, value, meta))

    def look(self, read: Callable[[Branch], Any]) -> Future[Any]:
        """Returns the future of what `read` finds when everything appended so far has run; fails with the branch's error."""
        look = Look(read)
        if self.error is not None:
            look.fail(self.error)
        else:
            self._enqueue([Item(look, (), ("", 0), -1)])  # no number: a look must not change the seeds of what follows
        return look.future

    def mark(self) -> Future[Any]:
        """Returns a future that is done when everything appended so far has run; fails with the branch's error."""
        with self.run.lock:
            if self.error is None and not self._busy:  # then nothing is queued either
                return _DONE
        return self.look(lambda _: None)

    def parked(self) -> Future[None]:
        """Returns a future that is done when tool calls of this branch wait for approval; it is at once if they do."""
        with self.run.lock:
            if self._parking is None:
                self._parking = Promise()
            return self._parking

    def park(self) -> None:
        """Says that tool calls wait for approval."""
        self.parked()
        with self.run.lock:
            parking = self._parking
        if parking is not None:
            parking.offer(None)

    def unpark(self) -> None:
        """Says that every call has been decided."""
        with self.run.lock:
            self._parking = None

    def expect(self, name: str) -> Future[Variable]:
        """Returns the future of a variable that the body may not have come to yet."""
        with self.run.lock:
            found, error = self.variables.get(name), self.error
            if found is None and error is None and not self.run.done.done():
                self._expected = {} if self._expected is None else self._expected
                return self._expected.setdefault(name, Promise())
        future: Future[Variable] = Promise()
        if found is not None:
            future.set_result(found)
        else:
            future.set_exception(error or UnknownVariableError(name, self.variables))
        return future

    def has_below(self, name: str) -> bool:
        """Whether a branch that parted from this one has set a variable."""
        below = f"{self.path}/" if self.path else ""
        return any(b.path and b.path.startswith(below) and name in b.own for b in self.run.branches)

    def end(self) -> None:
        """The run is over: nothing follows in the text, and what was expected will not come."""
        self.feed.close(self.error)
        with self.run.lock:
            expected, self._expected = self._expected, None
        for name, future in (expected or {}).items():
            future.set_exception(self.error or UnknownVariableError(name, self.variables))

    def _check(self) -> None:
        if self.error is not None:
            self.seen = True
            raise self.error

    def _declare(self, node: Any) -> tuple[Variable, ...]:
        if not node.name:
            return ()
        answer = Variable(node.name)
        thinking = getattr(node, "reasoning", None)
        variables = (Variable(f"{node.name}_reasoning_content"), answer) if thinking else (answer,)
        for variable in variables:
            self._register(variable)
        return variables

    def _register(self, variable: Variable) -> None:
        with self.run.lock:
            self.variables[variable.name] = variable
            self.own[variable.name] = None
            expected = self._expected.pop(variable.name, None) if self._expected else None
        if expected is not None:
            expected.set_result(variable)

    def _enqueue(self, items: list[Item]) -> None:
        # All of an expression's nodes at once: its first request is then told how many more calls follow.
        with self.run.lock:
            failed = self.error
            if failed is None:
                for item in items:
                    self._queue.append(item)
                    self._calls_waiting += type(item.node) in _CALLS
                if self._busy:
                    return
                self._busy = True
        if failed is None:
            self._drive()
            return
        for item in items:
            item.fail(failed)

    def enqueue_item(self, item: Item) -> None:
        """Appends a node that was under way when its state was saved, with what it had come to."""
        for variable in item.variables:
            self._register(variable)
        self._enqueue([item])

    def fork(self, count: int, where: ir.Where, budget: Callable[[], Budget] | None = None) -> list[Branch]:
        """Appends a fork point and returns its branches, which begin when it is reached."""
        self._check()
        fork, self.forks = self.forks, self.forks + 1
        prefix = f"{self.path}/{fork}" if self.path else str(fork)
        children = []
        for number in range(count):
            child = Branch(self.run, f"{prefix}.{number}", budget() if budget else self.budget, started=False)
            child.variables = self.variables.copy()
            children.append(child)
        self.enqueue(ForkPoint(children), where)
        return children

    def join(self, children: list[Branch], where: ir.Where, *, keep_errors: bool, append_text: bool) -> None:
        """Appends a join: the variables that the children set become lists here, in the children's order."""
        taken = [child for child in children if not child.cancelled]
        names = dict.fromkeys(name for child in taken for name in child.own)
        gathered = [
            (Variable(name), [child.variables[name] for child in taken if name in child.own]) for name in names
        ]
        point = JoinPoint(taken, [child.mark() for child in taken], gathered, keep_errors, append_text)
        for variable, _ in gathered:
            self._register(variable)
        self.enqueue(point, where)

    def cancel(self, reason: str = "the branch was cancelled") -> None:
        """Ends the branch: its request within a step, its waiting nodes at once."""
        if self.error is None:
            self.cancelled = True
            self.fail(AbortedError(reason))

    def fail(self, error: BaseException, item: Item | None = None) -> None:
        """Ends the branch with `error`, and everything that waits on it."""
        with self.run.lock:
            if self.error is not None:
                return
            self.error = error
            ended = [*([self._item] if self._item is not None else ()), *self._queue]
            self._queue.clear()
            asking = self._asking
        if item is not None:
            _explain(error, self.run.name, item)
        for waiting in ended:
            waiting.fail(error)
        for variable, _ in self.scopes:
            variable.fail(error)
        self.feed.close(error)
        if asking is not None and not asking.done():
            self.run.abort(asking.request.request_id)

    # ------------------------------------------------------------------- run time

    def _drive(self, ready: Future[Any] | None = None) -> None:
        """Runs nodes until one must wait or none is left. Only who set `_busy` is in here."""
        step, self._step = self._step, None
        try:
            while True:
                if step is None:
                    item = self._next()
                    if item is None:
                        return
                    step = STEPS[type(item.node)](self, item)
                    waiting = None if step is None else next(step, None)
                elif self.error is not None:  # cancelled meanwhile
                    step.close()
                    return
                else:
                    waiting = _resumed(step, ready)
                if waiting is None:
                    step = None
                elif not waiting.done():
                    self._step = step
                    waiting.add_done_callback(self._drive)
                    return
                ready = waiting
        except BaseException as error:
            self.fail(error, self._item)

    def _next(self) -> Item | None:
        """Takes the next node from the queue; None if there is none, or the branch has failed."""
        with self.run.lock:
            if self.error is not None or not self._queue:
                self._item = None
                self._busy = self.error is not None
                return None
            item = self._item = self._queue.popleft()
            self._calls_waiting -= type(item.node) in _CALLS
        return item

    def prompt(self, *, heal: bool = False) -> tuple[tuple[int, ...], bytes]:
        """Tokenises what waits and returns (ids, bytes left to the answer to complete).

        Raises:
            PromptError: There is nothing to ask about.
        """
        transcript = self.transcript
        tail = transcript.settle(self.run.tokenizer, heal=heal)
        ids = transcript.ids
        if not ids:
            raise PromptError("the prompt is empty: append some text before the first gen")
        self.known_ids = min(self.known_ids, len(ids))
        return ids, tail

    def seed(self, item: Item, attempt: int = 0) -> int:
        """The seed of a node's request: of the run's, the branch's path and the node's number alone."""
        return derive_seed(self.run.seed, self.path, item.number, attempt)

    def request(
        self,
        ids: tuple[int, ...],
        sampling: SamplingParams,
        *,
        tail: bytes = b"",
        seconds: float | None = None,
        parts: int = 0,
    ) -> Request:
        """Makes a request that carries the branch's place in the program, its deadline and what comes next."""
        left = self.budget.seconds() if self.budget.timed else None
        deadline = left if seconds is None else seconds if left is None else min(left, seconds)
        following = self._queue[0].node if self._queue else None
        if not parts and isinstance(following, ForkPoint):
            parts = len(following.children)
        tag = self._tag
        if tag is None or tag.expected_calls != self._calls_waiting or tag.will_fork != parts:
            tag = self._tag = ProgramTag(self.run.id, self.path, self._calls_waiting, parts)
        return made_request(ids, sampling, tag, deadline, tail)

    def submit(self, request: Request, show: Callable[[str], None] | None = None) -> Asking:
        """Starts the request of the node that is running.

        Raises:
            AgentrtError: As `Backend.submit`, or the branch was cancelled.
        """
        asking = self.run.submit(request, show)
        self._asking = asking
        if self.error is not None:
            self.run.abort(request.request_id)
        return asking

    def record(self, item: Item, kind: str, request: Request, usage: Usage, began: float, reason: str) -> Call:
        """Remembers a request that was answered, and that its prompt is computed now."""
        ids, known_ids = request.prompt_ids, self.known_ids
        call = Call(
            self.path,
            item.number,
            item.node.name or "",
            kind,
            item.where,
            len(ids),
            known_ids,
            ids[known_ids] if known_ids < len(ids) else None,
            usage,
            began,
            self.run.clock(),
            reason,
        )
        self.run.calls.append(call)
        self._asking = None
        self.known_ids = len(ids)
        if self.budget.bounded:
            self.budget.spend(usage.completion_tokens)
        return call

    def answered(self, completion: Completion, tail: bytes = b"") -> None:
        """Appends an answer's ids to the transcript."""
        sample = completion.samples[0]
        ends = self.run.ends
        if isinstance(sample.stop_match, int):
            ends = ends | {sample.stop_match}
        self.transcript.add_answer(sample, self.run.tokenizer, ends, tail)
        self.known_ids = len(self.transcript)

    def begin_after(self, parent: Branch, text: str) -> None:
        """Begins where `parent` stands, whose text so far is `text`."""
        self.transcript = parent.transcript.copy()
        self.known_ids = parent.known_ids
        self.shared_ids = len(self.transcript)
        self.roles, self.offered = parent.roles, parent.offered
        self.feed.push(text)
        self.fork_text = len(self.feed.pieces)
        self.messages = [message.inherited(parent.feed.pieces, self.fork_text) for message in parent.messages]
        with self.run.lock:
            self._busy = self.error is not None
            if self._busy or not self._queue:
                return
            self._busy = True
        self._drive()

    @property
    def item(self) -> Item | None:
        """The node that is running, or waits in the middle of its run."""
        return self._item


def _explain(error: BaseException, program: str, item: Item) -> None:
    file, line = item.where
    if line and not getattr(error, "__notes__", None):
        source = linecache.getline(file, line).strip()
        error.add_note(f"in program {program!r}, {file}:{line}" + (f": {source}" if source else ""))


def _resumed(step: Step, ready: Future[Any] | None) -> Future[Any] | None:
    """Goes on with a step that waited; returns what it waits on next, or None if it has ended."""
    if ready is None:
        raise AssertionError("a step waits on a future")
    error = ready.exception()
    try:
        return step.send(ready.result()) if error is None else step.throw(error)
    except StopIteration:
        return None
