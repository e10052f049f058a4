"""Runs plans: the one place where a plan becomes tensors and tensors become a `StepOutput`.

`launch` starts a step and answers at once with a `PendingStep`; `finish` takes the grammars' masks, which were computed
meanwhile, and samples. Where the device computes by itself, what can be known of the next step is worked out between the two.
One process and one device now; the plan is all that several ranks would need.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from agentrt.engine.batch import NextDecode, SequenceStates, forward_batch, next_decode
from agentrt.engine.model_runner import ModelRunner
from agentrt.engine.sampler import Choice, Row, Sampler
from agentrt.request import TokenLogprob
from agentrt.scheduling.plan import Run, Sampled, StepOutput, StepPlan

#: For each sequence with a grammar, int32 [len(sample_at), words].
Masks = Mapping[int, NDArray[np.int32]]


class PendingStep(Protocol):
    """A step that was launched."""

    def foresee(self) -> None:
        """Works out what can be known of the next step before this one's tokens are."""
        ...

    def finish(self, masks: Masks) -> StepOutput:
        """Samples, and waits for the result."""
        ...


class Executor(Protocol):
    """Runs steps, in order."""

    @property
    def asynchronous(self) -> bool:
        """Whether the device computes while the host goes on: `launch` does not wait for it, `finish` does."""
        ...

    def launch(self, plan: StepPlan) -> PendingStep:
        """Starts a step."""
        ...


class LocalExecutor:
    """Runs steps in this thread."""

    def __init__(self, runner: ModelRunner, sampler: Sampler, vocab_size: int) -> None:
        """Makes an executor without sequences.

        Args:
            runner: The model.
            sampler: Chooses tokens.
            vocab_size: Width of the logits.
        """
        self._runner = runner
        self._sampler = sampler
        self._states = SequenceStates(vocab_size)
        self._foreseen: NextDecode | None = None

    @property
    def asynchronous(self) -> bool:
        """Whether the device is a GPU."""
        return self._runner.device.type == "cuda"

    def launch(self, plan: StepPlan) -> PendingStep:
        """Computes the plan's tokens."""
        started = time.perf_counter()
        self._states.apply(plan)
        foreseen, self._foreseen = self._foreseen, None
        with torch.inference_mode():
            batch = foreseen.batch(plan) if foreseen is not None and foreseen.is_start_of(plan) else forward_batch(plan, self._states)
            hidden = self._runner.forward(batch)
            return _LocalStep(self, plan, hidden, batch.scored, started)

    def foresee(self, plan: StepPlan) -> None:
        """Works out the step after `plan`, as far as can be said before its tokens are known."""
        self._foreseen = next_decode(plan, self._states)
        if self._foreseen is not None:
            self._runner.foresee(self._foreseen.attention)

    def finish(self, plan: StepPlan, hidden: Tensor, scored: int, masks: Masks) -> dict[int, Sampled]:
        """Scores and samples what `launch` computed: hidden states of rows to score, so many, then of rows to sample from."""
        rows = [row for run in plan.runs for row in self._rows(run, masks)]
        with torch.inference_mode():
            scores = iter(self._runner.score(hidden[:scored], self._targets(plan)) if scored else ())
            to_sample = hidden[scored:] if scored else hidden
            choices = iter(self._sampler.sample(self._runner.logits(to_sample), rows) if rows else ())
        sampled: dict[int, Sampled] = {}
        for run in plan.runs:
            own_scores = tuple(next(scores) for _ in run.score_at)
            sampled[run.sequence_id] = _sampled([next(choices) for _ in run.sample_at], own_scores)
        return sampled

    def _targets(self, plan: StepPlan) -> list[tuple[int, int]]:
        """The tokens to score, and how many alternatives of each."""
        targets: list[tuple[int, int]] = []
        for run in plan.runs:
            state = self._states[run.sequence_id]
            count = state.sampling.prompt_logprobs or 0
            targets.extend((state.token_ids[run.start + offset + 1], count) for offset in run.score_at)
        return targets

    def _rows(self, run: Run, masks: Masks) -> list[Row]:
        state = self._states[run.sequence_id]
        mask = masks.get(run.sequence_id)
        rows = []
        for index, offset in enumerate(run.sample_at):
            position = run.start + offset + 1
            rows.append(
                Row(
                    state.sampling,
                    state.seed,
                    position,
                    position - state.prompt_length,
                    state.penalties,
                    run.token_ids[offset + 1 :],
                    None if mask is None else mask[index],
                )
            )
        return rows


class _LocalStep:
    def __init__(self, executor: LocalExecutor, plan: StepPlan, hidden: Tensor, scored: int, started: float) -> None:
        self._executor = executor
        self._plan = plan
        self._hidden, self._scored = hidden, scored
        self._started = started

    def foresee(self) -> None:
        self._executor.foresee(self._plan)

    def finish(self, masks: Masks) -> StepOutput:
        sampled = self._executor.finish(self._plan, self._hidden, self._scored, masks)
        return StepOutput(sampled, time.perf_counter() - self._started)


def _sampled(choices: list[Choice], scores: tuple[TokenLogprob, ...]) -> Sampled:
    error = next((choice.error for choice in choices if choice.error), None)
    if error is not None:
        return Sampled(scores=scores, error=error)
    logprobs = tuple(choice.logprob for choice in choices if choice.logprob is not None)
    return Sampled(tuple(choice.token_id for choice in choices), logprobs, scores)
