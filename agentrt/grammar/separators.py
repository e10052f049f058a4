"""How JSON is written: fixed separators and no free whitespace.

Whitespace decides how much of a document is forced, and a weak model that may write any amount of it never stops.
"""

from __future__ import annotations

ITEM = ", "
KEY = ": "

#: llguidance's options for a JSON grammar; they go beside the schema.
SEPARATORS = {"item_separator": ITEM, "key_separator": KEY, "whitespace_flexible": False}
