"""What a program writes: gen, select, roles and the rest, with the names and meanings of SGLang's frontend.

Every function here only makes nodes (see `agentrt.lang.ir`); nothing runs until a node is appended to a state. Wrong
options are refused here, where the author wrote them. Invariant: no option is dropped in silence.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Sequence
from functools import lru_cache, wraps
from typing import Any, ParamSpec

from agentrt.errors import UserError
from agentrt.lang import ir
from agentrt.lang.options import sampling_fields
from agentrt.lang.reasoning import known_family
from agentrt.lang.values import ValueType, value_type

token_length_normalized: ir.ChoicesMethod = "token_length_normalized"
greedy_token_selection: ir.ChoicesMethod = "greedy_token_selection"
unconditional_likelihood_normalized: ir.ChoicesMethod = "unconditional_likelihood_normalized"

METHODS = (token_length_normalized, greedy_token_selection, unconditional_likelihood_normalized)


P = ParamSpec("P")

KNOWN_NODES = 512  #: most nodes that are kept to be used again, for each of the functions that make them


def _made_once(make: Callable[P, ir.Expr]) -> Callable[P, ir.Expr]:
    """Nodes never change, so the same options give the same node again; making one checks every option, each time anew."""
    remembered = lru_cache(KNOWN_NODES, typed=True)(make)

    @wraps(make)
    def made(*args: P.args, **options: P.kwargs) -> ir.Expr:
        try:
            return remembered(*args, **options)  # type: ignore[arg-type]
        except TypeError:  # a list or dict among the options
            return make(*args, **options)

    return made


@_made_once
def gen(
    name: str | None = None,
    max_tokens: int | None = None,
    min_tokens: int | None = None,
    n: int | None = None,
    stop: str | Sequence[str] | None = None,
    stop_token_ids: Sequence[int] | None = None,
    stop_regex: str | Sequence[str] | None = None,
    temperature: float | None = None,
    top_p: float | None = None,
    top_k: int | None = None,
    min_p: float | None = None,
    frequency_penalty: float | None = None,
    presence_penalty: float | None = None,
    ignore_eos: bool | None = None,
    return_logprob: bool | None = None,
    logprob_start_len: int | None = None,
    top_logprobs_num: int | None = None,
    return_text_in_logprobs: bool | None = None,
    dtype: Any = None,
    choices: Sequence[str] | None = None,
    choices_method: ir.ChoicesMethod | None = None,
    regex: str | None = None,
    json_schema: Any = None,
    *,
    type: Any = None,
    retries: int = 0,
    token_healing: bool | None = None,
    deadline: float | None = None,
    **options: Any,
) -> ir.Expr:
    """Asks the model, and names the answer.

    Args:
        name: Variable that gets the answer; read it with ``s[name]``.
        max_tokens: Most tokens of the answer; `max_new_tokens` means the same. The run's default is 128; typed answers
            may use what is left of the context.
        min_tokens, n, stop, stop_token_ids, stop_regex, temperature, top_p, top_k, min_p, frequency_penalty,
            presence_penalty, ignore_eos, regex, json_schema: As in `SamplingParams`; with n above 1 the value is a list,
            and the program goes on from the first.
        return_logprob, logprob_start_len, top_logprobs_num: Log-probabilities in ``s.get_meta_info(name)``: of the answer, of the
            prompt from a place on, and of how many alternatives.
        return_text_in_logprobs: Accepted; the ids are there in any case.
        dtype: int, float, bool or str: the answer is one, and ``s[name]`` is a Python value. bool is JSON's true or false.
        choices: Makes this a `select`.
        choices_method: See `select`.
        type: Any type that pydantic validates (a model, ``list[Model]``, a Literal): ``s[name]`` is a validated value. A string or list
            without a bound (``Field(max_length=...)``) may go on to the end of the context, if `max_tokens` does not end it.
        retries: How often an answer that its type refuses, or that was cut, is asked for again, with what was wrong.
        token_healing: Let the answer complete the last bytes of the text before it; None follows the program.
        deadline: Seconds after which this call is aborted.
        **options: Further fields of `SamplingParams`: seed, logit_bias, ebnf, repetition_penalty, logprobs, strict...

    Raises:
        UserError: An option is unknown, or two of them contradict.
    """
    _check_name("gen", name)
    if choices is not None:
        return select(name, choices, 0.0 if temperature is None else temperature, choices_method or METHODS[0])
    own = sampling_fields(
        {
            "max_tokens": max_tokens, "min_tokens": min_tokens, "n": n, "stop": _hashable(stop),
            "stop_token_ids": _hashable(stop_token_ids), "stop_regex": _hashable(stop_regex), "temperature": temperature,
            "top_p": top_p, "top_k": top_k, "min_p": min_p, "frequency_penalty": frequency_penalty,
            "presence_penalty": presence_penalty, "ignore_eos": ignore_eos, "return_logprob": return_logprob,
            "logprob_start_len": logprob_start_len, "top_logprobs_num": top_logprobs_num,
            "return_text_in_logprobs": return_text_in_logprobs, "regex": regex, "json_schema": _schema(json_schema), **options,
        }
    )  # fmt: skip
    value = _value(dtype, type, own)
    if retries and value is None:
        raise UserError("retries asks again when a typed value is not valid; give type= or dtype= too", param="retries")
    return ir.Gen(name, own, value, retries, None, token_healing, deadline)


def _value(dtype: Any, kind: Any, own: dict[str, Any]) -> ValueType | None:
    if dtype is not None and kind is not None:
        raise UserError("dtype and type are the same option; give one of them", param="dtype")
    kind = dtype if kind is None else kind
    if kind is None:
        return None
    taken = [name for name in ("regex", "json_schema", "ebnf", "grammar", "tools") if name in own]
    if taken:
        raise UserError(f"a typed gen brings its own constraint; {taken[0]} was given too", param=taken[0])
    return value_type(kind)


def _check_name(what: str, name: Any) -> None:
    if name is not None and not isinstance(name, str):
        raise UserError(f"{what}({name!r:.60}): what comes first is the variable's name, a string", param="name")


def _hashable(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _schema(schema: Any) -> Any:
    if not isinstance(schema, str):
        return schema
    try:
        return json.loads(schema)
    except ValueError as error:
        raise UserError(f"json_schema is a string that is not JSON: {error}", param="json_schema") from error


def gen_int(name: str | None = None, max_tokens: int | None = None, **options: Any) -> ir.Expr:
    """Asks for an integer; ``s[name]`` is an int. Takes the options of `gen`."""
    return gen(name, max_tokens, dtype=int, **options)


def gen_string(name: str | None = None, max_tokens: int | None = None, **options: Any) -> ir.Expr:
    """Asks for a quoted string; ``s[name]`` is what stands between the quotes. Takes the options of `gen`."""
    return gen(name, max_tokens, dtype=str, **options)


@_made_once
def select(
    name: str | None = None,
    choices: Sequence[str] | None = None,
    temperature: float = 0.0,
    choices_method: ir.ChoicesMethod = "token_length_normalized",
) -> ir.Expr:
    """Scores every choice after the text so far, and appends the best.

    Args:
        name: Variable that gets the choice.
        choices: At least one string.
        temperature: 0 takes the best; above it, one is drawn by its score.
        choices_method: "token_length_normalized" (mean log-probability of the choice's tokens), "greedy_token_selection"
            (the likeliest next token decides, token after token) or "unconditional_likelihood_normalized" (by how much the
            text so far raises the choice's log-probability).

    Raises:
        UserError: There is no choice, one of them is no string, or the method is unknown.
    """
    _check_name("select", name)
    given = () if isinstance(choices, str) else tuple(choices or ())
    if not given or not all(isinstance(choice, str) and choice for choice in given):
        raise UserError(f"choices is {choices!r}; it must be a list of at least one non-empty string", param="choices")
    method = getattr(choices_method, "__name__", choices_method)
    if method not in METHODS:
        raise UserError(
            f"choices_method is {choices_method!r}; it must be one of {', '.join(METHODS)}", param="choices_method"
        )
    return ir.Select(name, given, method, temperature)


def _role(role: str, expr: Any) -> ir.Expr:
    if expr is None:
        return ir.RoleBegin(role)
    return ir.as_series((ir.RoleBegin(role), expr, ir.RoleEnd(role)))


def system(expr: Any = None) -> ir.Expr:
    """A system message, through the model's chat template; without an expression only its beginning."""
    return _role("system", expr)


def user(expr: Any = None) -> ir.Expr:
    """A user message, through the model's chat template; without an expression only its beginning."""
    return _role("user", expr)


def assistant(expr: Any = None) -> ir.Expr:
    """An assistant message, through the model's chat template; without an expression only its beginning."""
    return _role("assistant", expr)


def system_begin() -> ir.Expr:
    """Begins a system message."""
    return ir.RoleBegin("system")


def system_end() -> ir.Expr:
    """Ends a system message."""
    return ir.RoleEnd("system")


def user_begin() -> ir.Expr:
    """Begins a user message."""
    return ir.RoleBegin("user")


def user_end() -> ir.Expr:
    """Ends a user message."""
    return ir.RoleEnd("user")


def assistant_begin() -> ir.Expr:
    """Begins an assistant message."""
    return ir.RoleBegin("assistant")


def assistant_end() -> ir.Expr:
    """Ends an assistant message."""
    return ir.RoleEnd("assistant")


def special(text: str) -> ir.Expr:
    """One control token by its spelling, such as ``special("<|im_end|>")``; the same spelling in plain text stays text."""
    return ir.Special(text)


def image(source: Any) -> ir.Expr:
    """An image, for models that take them; others refuse it when the program gets there."""
    return ir.Media("image", source)


def video(source: Any, num_frames: int = 0) -> ir.Expr:
    """A video of `num_frames` frames, for models that take them; others refuse it when the program gets there."""
    return ir.Media("video", source, num_frames)


def separate_reasoning(expr: Any = None, model_type: str = "qwen3") -> ir.Expr:
    """Splits the thinking of every gen in `expr` from its answer: ``s[name]`` is the answer, and
    ``s[f"{name}_reasoning_content"]`` the thinking; both stream.

    Args:
        expr: A gen, or anything that holds some.
        model_type: Family of the model, which says how its thinking is marked: "qwen3", "deepseek-r1", "kimi"...

    Raises:
        UserError: The family is unknown, or `expr` holds no named gen.
    """
    family = known_family(model_type)
    found = list(ir.nodes(expr))
    if not any(isinstance(node, ir.Gen) and node.name for node in found):
        raise UserError("separate_reasoning splits what a named gen answers; give it one", param="expr")
    return ir.as_series([_splitting(node, family) for node in found])


def _splitting(node: ir.Expr, family: str) -> ir.Expr:
    if not isinstance(node, ir.Gen) or not node.name:
        return node
    if node.value is not None or node.sampling.get("n", 1) != 1:
        raise UserError("separate_reasoning takes gens of plain text, one sample each", param="expr")
    return ir.Gen(node.name, node.sampling, None, 0, family, node.healing, node.deadline)


def warn_unused(name: str, meaning: str) -> None:
    """Warns that an option of SGLang's surface changes nothing here."""
    warnings.warn(f"{name} is accepted and changes nothing here: {meaning}", stacklevel=4)
