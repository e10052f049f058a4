"""Keywords that count: characters, items, properties."""

from __future__ import annotations

import itertools
import math
from typing import Any

from agentrt.grammar.complement import TYPES
from agentrt.grammar.rewriter import IN_PLACE, MAX_SPLITS, Place, Rewriter
from agentrt.grammar.rules.numbers import number_of


def count_of(work: Rewriter, place: Place, keyword: str, value: Any) -> int:
    """The count that a keyword gives; refused if it is none."""
    number = number_of(work, place, keyword, value)
    if not isinstance(number, int) or number < 0:
        raise work.reject(place, keyword, f"is {value!r}; it must be a whole number of at least 0")
    return number


def length(work: Rewriter, place: Place, keyword: str, value: Any) -> None:
    """`minLength`, `maxLength`, `minItems`, `maxItems`, as far as the engine counts."""
    number = count_of(work, place, keyword, value)
    limit = 100_000 if keyword.endswith("Length") else 5_000
    if number > limit:
        work.relax(place, keyword, f"{number:,} is more than the engine counts ({limit:,})")
        return
    place.out[keyword] = max(number, place.out.get(keyword, 0)) if keyword == "minItems" else number
    work.enforced(place, keyword)


def properties_count(work: Rewriter, place: Place, keyword: str, value: Any) -> None:
    """`minProperties` and `maxProperties`: follow from other keywords, become a choice of names, or are CHECKED."""
    number = count_of(work, place, keyword, value)
    required, named = set(_names(place.schema.get("required"))), set(_names(place.schema.get("properties")))
    closed = place.schema.get("additionalProperties") is False and not place.schema.get("patternProperties")
    if (keyword == "minProperties" and number <= len(required)) or (keyword == "maxProperties" and closed and number >= len(named | required)):
        work.enforced(place, keyword, "follows from the other keywords")
    elif closed and _count_split(place, keyword, number):
        work.enforced(place, keyword, "rewritten as a choice of names")
    elif keyword == "maxProperties" and number == 0:
        place.also.append({"properties": {}, "additionalProperties": False})
        work.enforced(place, keyword)
    elif keyword == "maxProperties" and named <= required and not any(k in place.schema for k in IN_PLACE):
        place.out[keyword] = number
        work.enforced(place, keyword)
    else:
        work.relax(place, keyword, "the engine does not count names, of which one may come twice")
        if keyword == "minProperties" and named <= required and not any(k in place.schema for k in IN_PLACE):
            place.out[keyword] = number


def _names(value: Any) -> dict[str, None]:
    """The names in a list or an object, in order; none in what is malformed, which its own rule refuses."""
    return dict.fromkeys(name for name in value if isinstance(name, str)) if isinstance(value, list | dict) else {}


def _count_split(place: Place, keyword: str, number: int) -> bool:
    """Rewrites a count over few names, of a closed object, as a choice of which of them are there or not."""
    names = [*_names(place.schema.get("properties")), *_names(place.schema.get("required"))]
    names = list(dict.fromkeys(names))
    if keyword == "minProperties" and number > len(names):
        place.also.append({"type": [t for t in TYPES if t != "object"]})
        return True
    if math.comb(len(names), number) > MAX_SPLITS // 4 or any("anyOf" in part for part in place.also if isinstance(part, dict)):
        return False
    if keyword == "minProperties":
        options: list[dict[str, Any]] = [{"required": list(chosen)} for chosen in itertools.combinations(names, number)]
    else:
        absent = itertools.combinations(names, len(names) - number)
        options = [{"properties": dict.fromkeys(chosen, False)} for chosen in absent]
    place.also.append({"anyOf": options})
    return True
