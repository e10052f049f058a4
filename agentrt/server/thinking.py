"""Tells a reasoning model's thinking from its answer while the text streams.

Invariant: every character but the marks, and the blank lines around them, goes to exactly one of the two, in order.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ThinkingMarks:
    """What a model writes before and after its thinking."""

    open: str
    close: str


#: Known marks; a model is taken to think if its chat template writes them.
KNOWN_MARKS = (ThinkingMarks("<think>", "</think>"), ThinkingMarks("[THINK]", "[/THINK]"), ThinkingMarks("◁think▷", "◁/think▷"))


def guess_marks(turns: str) -> ThinkingMarks | None:
    """The marks in what a chat template renders; None if the model does not think."""
    return next((marks for marks in KNOWN_MARKS if marks.open in turns), None)


class ThinkingSplitter:
    """Takes text as it comes."""

    def __init__(self, marks: ThinkingMarks, *, inside: bool) -> None:
        """Begins an answer; `inside`: the prompt has already opened the thinking."""
        self._marks = marks
        self._held = ""
        self._told = inside  # whether it is known if there is any thinking
        self._trim = inside  # line ends beside a mark belong to it
        self.inside = inside

    def feed(self, text: str) -> tuple[str, str]:
        """Returns what is certain now: (thinking, answer)."""
        self._held += text
        if not self._told and not self._tell():
            return "", ""
        if not self.inside:
            return "", self._take(len(self._held))
        thought, found, after = self._held.partition(self._marks.close)
        if not found:
            certain = len(self._held) - _overlap(self._held, self._marks.close)
            return self._take(len(self._held[:certain].rstrip("\n"))), ""
        self._held = thought.rstrip("\n")
        thought = self._take(len(self._held))
        self.inside, self._trim, self._held = False, True, after
        return thought, self._take(len(after))

    def _tell(self) -> bool:
        """Decides by the first characters whether there is any thinking; False while it cannot be told."""
        start = self._held.lstrip()
        if start.startswith(self._marks.open):
            self._held = start[len(self._marks.open) :]
            self.inside = self._trim = True
        elif self._marks.open.startswith(start):
            return False
        self._told = True
        return True

    def _take(self, count: int) -> str:
        taken, self._held = self._held[:count], self._held[count:]
        if self._trim:
            taken = taken.lstrip("\n")
            self._trim = not taken
        return taken

    def finish(self) -> tuple[str, str]:
        """The answer is over: returns what was held back."""
        rest = self._take(len(self._held))
        return (rest, "") if self.inside else ("", rest)


def _overlap(text: str, mark: str) -> int:
    """Length of the longest ending of `text` that begins `mark`."""
    return next((n for n in range(min(len(text), len(mark) - 1), 0, -1) if mark.startswith(text[-n:])), 0)
