"""Many runs of one program at once: `run_batch` without a thread each, and their common prefix computed once.

Bodies run on a few workers (or as tasks), each until it reads something that is not there yet. The first requests of those
that have begun are held at a gate until every one of them has made its own or waits for something else; what their ids have
in common is then computed once, before all of them go on. No body runs twice. Invariant: the gate opens exactly once,
and every future of a batch ends.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from agentrt.backend import Backend, Sink
from agentrt.errors import UserError, as_request_error
from agentrt.lang.state import State
from agentrt.lang.waiting import WORKERS, Promise, event_loop, on_loop, settle, wait, workers
from agentrt.request import ProgramTag, Request, SamplingParams, TokenDelta

if TYPE_CHECKING:
    from agentrt.lang.program import Function, Plan

#: A common prefix below this many tokens is not worth a request of its own.
SHORTEST_PREFIX = 16


class PrefixGate:
    """Holds first requests until `open` is called, then computes their common prefix before it lets them go."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held: list[tuple[Backend, Request, Sink]] = []
        self._backend: Backend | None = None
        self._opened = False
        self.prefix_tokens = 0

    def bind(self, backend: Backend) -> None:
        """Says where the held requests will go."""
        self._backend = backend

    def submit(self, request: Request, sink: Sink) -> bool:
        """Holds a request; False once the gate is open."""
        with self._lock:
            if self._opened or self._backend is None:
                return False
            self._held.append((self._backend, request, sink))
            return True

    def open(self) -> None:
        """Lets everything go, the common prefix first; a second call does nothing."""
        with self._lock:
            self._opened = True
            held, self._held = self._held, []
        if not held:
            return
        backend, first, _ = held[0]
        ids = common_prefix([request.prompt_ids for _, request, _ in held])
        if len(held) < 2 or len(ids) < SHORTEST_PREFIX:
            _submit_all(held)
            return
        self.prefix_tokens = len(ids)
        program = first.program.program if first.program is not None else "batch"
        warm = Request(
            prompt_ids=ids,
            sampling=SamplingParams(max_tokens=0, temperature=0.0),
            program=ProgramTag(program, will_fork=len(held)),
        )
        _submit_one(backend, warm, lambda delta: _submit_all(held) if delta.last else None)


def _submit_all(held: list[tuple[Backend, Request, Sink]]) -> None:
    for backend, request, sink in held:
        _submit_one(backend, request, sink)


def _submit_one(backend: Backend, request: Request, sink: Sink) -> None:
    try:
        backend.submit(request, sink)
    except Exception as error:  # the body has gone on; it reads the error where it waits
        sink(TokenDelta(request.request_id, error=as_request_error(error)))


def common_prefix(prompts: list[tuple[int, ...]]) -> tuple[int, ...]:
    """The longest beginning that all have; of sorted sequences, the first and the last decide."""
    low, high = min(prompts), max(prompts)
    length = next(
        (place for place, (a, b) in enumerate(zip(low, high, strict=False)) if a != b), min(len(low), len(high))
    )
    return low[:length]


class Batch:
    """One `run_batch` under way: starts plans as others end."""

    def __init__(self, program: Function[..., Any], plans: list[Plan], limit: int) -> None:
        self._program = program
        self._gate = PrefixGate()
        self.done: list[Future[State]] = [Promise() for _ in plans]
        self._waiting = iter(list(zip(plans, self.done, strict=True)))
        self._lock = threading.Lock()
        self._limit = min(limit, len(plans))

    def start(self) -> None:
        """Starts as many as may be under way."""
        (self._start_tasks if self._program.is_async else self._start_bodies)()

    def _start_bodies(self) -> None:
        crew = workers(min(WORKERS, self._limit))
        for number in range(self._limit):
            worker = crew[number % len(crew)]
            worker.start_body(self._run_some)
        arrived = threading.Semaphore(len(crew) - 1)

        def arrive() -> None:
            if not arrived.acquire(blocking=False):  # the last of the crew
                self._gate.open()

        for worker in crew:
            worker.call(arrive)

    def _next(self) -> tuple[Plan, Future[State]] | None:
        with self._lock:
            return next(self._waiting, None)

    def _run_some(self) -> None:
        """Runs one plan after another, in one greenlet."""
        while (item := self._next()) is not None:
            plan, done = item
            settle(done, partial(self._run, plan))

    def _run(self, plan: Plan) -> State:
        trunk = self._program.begin(plan, self._gate)
        self._gate.bind(trunk.run.backend)
        self._program.perform(trunk, plan)
        return State(trunk, inside=False)

    def _start_tasks(self) -> None:
        loop = event_loop()

        def begin() -> None:
            for _ in range(self._limit):
                on_loop(self._arun_some())
            loop.call_soon(loop.call_soon, self._gate.open)  # after the first steps of all of them

        loop.call_soon_threadsafe(begin)

    async def _arun_some(self) -> None:
        while (item := self._next()) is not None:
            plan, done = item
            try:
                trunk = self._program.begin(plan, self._gate)
                self._gate.bind(trunk.run.backend)
                await self._program.aperform(trunk, plan)
            except BaseException as error:
                done.set_exception(error)
            else:
                done.set_result(State(trunk, inside=False))


def run_plans(
    program: Function[..., Any], plans: list[Plan], num_threads: int | Literal["auto"], progress_bar: bool
) -> list[Future[State]]:
    """Starts every plan and returns the futures of their states.

    Raises:
        UserError: num_threads is neither "auto" nor a number of at least 1.
    """
    if num_threads != "auto" and (not isinstance(num_threads, int) or num_threads < 1):
        raise UserError(f"num_threads is {num_threads!r}; it must be 'auto' or at least 1", param="num_threads")
    batch = Batch(program, plans, len(plans) if num_threads == "auto" else int(num_threads))
    if progress_bar:
        _show_progress(program.name, batch.done)
    if plans:
        batch.start()
    return batch.done


def in_order(done: list[Future[State]], keep_errors: bool) -> Iterator[Any]:
    """Yields the states in order, each as soon as it is there."""
    for future in done:
        yield _outcome(future, keep_errors)


def all_of(done: list[Future[State]], keep_errors: bool) -> list[Any]:
    """Waits for all, and returns the states in order; raises the first error unless errors are kept."""
    outcomes = [_outcome(future, True) for future in done]
    if not keep_errors:
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome
    return outcomes


def _outcome(future: Future[State], keep_errors: bool) -> Any:
    try:
        return wait(future)
    except Exception as error:
        if not keep_errors:
            raise
        return error


def _show_progress(name: str, done: list[Future[State]]) -> None:
    from rich.progress import Progress

    progress = Progress()
    progress.start()
    task = progress.add_task(name, total=len(done))
    left = [len(done)]
    lock = threading.Lock()

    def advance(_: Future[State]) -> None:
        with lock:
            left[0] -= 1
            progress.advance(task)
            if not left[0]:
                progress.stop()

    for future in done:
        future.add_done_callback(advance)
    if not done:
        progress.stop()
