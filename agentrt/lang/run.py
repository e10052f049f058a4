"""One run of a program: what its branches share.

A `Run` holds the backend, the sampling defaults, the seed, the budget and the deadline, the branches, and what was
recorded; it makes requests on the branches' behalf and knows which are in flight. It runs no body and no node.
Invariant: every request it submits ends in exactly one future, and after `close` nothing of the run is in flight.
"""

from __future__ import annotations

import copy
import itertools
import os
import secrets
import threading
import time
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from agentrt.backend import Backend, Collector, Sink
from agentrt.errors import AbortedError, AgentrtError
from agentrt.lang import ir
from agentrt.lang.budget import Budget
from agentrt.lang.options import Sampling
from agentrt.lang.recording import Call, Recording, ToolRun, report_of
from agentrt.lang.roles import ChatRoles, chat_roles
from agentrt.lang.waiting import Promise
from agentrt.observe import spans
from agentrt.request import Completion, FinishReason, ProgramTag, Request, Sample, SamplingParams, TokenDelta

if TYPE_CHECKING:
    from agentrt.lang.interpreter import Branch

_run_numbers, _request_numbers = itertools.count(), itertools.count()


Compact = Callable[[list[list[dict[str, Any]]]], list[list[dict[str, Any]]]]

_WARNED: dict[Any, Any] = {}  #: which warnings were shown, kept by `warnings` as for a module

ROOM = 256  #: tokens that an answer of open length should have, before compaction makes more


def _no_compaction(groups: list[list[dict[str, Any]]]) -> list[list[dict[str, Any]]]:
    return groups


class Gate(Protocol):
    """Holds back a batch's first requests until their common prefix is known."""

    def submit(self, request: Request, sink: Sink) -> bool:
        """Takes the request, to be submitted later; False if the gate is open."""
        ...


class Asking(Promise[Completion]):
    """One request in flight, and the promise of its completion: collects its deltas and shows its text as it comes."""

    def __init__(self, request: Request, show: Callable[[str], None] | None) -> None:
        self.request = request
        self._collector: Collector | None = None
        self._show = show

    def __call__(self, delta: TokenDelta) -> None:
        """Takes one delta; the sink of the request."""
        try:
            completion = self._add(delta)
            if self._show is not None and delta.text and delta.index == 0:
                self._show(delta.text)
        except BaseException as error:
            if not self.done():
                self.set_exception(copy.copy(error) if isinstance(error, AgentrtError) else error)
            return
        if completion is not None:
            self.offer(completion)

    def _add(self, delta: TokenDelta) -> Completion | None:
        if self._collector is None:
            usage, reason = delta.usage, delta.finish_reason
            if usage is not None and reason is not None and self.request.sampling.n == 1:  # all of it in one delta
                sample = Sample(delta.text, delta.token_ids, reason, delta.forced, delta.logprobs, delta.stop_match)
                return Completion(delta.request_id, (sample,), usage, delta.prompt_logprobs)
            self._collector = Collector(self.request)
        return self._collector.add(delta)


_REQUEST = Request(prompt_ids=(0,))  #: what a request has that nothing is said of
_set = object.__setattr__


def made_request(
    ids: tuple[int, ...], sampling: SamplingParams, tag: ProgramTag, deadline: float | None, tail: bytes
) -> Request:
    """A request of parts that are right by construction; checking every id again would cost more than all else of a gen."""
    request: Request = object.__new__(Request)
    _set(request, "prompt_ids", ids)
    _set(request, "sampling", sampling)
    _set(request, "request_id", f"{tag.program}#{next(_request_numbers)}")
    _set(request, "cache_salt", _REQUEST.cache_salt)
    _set(request, "priority", _REQUEST.priority)
    _set(request, "program", tag)
    _set(request, "deadline", deadline)
    _set(request, "prompt_tail", tail)
    return request


