"""Which draft of JSON Schema a schema is written in, and what differs between drafts. It resolves and judges nothing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jsonschema
import referencing.jsonschema
from referencing import Specification

from agentrt.errors import GrammarError


@dataclass(frozen=True, slots=True)
class Dialect:
    """One draft.

    Attributes:
        name: Its usual name.
        specification: How `referencing` finds ids and anchors in it.
        validator: jsonschema's class for it.
        ref_alone: Keywords beside `$ref` are ignored.
        items_list: `items` may be a list of schemas.
    """

    name: str
    specification: Specification[Any]
    validator: type[Any]
    ref_alone: bool
    items_list: bool

    def knows(self, keyword: str) -> bool:
        """Whether the keyword asserts something in this draft; later ones than the draft are annotations.

        2019-09 dropped `dependencies`, but lets implementations keep it, and schemas do. In draft 4 the exclusive bounds are flags of the others.
        """
        return keyword in self.validator.VALIDATORS or keyword in ("dependencies", "exclusiveMinimum", "exclusiveMaximum")


_DRAFT4 = Dialect("draft-04", referencing.jsonschema.DRAFT4, jsonschema.Draft4Validator, True, True)
_DRAFT6 = Dialect("draft-06", referencing.jsonschema.DRAFT6, jsonschema.Draft6Validator, True, True)
_DRAFT7 = Dialect("draft-07", referencing.jsonschema.DRAFT7, jsonschema.Draft7Validator, True, True)
_DRAFT2019 = Dialect("2019-09", referencing.jsonschema.DRAFT201909, jsonschema.Draft201909Validator, False, True)
_DRAFT2020 = Dialect("2020-12", referencing.jsonschema.DRAFT202012, jsonschema.Draft202012Validator, False, False)

_BY_URI = {
    "json-schema.org/draft-03/schema": _DRAFT4,
    "json-schema.org/draft-04/schema": _DRAFT4,
    "json-schema.org/draft-06/schema": _DRAFT6,
    "json-schema.org/draft-07/schema": _DRAFT7,
    "json-schema.org/draft/2019-09/schema": _DRAFT2019,
    "json-schema.org/draft/2020-12/schema": _DRAFT2020,
    "json-schema.org/schema": _DRAFT2020,
}


def dialect_of(schema: Any) -> Dialect:
    """The draft that `$schema` names; without one, the newest that the schema's form fits.

    Raises:
        GrammarError: `$schema` names a dialect that is not known, whose keywords might mean anything.
    """
    named = schema.get("$schema") if isinstance(schema, dict) else None
    if named is None:
        return _guessed(schema)
    if isinstance(named, str):
        found = _BY_URI.get(named.partition("://")[2].rstrip("#"))
        if found is not None:
            return found
    raise GrammarError(
        f"$schema is {named!r}, a dialect that is not known (and nothing is fetched); leave it out, or name a draft from draft-04 to 2020-12",
        pointer="/$schema",
        keyword="$schema",
    )


def _guessed(schema: Any) -> Dialect:
    """Draft 4 says `exclusiveMinimum: true`; lists under `items` ended with 2019-09; all else is read as 2020-12."""
    oldest = _DRAFT2020
    for node in _objects(schema):
        if isinstance(node.get("exclusiveMinimum"), bool) or isinstance(node.get("exclusiveMaximum"), bool):
            return _DRAFT4
        if isinstance(node.get("items"), list):
            oldest = _DRAFT2019
    return oldest


def _objects(value: Any) -> Iterator[dict[str, Any]]:
    stack = [value]
    while stack:
        node = stack.pop()
        if isinstance(node, dict):
            yield node
            stack.extend(node.values())
        elif isinstance(node, list):
            stack.extend(node)
