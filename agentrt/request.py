"""What is asked of an engine and what it answers: immutable, picklable, free of tensors.

A ``Request`` carries token ids, never text: whoever submits has tokenised already, and nothing is tokenised twice.
Values are checked when the objects are made (`UserError` names the field), so a bad request is refused at the door.
"""

from __future__ import annotations

import itertools
import math
import operator
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import Any, Literal, get_args

from agentrt.errors import AgentrtError, PromptError, UserError

GrammarKind = Literal["json_schema", "regex", "choices", "lark", "tools", "structural"]


class FinishReason(StrEnum):
    """Why a sequence ended well. A sequence that failed carries an error instead."""

    STOP = "stop"  #: an end token, a stop string, a stop token, or a grammar that is complete
    LENGTH = "length"  #: cut by max_tokens or by the end of the context
    ABORT = "abort"  #: cancelled by the caller; what was generated so far is kept


@dataclass(frozen=True, slots=True)
class GrammarSpec:
    """What the output must satisfy: plain text and numbers only, so that it pickles and can be a cache key.

    Attributes:
        kind: Which language `source` is in.
        source: JSON text of the schema, the regex, JSON array of choices, lark text, JSON array of tools, or JSON of
            the structural tags.
        options: Sorted (name, value) pairs that change what is compiled, such as ("tool_choice", "required").
        engine: "auto" (decided by the spec and the config, never by timing), "llguidance" or "fsm".
        strict: Refuse the spec if any keyword would only be CHECKED at the end.
        jump_forward: "on" (canonical forced tokens are appended), "off", or "exact_masked" (drafted and verified, so
            that the distribution is that of plain masking).
    """

    kind: GrammarKind
    source: str
    options: tuple[tuple[str, str | int | bool], ...] = ()
    engine: Literal["auto", "llguidance", "fsm"] = "auto"
    strict: bool = False
    jump_forward: Literal["on", "off", "exact_masked"] = "on"

    def __post_init__(self) -> None:
        for name, known in _SPEC_WORDS.items():
            value = getattr(self, name)
            _check(isinstance(value, str) and value in known, f"grammar.{name}", value, f"one of {', '.join(known)}")
        _check(isinstance(self.source, str), "grammar.source", self.source, "text")
        _check(isinstance(self.strict, bool), "grammar.strict", self.strict, "True or False")
        pairs = isinstance(self.options, tuple) and all(isinstance(pair, tuple) and len(pair) == 2 for pair in self.options)
        plain = pairs and all(isinstance(name, str) and isinstance(value, str | int) for name, value in self.options)
        _check(plain, "grammar.options", self.options, "a tuple of pairs of a name and a text, a number or a truth value")

    def option(self, name: str, default: Any = None) -> Any:
        """Returns the option's value, or `default`."""
        return next((value for key, value in self.options if key == name), default)


_SPEC_WORDS: Mapping[str, tuple[str, ...]] = {
    "kind": get_args(GrammarKind),
    "engine": ("auto", "llguidance", "fsm"),
    "jump_forward": ("on", "off", "exact_masked"),
}


def _check(condition: bool, param: str, value: object, rule: str) -> None:
    if not condition:
        raise UserError(f"{param} is {value!r}; it must be {rule}", param=param)


def _tuple(param: str, value: Any, rule: str) -> tuple[Any, ...]:
    _check(value is None or isinstance(value, Iterable), param, value, rule)
    return tuple(value or ())


