"""The door: what a caller gives becomes a checked `Request`, or a `UserError` that says what is wrong, before anything starts."""

from __future__ import annotations

import math
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from agentrt.backend import Message, Tokenizer
from agentrt.config import Limits
from agentrt.errors import PromptError, TooLongError, UserError
from agentrt.grammar.spec import FIELDS, spec_from
from agentrt.request import Request, SamplingParams
from agentrt.text.stop import StopMatcher

#: Text, token ids, or chat messages.
Prompt = str | Sequence[int] | Sequence[Message]


def is_batch(prompt: Prompt | Sequence[Prompt]) -> bool:
    """Whether this is a list of prompts, rather than one."""
    return not isinstance(prompt, str) and all(isinstance(item, str) or _is_list(item) for item in prompt)


def _is_list(item: object) -> bool:
    return hasattr(item, "__len__") and not isinstance(item, Mapping)


def prompt_ids(prompt: Prompt, tokenizer: Tokenizer) -> tuple[int, ...]:
    """Token ids of a prompt.

    Raises:
        PromptError: It is empty, or neither text, ids nor messages.
    """
    if isinstance(prompt, str):
        ids = tokenizer.encode(prompt, bos=True) if prompt else []
    elif all(isinstance(item, Mapping) for item in prompt):
        ids = tokenizer.encode_chat(prompt) if prompt else []  # type: ignore[arg-type]
    else:
        ids = [_token_id(item) for item in prompt]
    if not ids:
        raise PromptError("the prompt is empty; give at least one token", param="prompt")
    return tuple(ids)


def _token_id(item: Any) -> int:
    if isinstance(item, bool) or not hasattr(item, "__index__"):
        raise PromptError(
            f"a prompt is text, a list of token ids, or a list of chat messages; this one has {item!r} in it", param="prompt"
        )
    return int(item)


def checked_ids(ids: Sequence[int], vocab_size: int) -> tuple[int, ...]:
    """Token ids as plain integers.

    Raises:
        PromptError: One is not an integer, or not in the vocabulary.
    """
    plain = tuple(_token_id(item) for item in ids)
    wrong = next((token_id for token_id in plain if not 0 <= token_id < vocab_size), None)
    if wrong is not None:
        raise PromptError(f"token id {wrong} is not in the vocabulary (0 to {vocab_size - 1})", param="ids")
    return plain


def checked_hold(program: str, seconds: float) -> tuple[str, float]:
    """A program's id and how long its prefixes are to be kept.

    Raises:
        UserError: The time is not a finite number of at least 0.
    """
    if not isinstance(seconds, int | float) or not 0 <= seconds < math.inf:
        raise UserError(f"seconds is {seconds!r}; it must be a finite number of at least 0", param="seconds")
    return str(program), float(seconds)


def admit(request: Request, limits: Limits, *, max_context: int, kv_tokens: int, vocab_size: int) -> Request:
    """Checks a request against what the engine has, and fills in what it left open (its seed, its compiled-to-be grammar).

    Args:
        request: The ask.
        limits: Bounds on what one request may hold.
        max_context: Most tokens of prompt and output together that the model takes.
        kv_tokens: Token slots of the KV store.
        vocab_size: Width of the logits.

    Raises:
        PromptError: An id outside the vocabulary.
        TooLongError: It can never fit.
        UserError: Something else is beyond a limit.
        GrammarError: Its constraint is malformed.
    """
    _check_ids(request, vocab_size)
    _check_limits(request.sampling, limits)
    _at_most("prompt_tail", len(request.prompt_tail), limits.prompt_tail, "bytes", "prompt_tail")
    _check_length(request, max_context, kv_tokens)
    changes: dict[str, Any] = {}
    spec = spec_from(request.sampling)
    if spec is not None:
        field = FIELDS[spec.kind]
        _at_most(field, len(spec.source.encode("utf-8", "surrogatepass")), limits.grammar_bytes, "bytes", field)
        if request.sampling.strict and not spec.strict:
            spec = replace(spec, strict=True)
        changes = dict.fromkeys(("json_schema", "regex", "choices", "ebnf", "tools")) | {"grammar": spec}
    if request.sampling.seed is None:
        changes["seed"] = secrets.randbits(48)
    if not changes:
        return request
    return replace(request, sampling=request.sampling.replace(**changes))


def _check_ids(request: Request, vocab_size: int) -> None:
    if not request.prompt_ids:
        raise PromptError("the prompt is empty; give at least one token", param="prompt")
    low, high = min(request.prompt_ids), max(request.prompt_ids)
    if low < 0 or high >= vocab_size:
        wrong = low if low < 0 else high
        raise PromptError(f"token id {wrong} in the prompt is not in the vocabulary (0 to {vocab_size - 1})", param="prompt")
    sampling = request.sampling
    for name, ids in (("logit_bias", sampling.logit_bias or ()), ("stop_token_ids", sampling.stop_token_ids)):
        wrong = max(ids, default=0)
        if wrong >= vocab_size:
            raise UserError(f"token id {wrong} in {name} is not in the vocabulary (0 to {vocab_size - 1})", param=name)
    start = sampling.prompt_logprobs_start
    if sampling.prompt_logprobs is not None and start >= len(request.prompt_ids):
        raise UserError(
            f"prompt_logprobs_start is {start}, but the prompt has {len(request.prompt_ids)} tokens", param="prompt_logprobs_start"
        )


def _at_most(what: str, value: int, limit: int, unit: str, param: str) -> None:
    if value > limit:
        raise UserError(f"{what} has {value} {unit}; at most {limit} are allowed", param=param)


def _check_limits(sampling: SamplingParams, limits: Limits) -> None:
    _at_most("n", sampling.n, limits.n, "samples", "n")
    _at_most("logprobs", sampling.logprobs or 0, limits.logprobs, "alternatives", "logprobs")
    _at_most("prompt_logprobs", sampling.prompt_logprobs or 0, limits.logprobs, "alternatives", "prompt_logprobs")
    stops = len(sampling.stop) + len(sampling.stop_regex) + len(sampling.stop_token_ids)
    _at_most("stop", stops, limits.stops, "stops", "stop")
    for text in (*sampling.stop, *sampling.stop_regex):
        _at_most("a stop string", len(text), limits.stop_length, "characters", "stop")
    if sampling.stop_regex:
        StopMatcher(sampling.stop, sampling.stop_regex)  # refuses what does not compile
    _at_most("max_resamples", sampling.max_resamples, limits.resamples, "tries", "max_resamples")
    _at_most("logit_bias", len(sampling.logit_bias or ()), limits.logit_bias, "entries", "logit_bias")


def _check_length(request: Request, max_context: int, kv_tokens: int) -> None:
    prompt, wanted = len(request.prompt_ids), request.sampling.max_tokens
    # With max_tokens left open there must be room for one token; with 0, for the prompt alone.
    needed = prompt + (1 if wanted is None else wanted)
    for limit, what in ((max_context, "the model's context"), (kv_tokens, "the KV store")):
        if needed > limit:
            asked = "" if wanted is None else f" and max_tokens of {wanted}"
            raise TooLongError(
                f"the prompt of {prompt} tokens{asked} needs {needed} tokens, but {what} has {limit}; shorten the prompt or lower max_tokens"
                + ("" if limit == max_context else ", or start the engine with more kv_tokens"),
                needed=needed,
                limit=limit,
                param="prompt" if prompt >= limit else "max_tokens",
            )
