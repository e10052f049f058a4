"""Typed answers: which constraint a Python type asks for, and how the text becomes a value of it.

A `ValueType` is made once, when ``gen(..., dtype=...)`` or ``type=...`` is written, and only ever reads. It knows
nothing of requests or backends. Invariant: `parse` returns a value of the type or raises; it never returns a part.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from agentrt.errors import ConstraintError, UserError
from agentrt.request import GrammarSpec

#: Numbers are bounded, so that a weak model cannot write digits for ever.
INTEGER = r"-?(0|[1-9][0-9]{0,18})"
DECIMAL = r"-?(0|[1-9][0-9]{0,15})(\.[0-9]{1,15})?"
#: A JSON string; \uXXXX is left out, since half a surrogate pair is no text.
STRING = r'"([^"\\\x00-\x1f]|\\["\\/bfnrt])*"'


class InvalidValueError(ConstraintError):
    """The answer is complete, but not a valid value of its type.

    Attributes:
        text: The answer's text.
    """

    def __init__(self, message: str, *, text: str, violations: tuple[str, ...] = ()) -> None:
        super().__init__(message, violations=violations)
        self.text = text


class CutValueError(ConstraintError):
    """The answer was cut (by its length, a deadline or an abort) before the value was complete.

    Attributes:
        text: What there is of it.
        partial: The same as an incomplete Python value (a JSON document's closed parts), or None.
    """

    def __init__(self, message: str, *, text: str, partial: Any = None, violations: tuple[str, ...] = ()) -> None:
        super().__init__(message, violations=violations)
        self.text = text
        self.partial = partial


@dataclass(frozen=True, slots=True)
class ValueType:
    """A Python type as the language sees it.

    Attributes:
        label: The type's name, for messages.
        constraint: The `SamplingParams` fields that make the engine enforce it.
        read: Text to value; raises ValueError (pydantic's ValidationError is one).
        document: The text is a JSON document, of which parts can be shown while it streams.
    """

    label: str
    constraint: dict[str, Any]
    read: Callable[[str], Any] = field(compare=False)
    document: bool = False

    def parse(self, text: str) -> Any:
        """Returns the value.

        Raises:
            InvalidValueError: The text is no such value; carries the validator's messages, one line each.
        """
        try:
            return self.read(text)
        except ValueError as error:
            lines = _violations(error)
            message = f"the answer is not a valid {self.label}: {'; '.join(lines)}"
            raise InvalidValueError(message, text=text, violations=lines) from error

    def partial(self, text: str) -> Any:
        """Returns what can be read of an incomplete text, or None."""
        if not self.document:
            return None
        from pydantic_core import from_json

        try:
            return from_json(text, allow_partial="trailing-strings")
        except ValueError:
            return None


def _violations(error: ValueError) -> tuple[str, ...]:
    details = getattr(error, "errors", None)
    if not callable(details):
        return (str(error),)
    found = details(include_url=False, include_context=False, include_input=False)
    return tuple(f"{'.'.join(map(str, item['loc'])) or 'value'}: {item['msg']}" for item in found)


def _boolean(text: str) -> bool:
    if text not in ("true", "false"):
        raise ValueError(f"{text!r} is neither true nor false")
    return text == "true"


def _string(text: str) -> str:
    value = json.loads(text, strict=False)
    if not isinstance(value, str):
        raise ValueError(f"{text!r} is no JSON string")
    return value


def _pattern(source: str) -> dict[str, Any]:
    return {"grammar": GrammarSpec("regex", source)}


_PLAIN: dict[Any, ValueType] = {
    int: ValueType("int", _pattern(INTEGER), int),
    float: ValueType("float", _pattern(DECIMAL), float),
    bool: ValueType("bool", _pattern("true|false"), _boolean),
    str: ValueType("str", _pattern(STRING), _string),
}
_NAMED = {kind.__name__: kind for kind in _PLAIN} | {"string": str, "integer": int, "boolean": bool, "number": float}


def value_type(kind: Any) -> ValueType:
    """Returns the value type of a Python type: int, float, bool, str, or anything pydantic can validate.

    Raises:
        UserError: pydantic knows no schema for it.
    """
    kind = _NAMED.get(kind, kind) if isinstance(kind, str) else kind
    try:
        plain = _PLAIN.get(kind)
    except TypeError:  # an unhashable annotation
        plain = None
    return plain if plain is not None else _model_type(kind)


def document_type(kind: Any) -> ValueType:
    """Returns the value type of a Python type whose text is a JSON document, also for int and the like.

    Raises:
        UserError: pydantic knows no schema for it.
    """
    return _model_type(kind)


def _model_type(kind: Any) -> ValueType:
    try:
        return _cached_model_type(kind)
    except TypeError:
        return _make_model_type(kind)


def _make_model_type(kind: Any) -> ValueType:
    from pydantic import TypeAdapter
    from pydantic.errors import PydanticSchemaGenerationError, PydanticUserError

    from agentrt.text.closed_schema import closed
    from agentrt.text.portable_types import portable

    try:
        adapter: TypeAdapter[Any] = TypeAdapter(portable(kind))
        schema = closed(adapter.json_schema())  # pydantic would drop what else a model may write, for ever
    except (PydanticSchemaGenerationError, PydanticUserError) as error:
        raise UserError(f"type={kind!r} has no JSON Schema: {error}", param="type") from error
    label = getattr(kind, "__name__", str(kind))
    return ValueType(label, {"json_schema": schema}, adapter.validate_json, document=True)


_cached_model_type = lru_cache(maxsize=512)(_make_model_type)
