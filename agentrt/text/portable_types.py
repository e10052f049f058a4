"""Python types as pydantic takes them: before Python 3.12 it refuses `typing.TypedDict`, wherever it stands in a type."""

from __future__ import annotations

import functools
import operator
import sys
import typing
from types import UnionType
from typing import Any, NotRequired

from typing_extensions import TypedDict


def portable(kind: Any) -> Any:
    """The type with `typing.TypedDict`s as typing_extensions', the only ones that pydantic takes before Python 3.12."""
    if sys.version_info >= (3, 12):
        return kind
    if typing.is_typeddict(kind):
        hints = typing.get_type_hints(kind, include_extras=True)
        fields = {name: portable(hint) if name in kind.__required_keys__ else NotRequired[portable(hint)] for name, hint in hints.items()}
        make: Any = TypedDict
        return make(kind.__name__, fields)
    arguments, origin = typing.get_args(kind), typing.get_origin(kind)
    if not isinstance(origin, type) or not any(map(typing.is_typeddict, arguments)):
        return kind
    made = tuple(map(portable, arguments))
    rebuilt: Any = functools.reduce(operator.or_, made) if origin is UnionType else typing.cast(Any, origin)[made]
    return rebuilt
