"""The ledger: for each keyword of a constraint, what is done about it. It decides nothing; `normalize.py` writes it.

A keyword is ENFORCED (no token that breaks it can be sampled), CHECKED (the finished document is validated, and
generated anew within a bound if it fails) or REJECTED (the request is refused). Nothing is dropped in silence.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Standing(StrEnum):
    """What is done about a keyword."""

    ENFORCED = "ENFORCED"
    CHECKED = "CHECKED"
    REJECTED = "REJECTED"


@dataclass(frozen=True, slots=True)
class Entry:
    """One keyword of the constraint.

    Attributes:
        pointer: JSON pointer of the schema that holds it ("" is the root), or an offset in a pattern.
        keyword: The keyword.
        standing: What is done about it.
        why: How, or why not, in a few words.
    """

    pointer: str
    keyword: str
    standing: Standing
    why: str = ""


Ledger = tuple[Entry, ...]


def checked(ledger: Ledger) -> Ledger:
    """The entries that only the final check decides."""
    return tuple(entry for entry in ledger if entry.standing is Standing.CHECKED)
