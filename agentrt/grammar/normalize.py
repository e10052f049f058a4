"""Rewrites a JSON Schema into the part of the language that llguidance enforces, and keeps the ledger of what became of each keyword.

Four roads, in this order: a keyword goes over as it is; it is rewritten exactly (`not`, `if`, `oneOf`, dependencies, names); it is
relaxed, alone, and CHECKED when the document is complete; or the schema is refused, with pointer and keyword. The invariant:
what comes out holds wherever the schema does (so nothing right is ever rejected), and where every entry is ENFORCED it
holds nowhere else. Nothing of the input goes over unread, so no keyword is dropped in silence.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jsonschema

from agentrt.errors import GrammarError
from agentrt.grammar.dialect import dialect_of
from agentrt.grammar.ledger import Entry, Ledger, Standing
from agentrt.grammar.productive import refuse_endless
from agentrt.grammar.references import Scope, escaped
from agentrt.grammar.rewriter import MAX_DEPTH, Rewriter
from agentrt.grammar.rules import RULES
from agentrt.grammar.rules.numbers import note_wide_bounds
from agentrt.grammar.separators import SEPARATORS, has_control_literal, has_open_object, json_options


@dataclass(frozen=True)
class Normalized:
    """A schema in llguidance's words.

    Attributes:
        schema: The root.
        definitions: What its references refer to, under "#/$defs/".
        ledger: What became of each keyword.
        spelled: Names in open objects may be spelled in two ways, since control characters must be; so they are CHECKED.
    """

    schema: Any
    definitions: dict[str, Any]
    ledger: Ledger
    spelled: bool = False

    def whole(self) -> dict[str, Any]:
        """One schema that stands alone, with llguidance's options beside it."""
        root = self.schema if isinstance(self.schema, dict) else {"allOf": [self.schema]}
        options = SEPARATORS if self.spelled else json_options([root, self.definitions])
        return {"x-guidance": options, **root, "$defs": self.definitions}


@dataclass(frozen=True)
class Attempt:
    """What compiling an earlier rewriting taught.

    Attributes:
        relaxed: Keywords to relax wherever they stand, because the engine could not take them.
        never: Definitions that nothing satisfies, by name; what refers to them is false.
    """

    relaxed: frozenset[str] = frozenset()
    never: frozenset[str] = frozenset()


def normalize(schema: Any, prefix: str = "", *, attempt: Attempt = Attempt(), formats: bool = True) -> Normalized:
    """Rewrites `schema`.

    Args:
        schema: A JSON Schema, parsed.
        prefix: Put before the names of definitions, so that several schemas can share one `$defs`.
        attempt: What earlier attempts taught.
        formats: `format` is asserted; otherwise it is an annotation.

    Raises:
        GrammarError: The schema is malformed, or cannot be enforced; names pointer and keyword.
    """
    work = Rewriter(RULES, prefix, attempt.relaxed, attempt.never, formats)
    try:
        root = work.node(schema, Scope.of(schema), "", 0)
        work.finish_definitions()
        note_wide_bounds(work)
        refuse_endless(root, work.definitions, work.origins)
    except RecursionError as error:
        raise GrammarError(f"the schema nests deeper than {MAX_DEPTH} levels", keyword="") from error
    except GrammarError:
        raise
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise _malformed(schema, error) from error
    everything = [root, work.definitions]
    spelled = has_control_literal(everything) and has_open_object(everything)
    if spelled:
        why = "the schema spells control characters out, so names could be spelled in two ways"
        work.ledger.append(Entry("", "additionalProperties", Standing.CHECKED, why))
    return Normalized(root, work.definitions, tuple(work.ledger), spelled)


def _malformed(schema: Any, error: Exception) -> GrammarError:
    """What is wrong with a schema that the rules stumbled over, in the words of its draft's own schema."""
    try:
        dialect_of(schema).validator.check_schema(schema)
    except jsonschema.SchemaError as found:
        path = list(found.absolute_path)
        while path and isinstance(path[-1], int):
            path.pop()  # an item: the keyword is what holds it
        above, keyword = "".join(f"/{escaped(str(part))}" for part in path[:-1]), str(path[-1]) if path else "schema"
        return GrammarError(f"{keyword} at {above or '/'!r} is malformed: {found.message[:200]}", pointer=above, keyword=keyword)
    except Exception:  # a schema that not even that can read
        pass
    return GrammarError(f"the schema is malformed: {type(error).__name__}: {str(error)[:200]}", keyword="schema")
