"""Keywords about objects and the properties that they name."""

from __future__ import annotations

from typing import Any

from agentrt.grammar.evaluated import Evaluated, evaluated
from agentrt.grammar.rewriter import Place, Rewriter
from agentrt.grammar.rules.strings import pattern_core


def required(work: Rewriter, place: Place, keyword: str, value: Any) -> None:
    """`required`: goes over."""
    if isinstance(value, bool):
        work.enforced(place, keyword, "draft 3's form; asserts nothing")
        return
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise work.reject(place, keyword, f"is {str(value)[:60]!r}; it must be a list of names")
    place.out[keyword] = list(dict.fromkeys(value))
    work.enforced(place, keyword)


def properties(work: Rewriter, place: Place, keyword: str, value: Any) -> None:
    """`properties`: goes over."""
    place.out[keyword] = {
        name: work.inside(place, part, keyword, name) for name, part in work.named_schemas(place, keyword, value).items()
    }
    work.enforced(place, keyword)


def pattern_properties(work: Rewriter, place: Place, keyword: str, value: Any) -> None:
    """`patternProperties`: goes over if every pattern is an automaton's."""
    named = work.named_schemas(place, keyword, value)
    cores = {pattern: pattern_core(work, place, keyword, pattern) for pattern in named}
    if all(exact for _, exact in cores.values()):
        kept = {core: work.inside(place, named[pattern], keyword, pattern) for pattern, (core, _) in cores.items() if core}
        if kept:
            place.out[keyword] = kept
        work.enforced(place, keyword)
    else:
        place.open_names = True
        work.relax(place, keyword, "a name pattern is beyond an automaton")


def additional_properties(work: Rewriter, place: Place, keyword: str, value: Any) -> None:
    """`additionalProperties`: goes over if it is certain which names are additional."""
    loose = isinstance(place.schema.get("patternProperties"), dict) and (
        "patternProperties" in work.relaxed
        or any(not pattern_core(work, place, "patternProperties", p)[1] for p in place.schema["patternProperties"])
    )
    if loose:
        work.relax(place, keyword, "which names are additional depends on patterns beyond an automaton")
        return
    place.out[keyword] = work.inside(place, value, keyword)
    work.enforced(place, keyword)


def unevaluated_properties(work: Rewriter, place: Place, keyword: str, value: Any) -> None:
    """`unevaluatedProperties`: an object closed to what other keywords evaluate."""
    seen = evaluated(place.schema, place.scope)
    if value is True or seen.everything:
        work.enforced(place, keyword, "all names are evaluated")
        return
    closing = _closed_to_seen(work, place, seen, value)
    if closing is None:
        work.relax(place, keyword, "which names are evaluated depends on the document")
        return
    place.also.append(closing)
    if seen.depends:
        work.relax(place, keyword, "which names are evaluated depends on the document")
    else:
        work.enforced(place, keyword, "rewritten as additionalProperties")


def _closed_to_seen(work: Rewriter, place: Place, seen: Evaluated, value: Any) -> dict[str, Any] | None:
    """An object of the names that may be evaluated, and of `value` for all others."""
    if seen.maybe_everything:
        return None
    cores = [pattern_core(work, place, "patternProperties", pattern) for pattern in seen.patterns]
    if any(not exact for _, exact in cores):
        return None
    patterns: dict[str, Any] = {core: {} for core, _ in cores if core}
    names: dict[str, Any] = {name: {} for name in seen.names}
    rest = work.inside(place, value, "unevaluatedProperties")
    return {"properties": names, **({"patternProperties": patterns} if patterns else {}), "additionalProperties": rest}
