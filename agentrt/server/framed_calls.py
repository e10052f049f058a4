"""A call that the model began without its frame is begun anew inside it, where it would otherwise come to nothing.

A small model that writes a call as bare JSON, or in a markdown fence, ends its answer behind the first, and at times names a tool
that is not there; inside the frame that it was trained on it goes on to the next call, and the grammar holds it to the tools there
are. That it wants to call is told by how its answer begins, before a caller was told anything. So that beginning is dropped, and
the same prompt, which the cache has, is answered under a grammar of framed calls. Invariant: an answer that begins otherwise is
what it would have been.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import regex

from agentrt.backend import Backend
from agentrt.request import FinishReason, GrammarSpec, TokenDelta, Usage
from agentrt.server.in_parts import InParts, Joint, Sample, summed


@dataclass(frozen=True, slots=True)
class Unframed:
    """How to know a call that lacks its frame, and what is put in its place.

    Attributes:
        beginnings: How an answer begins that is one, each by itself.
        framed: The grammar of calls in their frame.
    """

    beginnings: tuple[regex.Pattern[str], ...]
    framed: GrammarSpec


class FramedCalls(InParts):
    """Stands before a backend for the requests of one call."""

    def __init__(self, backend: Backend, unframed: Unframed) -> None:
        """Makes it.

        Args:
            backend: Where both parts go.
            unframed: What is begun anew.
        """
        super().__init__(backend)
        self.unframed = unframed

    def sample(self, joint: Joint, index: int) -> Sample:
        """See `InParts.sample`."""
        return _CallingSample(self, joint, index)


class _CallingSample(Sample):
    def __init__(self, owner: FramedCalls, joint: Joint, index: int) -> None:
        super().__init__(owner.backend, joint, index)
        self._unframed = owner.unframed
        self._text = ""
        self._held: list[TokenDelta] | None = []  # what may yet be dropped; None once it is certain that it stays
        self._again = False
        self._begun = Usage()

    def begin(self) -> None:
        """Submits the request as it is."""
        request = self.joint.request
        self.submit(request.prompt_ids, request.sampling, self._on_beginning)

    def _on_beginning(self, delta: TokenDelta) -> None:
        if delta.error is not None:
            self.joint.fail(delta.error)
        elif self._again:
            self._when_ended(delta)
        elif self._held is None:
            self._pass(delta)
        else:
            self._hold(delta, self._held)

    def _hold(self, delta: TokenDelta, held: list[TokenDelta]) -> None:
        held.append(delta)
        self._text += delta.text
        found = [match for beginning in self._unframed.beginnings if (match := beginning.match(self._text, partial=True))]
        if delta.finish_reason is None and found:
            if not all(match.partial for match in found):
                self._again = True
                self.end_part()
            return
        self._held = None
        for each in held:
            self._pass(each)

    def _pass(self, delta: TokenDelta) -> None:
        if delta.usage is not None:
            self.joint.finish(self.mine(delta), delta.usage)
        else:
            self.joint.tell(self.mine(delta))

    def _when_ended(self, delta: TokenDelta) -> None:
        """Submits the call in its frame once the beginning is out of the engine."""
        if delta.usage is None:
            return
        if self.aborted:
            self.joint.finish(replace(self.mine(delta), token_ids=(), forced=(), text="", finish_reason=FinishReason.ABORT), delta.usage)
            return
        self._begun = replace(delta.usage, completion_tokens=0, forced_tokens=0)
        request = self.joint.request
        self.submit_next(request.prompt_ids, request.sampling.replace(grammar=self._unframed.framed), self._on_call)

    def _on_call(self, delta: TokenDelta) -> None:
        if delta.error is not None:
            self.joint.fail(delta.error)
        elif delta.usage is not None:
            self.joint.finish(self.mine(delta), summed([self._begun, delta.usage]))
        else:
            self.joint.tell(self.mine(delta))
