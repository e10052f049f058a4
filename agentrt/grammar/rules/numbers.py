"""Keywords about numbers: bounds, and what they are multiples of, drawn in to what llguidance writes exactly."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

from agentrt.grammar.ledger import Entry, Standing
from agentrt.grammar.rewriter import Place, Rewriter

#: Whole numbers beyond this are not exact in llguidance, which reads bounds as doubles.
EXACT = 2**53


def bound(work: Rewriter, place: Place, keyword: str, value: Any) -> None:
    """`minimum`, `maximum` and the exclusive ones, draft 4's flags among them."""
    if keyword.startswith("exclusive") and place.scope.dialect.name == "draft-04":
        if not isinstance(value, bool):
            raise work.reject(place, keyword, f"is {value!r}; in draft-04 it must be true or false")
        work.enforced(place, keyword, f"taken together with {keyword.removeprefix('exclusive').lower()}")
        return
    number = number_of(work, place, keyword, value)
    if abs(number) >= EXACT:
        work.relax(place, keyword, f"{str(value)[:30]} is beyond the engine's exact range")
        return
    flag = {"minimum": "exclusiveMinimum", "maximum": "exclusiveMaximum"}.get(keyword)
    written = flag if flag and place.schema.get(flag) is True else keyword
    place.out[written] = number
    work.bounds.append((place, written, number))
    work.enforced(place, keyword)


def multiple_of(work: Rewriter, place: Place, keyword: str, value: Any) -> None:
    """`multipleOf`: goes over, or becomes a choice of how many decimals there are."""
    number = number_of(work, place, keyword, value)
    if number <= 0:
        raise work.reject(place, keyword, f"is {value!r}; it must be above 0")
    steps = _steps(number)
    if not steps:
        work.relax(place, keyword, f"{str(value)[:30]} is beyond what the engine multiplies exactly")
    elif len(steps) == 1:
        place.out[keyword] = steps[0]
        work.enforced(place, keyword)
    else:
        options = [{keyword: step, **_on_grid(place.schema, step)} for step in steps]
        place.also.append({"anyOf": [options[0], *({"type": "number", **option} for option in options[1:])]})
        work.enforced(place, keyword, "rewritten as a choice of how many decimals there are")


def number_of(work: Rewriter, place: Place, keyword: str, value: Any) -> int | float:
    """The number that a keyword gives, 2.0 as 2; refused if it is none."""
    if isinstance(value, bool) or not isinstance(value, int | float) or (isinstance(value, float) and not math.isfinite(value)):
        raise work.reject(place, keyword, f"is {value!r}; it must be a number")
    return int(value) if isinstance(value, float) and value.is_integer() else value


def note_wide_bounds(work: Rewriter) -> None:
    """Says CHECKED of bounds n < x with x < m and m < n + 1: there the engine takes the whole number n, too (and likewise below 0)."""
    for place, keyword, number in work.bounds:
        sign = {"exclusiveMinimum": 1, "exclusiveMaximum": -1}.get(keyword, 0)
        if not sign or not isinstance(number, int) or sign * number < 0 or place.types() == {"integer"}:
            continue
        ends = ("maximum", "exclusiveMaximum") if sign > 0 else ("minimum", "exclusiveMinimum")
        if any(k in ends and 0 < sign * (end - number) < 1 and (other is place or (other.joined and place.joined)) for other, k, end in work.bounds):
            work.ledger.append(Entry(place.pointer, keyword, Standing.CHECKED, f"the engine takes {number} itself, where what follows ends before {number + sign}"))


def _steps(step: float) -> list[int | float]:
    """What numbers with all, one fewer, ... and no decimals must be multiples of, to be multiples of `step`.

    The engine writes multiples of 0.01 with two decimals or none, and numbers within bounds without zeros at their end; so of
    both together it would never write 0.5. Empty if a step is beyond what it multiplies exactly.
    """
    exact = Fraction(repr(step))
    places = next((n for n in range(7) if (exact * 10**n).denominator == 1), None)
    if places is None:
        return []
    found: dict[int | float, None] = {}
    for n in range(places, -1, -1):
        least = Fraction(math.lcm(int(exact * 10**places), 10 ** (places - n)), 10**places)
        if not Fraction(1, 10**6) <= least <= 10**9:
            return []
        found[int(least) if least.denominator == 1 else float(least)] = None
    return list(found)


def _on_grid(schema: dict[str, Any], step: float) -> dict[str, int | float]:
    """The bounds beside a `multipleOf`, drawn in to the multiples of `step`: the engine writes no 99.9 below 99.99, but 99.90."""
    grid = Fraction(repr(step))
    found: dict[str, int | float] = {}
    for bound, sign in (("minimum", 1), ("maximum", -1)):
        exclusive = "exclusiveM" + bound[1:]
        ends = []
        for keyword in (bound, exclusive):
            end = schema.get(keyword)
            if isinstance(end, bool) or not isinstance(end, int | float) or not abs(end) < EXACT:
                continue
            multiples = math.ceil(sign * Fraction(repr(end)) / grid)
            if (keyword == exclusive or schema.get(exclusive) is True) and multiples * grid == sign * Fraction(repr(end)):
                multiples += 1
            ends.append(sign * multiples * grid)
        if ends:
            end = max(ends) if sign > 0 else min(ends)
            found[bound] = int(end) if end.denominator == 1 else float(end)
    return found
