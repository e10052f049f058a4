"""An answer as a row of blocks, each opened, grown and closed while it streams: the form of responses and of messages.

Invariant: at most one block is open, and blocks are closed in the order in which they were opened.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from agentrt.server.answers import Heard, SampleAnswer

Kind = Literal["thought", "text", "call"]


@dataclass(slots=True)
class Block:
    """A stretch of thinking, a stretch of text, or a call.

    Attributes:
        kind: Which of these.
        index: Its place in the row.
        text: Its text, or the JSON text of the call's arguments.
        name, call_id: Of the call.
    """

    kind: Kind
    index: int
    text: str = ""
    name: str = ""
    call_id: str = ""


@dataclass(frozen=True, slots=True)
class Change:
    """What happened to a block; `grown` is the text that was added."""

    what: Literal["open", "grow", "close"]
    block: Block
    grown: str = ""


class BlockRow:
    """The blocks of one answer."""

    def __init__(self) -> None:
        self.blocks: list[Block] = []
        self._open: Block | None = None

    def hear(self, heard: Iterable[Heard]) -> Iterator[Change]:
        """What the events change."""
        for event in heard:
            if event.kind == "call":
                yield from self._begin("call", event.text, event.call_id)
                continue
            kind: Kind = "call" if event.kind == "arguments" else event.kind
            if self._open is None or self._open.kind != kind:
                yield from self._begin(kind)
            block = self.blocks[-1]
            block.text += event.text
            yield Change("grow", block, event.text)

    def _begin(self, kind: Kind, name: str = "", call_id: str = "") -> Iterator[Change]:
        yield from self.close()
        self._open = Block(kind, len(self.blocks), name=name, call_id=call_id)
        self.blocks.append(self._open)
        yield Change("open", self._open)

    def close(self) -> Iterator[Change]:
        """Closes the block that is open."""
        if self._open is not None:
            block, self._open = self._open, None
            yield Change("close", block)


def blocks_of(answer: SampleAnswer) -> list[Block]:
    """The blocks of a whole answer."""
    row = BlockRow()
    heard = [Heard("thought", answer.thoughts)] if answer.thoughts else []
    heard += [Heard("text", answer.text)] if answer.text else []
    for index, call in enumerate(answer.calls):
        heard += [Heard("call", call.name, index, call.id), Heard("arguments", call.arguments, index, call.id)]
    list(row.hear(heard))
    return row.blocks
