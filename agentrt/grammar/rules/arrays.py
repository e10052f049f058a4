"""Keywords about arrays and their items."""

from __future__ import annotations

import itertools
from typing import Any

from agentrt.grammar.complement import TYPES, type_of
from agentrt.grammar.rewriter import IN_PLACE, Place, Rewriter
from agentrt.grammar.rules.counts import count_of
from agentrt.grammar.rules.values import expressible


def items(work: Rewriter, place: Place, keyword: str, value: Any) -> None:
    """`items`: one schema for all, or, in older drafts, a list."""
    if isinstance(value, list):
        if not place.scope.dialect.items_list:
            raise work.reject(place, keyword, "is a list; in 2020-12 that is prefixItems")
        place.out["prefixItems"] = [work.inside(place, part, "items", i) for i, part in enumerate(value)]
        work.enforced(place, keyword)
        return
    place.out["items"] = work.inside(place, value, keyword)
    work.enforced(place, keyword)


def additional_items(work: Rewriter, place: Place, keyword: str, value: Any) -> None:
    """`additionalItems`: the `items` beyond a list of them."""
    if isinstance(place.schema.get("items"), list) and place.scope.dialect.items_list:
        place.out["items"] = work.inside(place, value, keyword)
        work.enforced(place, keyword)
    else:
        work.enforced(place, keyword, "without a list of items, asserts nothing")


def prefix_items(work: Rewriter, place: Place, keyword: str, value: Any) -> None:
    """`prefixItems`: goes over."""
    place.out[keyword] = [work.inside(place, part, keyword, i) for i, part in enumerate(work.schemas(place, keyword, value))]
    work.enforced(place, keyword)


def contains(work: Rewriter, place: Place, keyword: str, value: Any) -> None:
    """`contains`: CHECKED, but there must be as many items."""
    counted = not place.scope.dialect.ref_alone  # since 2019-09
    least = count_of(work, place, "minContains", place.schema.get("minContains", 1)) if counted else 1
    if least == 0 and "maxContains" not in place.schema:
        work.enforced(place, keyword, "at least 0 asserts nothing")
        return
    if 0 < least <= 5_000:
        place.also.append({"minItems": least})
    work.relax(place, keyword, "items are not counted by what they satisfy")


def unique_items(work: Rewriter, place: Place, keyword: str, value: Any) -> None:
    """`uniqueItems`: the arrangements of few values, else CHECKED."""
    most = place.schema.get("maxItems")
    if value is not True or (isinstance(most, int) and most <= 1):
        work.enforced(place, keyword, "asserts nothing here")
        return
    values = _few_values(place)
    if values is not None:
        place.also.append(_arrangements(values, place.schema))
        work.enforced(place, keyword, "rewritten as the arrangements of the values")
        return
    work.relax(place, keyword, "items are not compared with each other")


def unevaluated_items(work: Rewriter, place: Place, keyword: str, value: Any) -> None:
    """`unevaluatedItems`: the `items` that no other keyword speaks of, where that is certain."""
    schema = place.schema
    items = schema.get("items")
    listed = isinstance(items, list)
    if value is True or (items is not None and not listed) or (listed and "additionalItems" in schema):
        work.enforced(place, keyword, "all items are evaluated")
    elif any(k in schema for k in (*IN_PLACE, "contains")):
        work.relax(place, keyword, "which items are evaluated depends on the document")
    else:
        place.out["items"] = work.inside(place, value, keyword)
        work.enforced(place, keyword)


def _few_values(place: Place) -> list[Any] | None:
    """The values that items may have, if they are few and nothing else is said about them."""
    items = place.schema.get("items")
    if place.types() != {"array"} or not isinstance(items, dict) or not set(items) <= {"enum", "type", "title", "description"}:
        return None
    if "enum" not in items or set(place.schema) & {"prefixItems", "contains", *IN_PLACE}:
        return None
    values = items["enum"]
    named = items.get("type", TYPES)
    named = {named} if isinstance(named, str) else set(named)
    if "integer" in named or not isinstance(values, list) or not all(isinstance(v, str | int | None) and expressible(v) for v in values):
        return None
    values = [v for v in values if type_of(v) in named]
    distinct = [v for i, v in enumerate(values) if not any(type_of(v) == type_of(w) and v == w for w in values[:i])]
    return distinct if 0 < len(distinct) <= 4 else None


def _arrangements(values: list[Any], schema: dict[str, Any]) -> dict[str, Any]:
    low, high = schema.get("minItems", 0), schema.get("maxItems", len(values))
    lengths = range(int(low), min(int(high), len(values)) + 1)
    return {"enum": [list(order) for n in lengths for order in itertools.permutations(values, n)]}
