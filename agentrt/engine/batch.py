"""From a plan to tensors: the executor's memory of each sequence, and the batch that the model runs on.

A plan says only what is new; the slots and the way to sample of every running sequence are kept here, in step with it. What does not
depend on the tokens that a step samples can be worked out for the next one while a device runs it (`next_decode`): the same numbers, sooner.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from agentrt.attention.base import AttentionBatch
from agentrt.attention.sharing import shared_prefixes
from agentrt.engine.penalties import Penalties, wants_penalties
from agentrt.request import SamplingParams
from agentrt.scheduling.plan import Admission, Run, Slots, StepPlan


@dataclass(slots=True)
class SequenceState:
    """What the executor remembers of a running sequence.

    Attributes:
        sampling: How to choose its tokens.
        seed: Of the sample.
        prompt_length: Tokens of its prompt.
        admitted_length: Tokens it had when it was admitted.
        token_ids: Every token known, for penalties and scores; up to `admitted_length` they are known before they are fed.
        slots: int64 [capacity]: the slot of each position; valid up to what was computed.
        penalties: Occurrences of tokens, if a penalty is asked for.
    """

    sampling: SamplingParams
    seed: int
    prompt_length: int
    admitted_length: int
    token_ids: list[int]
    slots: NDArray[np.int64]
    penalties: Penalties | None

    def place(self, start: int, slots: Slots) -> None:
        """Says where the positions from `start` on are."""
        stop = start + len(slots)
        self.reserve(stop)
        self.slots[start:stop] = slots

    def reserve(self, stop: int) -> None:
        """Makes room for the slots of positions up to `stop`, so that a view of them made now stays one."""
        if stop > len(self.slots):
            grown = np.zeros(max(stop, 2 * len(self.slots)), dtype=np.int64)
            grown[: len(self.slots)] = self.slots
            self.slots = grown

    def feed(self, run: Run) -> None:
        """Takes a run's tokens; what else lay beyond its start was a rejected draft."""
        known = max(run.start, self.admitted_length)
        new = run.token_ids[max(known - run.start, 0) :]
        if self.penalties is not None:
            self.penalties.remove(self.token_ids[known:])
            self.penalties.add(new)
        self.token_ids[known:] = new
        self.place(run.start, run.slots)


class SequenceStates:
    """The states of all running sequences, kept in step with the plans."""

    def __init__(self, vocab_size: int) -> None:
        """Makes an empty memory.

        Args:
            vocab_size: Width of the logits.
        """
        self._vocab_size = vocab_size
        self._states: dict[int, SequenceState] = {}

    def __getitem__(self, sequence_id: int) -> SequenceState:
        return self._states[sequence_id]

    def __len__(self) -> int:
        return len(self._states)

    def apply(self, plan: StepPlan) -> None:
        """Follows a plan: who left, who joined, which slots changed, what is fed."""
        for sequence_id in plan.released:
            self._states.pop(sequence_id, None)
        for admission in plan.admitted:
            self._states[admission.sequence_id] = _admitted(admission, self._vocab_size)
        for remap in plan.remaps:
            self._states[remap.sequence_id].place(remap.start, remap.slots)
        for run in plan.runs:
            self._states[run.sequence_id].feed(run)


def _admitted(admission: Admission, vocab_size: int) -> SequenceState:
    slots = np.zeros(len(admission.token_ids) + 64, dtype=np.int64)
    slots[: len(admission.slots)] = admission.slots
    penalties = None
    if wants_penalties(admission.sampling):
        penalties = Penalties(vocab_size, admission.token_ids, admission.prompt_length)
    return SequenceState(
        sampling=admission.sampling,
        seed=admission.seed,
        prompt_length=admission.prompt_length,
        admitted_length=len(admission.token_ids),
        token_ids=list(admission.token_ids),
        slots=slots,
        penalties=penalties,
    )


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """What the model runs on; made on the CPU.

    Attributes:
        token_ids: int64 [tokens].
        positions: int64 [tokens].
        attention: Which tokens see which slots.
        logits_rows: int64 [rows]: tokens whose logits are wanted: first all to score, then all to sample from.
        scored: How many of those rows are to score.
    """

    token_ids: Tensor
    positions: Tensor
    attention: AttentionBatch
    logits_rows: Tensor
    scored: int

    @property
    def every(self) -> bool:
        """Whether every token is sampled from, so that `logits_rows` counts them through: a step of decodes."""
        return not self.scored and len(self.logits_rows) == len(self.token_ids)

    def on(self, device: torch.device, *, slots: bool) -> ForwardBatch:
        """The same on a device, sent in one copy from pinned memory, for which nobody waits.

        Args:
            device: Where to; a GPU, or a CPU in tests.
            slots: Whether each run's slots are wanted there too, or stay here for an attention that plans on the host.
        """
        attention = self.attention
        parts = [self.token_ids, self.positions, attention.new_slots, self.logits_rows, *(attention.slots if slots else ())]
        sizes = [len(part) for part in parts]
        packed = torch.cat(parts, out=torch.empty(sum(sizes), dtype=torch.int64, pin_memory=device.type == "cuda"))
        token_ids, positions, new_slots, logits_rows, *rest = packed.to(device, non_blocking=True).split(sizes)
        moved = replace(attention, new_slots=new_slots, slots=tuple(rest) if slots else attention.slots, prepared=dict(attention.prepared))
        return ForwardBatch(token_ids, positions, moved, logits_rows, self.scored)


