"""How a call begins that lacks its frame: as a bare JSON object, or in a markdown fence. Small models write both.

One expression for the grammar, which makes what follows a constrained call, and for the reader, which tells it as one. It is
matched at the beginning of an answer alone. Invariant: it names a tool that is offered, so that no other JSON is taken for a call.
"""

from __future__ import annotations

import json
from collections.abc import Callable

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
    quoted = [escape(json.dumps(text, ensure_ascii=False)) for text in (name_key, name, arguments_key)]
    key, value, arguments = quoted
    parts = [r"\{", key, ":", value, ",", arguments, ":"]
    return (FENCE if fenced else "") + BLANKS.join(parts) + "[ ]?"