class Run:
    """What the branches of one run share; see the module's text.

    Attributes:
        id: Unique; the program id that the engine is told.
        name: The program's name.
        backend: Where its requests go.
        sampling: Defaults of its gens.
        seed: Every gen's seed derives from it.
        budget: Of the whole run.
        branches: Every branch, the trunk first.
        calls, tool_runs: What was recorded.
        recording: What a replay needs.
        done: Of the end of the whole run; with the error that it ended with.
        ret_value: What the body returned.
        compact: Says which messages to keep when the context is nearly full.
        healing: Whether plain text before a gen may be completed by it.
        caller: OpenTelemetry's context of who began the run; None if it makes no spans.
    """

    def __init__(
        self,
        backend: Backend,
        sampling: Sampling,
        *,
        name: str = "program",
        budget: Budget | None = None,
        gate: Gate | None = None,
        replay: Recording | None = None,
        healing: bool = False,
        compact: Compact | None = None,
        caller: Any = None,
    ) -> None:
        self.id = f"{name}-{os.getpid():x}-{next(_run_numbers)}"
        self.name = name
        self.backend = backend
        self.tokenizer = backend.tokenizer
        self.sampling = sampling
        fresh = secrets.randbits(48) if sampling.seed is None else sampling.seed
        self.seed = replay.seed if replay is not None else fresh
        self.budget = budget or Budget()
        self.gate = gate
        self.healing = healing
        self.compact = compact or _no_compaction
        self.caller = caller
        self.branches: list[Branch] = []
        self.calls: list[Call] = []
        self.tool_runs: list[ToolRun] = []
        self.replay = replay
        self.recording = Recording(name, self.seed)
        self.began = time.monotonic()
        self.ended: float | None = None
        self.done: Promise[None] = Promise()
        self.ret_value: Any = None
        self.lock = threading.Lock()
        self.ends = frozenset(self.tokenizer.eos_ids)
        self.warned: set[str] = set()

    @property
    def roles(self) -> ChatRoles:
        """The model's chat roles."""
        return chat_roles(self.tokenizer)

    def must_compact(self, prompt: int, wanted: int | None) -> bool:
        """Whether a prompt of so many tokens, with the answer wanted, leaves no room, and something can be done about it."""
        if self.compact is _no_compaction:
            return False
        room = self.backend.capabilities.max_context - prompt
        return room < (ROOM if wanted is None else max(wanted, 1))

    def clock(self) -> float:
        """Seconds since the run began."""
        return time.monotonic() - self.began

    def warn_once(self, topic: str, message: str, where: ir.Where) -> None:
        """Warns, once per topic and run, at the author's line."""
        if topic not in self.warned:
            self.warned.add(topic)
            warnings.warn_explicit(message, UserWarning, where[0] or self.name, where[1], registry=_WARNED)

    def submit(self, request: Request, show: Callable[[str], None] | None = None) -> Asking:
        """Starts a request.

        Raises:
            AgentrtError: As `Backend.submit`.
        """
        asking = Asking(request, show)
        gate = self.gate
        if gate is None or not gate.submit(request, asking):
            self.backend.submit(request, asking)
        return asking

    def abort(self, request_id: str) -> None:
        """Ends a request within a step."""
        self.backend.abort(request_id)

    def cancel(self, reason: str) -> None:
        """Ends every branch: requests within a step, what waits at once."""
        for branch in list(self.branches):
            branch.cancel(reason)

    def close(self, error: BaseException | None = None) -> None:
        """The body has ended and nothing is in flight: says so to the backend and to every reader."""
        try:
            self.backend.end_program(self.id)
        except AgentrtError as failure:  # an engine that is down has nothing to free
            error = error or failure
        self.ended = self.ended or self.clock()
        with self.lock:
            first = not self.done.done()
            if first and error is None:
                self.done.set_result(None)
            elif first:
                self.done.set_exception(error)
        for branch in list(self.branches):
            branch.end()
        if first and self.caller is not None:
            spans.export(report_of(self), time.time_ns() - int(self.clock() * 1e9), self.caller)


def check_complete(completion: Completion) -> Completion:
    """Returns the completion.

    Raises:
        AbortedError: It was aborted, by a deadline or from outside the program.
    """
    for sample in completion.samples:
        if sample.finish_reason is not FinishReason.ABORT:
            continue
        raise AbortedError(
            "the request was aborted before its answer was complete (a deadline passed, or someone aborted it)"
        )
    return completion