def forward_batch(plan: StepPlan, states: SequenceStates) -> ForwardBatch:
    """Makes the tensors of a step. The states must have applied the plan."""
    token_ids: list[int] = []
    positions: list[int] = []
    slots: list[Tensor] = []
    new_slots: list[int] = []
    score_rows: list[int] = []
    sample_rows: list[int] = []
    for run in plan.runs:
        first, stop = len(token_ids), run.start + len(run.token_ids)
        score_rows.extend(first + offset for offset in run.score_at)
        sample_rows.extend(first + offset for offset in run.sample_at)
        token_ids.extend(run.token_ids)
        new_slots.extend(run.slots)
        positions.extend(range(run.start, stop))
        slots.append(torch.from_numpy(states[run.sequence_id].slots[:stop]))
    # One piece of memory, since each tensor made from numbers takes as long as four views of one.
    numbers = np.array([*token_ids, *positions, *new_slots, *score_rows, *sample_rows], dtype=np.int64)
    tokens = len(token_ids)
    context_lengths = tuple(run.start for run in plan.runs)
    attention = AttentionBatch(
        query_lengths=tuple(len(run.token_ids) for run in plan.runs),
        context_lengths=context_lengths,
        slots=tuple(slots),
        new_slots=torch.from_numpy(numbers[2 * tokens : 3 * tokens]),
        shared=shared_prefixes(slots, context_lengths),
    )
    return ForwardBatch(
        token_ids=torch.from_numpy(numbers[:tokens]),
        positions=torch.from_numpy(numbers[tokens : 2 * tokens]),
        attention=attention,
        logits_rows=torch.from_numpy(numbers[3 * tokens :]),
        scored=len(score_rows),
    )


@dataclass(frozen=True, slots=True)
class NextDecode:
    """What is known of the next step while this one runs, should it be one token more of each of its sequences.

    Attributes:
        places: Sequence id and start of each run.
        positions: int64 [runs]: the starts.
        attention: Of that step, but for where its tokens will go: `new_slots` is empty, and the last of each run's slots is not set yet.
    """

    places: tuple[tuple[int, int], ...]
    positions: Tensor
    attention: AttentionBatch

    def is_start_of(self, plan: StepPlan) -> bool:
        """Whether the plan is that step, and nobody's slots have changed."""
        if plan.admitted or plan.remaps or len(plan.runs) != len(self.places):
            return False
        return all(
            (run.sequence_id, run.start) == place and run.sample_at == (0,) and len(run.token_ids) == 1 and not run.score_at
            for run, place in zip(plan.runs, self.places, strict=True)
        )

    def batch(self, plan: StepPlan) -> ForwardBatch:
        """What `forward_batch` makes of the plan, which this is the start of."""
        new_slots = torch.tensor([run.slots[0] for run in plan.runs])
        return ForwardBatch(
            token_ids=torch.tensor([run.token_ids[0] for run in plan.runs]),
            positions=self.positions,
            attention=replace(self.attention, new_slots=new_slots),
            logits_rows=torch.arange(len(plan.runs)),
            scored=0,
        )


def next_decode(plan: StepPlan, states: SequenceStates) -> NextDecode | None:
    """Works out the step after `plan`, which the states have applied; None if some sequence of it will not sample a token."""
    if not all(run.sample_at for run in plan.runs):
        return None
    places = tuple((run.sequence_id, run.start + len(run.token_ids)) for run in plan.runs)
    starts = tuple(start for _, start in places)
    slots = []
    for sequence_id, start in places:
        states[sequence_id].reserve(start + 1)
        slots.append(torch.from_numpy(states[sequence_id].slots[: start + 1]))
    nowhere = torch.empty(0, dtype=torch.int64)
    attention = AttentionBatch((1,) * len(places), starts, tuple(slots), nowhere, shared_prefixes(slots, starts))
    return NextDecode(places, torch.tensor(starts), attention)
