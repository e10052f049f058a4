"""Keywords about strings: patterns and formats, as an automaton has them."""

from __future__ import annotations

from typing import Any

from agentrt.errors import GrammarError
from agentrt.grammar import regex_syntax
from agentrt.grammar.complement import TYPES
from agentrt.grammar.formats import FORMATS
from agentrt.grammar.rewriter import Place, Rewriter


def pattern(work: Rewriter, place: Place, keyword: str, value: Any) -> None:
    """`pattern`: as an automaton has it; what is beyond one is CHECKED."""
    core, exact = pattern_core(work, place, keyword, value)
    if core is None:
        place.also.append({"type": [t for t in TYPES if t != "string"]})
    elif core:
        place.also.append({"pattern": core})
    if exact:
        work.enforced(place, keyword)
    else:
        work.relax(place, keyword, "lookaround, word boundaries and backreferences are beyond an automaton")


def pattern_core(work: Rewriter, place: Place, keyword: str, pattern: Any) -> tuple[str | None, bool]:
    """An ECMA pattern as the engine takes it ("" for no constraint, None if nothing matches), and whether that is all of it."""
    if not isinstance(pattern, str):
        raise work.reject(place, keyword, f"is {pattern!r}; it must be a string")
    try:
        tree = regex_syntax.parse_any(pattern)
    except GrammarError as error:
        raise work.reject(place, keyword, f"is not a pattern: {error}") from error
    exact = not regex_syntax.opaque_parts(tree)
    try:
        full = regex_syntax.anywhere(regex_syntax.widened(tree))
    except GrammarError:
        return "", False
    if regex_syntax.empty_language(full):
        return (None, True) if exact else ("", False)
    return f"^(?:{regex_syntax.write(full)})$", exact


def format_(work: Rewriter, place: Place, keyword: str, value: Any) -> None:
    """`format`: the pattern of a known one, if formats are asserted."""
    form = FORMATS.get(value) if isinstance(value, str) else None
    if form is None or not work.formats:
        work.enforced(place, keyword, "an annotation; asserts nothing")
        return
    parts = form.constraint()
    if parts:
        name = f"{work.prefix}format.{value}"
        work.definitions[name] = {"type": "string", "allOf": parts}
        only_strings = place.types() == {"string"}
        place.also.append({"$ref": f"#/$defs/{name}"} if only_strings else {"allOf": parts})
    if form.exact:
        work.enforced(place, keyword)
    else:
        work.relax(place, keyword, f"{value} has rules beyond an automaton")
