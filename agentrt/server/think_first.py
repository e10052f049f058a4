"""For a reasoning model with a constraint: the thinking is generated freely first, and then the answer under the constraint.

Two requests take the place of one; the second one's prompt is the first one's, so that the cache has it. To the caller
it is one request whose deltas come as they would from a backend. Invariant: each sample ends exactly once, and what it
cost is both parts together.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace

from agentrt.backend import Backend, Sink
from agentrt.errors import AgentrtError
from agentrt.request import FinishReason, Request, SamplingParams, TokenDelta, Usage
from agentrt.server.thinking import ThinkingMarks

_CONSTRAINTS = ("json_schema", "regex", "choices", "ebnf", "tools", "grammar")


class ThinkFirst:
    """Stands before a backend for the requests of one call."""

    def __init__(self, backend: Backend, marks: ThinkingMarks, *, inside: bool, budget: int | None = None) -> None:
        """Makes it.

        Args:
            backend: Where both parts go.
            marks: Around the thinking.
            inside: The prompt has already opened the thinking.
            budget: Most tokens of thinking; None: as many as the answer may have.
        """
        self.backend = backend
        self.marks = marks
        self.inside = inside
        self.budget = budget
        self._samples: dict[str, list[_ThinkingSample]] = {}

    def submit(self, request: Request, sink: Sink) -> None:
        """As `Backend.submit`."""
        joint = _Joint(request, sink, request.sampling.n)
        samples = [_ThinkingSample(self, joint, index) for index in range(request.sampling.n)]
        self._samples[request.request_id] = samples
        for sample in samples:
            sample.begin()

    def abort(self, request_id: str) -> None:
        """As `Backend.abort`."""
        for sample in self._samples.get(request_id, ()):
            sample.abort()


@dataclass(slots=True)
class _Joint:
    """What the samples of one request share: the sink, and when the whole request is over."""

    request: Request
    sink: Sink
    running: int
    usage: Usage = field(default_factory=Usage)
    over: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)

    def tell(self, delta: TokenDelta) -> None:
        with self.lock:
            if not self.over:
                self.sink(delta)

    def fail(self, error: AgentrtError) -> None:
        with self.lock:
            if not self.over:
                self.over = True
                self.sink(TokenDelta(self.request.request_id, error=error))

    def finish(self, delta: TokenDelta, usage: Usage) -> None:
        with self.lock:
            if self.over:
                return
            self.usage = _sum(self.usage, usage)
            self.running -= 1
            self.over = not self.running
            usage = replace(self.usage, prompt_tokens=len(self.request.prompt_ids))
            self.sink(replace(delta, usage=usage if self.over else None))


def _sum(a: Usage, b: Usage) -> Usage:
    values = {f.name: getattr(a, f.name) + getattr(b, f.name) for f in fields(Usage)}
    return Usage(**values | {"cached_tokens": max(a.cached_tokens, b.cached_tokens)})


class _ThinkingSample:
    def __init__(self, owner: ThinkFirst, joint: _Joint, index: int) -> None:
        self._owner = owner
        self._joint = joint
        self._index = index
        self._ids: list[int] = []
        self._part: Request | None = None
        self._thought = Usage()
        self._aborted = False

    def begin(self) -> None:
        """Submits the thinking."""
        request, owner = self._joint.request, self._owner
        if not owner.inside:
            self._write(f"{owner.marks.open}\n")
        limits = [limit for limit in (owner.budget, request.sampling.max_tokens) if limit is not None]
        free: dict[str, None] = dict.fromkeys(_CONSTRAINTS)
        sampling = self._part_sampling(request.sampling).replace(
            **free, stop=(owner.marks.close,), stop_regex=(), include_stop=True, min_tokens=0, max_tokens=min(limits) if limits else None
        )
        self._submit(sampling, self._on_thought)

    def _part_sampling(self, sampling: SamplingParams) -> SamplingParams:
        seed = None if sampling.seed is None else sampling.seed + 7919 * self._index
        return sampling.replace(n=1, seed=seed)

    def _write(self, text: str) -> None:
        """Feeds a text of ours, and tells it as if the model had written it."""
        ids = self._owner.backend.tokenizer.encode(text, special=True)
        self._ids += ids
        self._joint.tell(TokenDelta(self._joint.request.request_id, self._index, text=text))

    def _submit(self, sampling: SamplingParams, sink: Sink) -> None:
        request = self._joint.request
        prompt: Sequence[int] = (*request.prompt_ids, *self._ids)
        self._part = Request(
            prompt_ids=tuple(prompt),
            sampling=sampling,
            cache_salt=request.cache_salt,
            priority=request.priority,
            program=request.program,
            deadline=request.deadline,
        )
        self._owner.backend.submit(self._part, sink)

    def abort(self) -> None:
        """Ends it, in whichever part it is."""
        self._aborted = True
        if self._part is not None:
            self._owner.backend.abort(self._part.request_id)

    def _mine(self, delta: TokenDelta) -> TokenDelta:
        return replace(delta, request_id=self._joint.request.request_id, index=self._index, usage=None)

    def _on_thought(self, delta: TokenDelta) -> None:
        if delta.error is not None:
            self._joint.fail(delta.error)
            return
        self._ids += delta.token_ids
        if delta.finish_reason is None:
            self._joint.tell(self._mine(delta))
            return
        self._thought = delta.usage or Usage()
        left = self._left(self._joint.request.sampling)
        over = delta.finish_reason is FinishReason.ABORT or (left is not None and left <= 0)
        if over:
            self._joint.finish(self._mine(delta), self._thought)
            return
        self._joint.tell(replace(self._mine(delta), finish_reason=None, stop_match=None))
        self._answer(delta, left)

    def _left(self, sampling: SamplingParams) -> int | None:
        return None if sampling.max_tokens is None else sampling.max_tokens - self._thought.completion_tokens

    def _answer(self, delta: TokenDelta, left: int | None) -> None:
        """Submits the answer, behind the closed thinking."""
        if delta.stop_match != self._owner.marks.close:  # cut by its budget, or the model forgot to close it
            ends = set(self._owner.backend.tokenizer.eos_ids)
            while self._ids and self._ids[-1] in ends:
                self._ids.pop()
            self._write(f"\n{self._owner.marks.close}")
        self._write("\n\n")
        sampling = self._part_sampling(self._joint.request.sampling)
        try:
            self._submit(sampling.replace(max_tokens=left, min_tokens=0), self._on_answer)
        except AgentrtError as error:
            self._joint.fail(error)
            return
        if self._aborted:  # meanwhile
            self.abort()

    def _on_answer(self, delta: TokenDelta) -> None:
        if delta.error is not None:
            self._joint.fail(delta.error)
        elif delta.usage is not None:
            self._joint.finish(self._mine(delta), _sum(self._thought, delta.usage))
        else:
            self._joint.tell(self._mine(delta))
