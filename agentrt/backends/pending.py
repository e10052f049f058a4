"""What waits for a worker: the sinks of its requests and the futures of its calls. Each ends exactly once, whatever happens.

Messages from the worker come in on one thread. A sink is its caller's code: one that raises loses its request, and nothing
else. This object outlives the backend that made it until the worker is gone, so that nobody is left without an answer.
"""

from __future__ import annotations

import itertools
import logging
import os
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from agentrt.backend import EngineFacts, Sink
from agentrt.errors import AgentrtError, EngineError, QueueFullError, UserError, as_request_error
from agentrt.request import TokenDelta

Message = tuple[Any, ...]

_log = logging.getLogger("agentrt")


class Pending:
    """Sinks and calls by id; thread-safe."""

    def __init__(self) -> None:
        """Begins with nothing pending."""
        self.ready: Future[EngineFacts] = Future()
        #: Tells the worker to end a request; called when a sink has failed.
        self.abort: Callable[[str], None] = lambda request_id: None
        self._lock = threading.Lock()
        self._sinks: dict[str, Sink] = {}
        self._calls: dict[int, Future[Any]] = {}
        self._call_ids = itertools.count()
        self._failure: AgentrtError | None = None
        _all.add(self)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._sinks

    @property
    def down(self) -> bool:
        """Whether the worker is gone."""
        return self._failure is not None

    # -- asking ----------------------------------------------------------------------------------------------------------

    def add(self, request_id: str, sink: Sink, limit: int) -> None:
        """Registers a request that is about to be sent.

        Raises:
            EngineError: The worker is gone.
            QueueFullError: `limit` requests are pending already.
            UserError: The id is in use.
        """
        with self._lock:
            self._check()
            if len(self._sinks) >= limit:
                raise QueueFullError(f"{len(self._sinks)} requests are pending; at most {limit} are taken")
            if request_id in self._sinks:
                raise UserError(f"request id {request_id!r} is in use; ids are unique while a request lives", param="request_id")
            self._sinks[request_id] = sink

    def remove(self, request_id: str) -> None:
        """Forgets a request that could not be sent."""
        self._sinks.pop(request_id, None)

    def refuse(self, request_id: str, error: BaseException) -> None:
        """Ends a request whose submission is over, and which could not be sent after all."""
        self._give(TokenDelta(request_id, error=as_request_error(error)))

    def call(self) -> tuple[int, Future[Any]]:
        """Registers a call that is about to be sent.

        Raises:
            EngineError: The worker is gone.
        """
        future: Future[Any] = Future()
        with self._lock:
            self._check()
            call_id = next(self._call_ids)
            self._calls[call_id] = future
        return call_id, future

    def remove_call(self, call_id: int) -> None:
        """Forgets a call that could not be sent."""
        self._calls.pop(call_id, None)

    def _check(self) -> None:
        if self._failure is not None:
            raise self._down()

    def _down(self) -> EngineError:
        return EngineError(str(self._failure))  # a fresh one each time: a raised one holds its callers' frames

    # -- answers ---------------------------------------------------------------------------------------------------------

    def receive(self, message: Message) -> None:
        """Takes a message from the worker."""
        kind = message[0]
        if kind == "deltas":
            for delta in message[1]:
                self._give(delta)
        elif kind == "result":
            self._answer(message[1], lambda future: future.set_result(message[2]))
        elif kind == "error":
            self._answer(message[1], lambda future: future.set_exception(message[2]))
        elif kind == "ready":
            self.ready.set_result(message[1])
        else:
            self.fail(message[1])

    def _answer(self, call_id: int, set_it: Callable[[Future[Any]], None]) -> None:
        future = self._calls.pop(call_id, None)
        if future is not None:
            set_it(future)

    def _give(self, delta: TokenDelta) -> None:
        sink = self._sinks.pop(delta.request_id, None) if delta.last else self._sinks.get(delta.request_id)
        if sink is not None and not given(sink, delta) and not delta.last:
            self._sinks.pop(delta.request_id, None)
            self.abort(delta.request_id)

    def fail(self, error: AgentrtError) -> None:
        """The worker is gone: whatever waits for it ends now."""
        with self._lock:
            self._failure = self._failure or error
            sinks, self._sinks = self._sinks, {}
            calls, self._calls = self._calls, {}
        if not self.ready.done():
            self.ready.set_exception(error)
        for call in calls.values():
            call.set_exception(self._down())
        for request_id, sink in sinks.items():
            given(sink, TokenDelta(request_id, error=self._down()))

    def forked(self) -> None:
        """This is a forked child: the worker is its parent's, and so is whatever was pending."""
        self._lock = threading.Lock()
        self._sinks, self._calls = {}, {}
        self._failure = EngineError("this process was forked from the one that the engine belongs to; start an engine of its own here")


def given(sink: Sink, delta: TokenDelta) -> bool:
    """Gives a sink a delta; False, and a line in the log, if it raises."""
    try:
        sink(delta)
    except BaseException:  # an exit, too, is this sink's alone
        _log.exception("the sink of request %s raised; the request is dropped", delta.request_id)
        return False
    return True


_all: weakref.WeakSet[Pending] = weakref.WeakSet()


def _in_forked_child() -> None:
    for pending in list(_all):
        pending.forked()


os.register_at_fork(after_in_child=_in_forked_child)
