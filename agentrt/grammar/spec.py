"""From Python values to a `GrammarSpec`, and from text back to a value of the type that was asked for.

This is the door: a pydantic model, a dataclass, a TypedDict, any Python type, a dict, a list of choices or of tools becomes plain
text here, and only text goes further. Nothing is compiled here; what is wrong on its face is refused.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from types import FunctionType
from typing import TYPE_CHECKING, Any, Literal

from agentrt.errors import ConstraintError, GrammarError
from agentrt.request import GrammarSpec, SamplingParams
from agentrt.text.portable_types import portable

if TYPE_CHECKING:
    from pydantic import TypeAdapter

Options = dict[str, str | int | bool]
#: The field of a request that each kind of constraint comes from: what errors call it.
FIELDS = {"json_schema": "json_schema", "regex": "regex", "choices": "choices", "lark": "ebnf", "tools": "tools", "structural": "grammar"}

_GBNF_RULE = re.compile(r"^\s*[\w-]+\s*::=", re.MULTILINE)


def _frozen(options: Options) -> tuple[tuple[str, str | int | bool], ...]:
    return tuple(sorted(options.items()))


def schema_of(value: Any) -> Any:
    """The JSON Schema that `value` stands for: a dict or bool as it is, JSON text parsed, a Python type described.

    Raises:
        GrammarError: It is none of these.
    """
    if isinstance(value, bool | Mapping):
        return dict(value) if isinstance(value, Mapping) else value
    if isinstance(value, str):
        return _schema_from_text(value)
    from pydantic.errors import PydanticInvalidForJsonSchema  # here as below, since most starts need none of it

    try:
        return _adapter(value).json_schema()
    except PydanticInvalidForJsonSchema as error:
        raise GrammarError(f"json_schema: {value!r} has no JSON Schema: {error.message}", param="json_schema") from error


def _schema_from_text(text: str) -> Any:
    if not text.strip():
        raise GrammarError("json_schema is an empty string; write a JSON Schema, such as {}", param="json_schema")
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise GrammarError(f"json_schema is not JSON: {error}", param="json_schema") from error
    if not isinstance(schema, dict | bool):
        raise GrammarError(f"json_schema is a JSON {type(schema).__name__}; a schema is an object or a boolean", param="json_schema")
    return schema


def _adapter(kind: Any) -> TypeAdapter[Any]:
    if isinstance(kind, FunctionType):
        raise GrammarError(f"json_schema: {kind!r} is a function; give the type of what it should return", param="json_schema")
    from pydantic import PydanticUserError, TypeAdapter
    from pydantic.errors import PydanticSchemaGenerationError

    try:
        return TypeAdapter(portable(kind))
    except (PydanticSchemaGenerationError, PydanticUserError, NameError) as error:
        first = str(error).splitlines()[0]
        raise GrammarError(f"json_schema: {kind!r} is not a type that JSON can hold: {first}", param="json_schema") from error


def json_schema_spec(value: Any, *, strict: bool = False, engine: Literal["auto", "llguidance", "fsm"] = "auto", **options: str | int | bool) -> GrammarSpec:
    """The spec of a JSON Schema, from any value that `schema_of` takes."""
    return GrammarSpec("json_schema", _dumped(schema_of(value)), _frozen(options), engine=engine, strict=strict)


def _dumped(schema: Any) -> str:
    try:
        return json.dumps(schema, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise GrammarError(f"json_schema holds what JSON cannot: {error}", param="json_schema") from error


def regex_spec(pattern: str) -> GrammarSpec:
    """The spec of a regular expression that the whole text must match."""
    if not isinstance(pattern, str) or not pattern:
        raise GrammarError(f"regex is {pattern!r}; it must be a non-empty string", param="regex")
    return GrammarSpec("regex", pattern)


def choices_spec(choices: Sequence[str]) -> GrammarSpec:
    """The spec of a text that must be one of `choices`."""
    if isinstance(choices, str) or not choices or not all(isinstance(c, str) for c in choices):
        raise GrammarError(f"choices is {choices!r}; it must be a list of at least one string", param="choices")
    return GrammarSpec("choices", json.dumps(list(choices), ensure_ascii=False))


def lark_spec(text: str) -> GrammarSpec:
    """The spec of a grammar in lark's notation (llguidance's variant, with a rule named start), or in GBNF (``root ::= ...``)."""
    if not isinstance(text, str) or not text.strip():
        raise GrammarError(f"ebnf is {text!r}; it must be a grammar in lark notation, with a rule named start", param="ebnf")
    return GrammarSpec("lark", _from_gbnf(text) if _GBNF_RULE.search(text) else text)


def _from_gbnf(text: str) -> str:
    from llguidance.gbnf_to_lark import gbnf_to_lark  # type: ignore[import-untyped, unused-ignore]

    try:
        lark: str = gbnf_to_lark(text)
    except Exception as error:  # it raises plain exceptions, too
        raise GrammarError(
            f"ebnf is in GBNF notation (it has '::='), but is not right: {error}. In lark notation it reads  start: \"yes\" | \"no\"",
            keyword="::=", param="ebnf",
        ) from error  # fmt: skip
    return lark


def tools_spec(
    tools: Sequence[Any], *, tool_choice: str = "auto", parallel: bool = True, strict: bool = False, **form: str | int | bool
) -> GrammarSpec | None:
    """The spec of calls of tools.

    Args:
        tools: In OpenAI's form (with or without the "function" around it), or objects with `name` and `parameters`.
        tool_choice: "auto" (text, or calls behind the trigger), "required", "none", or a tool's name.
        parallel: More than one call is allowed.
        strict: Refuse keywords that would only be CHECKED.
        form: How this model writes calls: `begin`, `end`, `separator`, `trigger`, `name_key`, `arguments_key`; and
            `answer_schema`, JSON text of a schema that an answer without calls must satisfy.

    Returns:
        None if `tool_choice` is "none" and the text is free.

    Raises:
        GrammarError: A tool is malformed, or `tool_choice` names none of them.
    """
    functions = [_function(tool, number) for number, tool in enumerate(tools)]
    names = [function["name"] for function in functions]
    if len(set(names)) < len(names):
        raise GrammarError(f"tools: the names {sorted({n for n in names if names.count(n) > 1})} occur twice", param="tools")
    if tool_choice == "none" or not functions:
        answer = form.get("answer_schema")
        return json_schema_spec(str(answer), strict=strict) if answer else None
    if tool_choice not in ("auto", "required", *names):
        raise GrammarError(f"tool_choice is {tool_choice!r}; it must be auto, required, none or one of {names}", param="tool_choice")
    options: Options = {"tool_choice": tool_choice, "parallel": parallel, **form}
    return GrammarSpec("tools", _dumped(functions), _frozen(options), strict=strict)


def _function(tool: Any, number: int) -> dict[str, Any]:
    if not isinstance(tool, Mapping):
        tool = {"name": getattr(tool, "name", None), "parameters": getattr(tool, "parameters", None)}
    function = tool.get("function", tool)
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str) or not name:
        raise GrammarError(f"tools[{number}] has no name; a tool is {{'name': ..., 'parameters': <JSON Schema>}}", param="tools", pointer=f"/{number}")
    parameters = function.get("parameters")
    if parameters is None:
        parameters = {"type": "object", "properties": {}}
    if not isinstance(parameters, Mapping | bool):
        raise GrammarError(f"tools[{number}] ({name}): parameters is {parameters!r}; it must be a JSON Schema", param="tools", pointer=f"/{number}/parameters")
    return {"name": name, "parameters": parameters}


def structural_spec(tags: Sequence[Mapping[str, Any]], *, at_least_one: bool = False, stop_after_first: bool = False, strict: bool = False) -> GrammarSpec:
    """The spec of free text in which spans between tags are constrained.

    Args:
        tags: Each {"begin": text, "end": text, and one of "json_schema", "regex", "lark"}; "trigger", a beginning of
            `begin` from which on the tag is certain (default: all of it).
        at_least_one: Text alone will not do.
        stop_after_first: Nothing follows the first tag's end.
        strict: Refuse keywords that would only be CHECKED.
    """
    plain = [{**tag, "json_schema": schema_of(tag["json_schema"])} if "json_schema" in tag else dict(tag) for tag in tags]
    options: Options = {"at_least_one": at_least_one, "stop_after_first": stop_after_first}
    return GrammarSpec("structural", _dumped(plain), _frozen(options), strict=strict)


def spec_from(sampling: SamplingParams) -> GrammarSpec | None:
    """The one constraint of a request, or None.

    Raises:
        GrammarError: It is malformed; `param` names the field.
    """
    if sampling.grammar is not None:
        return sampling.grammar
    if sampling.json_schema is not None:
        return json_schema_spec(sampling.json_schema, strict=sampling.strict)
    if sampling.regex is not None:
        return regex_spec(sampling.regex)
    if sampling.choices is not None:
        return choices_spec(sampling.choices)
    if sampling.ebnf is not None:
        return lark_spec(sampling.ebnf)
    if sampling.tools is not None:
        return tools_spec(sampling.tools, tool_choice=sampling.tool_choice, parallel=sampling.parallel_tool_calls, strict=sampling.strict)
    return None


def parse_value(kind: Any, text: str) -> Any:
    """Turns finished text into a value of the type that was asked for; a schema (dict or text) gives plain JSON.

    Raises:
        ConstraintError: The text is not such a value (cut short, or a rule of the type that no schema says).
    """
    from pydantic import BaseModel, ValidationError

    try:
        if isinstance(kind, str | Mapping | bool):
            return json.loads(text)
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            return kind.model_validate_json(text)
        return _adapter(kind).validate_json(text)
    except ValidationError as error:
        lines = tuple(f"/{'/'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors(include_url=False))
        raise ConstraintError(f"the text is not a {kind!r}: {'; '.join(lines)}", violations=lines) from error
    except ValueError as error:
        raise ConstraintError(f"the text is not JSON: {error}", violations=(str(error),)) from error
