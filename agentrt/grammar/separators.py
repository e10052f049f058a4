"""How JSON is written: fixed separators, no free whitespace, and no two spellings of one property's name.

Whitespace decides how much of a document is forced, and a weak model that may write any amount of it never stops.
"""

from __future__ import annotations

import re
from typing import Any

ITEM = ", "
KEY = ": "

SEPARATORS = {"item_separator": ITEM, "key_separator": KEY, "whitespace_flexible": False}
_CONTROL = re.compile(r"[\x00-\x07\x0b\x0e-\x1f\x7f]")


def json_options(schema: Any) -> dict[str, Any]:
    """Llguidance's options for a normalised schema.

    An object that names some properties and is open to others is a trap: llguidance would read ``"\\u0061"`` as another
    name than ``"a"``, and let it past the schema of ``a``. Where there is such an object, ``\\uXXXX`` is not written at
    all; what cannot be written then are control characters, which have no other spelling.
    """
    return {**SEPARATORS, "json_allowed_escapes": 'nrbtf\\"'} if has_open_object(schema) else SEPARATORS


def has_open_object(schema: Any) -> bool:
    """Whether some object names properties, or patterns of them, and is open to others."""
    stack = [schema]
    while stack:
        node = stack.pop()
        if isinstance(node, dict):
            named = node.get("properties") or node.get("patternProperties") or node.get("required")
            if named and node.get("additionalProperties") is not False:
                return True
            stack.extend(value for key, value in node.items() if key != "enum")
        elif isinstance(node, list):
            stack.extend(node)
    return False


def has_control_literal(schema: Any) -> bool:
    """Whether some value or name that a normalised schema spells out holds a character that only ``\\uXXXX`` can write."""
    stack: list[tuple[Any, bool]] = [(schema, False)]
    while stack:
        node, literal = stack.pop()
        if isinstance(node, dict):
            if any(map(_CONTROL.search, node)):
                return True
            stack.extend((value, literal or key == "enum") for key, value in node.items())
        elif isinstance(node, list):
            stack.extend((value, literal) for value in node)
        elif literal and isinstance(node, str) and _CONTROL.search(node):
            return True
    return False
