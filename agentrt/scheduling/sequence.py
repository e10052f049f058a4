"""A sequence: the live state of one sample of a request. Only the scheduler changes it.

What it owns, by position (``page_size`` 1 drawn):

```
token_ids   |  prompt ............................ |  output (sampled and forced) ... |
KV exists   |<----------- computed_tokens ------------------>|  pending: the next run  |
pages       |<- lease.pages: the tree's, shared ->|<- private: only this sequence's ->|
            0                          shared_pages                          len(pages)
```

Ids are only ever appended (a restart begins a new answer), so whatever was fed is what the tree is keyed by.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from agentrt.cache.prefix_cache import PrefixLease
from agentrt.cache.radix_tree import PrefixKey
from agentrt.errors import AgentrtError
from agentrt.request import FinishReason, Request, TokenLogprob


class Status(Enum):
    """Where a sequence stands."""

    WAITING = auto()
    RUNNING = auto()
    FINISHED = auto()


class Cursor(Protocol):
    """What the scheduler asks of one sequence's position in its grammar."""

    @property
    def accepting(self) -> bool:
        """Whether an end token may follow."""
        ...

    @property
    def finished(self) -> bool:
        """Whether nothing but an end token may follow."""
        ...

    def allowed(self) -> NDArray[np.int32]:
        """The tokens that may follow: int32 [words], bit i of word w for token 32 w + i."""
        ...

    def advance(self, token_id: int) -> bool:
        """Takes a token; False if the grammar does not allow it."""
        ...

    def forced(self) -> list[int]:
        """The tokens that must follow, canonically spelt; they are not taken yet."""
        ...

    def rollback(self, count: int) -> None:
        """Takes back the last `count` tokens."""
        ...


class Watch(Protocol):
    """Watches the text of one sample: stop strings as it grows, the final check when it is complete."""

    def push(self, token_id: int) -> str | None:
        """Takes a token; returns the stop string or pattern that its text completed, if any."""
        ...

    def violations(self) -> tuple[str, ...]:
        """What the complete answer fails of its final check; empty if it passes or needs none."""
        ...

    def restart(self) -> Cursor | None:
        """Forgets the answer, which failed its check; returns a cursor at the beginning of the grammar."""
        ...


