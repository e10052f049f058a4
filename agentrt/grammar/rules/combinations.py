"""Schemas joined by all, any, one, not and if: rewritten so that the engine's `anyOf` says the same, where that can be written."""

from __future__ import annotations

import math
from typing import Any

from agentrt.grammar.complement import complement, disjoint
from agentrt.grammar.rewriter import MAX_SPLITS, Place, Rewriter


def all_of(work: Rewriter, place: Place, keyword: str, value: Any) -> None:
    """`allOf`: goes over."""
    parts = [work.beside(place, part, keyword, i) for i, part in enumerate(work.schemas(place, keyword, value))]
    place.out.setdefault("allOf", []).extend(parts)
    work.enforced(place, keyword)


def any_of(work: Rewriter, place: Place, keyword: str, value: Any) -> None:
    """`anyOf`: goes over."""
    parts = [work.beside(place, part, keyword, i) for i, part in enumerate(work.schemas(place, keyword, value))]
    place.also.append({"anyOf": parts} if parts else False)
    work.enforced(place, keyword)


def one_of(work: Rewriter, place: Place, keyword: str, value: Any) -> None:
    """`oneOf`: an `anyOf`, where the options exclude each other or can be set apart."""
    options = work.schemas(place, keyword, value)
    clashes = [(i, j) for i in range(len(options)) for j in range(i) if not disjoint(options[i], options[j], place.scope)]
    parts: list[Any] = [work.beside(place, option, keyword, i) for i, option in enumerate(options)]
    if not clashes:
        place.also.append({"anyOf": parts} if parts else False)
        work.enforced(place, keyword, "the options exclude each other, so anyOf says the same")
        return
    apart = _set_apart(work, place, options, parts, clashes)
    place.also.append({"anyOf": apart or parts})
    if apart is None:
        work.relax(place, keyword, "options may hold together; that exactly one does is not followed")
    else:
        work.enforced(place, keyword, "rewritten: each option without those it may clash with")


def _set_apart(work: Rewriter, place: Place, options: list[Any], parts: list[Any], clashes: list[tuple[int, int]]) -> list[Any] | None:
    """Each option and the complements of those that it may clash with."""
    opposites: dict[int, Any] = {}
    for index in sorted({i for clash in clashes for i in clash}):
        opposite = complement(options[index], place.scope)
        made = None if opposite is None else work.exactly_made(place, opposite)
        if made is None or len(options) > 8:
            return None
        opposites[index] = made
    apart = []
    for index, part in enumerate(parts):
        others = [opposites[j] for pair in clashes if index in pair for j in pair if j != index]
        apart.append({"allOf": [part, *others]} if others else part)
    return apart


def not_(work: Rewriter, place: Place, keyword: str, value: Any) -> None:
    """`not`: the opposite, where it can be written."""
    opposite = complement(value, place.scope)
    made = None if opposite is None else work.exactly_made(place, opposite)
    if made is None:
        work.relax(place, keyword, "the opposite of this schema cannot be written")
        return
    if made is not True:
        place.also.append(made)
    work.enforced(place, keyword, "rewritten as the opposite")


def if_(work: Rewriter, place: Place, keyword: str, value: Any) -> None:
    """`if`, `then` and `else`: two cases."""
    then, other = place.schema.get("then", True), place.schema.get("else", True)
    if then is True and other is True:
        work.enforced(place, keyword, "without then and else, asserts nothing")
        return
    opposite = complement(value, place.scope)
    yes, no = work.exactly_made(place, value), None if opposite is None else work.exactly_made(place, opposite)
    if yes is None or no is None:
        place.also.append({"anyOf": [work.made(place, then), work.made(place, other)]})
        work.relax(place, keyword, "the condition's opposite cannot be written")
        return
    made_then = work.beside(place, then, "then") if "then" in place.schema else True
    made_else = work.beside(place, other, "else") if "else" in place.schema else True
    options = [{"allOf": [yes, made_then]}, {"allOf": [no, made_else]}]
    split(work, place, keyword, options, "rewritten as two cases")


def split(work: Rewriter, place: Place, keyword: str, options: list[Any], why: str) -> None:
    """Adds a choice, unless the choices of this object multiply too far."""
    ways = math.prod(len(part["anyOf"]) for part in place.also if isinstance(part, dict) and "anyOf" in part)
    if ways * len(options) > MAX_SPLITS:
        work.relax(place, keyword, f"it would split the object in more than {MAX_SPLITS} ways")
        return
    place.also.append({"anyOf": options})
    work.enforced(place, keyword, why)
