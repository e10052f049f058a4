"""A model without tensors that notices every mistake: each slot remembers the whole prefix that was computed into it."""

from __future__ import annotations

import pytest

from agentrt.scheduling.plan import Sampled, StepOutput, StepPlan

VOCAB = 50


def next_token(prefix: tuple[int, ...]) -> int:
    """The only answer this model gives after a prefix."""
    return hash((*prefix, 12345)) % VOCAB


class PrefixModel:
    """Runs plans; fails loudly if a run's context is not exactly its sequence's prefix."""

    def __init__(self) -> None:
        self.store: dict[int, tuple[int, ...]] = {}  # slot -> the prefix up to and including its token
        self.slots: dict[int, list[int]] = {}
        self.computed = 0
        self.steps = 0

    def run(self, plan: StepPlan) -> StepOutput:
        self.steps += 1
        for sequence_id in plan.released:
            self.slots.pop(sequence_id, None)
        for admission in plan.admitted:
            self.slots[admission.sequence_id] = list(admission.slots)
        for remap in plan.remaps:
            self.slots[remap.sequence_id][remap.start : remap.start + len(remap.slots)] = remap.slots
        written: set[int] = set()
        sampled = {}
        for run in plan.runs:
            slots = self.slots[run.sequence_id]
            del slots[run.start :]
            assert len(slots) == run.start, "the context's slots are not all known"
            prefix = self.store[slots[-1]] if slots else ()
            assert len(prefix) == run.start
            assert [self.store[slot] for slot in slots] == [prefix[: i + 1] for i in range(len(prefix))], "wrong context"
            tokens = []
            for offset, (token, slot) in enumerate(zip(run.token_ids, run.slots, strict=True)):
                assert slot not in written, "two runs write one slot"
                written.add(slot)
                prefix = (*prefix, token)
                self.store[slot] = prefix
                if offset in run.sample_at:
                    tokens.append(next_token(prefix))
            slots.extend(run.slots)
            self.computed += len(run.token_ids)
            sampled[run.sequence_id] = Sampled(tuple(tokens))
        return StepOutput(sampled)


@pytest.fixture
def model() -> PrefixModel:
    return PrefixModel()


@pytest.fixture
def reference():
    """The answer that a cache-less, batch-less run gives."""

    def answer(prompt: tuple[int, ...], max_tokens: int, ends: frozenset[int]) -> tuple[int, ...]:
        out: list[int] = []
        while len(out) < max_tokens:
            out.append(next_token((*prompt, *out)))
            if out[-1] in ends:
                break
        return tuple(out)

    return answer


@pytest.fixture
def new_model() -> type[PrefixModel]:
    return PrefixModel
