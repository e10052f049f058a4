"""Sampling options: from the many names people write to one checked `SamplingParams`.

Knows the names of SGLang's surface beside our own, merges a program's defaults with a gen's own options, and derives
seeds. Invariant: the options of a gen win over those of the run, and a name that means nothing is refused, never dropped.
"""

from __future__ import annotations

import difflib
import hashlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from operator import attrgetter
from typing import Any

from agentrt.errors import UserError
from agentrt.request import CONSTRAINT_FIELDS, SamplingParams

DEFAULT_MAX_TOKENS = 128

_FIELDS = tuple(f.name for f in fields(SamplingParams))
_KNOWN = frozenset(_FIELDS)
_all_of = attrgetter(*_FIELDS)
_PUT: tuple[Callable[[SamplingParams, Any], None], ...] = tuple(getattr(SamplingParams, name).__set__ for name in _FIELDS)
_PUT_SEED = _PUT[_FIELDS.index("seed")]

#: Options that a run takes as defaults for every gen; the rest of SamplingParams belongs to one gen alone.
RUN_FIELDS = frozenset(_FIELDS) - frozenset(CONSTRAINT_FIELDS) - {"tool_choice", "parallel_tool_calls"}
#: Further names that mean something of the above.
ALIASES = frozenset(
    {"max_new_tokens", "return_logprob", "logprob_start_len", "top_logprobs_num", "return_text_in_logprobs"}
)


def meant(name: str, known: Iterable[str]) -> str:
    """Says which known name was meant, if one is close to `name`; else nothing."""
    close = difflib.get_close_matches(name, known, 1)
    return f"; did you mean {close[0]!r}?" if close else ""


def sampling_fields(options: Mapping[str, Any]) -> dict[str, Any]:
    """Translates options as people write them into `SamplingParams` fields; None means "not given".

    Raises:
        UserError: A name that is not an option, or two names for one thing.
    """
    given = {name: value for name, value in options.items() if value is not None}
    if not given:
        return given
    unknown = [name for name in given if name not in _KNOWN and name not in ALIASES]
    if unknown:
        known = sorted({*_FIELDS, *ALIASES})
        hint = meant(unknown[0], known) or f"; options are {', '.join(known)}"
        raise UserError(f"unknown option {unknown[0]!r}{hint}", param=unknown[0])
    if "max_new_tokens" in given:
        if "max_tokens" in given:
            raise UserError(
                "max_tokens and max_new_tokens are the same option; give one of them", param="max_new_tokens"
            )
        given["max_tokens"] = given.pop("max_new_tokens")
    if given.get("top_k") == -1:  # SGLang's "all"
        given["top_k"] = 0
    _log_probabilities(given)
    return given


def _log_probabilities(given: dict[str, Any]) -> None:
    wanted = given.pop("return_logprob", False)
    alternatives = given.pop("top_logprobs_num", 0)
    start = given.pop("logprob_start_len", -1)
    given.pop("return_text_in_logprobs", None)  # the texts are always there
    if wanted:
        given.setdefault("logprobs", alternatives)
        if start >= 0:
            given.setdefault("prompt_logprobs", alternatives)
            given.setdefault("prompt_logprobs_start", start)


class Sampling:
    """The sampling of one run: its defaults, and a memo of what they make with a gen's options."""

    def __init__(self, defaults: Mapping[str, Any], base: SamplingParams | None = None) -> None:
        if base is not None and not isinstance(base, SamplingParams):
            raise UserError(
                f"sampling is {base!r:.80}; it must be SamplingParams(...), or give its fields as keywords", param="sampling"
            )
        fixed = {} if base is None else {name: getattr(base, name) for name in _FIELDS}
        self._defaults = fixed | dict(defaults)
        self._limit = self._defaults.pop("max_tokens", DEFAULT_MAX_TOKENS)
        self._limited = "max_tokens" in defaults or base is not None
        self.seed: int | None = self._defaults.pop("seed", None)
        self._made: dict[Any, SamplingParams] = {}

    def to_json(self) -> dict[str, Any]:
        """The defaults as plain values."""
        given = self._defaults | ({"max_tokens": self._limit} if self._limited else {})
        return {name: list(value) if isinstance(value, tuple) else value for name, value in given.items()}

    @classmethod
    def from_json(cls, values: Mapping[str, Any], seed: int | None = None) -> Sampling:
        """Reads what `to_json` wrote."""
        bias = values.get("logit_bias")
        restored = dict(values) | ({"logit_bias": {int(k): v for k, v in bias.items()}} if bias else {})
        return cls(restored | {"seed": seed})

    def params(
        self,
        own: Mapping[str, Any],
        *,
        typed: bool = False,
        seed: Callable[[], int] = lambda: 0,
    ) -> SamplingParams:
        """Returns the checked parameters of one gen.

        Args:
            own: The gen's own fields.
            typed: The answer is a typed value: its length is bounded by the context, not by the default limit.
            seed: Makes what this gen draws from, if it draws at all and brings no seed of its own.
        """
        key = (typed, tuple(own.items()))
        try:
            made = self._made.get(key)
        except TypeError:  # a dict or list among the options
            return self._seeded(self._make(own, typed), own, seed)
        if made is None:
            made = self._make(own, typed)
            if len(self._made) < 1024:
                self._made[key] = made
        return self._seeded(made, own, seed)

    def _make(self, own: Mapping[str, Any], typed: bool) -> SamplingParams:
        merged: dict[str, Any] = self._defaults | dict(own)
        limit = None if typed and not self._limited else self._limit
        limit = merged.pop("max_tokens", limit)
        return SamplingParams(max_tokens=limit, **merged)

    def _seeded(self, made: SamplingParams, own: Mapping[str, Any], seed: Callable[[], int]) -> SamplingParams:
        if "seed" in own or (made.temperature == 0 and made.n == 1):  # nothing is drawn
            return made
        return _with_seed(made, seed())


def _with_seed(params: SamplingParams, seed: int) -> SamplingParams:
    # All but the seed was checked when `params` was made; checking it again would cost a third of a gen's whole overhead.
    copy = object.__new__(SamplingParams)
    for put, value in zip(_PUT, _all_of(params), strict=True):
        put(copy, value)
    _PUT_SEED(copy, seed)
    return copy


def derive_seed(*path: int | str) -> int:
    """Returns a 63-bit seed that depends on the whole path (the run's seed, the branch, the gen's number) and nothing else."""
    digest = hashlib.blake2b("\x1f".join(map(str, path)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
