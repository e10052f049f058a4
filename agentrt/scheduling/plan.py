"""What one step is to do and what came of it: the plan and its output, free of tensors and picklable.

The scheduler makes a `StepPlan`; the executor runs it and answers with a `StepOutput`. The executor remembers, per
sequence, its slots and how to sample, so a plan carries only what is new and never grows with the context.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from agentrt.errors import AgentrtError
from agentrt.request import SamplingParams, TokenLogprob

Slots = Sequence[int]
"""KV slots, in order of position: a packed array where they are many, so that planning a long prompt makes no objects."""


@dataclass(frozen=True, slots=True)
class Admission:
    """A sequence that joins the running ones in this step.

    Attributes:
        sequence_id: Unique in the engine's life; a preempted sequence comes back under the same id.
        slots: KV slots of the tokens found in the cache, one per token, in order.
        token_ids: Every token of the sequence so far, prompt and output (penalties count them).
        prompt_length: How many of those are the prompt.
        sampling: How to choose its tokens.
        seed: The sample's own seed, from the request's seed and the sample's index.
    """

    sequence_id: int
    slots: Slots
    token_ids: tuple[int, ...]
    prompt_length: int
    sampling: SamplingParams
    seed: int


@dataclass(frozen=True, slots=True)
class Run:
    """The new tokens that one sequence contributes to a step: a prefill chunk, a decode, a forced run, a draft.

    Attributes:
        sequence_id: Whose it is.
        token_ids: The new tokens, at least one.
        start: Position of the first of them: the sequence's computed_tokens.
        slots: Where their KV goes, one per token.
        sample_at: Offsets in the run after which a token is to be sampled: none (a prefill chunk), the last (a decode, the
            end of a prompt), or several (a draft: each guess is kept while it equals what was sampled before it).
        score_at: Offsets in the run after which the sequence's own next token is to be scored.
        parents: For a tree of guesses, each token's parent offset in the run; None for a plain chain.
    """

    sequence_id: int
    token_ids: tuple[int, ...]
    start: int
    slots: Slots
    sample_at: tuple[int, ...] = ()
    score_at: tuple[int, ...] = ()
    parents: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class Remap:
    """Slots of a sequence that changed because the tree already had those tokens: position `start` on is now at `slots`."""

    sequence_id: int
    start: int
    slots: Slots


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step.

    Attributes:
        released: Sequences that left since the last plan: finished, aborted or preempted. Applied first.
        admitted: Sequences that join. Applied second.
        remaps: Slots that changed hands since the last plan. Applied third.
        runs: What is computed, one run a sequence.
    """

    runs: tuple[Run, ...]
    admitted: tuple[Admission, ...] = ()
    released: tuple[int, ...] = ()
    remaps: tuple[Remap, ...] = ()

    @property
    def tokens(self) -> int:
        """New tokens computed in the step."""
        return sum(len(run.token_ids) for run in self.runs)


@dataclass(frozen=True, slots=True)
class Sampled:
    """What came of one run.

    Attributes:
        token_ids: What was sampled at each of the run's `sample_at`; empty if the logits were not finite.
        logprobs: Their log-probabilities and alternatives, if the request asks for them.
        scores: For each of the run's `score_at`, the log-probability of the token that follows in the sequence.
        error: Why this sequence cannot go on, if it cannot.
    """

    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    scores: tuple[TokenLogprob, ...] = ()
    error: AgentrtError | None = None


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What a step gave: one `Sampled` per run, by sequence id, and the seconds it took."""

    sampled: dict[int, Sampled] = field(default_factory=dict)
    seconds: float = 0.0
