"""What a schema would do, told without a model: the ledger, the engine that would take it, and what a request would get.

It compiles for real, against a vocabulary of the 256 bytes, so that what it says is what happens. The command line
prints it; this module only answers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from agentrt.config import Limits
from agentrt.errors import GrammarError, UserError
from agentrt.grammar import regex_fsm, schema_regex
from agentrt.grammar.automaton_store import AutomatonStore
from agentrt.grammar.compiler import GrammarCache, automaton_of
from agentrt.grammar.killable import TooManyStatesError
from agentrt.grammar.ledger import Entry, Ledger, Standing, checked
from agentrt.grammar.normalize import normalize
from agentrt.grammar.spec import json_schema_spec, schema_of


@dataclass(frozen=True)
class SchemaReport:
    """What would become of a schema.

    Attributes:
        ledger: One entry a keyword; a refused one is REJECTED.
        error: Why a request with it would be refused, or "".
        automaton: Why it is, or is not, of the regular kind that `engine="fsm"` takes.
        regular: Whether it is.
        states: States of its automaton, if it is regular.
        ahead: Whether it was compiled ahead of time, so that the automaton takes it without being asked to.
    """

    ledger: Ledger
    error: str
    automaton: str
    regular: bool
    states: int = 0
    ahead: bool = False

    @property
    def rows(self) -> list[tuple[str, str, str, str]]:
        """(pointer, keyword, standing, why), in the schema's order; the root's pointer is "/"."""
        return [(entry.pointer or "/", entry.keyword, entry.standing.value, entry.why) for entry in self.ledger]

    @property
    def summary(self) -> list[str]:
        """What a request with the schema would do, in sentences."""
        if self.error:
            return [f"A request is refused: {self.error}"]
        loose = checked(self.ledger)
        lines = ["Every keyword is enforced while the text is written; it streams as it comes, and strict=True changes nothing."]
        if loose:
            places = ", ".join(f"{entry.keyword} at {entry.pointer or '/'}" for entry in loose[:5])
            lines = [
                f"{len(loose)} keyword{'s are' if len(loose) > 1 else ' is'} checked when the document is complete ({places}): "
                "the text is held back until then, and generated anew, within the request's bound, if it fails.",
                "strict=True refuses it.",
            ]
        return [*lines, self._path]

    @property
    def _path(self) -> str:
        """Which engine takes it, and why."""
        if self.ahead:
            return f"It was compiled ahead of time, so an automaton takes it: {self.automaton}."
        if self.regular:
            return (
                "llguidance takes it, which compiles it some thirty times as fast as an automaton is made; compiled ahead of time (agentrt schema compile)"
                f' or with engine="fsm", {self.automaton} would, whose masks then cost about a fifth.'
            )
        return f"llguidance takes it; an automaton cannot, because {self.automaton}."


def check_schema(value: Any) -> SchemaReport:
    """Says what would become of a schema: a dict, JSON text, or a Python type."""
    try:
        schema = schema_of(value)
        compiled = GrammarCache().compile(json_schema_spec(schema), byte_tokenizer())
    except GrammarError as error:
        entry = Entry(error.pointer, error.keyword or "schema", Standing.REJECTED, str(error))
        return SchemaReport((entry,), str(error), "", False)
    try:
        automaton = _automaton(schema)
    except (schema_regex.NotRegularError, GrammarError) as error:
        return SchemaReport(compiled.ledger, "", str(error), False)
    words = f"a finite automaton of {len(automaton):,} states"
    return SchemaReport(compiled.ledger, "", words, True, len(automaton), ahead=compiled.engine == "fsm")


def compile_ahead(values: Iterable[Any], folder: Path | None = None) -> list[tuple[str, Path | None]]:
    """Compiles schemas of the regular kind to automata on disk, where requests with the same schema find them.

    Args:
        values: Schemas, as `check_schema` takes them.
        folder: Where to; the cache's own folder if None (the one that requests look into).

    Returns:
        For each, what became of it in words, and the file or None.

    Raises:
        GrammarError: A schema is malformed.
    """
    store = AutomatonStore(folder)
    told: list[tuple[str, Path | None]] = []
    for value in values:
        try:
            schema = schema_of(value)
            automaton = _automaton(schema)
            told.append((f"{len(automaton):,} states", store.save(json_schema_spec(schema), automaton)))
        except (schema_regex.NotRegularError, TooManyStatesError) as error:
            told.append((f"stays on llguidance, because {error}", None))
    return told


def _automaton(schema: Any) -> regex_fsm.ByteAutomaton:
    normal = normalize(schema)
    return automaton_of(schema_regex.regex_of(normal.schema, normal.definitions), Limits())


class ByteTokenizer:
    """One token a byte, and an end token: enough to compile against."""

    vocab_size = 257
    bos_id = None
    eos_ids = (256,)

    def encode(self, text: str, *, bos: bool = False, special: bool = False) -> list[int]:
        """The bytes of `text`."""
        return list(text.encode())

    def decode(self, ids: Iterable[int], *, skip_special: bool = True) -> str:
        """The text of the bytes."""
        return bytes(i for i in ids if i < 256).decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes | None:
        """The byte."""
        return bytes([token_id]) if token_id < 256 else None

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **template_arguments: Any,
    ) -> list[int]:
        """There is none."""
        raise UserError("single bytes have no chat template")


@lru_cache(maxsize=1)
def byte_tokenizer() -> ByteTokenizer:
    """The one tokenizer of single bytes, so that its grammars are cached together."""
    return ByteTokenizer()
