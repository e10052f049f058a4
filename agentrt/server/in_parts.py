"""Several requests, one after another, in the place of one: what they share.

To the caller it is one request whose deltas come as they would from a backend. Invariant: each sample ends exactly once,
and what it cost is all its parts together. Where one sample fails, or cannot begin, none of the others runs on.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace

from agentrt.backend import Backend, Sink
from agentrt.errors import AgentrtError
from agentrt.request import Request, SamplingParams, TokenDelta, Usage


class InParts(ABC):
    """Stands before a backend for the requests of one call; what a sample does is its subclass' `sample`."""

    def __init__(self, backend: Backend) -> None:
        """Makes it.

        Args:
            backend: Where all parts go.
        """
        self.backend = backend
        self._samples: dict[str, list[Sample]] = {}

    @abstractmethod
    def sample(self, joint: Joint, index: int) -> Sample:
        """A sample that has not begun."""

    def submit(self, request: Request, sink: Sink) -> None:
        """As `Backend.submit`."""
        joint = Joint(request, sink, lambda: self.abort(request.request_id), request.sampling.n)
        samples = [self.sample(joint, index) for index in range(request.sampling.n)]
        self._samples[request.request_id] = samples
        try:
            for sample in samples:
                if not joint.over:
                    sample.begin()
        except BaseException:  # whoever submits is told by this
            joint.leave()
            raise

    def abort(self, request_id: str) -> None:
        """As `Backend.abort`."""
        for sample in self._samples.get(request_id, ()):
            sample.abort()


@dataclass(slots=True)
class Joint:
    """What the samples of one request share: the sink, how all of them are aborted, and when the whole request is over."""

    request: Request
    sink: Sink
    abort: Callable[[], None]
    running: int
    usages: list[Usage] = field(default_factory=list)
    over: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)

    def tell(self, delta: TokenDelta) -> None:
        """Tells a delta that ends nothing."""
        with self.lock:
            if not self.over:
                self.sink(delta)

    def fail(self, error: AgentrtError) -> None:
        """Ends the request with an error."""
        with self.lock:
            if self.over:
                return
            self.over = True
            self.sink(TokenDelta(self.request.request_id, error=error))
        self.abort()

    def leave(self) -> None:
        """Ends the request without a word."""
        with self.lock:
            self.over = True
        self.abort()

    def finish(self, delta: TokenDelta, usage: Usage) -> None:
        """Tells a sample's last delta; `usage` is what that sample cost."""
        with self.lock:
            if self.over:
                return
            self.usages.append(usage)
            self.running -= 1
            self.over = not self.running
            self.sink(replace(delta, usage=self._usage() if self.over else None))

    def _usage(self) -> Usage:
        cached = min(usage.cached_tokens for usage in self.usages)  # siblings find the prompt that the first one computed
        return replace(summed(self.usages), prompt_tokens=len(self.request.prompt_ids), cached_tokens=cached)


def summed(usages: Sequence[Usage]) -> Usage:
    """What parts cost together; from the cache is what the first one found, as the later ones find the earlier."""
    values = {f.name: sum(getattr(usage, f.name) for usage in usages) for f in fields(Usage)}
    return Usage(**values | {"cached_tokens": usages[0].cached_tokens})


class Sample(ABC):
    """One sample: the part that is under way."""

    def __init__(self, backend: Backend, joint: Joint, index: int) -> None:
        self.backend = backend
        self.joint = joint
        self.index = index
        self.aborted = False
        self._part: Request | None = None

    @abstractmethod
    def begin(self) -> None:
        """Submits the first part."""

    def abort(self) -> None:
        """Ends it, in whichever part it is."""
        self.aborted = True
        self.end_part()

    def end_part(self) -> None:
        """Ends the part that is under way; its last delta still comes."""
        if self._part is not None:
            with suppress(AgentrtError):  # it is gone, and says so to the part's sink
                self.backend.abort(self._part.request_id)

    def submit(self, prompt_ids: Sequence[int], sampling: SamplingParams, sink: Sink) -> None:
        """Submits a part, of one sample with a seed of its own."""
        request = self.joint.request
        seed = None if sampling.seed is None else sampling.seed + 7919 * self.index
        self._part = Request(
            prompt_ids=tuple(prompt_ids),
            sampling=sampling.replace(n=1, seed=seed),
            cache_salt=request.cache_salt,
            priority=request.priority,
            program=request.program,
            deadline=request.deadline,
        )
        self.backend.submit(self._part, sink)

    def submit_next(self, prompt_ids: Sequence[int], sampling: SamplingParams, sink: Sink) -> None:
        """Submits a further part, from a sink: what is wrong with it is told, not raised."""
        try:
            self.submit(prompt_ids, sampling, sink)
        except AgentrtError as error:
            self.joint.fail(error)
            return
        if self.aborted:  # meanwhile
            self.end_part()

    def mine(self, delta: TokenDelta) -> TokenDelta:
        """A part's delta as one of the whole request."""
        return replace(delta, request_id=self.joint.request.request_id, index=self.index, usage=None)
