"""For a reasoning model with a constraint: the thinking is generated freely first, and then the answer under the constraint.

Two requests take the place of one; the second one's prompt is the first one's with the thinking, so that the cache has it.
"""

from __future__ import annotations

from dataclasses import replace

from agentrt.backend import Backend
from agentrt.request import FinishReason, SamplingParams, TokenDelta, Usage
from agentrt.server.in_parts import InParts, Joint, Sample, summed
from agentrt.server.thinking import ThinkingMarks

_CONSTRAINTS = ("json_schema", "regex", "choices", "ebnf", "tools", "grammar")


class ThinkFirst(InParts):
    """Stands before a backend for the requests of one call."""

    def __init__(self, backend: Backend, marks: ThinkingMarks, *, inside: bool, budget: int | None = None) -> None:
        """Makes it.

        Args:
            backend: Where both parts go.
            marks: Around the thinking.
            inside: The prompt has already opened the thinking.
            budget: Most tokens of thinking; None: as many as the answer may have.
        """
        super().__init__(backend)
        self.marks = marks
        self.inside = inside
        self.budget = budget

    def sample(self, joint: Joint, index: int) -> Sample:
        """See `InParts.sample`."""
        return _ThinkingSample(self, joint, index)


class _ThinkingSample(Sample):
    def __init__(self, owner: ThinkFirst, joint: Joint, index: int) -> None:
        super().__init__(owner.backend, joint, index)
        self._owner = owner
        self._ids: list[int] = []
        self._thought = Usage()

    def begin(self) -> None:
        """Submits the thinking."""
        request, owner = self.joint.request, self._owner
        if not owner.inside:
            self._write(f"{owner.marks.open}\n")
        limits = [limit for limit in (owner.budget, request.sampling.max_tokens) if limit is not None]
        free: dict[str, None] = dict.fromkeys(_CONSTRAINTS)
        sampling = request.sampling.replace(
            **free, stop=(owner.marks.close,), stop_regex=(), include_stop=True, min_tokens=0, max_tokens=min(limits) if limits else None
        )
        self.submit((*request.prompt_ids, *self._ids), sampling, self._on_thought)

    def _write(self, text: str) -> None:
        """Feeds a text of ours, and tells it as if the model had written it."""
        self._ids += self.backend.tokenizer.encode(text, special=True)
        self.joint.tell(TokenDelta(self.joint.request.request_id, self.index, text=text))

    def _on_thought(self, delta: TokenDelta) -> None:
        if delta.error is not None:
            self.joint.fail(delta.error)
            return
        self._ids += delta.token_ids
        if delta.finish_reason is None:
            self.joint.tell(self.mine(delta))
            return
        self._thought = delta.usage or Usage()
        left = self._left(self.joint.request.sampling)
        if delta.finish_reason is FinishReason.ABORT:
            self.joint.finish(self.mine(delta), self._thought)
            return
        if left is not None and left <= 0:  # closed in time or not, there is no room for an answer
            self.joint.finish(replace(self.mine(delta), finish_reason=FinishReason.LENGTH, stop_match=None), self._thought)
            return
        self.joint.tell(replace(self.mine(delta), finish_reason=None, stop_match=None))
        self._answer(delta, left)

    def _left(self, sampling: SamplingParams) -> int | None:
        return None if sampling.max_tokens is None else sampling.max_tokens - self._thought.completion_tokens

    def _answer(self, delta: TokenDelta, left: int | None) -> None:
        """Submits the answer, behind the closed thinking."""
        if delta.stop_match != self._owner.marks.close:  # cut by its budget, or the model forgot to close it
            ends = set(self.backend.tokenizer.eos_ids)
            while self._ids and self._ids[-1] in ends:
                self._ids.pop()
            self._write(f"\n{self._owner.marks.close}")
        self._write("\n\n")
        request = self.joint.request
        self.submit_next((*request.prompt_ids, *self._ids), request.sampling.replace(max_tokens=left, min_tokens=0), self._on_answer)

    def _on_answer(self, delta: TokenDelta) -> None:
        if delta.error is not None:
            self.joint.fail(delta.error)
        elif delta.usage is not None:
            self.joint.finish(self.mine(delta), summed([self._thought, delta.usage]))
        else:
            self.joint.tell(self.mine(delta))
