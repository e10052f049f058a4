"""Waiting without a thread per program: futures, and workers on which a waiting body is parked.

A synchronous body that reads a variable must stop in the middle of its own code. On a worker it runs in a greenlet, and
`wait` switches back to the worker's loop, which runs other bodies until the future is done; anywhere else `wait` simply
blocks the calling thread. Asynchronous bodies need none of this: they are tasks on one event loop. Nothing here knows
of programs. Invariant: at most `WORKERS` worker threads and one loop thread exist, however many bodies wait.
"""

from __future__ import annotations

import asyncio
import itertools
import queue
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, InvalidStateError
from typing import Any, TypeVar

import greenlet

T = TypeVar("T")

WORKERS = 4  #: enough to keep bodies going when one of them blocks in code of its own

_here = threading.local()


class Promise(Future[T]):
    """A future without a condition variable: a third of a `Future`'s cost, of which every gen makes several.

    It has the same methods but for timeouts and cancelling. Callbacks run in the thread that sets it, and must not raise.
    What it has before it is set stands on the class, one lock for all included: it is held for a few assignments at a time.
    """

    _mutex = threading.Lock()
    _set = False
    _outcome: Any = None
    _failure: BaseException | None = None
    _told: tuple[Callable[[Any], Any], ...] = ()

    def __init__(self) -> None:
        pass

    def __repr__(self) -> str:
        return f"<Promise {self._failure or self._outcome!r}>" if self._set else "<Promise, not set>"

    def done(self) -> bool:
        """Whether it has its result or error."""
        return self._set

    def add_done_callback(self, fn: Callable[[Any], Any]) -> None:
        """Calls `fn` with the promise once it is set; at once if it is."""
        with self._mutex:
            if not self._set:
                self._told += (fn,)
                return
        fn(self)

    def set_result(self, result: T) -> None:
        """Gives it its result."""
        self._end(result, None)

    def offer(self, result: T) -> None:
        """Gives it its result, unless it has its outcome already."""
        if not self._set:
            try:
                self._end(result, None)
            except InvalidStateError:  # another thread was first
                return

    def set_exception(self, exception: BaseException | None) -> None:
        """Gives it its error."""
        self._end(None, exception)

    def _end(self, outcome: Any, failure: BaseException | None) -> None:
        with self._mutex:
            if self._set:
                raise InvalidStateError("this promise has its outcome already")
            self._outcome, self._failure, self._set = outcome, failure, True
            told = self._told
            if told:
                self._told = ()
        for callback in told:
            callback(self)

    def result(self, timeout: float | None = None) -> T:
        """Returns its result or raises its error, blocking the thread until it is set."""
        if not self._set:
            self._block()
        if self._failure is not None:
            raise self._failure
        outcome: T = self._outcome
        return outcome

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Returns its error, or None, blocking the thread until it is set."""
        if not self._set:
            self._block()
        return self._failure

    def _block(self) -> None:
        latch = threading.Lock()
        latch.acquire()
        self.add_done_callback(lambda _: latch.release())
        latch.acquire()


class Worker(threading.Thread):
    """One thread that runs many bodies, each until it waits."""

    def __init__(self, number: int) -> None:
        super().__init__(name=f"agentrt-worker-{number}", daemon=True)
        self._ready: queue.SimpleQueue[Callable[[], Any]] = queue.SimpleQueue()
        self.loop: greenlet.greenlet | None = None

    def run(self) -> None:
        """Runs whatever is ready, for ever."""
        self.loop = greenlet.getcurrent()
        _here.worker = self
        while True:
            self._ready.get()()

    def start_body(self, body: Callable[[], Any]) -> None:
        """Runs `body` in a greenlet of its own; it must not raise."""
        self._ready.put(lambda: greenlet.greenlet(body).switch())

    def call(self, callback: Callable[[], Any]) -> None:
        """Calls `callback` on the worker's thread, after the bodies that were started before it ran or parked."""
        self._ready.put(callback)

    def park(self, future: Future[Any]) -> None:
        """Switches from the current body to the loop until `future` is done."""
        body = greenlet.getcurrent()
        future.add_done_callback(lambda _: self._ready.put(body.switch))
        assert self.loop is not None
        self.loop.switch()


_lock = threading.Lock()
_workers: list[Worker] = []
_turn = itertools.count()
_loop: asyncio.AbstractEventLoop | None = None


def workers(count: int = WORKERS) -> list[Worker]:
    """Returns the first `count` workers, started on first use."""
    count = max(1, min(count, WORKERS))
    with _lock:
        while len(_workers) < count:
            worker = Worker(len(_workers))
            worker.start()
            _workers.append(worker)
        return _workers[:count]


def next_worker() -> Worker:
    """Returns a worker, in turn."""
    return workers()[next(_turn) % WORKERS]


def wait(future: Future[T]) -> T:
    """Returns the future's result, or raises its error: parks the body on a worker, else blocks the thread."""
    if not future.done():
        worker: Worker | None = getattr(_here, "worker", None)
        if worker is not None and greenlet.getcurrent() is not worker.loop:
            worker.park(future)
    return future.result()


async def await_future(future: Future[T]) -> T:
    """Awaits the future. Cancelling the task that awaits leaves the future alone: others may wait for it too."""
    if not future.done():
        loop = asyncio.get_running_loop()
        ready: asyncio.Future[None] = loop.create_future()

        def tell() -> None:
            if not ready.done():
                ready.set_result(None)

        def done(_: Future[T]) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(tell)

        future.add_done_callback(done)
        await ready
    return future.result()


def first_of(*futures: Future[Any]) -> Future[None]:
    """Returns a future that is done when one of these is, whatever its outcome."""
    first: Promise[None] = Promise()
    for future in futures:
        future.add_done_callback(lambda _: first.offer(None))
    return first


def after(seconds: float) -> Future[None]:
    """Returns a future that is done when so many seconds have passed."""
    done: Promise[None] = Promise()
    loop = event_loop()
    loop.call_soon_threadsafe(loop.call_later, seconds, done.offer, None)
    return done


def in_background(body: Callable[[], T]) -> Future[T]:
    """Starts `body` on a worker and returns the future of what it returns."""
    done: Promise[T] = Promise()
    next_worker().start_body(lambda: settle(done, body))
    return done


def settle(future: Future[T], body: Callable[[], T]) -> None:
    """Runs `body` and puts its result or its error into `future`."""
    try:
        result = body()
    except BaseException as error:
        future.set_exception(error)
    else:
        future.set_result(result)


def event_loop() -> asyncio.AbstractEventLoop:
    """Returns the loop on which asynchronous bodies run that were started from synchronous code."""
    global _loop
    with _lock:
        if _loop is None:
            _loop = asyncio.new_event_loop()
            threading.Thread(target=_loop.run_forever, name="agentrt-loop", daemon=True).start()
        return _loop


def on_loop(work: Coroutine[Any, Any, T]) -> Future[T]:
    """Runs a coroutine on that loop."""
    return asyncio.run_coroutine_threadsafe(work, event_loop())
