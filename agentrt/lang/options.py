"""Sampling options: from the many names people write to one checked `SamplingParams`.

Knows the names of SGLang's surface beside our own, merges a program's defaults with a gen's own options, and derives
seeds. Invariant: the options of a gen win over those of the run, and a name that means nothing is refused, never dropped.
"""

from __future__ import annotations

import difflib
import hashlib
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from itertools import repeat
from operator import attrgetter, call
from typing import TYPE_CHECKING, Any

from agentrt.errors import UserError
from agentrt.request import CONSTRAINT_FIELDS, SamplingParams

if TYPE_CHECKING:
    from agentrt.lang.ir import Gen

DEFAULT_MAX_TOKENS = 128
KNOWN_NODES = 1024  #: most gens whose parameters a run keeps

#: Parameters, and all their values if something is drawn with them: each gen then gets them with a seed of its own.
Made = tuple[SamplingParams, tuple[Any, ...] | None]

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
        self._made: dict[int, tuple[Gen, Made]] = {}

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
        """Returns the checked parameters of one request.

        Args:
            own: The fields that were given for it.
            typed: The answer is a typed value: its length is bounded by the context, not by the default limit.
            seed: Makes what it draws from, if it draws at all and brings no seed of its own.
        """
        made, drawing = self._make(own, typed)
        return made if drawing is None else seeded(drawing, seed())

    def of_gen(self, node: Gen) -> Made:
        """The checked parameters of a gen, worked out once for each node."""
        known = self._made.get(id(node))
        if known is not None:
            return known[1]
        own = node.sampling if node.value is None else {**node.sampling, **node.value.constraint}
        made = self._make(own, node.value is not None)
        if len(self._made) < KNOWN_NODES:
            self._made[id(node)] = node, made  # with the node, so that its id stays its own
        return made

    def _make(self, own: Mapping[str, Any], typed: bool) -> Made:
        merged: dict[str, Any] = self._defaults | dict(own)
        limit = None if typed and not self._limited else self._limit
        limit = merged.pop("max_tokens", limit)
        made = SamplingParams(max_tokens=limit, **merged)
        draws = "seed" not in own and (made.temperature > 0 or made.n > 1)
        return made, _all_of(made) if draws else None


def seeded(values: tuple[Any, ...], seed: int) -> SamplingParams:
    """Returns parameters with these values and that seed. The values were checked when they were first put together; doing so for
    every gen would cost more than all else that the language does for it.
    """
    params = object.__new__(SamplingParams)
    deque(map(call, _PUT, repeat(params), values), 0)
    _PUT_SEED(params, seed)
    return params


def derive_seed(*path: int | str) -> int:
    """Returns a 63-bit seed that depends on the whole path (the run's seed, the branch, the gen's number) and nothing else."""
    digest = hashlib.blake2b("\x1f".join(map(str, path)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
