"""One sample's text, as it comes, told apart: thinking, text, and calls of tools; and added up to the whole answer.

Invariant: streamed and added up, the same text gives the same answer, because there is only this one way.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field
from typing import Literal

from agentrt.request import FinishReason, TokenDelta, TokenLogprob
from agentrt.server.thinking import ThinkingMarks, ThinkingSplitter
from agentrt.text.tool_format import ArgumentsGrown, CallBegun, Event, Reader, Said


@dataclass(frozen=True, slots=True)
class Heard:
    """One thing that became certain.

    Attributes:
        kind: "thought" and "text" carry text; "call" the name of a tool, "arguments" a piece of a call's JSON text.
        text: The text, name or piece.
        index: Of the call, from 0.
        call_id: Of the call.
    """

    kind: Literal["thought", "text", "call", "arguments"]
    text: str
    index: int = -1
    call_id: str = ""


@dataclass(slots=True)
class ToolCall:
    """A call that is being written."""

    id: str
    name: str
    arguments: str = ""


@dataclass(slots=True)
class SampleAnswer:
    """One of the n answers, added up as it comes.

    Attributes:
        reader: Tells calls from text; None where no tools were offered.
        thinking: Tells thinking from the answer; None for a model that does not think.
    """

    reader: Reader | None = None
    thinking: ThinkingSplitter | None = None
    text: str = ""
    thoughts: str = ""
    calls: list[ToolCall] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    forced_tokens: int = 0
    thinking_tokens: int = 0
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: tuple[TokenLogprob, ...] | None = None
    finish_reason: FinishReason | None = None
    stop_match: str | int | None = None

    def add(self, delta: TokenDelta) -> list[Heard]:
        """Adds a delta; returns what became certain."""
        self.token_ids.extend(delta.token_ids)
        self.forced_tokens += sum(delta.forced)
        if self.thinking is not None and self.thinking.inside:
            self.thinking_tokens += len(delta.token_ids)
        self.logprobs.extend(delta.logprobs or ())
        if delta.prompt_logprobs is not None:
            self.prompt_logprobs = delta.prompt_logprobs
        heard = self._hear(delta.text)
        if delta.finish_reason is not None:
            self.finish_reason, self.stop_match = delta.finish_reason, delta.stop_match
            heard += self._finish()
        return heard

    def _hear(self, text: str) -> list[Heard]:
        if not text:
            return []
        if self.thinking is None:
            return self._say(text)
        thought, said = self.thinking.feed(text)
        return self._think(thought) + self._say(said)

    def _finish(self) -> list[Heard]:
        heard: list[Heard] = []
        if self.thinking is not None:
            thought, said = self.thinking.finish()
            heard = self._think(thought) + self._say(said)
        if self.reader is not None:
            heard += [self._take(event) for event in self.reader.finish()]
        return heard

    def _think(self, text: str) -> list[Heard]:
        self.thoughts += text
        return [Heard("thought", text)] if text else []

    def _say(self, text: str) -> list[Heard]:
        if not text:
            return []
        events: list[Event] = [Said(text)] if self.reader is None else self.reader.feed(text)
        return [self._take(event) for event in events]

    def _take(self, event: Event) -> Heard:
        if isinstance(event, CallBegun):
            self.calls.append(ToolCall(f"call_{secrets.token_hex(12)}", event.name))
            return Heard("call", event.name, event.index, self.calls[-1].id)
        if isinstance(event, ArgumentsGrown):
            self.calls[event.index].arguments += event.text
            return Heard("arguments", event.text, event.index, self.calls[event.index].id)
        self.text += event.text
        return Heard("text", event.text)


def new_splitter(marks: ThinkingMarks | None, *, inside: bool) -> ThinkingSplitter | None:
    """A splitter for one answer of a model that thinks between `marks`."""
    return None if marks is None else ThinkingSplitter(marks, inside=inside)
