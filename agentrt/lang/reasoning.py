"""Splits a reasoning model's thinking from its answer while both stream.

It looks for the family's own marks in the text as it comes, holding back what may be the beginning of one. It knows
nothing of tokens or requests. Invariant: every character but the marks goes to exactly one of the two, in order.
"""

from __future__ import annotations

from collections.abc import Callable

from agentrt.errors import UserError

#: Family -> (mark that opens the thinking, mark that ends it, whether the answer begins inside the thinking).
FAMILIES: dict[str, tuple[str, str, bool]] = {
    "deepseek-r1": ("<think>", "</think>", True),
    "deepseek-v3": ("<think>", "</think>", False),
    "qwen3": ("<think>", "</think>", False),
    "qwen3-thinking": ("<think>", "</think>", True),
    "glm45": ("<think>", "</think>", False),
    "kimi": ("◁think▷", "◁/think▷", False),
    "step3": ("<think>", "</think>", True),
    "mistral": ("[THINK]", "[/THINK]", False),
}


def known_family(name: str) -> str:
    """Returns the family's name in its known spelling.

    Raises:
        UserError: It is not known.
    """
    family = name.lower()
    if family not in FAMILIES:
        raise UserError(f"unknown model_type {name!r}; known are {', '.join(sorted(FAMILIES))}", param="model_type")
    return family


class ReasoningSplitter:
    """Takes text as it comes and hands on thinking and answer; see the module's text."""

    def __init__(self, family: str, think: Callable[[str], None], say: Callable[[str], None]) -> None:
        self._open, self._close, self._thinking = FAMILIES[family]
        self._think, self._say = think, say
        self._held = ""
        self._began = False
        self._thoughts: list[str] = []
        self._answers: list[str] = []

    def push(self, text: str) -> None:
        """Takes the next text."""
        self._held += text
        while self._step():
            pass

    def finish(self) -> None:
        """Hands on what was held back; nothing follows."""
        held, self._held = self._held, ""
        self._give(held)

    @property
    def reasoning(self) -> str:
        """The thinking so far."""
        return "".join(self._thoughts)

    @property
    def answer(self) -> str:
        """The answer so far."""
        return "".join(self._answers)

    def _step(self) -> bool:
        """Hands on what is certain; True if a mark was passed and more may be."""
        mark = self._close if self._thinking else self._open
        before, found, after = self._held.partition(mark)
        if found:
            self._give(before)
            self._thinking = not self._thinking
            self._held = after.lstrip("\n")
            return bool(self._held)
        if self._thinking and not self._began and self._held.lstrip().startswith(self._open):
            self._held = self._held.lstrip()[len(self._open) :].lstrip("\n")
            self._began = True
            return bool(self._held)
        certain = len(self._held) - _overlap(self._held, mark)
        if self._thinking and not self._began and self._open.startswith(self._held.lstrip()):
            return False
        self._give(self._held[:certain])
        self._held = self._held[certain:]
        return False

    def _give(self, text: str) -> None:
        if not text:
            return
        if self._thinking:
            text = text if self._thoughts else text.lstrip("\n")
            self._began = True
            self._thoughts.append(text)
            self._think(text)
        else:
            if not self._answers:
                text = text.lstrip("\n")
            self._answers.append(text)
            self._say(text)


def _overlap(text: str, mark: str) -> int:
    """Length of the longest end of `text` that begins `mark`."""
    return next((n for n in range(min(len(text), len(mark) - 1), 0, -1) if mark.startswith(text[-n:])), 0)
