"""References: each becomes one to a definition of ours, unless where it leads depends on the way taken to it."""

from __future__ import annotations

from typing import Any

from agentrt.grammar.rewriter import Place, Rewriter


def ref(work: Rewriter, place: Place, keyword: str, value: Any) -> None:
    """`$ref`, and `$dynamicRef` where it can lead to one place only."""
    if keyword == "$dynamicRef" and _moves(work, place, value):
        work.relax(place, keyword, "where it leads depends on the way taken to it")
        return
    target, scope, where = place.scope.look_up(value, place.pointer, keyword)
    if isinstance(target, bool):
        place.also.append(target)
    else:
        name = work.definition(target, scope, where)
        work.follow(place, keyword, name)
        if name in work.never:
            place.also.append(False)
        else:
            place.out["$ref"] = f"#/$defs/{name}"
    work.enforced(place, keyword)


def _moves(work: Rewriter, place: Place, value: Any) -> bool:
    anchor = value.rpartition("#")[2] if isinstance(value, str) else ""
    return place.scope.names.dynamic_anchors.get(anchor, 0) > 1 or anchor == "meta"


def recursive_ref(work: Rewriter, place: Place, keyword: str, value: Any) -> None:
    """`$recursiveRef`, where it can lead to one place only."""
    if '"$recursiveAnchor": true' in str(place.scope.root).replace("'", '"').replace("True", "true"):
        work.relax(place, keyword, "where it leads depends on the way taken to it")
    else:
        ref(work, place, keyword, value)