def _finite(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to choose tokens and when to stop.

    Attributes:
        max_tokens: Most tokens to generate; None means up to the end of the context. 0 generates nothing (with
            `prompt_logprobs` it scores the prompt).
        min_tokens: End tokens, stop strings and stop tokens are ignored before this many tokens.
        temperature: 0 is greedy.
        top_k: Keep the k likeliest tokens; 0 keeps all.
        top_p: Keep the likeliest tokens whose probabilities add up to this.
        min_p: Drop tokens whose probability is below this share of the likeliest one's.
        repetition_penalty: Divides (or multiplies, if negative) logits of tokens seen in prompt or output; 1 is off.
        frequency_penalty: Subtracted per occurrence in the output.
        presence_penalty: Subtracted once for a token that occurs in the output.
        logit_bias: Token id to a number added to its logit.
        stop: Stop strings; the text before the first match is the answer.
        stop_regex: Stop patterns, matched on the output's text like stop strings.
        stop_token_ids: Further end tokens.
        ignore_eos: Do not stop at the model's end tokens.
        include_stop: Keep the matched stop string in the text.
        seed: Same seed, prompt and parameters give the same tokens, whatever else runs. None draws a fresh one.
        n: Number of samples, which share one prompt.
        logprobs: None for none, else the log-probability of each token and of this many likeliest alternatives.
            They are of the model's own distribution over the tokens that the grammar allows, at temperature 1.
        prompt_logprobs: The same for the prompt's tokens, from `prompt_logprobs_start` on.
        prompt_logprobs_start: First prompt position to score.
        json_schema, regex, choices, ebnf, tools, grammar: At most one; what the output must satisfy. The first five
            take Python values (dict, pydantic model, list of strings...), turned into a `GrammarSpec` at the door.
        tool_choice: With `tools`: "auto", "required", "none" or a tool's name.
        parallel_tool_calls: With `tools`: more than one call is allowed.
        strict: Refuse a constraint of which some keyword would only be checked at the end.
        max_resamples: How many times output that failed its final check is generated anew.

    Raises:
        UserError: A value is out of its range; names the field.
    """

    max_tokens: int | None = None
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = None
    stop: tuple[str, ...] = ()
    stop_regex: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    include_stop: bool = False
    seed: int | None = None
    n: int = 1
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    prompt_logprobs_start: int = 0
    json_schema: Any = None
    regex: str | None = None
    choices: Sequence[str] | None = None
    ebnf: str | None = None
    tools: Sequence[Any] | None = None
    grammar: GrammarSpec | None = None
    tool_choice: str = "auto"
    parallel_tool_calls: bool = True
    strict: bool = False
    max_resamples: int = 3

    def __post_init__(self) -> None:
        for name in ("stop", "stop_regex"):
            value = getattr(self, name)
            rule = "a non-empty string or a list of them"
            texts = (value,) if isinstance(value, str) else _tuple(name, value, rule)
            object.__setattr__(self, name, texts)
            _check(all(isinstance(s, str) and s for s in texts), name, value, rule)
        object.__setattr__(self, "stop_token_ids", _tuple("stop_token_ids", self.stop_token_ids, "a list of token ids"))
        for name, low in (("max_tokens", 0), ("logprobs", 0), ("prompt_logprobs", 0), ("seed", None)):
            value = getattr(self, name)
            ok = value is None or (isinstance(value, int) and not isinstance(value, bool) and (low is None or value >= low))
            _check(ok, name, value, "None or an integer" + ("" if low is None else f" of at least {low}"))
        for name, low in (("min_tokens", 0), ("top_k", 0), ("n", 1), ("prompt_logprobs_start", 0), ("max_resamples", 0)):
            value = getattr(self, name)
            _check(isinstance(value, int) and not isinstance(value, bool) and value >= low, name, value, f"an integer of at least {low}")
        _check(_finite(self.temperature) and 0 <= self.temperature <= 100, "temperature", self.temperature, "from 0 to 100")
        _check(_finite(self.top_p) and 0 < self.top_p <= 1, "top_p", self.top_p, "above 0 and at most 1")
        _check(_finite(self.min_p) and 0 <= self.min_p <= 1, "min_p", self.min_p, "from 0 to 1")
        _check(_finite(self.repetition_penalty) and self.repetition_penalty > 0, "repetition_penalty", self.repetition_penalty, "above 0")
        for name in ("frequency_penalty", "presence_penalty"):
            _check(_finite(getattr(self, name)) and abs(getattr(self, name)) <= 2, name, getattr(self, name), "from -2 to 2")
        if self.logit_bias is not None:
            object.__setattr__(self, "logit_bias", dict(self.logit_bias))
            ok = all(isinstance(k, int) and k >= 0 and _finite(v) for k, v in self.logit_bias.items())
            _check(ok, "logit_bias", dict(self.logit_bias), "token ids (0 or more) to finite numbers")
        _check(all(isinstance(t, int) and t >= 0 for t in self.stop_token_ids), "stop_token_ids", self.stop_token_ids, "token ids of 0 or more")
        if self.max_tokens is not None:
            _check(self.min_tokens <= self.max_tokens, "min_tokens", self.min_tokens, f"at most max_tokens ({self.max_tokens})")
        asked = [name for name in CONSTRAINT_FIELDS if getattr(self, name) is not None]
        if len(asked) > 1:
            raise UserError(f"{' and '.join(asked)} were given together; one request takes one constraint", param=asked[1])

    def replace(self, **changes: Any) -> SamplingParams:
        """Returns a copy with some fields changed, checked again."""
        return SamplingParams(**{f.name: getattr(self, f.name) for f in fields(self)} | changes)


CONSTRAINT_FIELDS = ("json_schema", "regex", "choices", "ebnf", "tools", "grammar")


@dataclass(frozen=True, slots=True)
class ProgramTag:
    """Where a request stands in the program that makes it; hints for scheduling and eviction, never needed for the answer.

    Attributes:
        program: Id of the run of the @function.
        branch: Id of the fork within it; "" is the trunk.
        expected_calls: How many more calls the program is thought to make after this one (its remaining critical path).
        will_fork: Into how many branches the prefix is about to part; 0 for none.
    """

    program: str
    branch: str = ""
    expected_calls: int = 0
    will_fork: int = 0

    def __post_init__(self) -> None:
        for name in ("program", "branch"):
            value = getattr(self, name)
            _check(isinstance(value, str), name, value, "a string")
        for name in ("expected_calls", "will_fork"):
            value = getattr(self, name)
            _check(isinstance(value, int) and not isinstance(value, bool), name, value, "a whole number")


def _plain_ids(ids: Iterable[Any]) -> tuple[int, ...]:
    try:
        return tuple(map(operator.index, ids))
    except TypeError as error:
        raise PromptError(f"prompt_ids must be token ids, whole numbers: {error}", param="prompt") from error


_counter = itertools.count()


def _new_request_id() -> str:
    return f"req-{os.getpid():x}-{next(_counter)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """The immutable ask.

    Attributes:
        prompt_ids: Token ids of the whole prompt; at least one.
        sampling: How to choose tokens and when to stop.
        request_id: Unique while the request lives.
        cache_salt: Requests with different salts never share KV.
        priority: Higher runs first; equal priorities follow the policy.
        program: Its place in a program, if it has one.
        deadline: Seconds after submission at which it is aborted; None for never.
        prompt_tail: Bytes of text not yet fed that the generation must begin by completing (token healing).
    """

    prompt_ids: tuple[int, ...]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    request_id: str = field(default_factory=_new_request_id)
    cache_salt: str = ""
    priority: int = 0
    program: ProgramTag | None = None
    deadline: float | None = None
    prompt_tail: bytes = b""

    def __post_init__(self) -> None:
        object.__setattr__(self, "prompt_ids", _plain_ids(self.prompt_ids))
        for name, kind, rule in (
            ("sampling", SamplingParams, "a SamplingParams"),
            ("request_id", str, "a string"),
            ("cache_salt", str, "a string"),
            ("priority", int, "a whole number"),
            ("prompt_tail", bytes, "bytes"),
        ):
            value = getattr(self, name)
            _check(isinstance(value, kind) and not isinstance(value, bool), name, value, rule)
        _check(self.program is None or isinstance(self.program, ProgramTag), "program", self.program, "a ProgramTag or None")
        ok = self.deadline is None or (_finite(self.deadline) and self.deadline >= 0)
        _check(ok, "deadline", self.deadline, "None or a finite number of seconds of at least 0")


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Log-probability of one token (natural logarithm), and of its likeliest alternatives.

    Attributes:
        token_id: The token.
        logprob: Its log-probability; 0.0 for a forced token; None for the first token of a prompt.
        top: (token id, log-probability) of the likeliest tokens, best first.
    """

    token_id: int
    logprob: float | None
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Usage:
    """What one request cost, all samples together.

    Attributes:
        prompt_tokens: Length of the prompt.
        cached_tokens: Prompt tokens whose KV was found in the tree when the first sample was admitted.
        completion_tokens: Tokens generated, forced ones included.
        forced_tokens: Tokens that the grammar left no choice about.
        forward_passes: Steps in which a sample of this request took part.
        passes_saved: Forward passes that forced or accepted drafted tokens made unnecessary.
        preemptions: Times it had to give its pages back and start over.
        resamples: Times its output failed the final check and was generated anew.
        queue_seconds: From submission to first admission.
        run_seconds: From first admission to the end.
    """

    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    forced_tokens: int = 0
    forward_passes: int = 0
    passes_saved: int = 0
    preemptions: int = 0
    resamples: int = 0
    queue_seconds: float = 0.0
    run_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class TokenDelta:
    """What one step added to one sample of a request.

    Attributes:
        request_id: Whose it is.
        index: Which of the n samples.
        token_ids: Ids fed or sampled in this step, in order. Ids are told even while their text is held back.
        text: Text that became certain: never half a character, never the beginning of a possible stop string.
        forced: For each of `token_ids`, whether the grammar left no choice.
        logprobs: For each of `token_ids`, if asked for.
        prompt_logprobs: Scores of the prompt, on the first delta of sample 0, if asked for.
        finish_reason: Set on the last delta of a sample.
        stop_match: The stop string, pattern or token id that ended it, if one did.
        usage: On the last delta of the request.
        error: Set instead of `finish_reason` if the request failed; nothing follows it.
    """

    request_id: str
    index: int = 0
    token_ids: tuple[int, ...] = ()
    text: str = ""
    forced: tuple[bool, ...] = ()
    logprobs: tuple[TokenLogprob, ...] | None = None
    prompt_logprobs: tuple[TokenLogprob, ...] | None = None
    finish_reason: FinishReason | None = None
    stop_match: str | int | None = None
    usage: Usage | None = None
    error: AgentrtError | None = None

    @property
    def last(self) -> bool:
        """Whether nothing follows for the whole request."""
        return self.usage is not None or self.error is not None


@dataclass(frozen=True, slots=True)
class Sample:
    """One of the n answers.

    Attributes:
        text: The answer, with a matched stop string cut off.
        token_ids: Every id sampled or forced, the end token included.
        finish_reason: Why it ended.
        forced: For each id, whether it was forced.
        logprobs: For each id, if asked for.
        stop_match: What ended it, if a stop string, pattern or token did.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    forced: tuple[bool, ...] = ()
    logprobs: tuple[TokenLogprob, ...] | None = None
    stop_match: str | int | None = None


@dataclass(frozen=True, slots=True)
class Completion:
    """The whole answer to a request; its first sample's fields are readable directly.

    Attributes:
        request_id: Whose it is.
        samples: The n answers, in order.
        usage: What it cost.
        prompt_logprobs: Scores of the prompt, if asked for.
    """

    request_id: str
    samples: tuple[Sample, ...]
    usage: Usage
    prompt_logprobs: tuple[TokenLogprob, ...] | None = None

    @property
    def text(self) -> str:
        """Text of the first sample."""
        return self.samples[0].text

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Ids of the first sample."""
        return self.samples[0].token_ids

    @property
    def finish_reason(self) -> FinishReason:
        """Why the first sample ended."""
        return self.samples[0].finish_reason

    @property
    def logprobs(self) -> tuple[TokenLogprob, ...] | None:
        """Log-probabilities of the first sample."""
        return self.samples[0].logprobs
