"""`propertyNames`, rewritten as the patterns and names that an object may have."""

from __future__ import annotations

from typing import Any

from agentrt.grammar import regex_syntax
from agentrt.grammar.rewriter import Place, Rewriter
from agentrt.grammar.rules.counts import count_of
from agentrt.grammar.rules.strings import pattern_core


def property_names(work: Rewriter, place: Place, keyword: str, value: Any) -> None:
    """`propertyNames`: becomes an object of such names."""
    rule = _names_rule(value, work, place)
    if rule is None:
        work.relax(place, keyword, "names are constrained only by pattern, length, enum and const")
        return
    if rule:
        place.also.append(rule)
    work.enforced(place, keyword, "rewritten as patternProperties")


def _names_rule(value: Any, work: Rewriter, place: Place) -> dict[str, Any] | None:
    """The object whose names satisfy `value`; {} for any, None if that cannot be said."""
    if value is True or value == {}:
        return {}
    if value is False:
        return {"properties": {}, "additionalProperties": False}
    if not isinstance(value, dict) or not set(value) <= {"type", "pattern", "minLength", "maxLength", "enum", "const", "title", "description"}:
        return None
    if value.get("type", "string") != "string":
        return None
    if "enum" in value or "const" in value:
        names = value.get("enum", [value.get("const")])
        if set(value) & {"pattern", "minLength", "maxLength"}:
            return None
        return {"properties": {n: {} for n in names if isinstance(n, str)}, "additionalProperties": False}
    low, high = value.get("minLength", 0), value.get("maxLength")
    if "pattern" in value:
        core, exact = pattern_core(work, place, "propertyNames", value["pattern"])
        if not exact or core is None or low or high is not None:
            return None
        return {"patternProperties": {core or "^": {}}, "additionalProperties": False}
    if not low and high is None:
        return {}
    low, high = count_of(work, place, "minLength", low), None if high is None else count_of(work, place, "maxLength", high)
    text = regex_syntax.write(regex_syntax.Repeat(regex_syntax.ANY_CHAR, low, high))
    return {"patternProperties": {f"^(?:{text})$": {}}, "additionalProperties": False}