@dataclass(eq=False, slots=True)
class Sequence:
    """One sample of a request, alive.

    Attributes:
        sequence_id: Unique in the engine's life.
        request: The ask.
        index: Which of the request's n samples.
        seed: The sample's own seed.
        arrival: When it was submitted, on the scheduler's clock.
        max_length: Most tokens, prompt and output together.
        end_ids: Tokens that end the output.
        watch: Watches the text; None where there is nothing to watch for.
        cursor: Position in the grammar; None if the output is free.
        token_ids: Prompt, then output; packed, so that 10,000 waiting prompts cost the garbage collector nothing.
        pages: Page of every `page_size` tokens whose slots are set aside, in order.
        computed_tokens: Tokens whose KV exists.
        lease: The locked path in the tree that the first pages belong to; None while waiting.
        shared_pages: How many of `pages` the tree owns.
        status: Where it stands.
        admitted_length: Tokens it had when it was admitted; until those are computed it is prefilling.
        told: Output tokens that its caller has been told of.
        drafted: How many of the pending tokens are guesses to verify (exact_masked).
        output_forced: For each output token, whether it was forced.
        scores: Prompt log-probabilities gathered so far.
        cached_tokens: Prefix found in the tree at first admission; None before it.
        first_admission: When that was.
        forward_passes: Steps it took part in.
        passes_saved: Tokens that came without a pass of their own.
        preemptions: Times it had to give its pages back.
        resamples: Times its answer was begun anew.
        excluded: For a greedy one, (output so far, token) pairs that led to an answer that failed its final check.
        finish_reason: Why it ended.
        stop_match: The stop that ended it.
        error: Why it failed.
    """

    sequence_id: int
    request: Request
    index: int
    seed: int
    arrival: float
    max_length: int
    end_ids: frozenset[int]
    watch: Watch | None = None
    cursor: Cursor | None = None
    token_ids: array[int] = field(default_factory=lambda: array("i"))
    pages: array[int] = field(default_factory=lambda: array("i"))
    computed_tokens: int = 0
    lease: PrefixLease | None = None
    shared_pages: int = 0
    status: Status = Status.WAITING
    admitted_length: int = 0
    told: int = 0
    drafted: int = 0
    output_forced: list[bool] = field(default_factory=list)
    scores: list[TokenLogprob] = field(default_factory=list)
    cached_tokens: int | None = None
    first_admission: float | None = None
    forward_passes: int = 0
    passes_saved: int = 0
    preemptions: int = 0
    resamples: int = 0
    excluded: list[tuple[array[int], int]] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_match: str | int | None = None
    error: AgentrtError | None = None
    _key: PrefixKey | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        if not self.token_ids:
            self.token_ids = array("i", self.request.prompt_ids)

    @property
    def key(self) -> PrefixKey:
        """Its ids as the tree is searched for them: packed once for all the time it waits."""
        if self._key is None:
            self._key = PrefixKey(self.token_ids[:], self.namespace)
        return self._key

    def forget_key(self) -> None:
        """Its ids will change, or are not searched for again soon."""
        self._key = None

    @property
    def prompt_length(self) -> int:
        """Tokens of the prompt."""
        return len(self.request.prompt_ids)

    @property
    def output_length(self) -> int:
        """Tokens generated so far."""
        return len(self.token_ids) - self.prompt_length

    @property
    def pending(self) -> int:
        """Tokens known but not yet computed."""
        return len(self.token_ids) - self.computed_tokens

    @property
    def prefilling(self) -> bool:
        """Whether it is still computing what it was admitted with."""
        return self.computed_tokens < self.admitted_length

    @property
    def namespace(self) -> str:
        """Whose tree it shares."""
        return self.request.cache_salt

    @property
    def program(self) -> str | None:
        """The program that it belongs to, if any."""
        return self.request.program.program if self.request.program else None

    @property
    def reuse_limit(self) -> int:
        """How many leading tokens may come from the cache: never the last, nor what is to be scored.

        The logits after position p need the token at p computed, so scoring from position s needs s - 1 on.
        """
        limit = len(self.token_ids) - 1
        if self._scored and len(self.scores) < self._scores_wanted:
            limit = min(limit, max(self._score_start + len(self.scores) - 1, 0))
        return limit

    @property
    def _scored(self) -> bool:
        """Whether its prompt is scored; the samples share one prompt, so the first does it for all."""
        return self.request.sampling.prompt_logprobs is not None and self.index == 0

    @property
    def _score_start(self) -> int:
        return max(self.request.sampling.prompt_logprobs_start, 1)

    @property
    def _scores_wanted(self) -> int:
        return max(self.prompt_length - self._score_start, 0)

    def score_offsets(self, start: int, count: int) -> tuple[int, ...]:
        """Offsets within a run of `count` tokens at `start` after which a prompt token still needs its score."""
        if not self._scored:
            return ()
        first = self._score_start - 1 + len(self.scores)  # the position whose logits give the next score
        last = min(start + count, self.prompt_length - 1)
        return tuple(position - start for position in range(max(first, start), last))

    def exclude_answer(self) -> None:
        """Rules the present answer out for the next try: one of its free tokens may not be chosen again at its place.

        Each try takes an earlier place, so that few tries reach both what was decided late and what was decided early.
        """
        free = [at for at, forced in enumerate(self.output_forced) if not forced]
        if not free:
            return
        tries = self.request.sampling.max_resamples + 1
        at = free[len(free) * (tries - 1 - self.resamples) // tries]
        output = self.token_ids[self.prompt_length :]
        self.excluded.append((output[:at], output[at]))
