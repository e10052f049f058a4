"""Whether a compiled grammar can write a given document: in one of its serialisations, since JSON has many for one value.

A grammar fixes the order of properties, the separators and the spelling of numbers; a document fixes none of them. So
the spellings are searched, with the cursor cutting off what cannot be. For tests and benchmarks; it needs a grammar
that was compiled for single bytes (see `check`), where every text is one sequence of tokens.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from decimal import Decimal
from typing import Any

from agentrt.grammar.compiler import CompiledGrammar
from agentrt.grammar.cursor import GrammarCursor
from agentrt.grammar.separators import ITEM, KEY

#: Pieces of text tried before the search gives up and says no.
MAX_TRIES = 20_000


class _GaveUpError(Exception):
    """The search is too long."""


def accepts(compiled: CompiledGrammar, document: Any, schema: Any) -> bool:
    """Whether some serialisation of `document` walks to an accepting state and passes the final check.

    Args:
        compiled: The grammar, compiled for single bytes.
        document: A JSON value.
        schema: The schema, for the order in which properties are tried first.
    """
    return not compiled.verify(json.dumps(document)) and walks(compiled, document, schema)


def walks(compiled: CompiledGrammar, document: Any, schema: Any, tries: int = MAX_TRIES) -> bool:
    """As `accepts`, without the final check."""
    return serialisation(compiled, document, schema, tries) is not None


def serialisation(compiled: CompiledGrammar, document: Any, schema: Any, tries: int = MAX_TRIES) -> str | None:
    """The first serialisation of `document` that walks to an accepting state; None if `tries` pieces of text found none."""
    search = _Search(compiled.cursor(), _orders(schema), tries)
    try:
        return next((text for text in search.value(document) if search.cursor.accepting), None)
    except _GaveUpError:
        return None


class _Search:
    """Each method yields texts that the cursor has taken, and takes them back before it tries the next."""

    def __init__(self, cursor: GrammarCursor, orders: list[list[str]], tries: int) -> None:
        self.cursor = cursor
        self._orders = orders
        self._tries = tries

    def text(self, text: str) -> Iterator[str]:
        self._tries -= 1
        if self._tries < 0:
            raise _GaveUpError
        before = len(self.cursor)
        if all(map(self.cursor.advance, text.encode())):
            yield text
        self.cursor.rollback(len(self.cursor) - before)

    def value(self, value: Any) -> Iterator[str]:
        if isinstance(value, dict):
            yield from self.object(value)
        elif isinstance(value, list):
            yield from self.array(value)
        else:
            for spelling in spellings(value):
                yield from self.text(spelling)

    def joined(self, *parts: Any) -> Iterator[str]:
        """Texts (strings) and values (in tuples of one), one after the other."""
        if not parts:
            yield ""
            return
        first, *rest = parts
        heads = self.text(first) if isinstance(first, str) else self.value(first[0])
        for head in heads:
            for tail in self.joined(*rest):
                yield head + tail

    def array(self, values: list[Any]) -> Iterator[str]:
        parts: list[Any] = ["["]
        for i, value in enumerate(values):
            parts += [ITEM, (value,)] if i else [(value,)]
        yield from self.joined(*parts, "]")

    def object(self, members: dict[str, Any]) -> Iterator[str]:
        for head in self.text("{"):
            for tail in self.members(members, self.likely_order(members), ""):
                yield head + tail

    def members(self, members: dict[str, Any], left: list[str], separator: str) -> Iterator[str]:
        if not left:
            yield from self.text("}")
            return
        for i, name in enumerate(left):
            for head in self.joined(separator + _quoted(name) + KEY, (members[name],)):
                for tail in self.members(members, left[:i] + left[i + 1 :], ITEM):
                    yield head + tail

    def likely_order(self, members: dict[str, Any]) -> list[str]:
        """The order of the properties that share most names with `members`, other names last."""
        names = set(members)
        best = max(self._orders, key=lambda order: (len(names & set(order)), -len(order)), default=[])
        place = {name: i for i, name in enumerate(best)}
        return sorted(members, key=lambda name: place.get(name, len(place)))


def spellings(value: Any) -> list[str]:
    """Ways to write a value that is neither object nor array; numbers have several."""
    if isinstance(value, str):
        return [_quoted(value)]
    ways = [json.dumps(value)]
    if isinstance(value, bool) or not isinstance(value, int | float):
        return ways
    if isinstance(value, int):
        return [*ways, f"{value}.0"]
    plain = format(Decimal(repr(value)), "f")
    return list(dict.fromkeys([*ways, plain, *([str(int(value))] if value.is_integer() else []), f"{plain}0", f"{plain}00"]))


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _orders(schema: Any) -> list[list[str]]:
    """The orders in which properties are named, anywhere in the schema."""
    found: list[list[str]] = []
    stack = [schema]
    while stack:
        node = stack.pop()
        if isinstance(node, dict):
            properties, required = node.get("properties"), node.get("required")
            names = list(properties) if isinstance(properties, dict) else []
            names += [n for n in required if isinstance(n, str) and n not in names] if isinstance(required, list) else []
            found += [names] if names else []
            stack.extend(node.values())
        elif isinstance(node, list):
            stack.extend(node)
    return found
