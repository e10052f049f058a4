"""Keywords about any value: its type, and the values that it may be.

Numbers in values go over only where the engine writes them as Python does; others leave their keyword to the final check.
"""

from __future__ import annotations

import math
from typing import Any

from agentrt.grammar.complement import TYPES
from agentrt.grammar.rewriter import Place, Rewriter
from agentrt.grammar.rules.numbers import EXACT


def type_(work: Rewriter, place: Place, keyword: str, value: Any) -> None:
    """`type`: goes over as it is."""
    named = [value] if isinstance(value, str) else value
    allowed = (*TYPES, "integer")
    if not isinstance(named, list) or not named or not all(isinstance(n, str) and n in allowed for n in named):
        raise work.reject(place, keyword, f"is {value!r}; it must be one of {', '.join(allowed)}, or a list of them")
    place.out["type"] = value
    work.enforced(place, keyword)


def enum(work: Rewriter, place: Place, keyword: str, value: Any) -> None:
    """`enum`: goes over with whole numbers written as such."""
    if not isinstance(value, list):
        raise work.reject(place, keyword, f"is {str(value)[:60]!r}; it must be a list")
    place.scope.spend(150 * sum(isinstance(v, list | dict) for v in value), place.pointer, keyword)
    values = [whole_numbers(v) for v in value]
    exact = [v for v in values if expressible(v)]
    if len(exact) < len(values):
        work.relax(place, keyword, "a number in it is beyond the engine's exact range")
        return
    place.also.append({"enum": exact} if exact else False)
    work.enforced(place, keyword)


def const(work: Rewriter, place: Place, keyword: str, value: Any) -> None:
    """`const`: becomes an enum of one value."""
    if not expressible(whole_numbers(value)):
        work.relax(place, keyword, "a number in it is beyond the engine's exact range")
        return
    place.also.append({"enum": [whole_numbers(value)]})
    work.enforced(place, keyword)


def whole_numbers(value: Any) -> Any:
    """Writes 2.0 as 2, everywhere inside."""
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e18:
        return int(value)
    if isinstance(value, list):
        return [whole_numbers(v) for v in value]
    if isinstance(value, dict):
        return {k: whole_numbers(v) for k, v in value.items()}
    return value


def expressible(value: Any) -> bool:
    """Whether every number inside is one that the engine writes as Python does."""
    if isinstance(value, list):
        return all(map(expressible, value))
    if isinstance(value, dict):
        return all(map(expressible, value.values()))
    if isinstance(value, int) and not isinstance(value, bool):
        return abs(value) <= EXACT
    return not isinstance(value, float) or (math.isfinite(value) and "e" not in repr(value))
