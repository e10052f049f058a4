"""How a call begins that lacks its frame: as a bare JSON object, or in a markdown fence. Small models write both.

One expression for the grammar, which makes what follows a constrained call, and for the reader, which tells it as one. It is
matched at the beginning of an answer alone. Invariant: no JSON is taken for a call but an object whose first two keys are a
call's, and it is read as one only if it names a tool that is offered.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import regex

#: What may stand before a call's object; blanks are bounded, so that a model cannot write them for ever.
FENCE = r"```(json|tool_call)?\n"

#: Between the parts of a call's object.
BLANKS = r"[ \n]{0,12}"


def bare_head(name: str, name_key: str, arguments_key: str, *, escape: Callable[[str], str], fenced: bool) -> str:
    """An expression of a call's text up to its arguments, in what Rust's and Python's engines read alike.

    Args:
        name: Of the tool.
        name_key, arguments_key: Of the call's object.
        escape: Writes a text as an expression of itself.
        fenced: It stands in a fence.
    """
    return _head(escape(_quoted(name)), name_key, arguments_key, escape=escape, fenced=fenced)


@dataclass(frozen=True, slots=True)
class BareCalls:
    """How answers begin that are calls without a frame.

    Attributes:
        offered: Up to the arguments of a call of a tool that is offered.
        misnamed: Into the arguments of a call of a tool that is not; small models shorten a name, or make one up.
    """

    offered: regex.Pattern[str]
    misnamed: regex.Pattern[str]


def bare_calls(names: Iterable[str], name_key: str, arguments_key: str) -> BareCalls:
    """The expressions for tools of these names; the keys are those of a call's object."""
    offered = [re.escape(_quoted(name)) for name in names]
    other = rf'(?!{"|".join(offered)})"(?:[^"\\\n]|\\.){{1,64}}"'

    def both(name: str) -> str:
        heads = (_head(name, name_key, arguments_key, escape=re.escape, fenced=fenced) for fenced in (False, True))
        return "|".join(f"(?:{head})" for head in heads)

    return BareCalls(regex.compile(both(f"(?:{'|'.join(offered)})")), regex.compile(rf"(?:{both(other)})\{{"))


def _head(name: str, name_key: str, arguments_key: str, *, escape: Callable[[str], str], fenced: bool) -> str:
    key, arguments = (escape(_quoted(text)) for text in (name_key, arguments_key))
    return (FENCE if fenced else "") + BLANKS.join([r"\{", key, ":", name, ",", arguments, ":"]) + "[ ]?"


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
