"""What a property that is there asks of the rest of its object, rewritten as a choice: it is absent, or that holds."""

from __future__ import annotations

from typing import Any

from agentrt.grammar.rewriter import Place, Rewriter
from agentrt.grammar.rules.combinations import split


def dependent_required(work: Rewriter, place: Place, keyword: str, value: Any) -> None:
    """`dependentRequired`."""
    for name, needed in work.named_schemas(place, keyword, value).items():
        if not isinstance(needed, list):
            raise work.reject(place, keyword, f"gives {name!r} {needed!r}; it must be a list of names")
        _depend(work, place, keyword, name, {"required": [name, *needed]})


def dependent_schemas(work: Rewriter, place: Place, keyword: str, value: Any) -> None:
    """`dependentSchemas`."""
    for name, part in work.named_schemas(place, keyword, value).items():
        made = work.beside(place, part, keyword, name)
        _depend(work, place, keyword, name, {"allOf": [{"required": [name]}, made]})


def dependencies(work: Rewriter, place: Place, keyword: str, value: Any) -> None:
    """`dependencies`, older drafts' form of both."""
    for name, part in work.named_schemas(place, keyword, value).items():
        if isinstance(part, list | str):
            needed = [part] if isinstance(part, str) else part
            _depend(work, place, keyword, name, {"required": [name, *needed]})
        else:
            dependent_schemas(work, place, keyword, {name: part})


def _depend(work: Rewriter, place: Place, keyword: str, name: str, consequence: dict[str, Any]) -> None:
    """Either the name is absent, or the consequence holds."""
    split(work, place, keyword, [{"properties": {name: False}}, consequence], "rewritten as a choice")
