"""Grammar masks for a step, computed in a second thread.

A mask depends only on tokens that are known when the step before is committed. So most are begun then: while deltas are sent, the next
step is planned and its batch is put together, a core is free, which the forward pass would want for itself; the rest, of sequences
that only now sample, are begun with the plan. Those of a whole batch are made in one call, in which llguidance holds no lock of the
interpreter's. For a draft the cursor walks the guesses, giving a mask after each, and is rolled back: guesses are not part of the sequence.
"""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from agentrt.errors import AgentrtError, as_request_error
from agentrt.scheduling.plan import StepPlan
from agentrt.scheduling.sequence import Cursor, Sequence


@dataclass(frozen=True, slots=True)
class MadeMasks:
    """The masks of a step, and why a sequence has none: its grammar reached its bounds, which is that request's fault alone."""

    masks: dict[int, NDArray[np.int32]] = field(default_factory=dict)
    errors: dict[int, AgentrtError] = field(default_factory=dict)


class MaskMaker:
    """Makes the masks of a step's sequences. A cursor is not to be touched from when its mask is begun until it is made."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="agentrt-masks")
        self._foreseen: Future[_Foreseen] | None = None

    def foresee(self, sequences: Iterable[Sequence]) -> None:
        """Begins with the masks of those that will sample next, as far as can be said before the next plan."""
        likely = [s for s in sequences if s.cursor is not None and not s.drafted and not s.prefilling]
        self._foreseen = self._thread.submit(_foresee, likely) if likely else None

    def start(self, plan: StepPlan, sequences: Iterable[Sequence]) -> Future[MadeMasks]:
        """Begins with the masks of those runs of `plan` that sample under a grammar and were not foreseen."""
        foreseen, self._foreseen = self._foreseen, None
        constrained = [s for s in sequences if s.cursor is not None]
        if constrained:
            wanted = {run.sequence_id for run in plan.runs if run.sample_at}
            constrained = [s for s in constrained if s.sequence_id in wanted]
        if not constrained:
            return _NONE
        return self._thread.submit(_complete, constrained, foreseen)

    def close(self) -> None:
        """Ends the thread."""
        self._thread.shutdown(wait=True)


#: For steps without a grammar.
_NONE: Future[MadeMasks] = Future()
_NONE.set_result(MadeMasks())

#: Masks, and what each of their sequences was when they were made: its cursor and how many tokens it had.
_Foreseen = tuple[MadeMasks, dict[int, tuple[Cursor | None, int]]]


def _foresee(sequences: list[Sequence]) -> _Foreseen:
    return _make(sequences), {s.sequence_id: (s.cursor, len(s.token_ids)) for s in sequences}


def _complete(sequences: list[Sequence], foreseen: Future[_Foreseen] | None) -> MadeMasks:
    """What was foreseen, where it still holds, and the rest."""
    if foreseen is None:
        return _make(sequences)
    known, places = foreseen.result()
    left = [s for s in sequences if s.drafted or places.get(s.sequence_id) != (s.cursor, len(s.token_ids))]
    made, others = _make(left), {s.sequence_id for s in sequences} - {s.sequence_id for s in left}
    made.masks.update((number, mask) for number, mask in known.masks.items() if number in others)
    made.errors.update((number, error) for number, error in known.errors.items() if number in others)
    return made


def _make(sequences: list[Sequence]) -> MadeMasks:
    made = MadeMasks()
    made.masks.update(_together([s for s in sequences if not s.drafted]))
    for sequence in sequences:
        if sequence.sequence_id in made.masks:
            continue
        try:
            made.masks[sequence.sequence_id] = _one_by_one(sequence)
        except Exception as error:
            made.errors[sequence.sequence_id] = as_request_error(error)
    return made


def _together(sequences: list[Sequence]) -> dict[int, NDArray[np.int32]]:
    """The masks of sequences without drafts, int32 [1, words] each; none if one of them has failed, so that each is asked for itself."""
    from agentrt.grammar.cursor import GrammarCursor, fill_masks  # here, since it is no part of a start

    pairs = [(s, s.cursor) for s in sequences if isinstance(s.cursor, GrammarCursor)]
    sequences, cursors = [s for s, _ in pairs], [cursor for _, cursor in pairs]
    if not cursors:
        return {}
    masks = np.empty((len(cursors), cursors[0].words), dtype=np.int32)
    try:
        fill_masks(cursors, masks)
    except Exception:
        return {}
    for sequence, mask in zip(sequences, masks, strict=True):
        if sequence.excluded:
            mask[:] = _without_excluded(sequence, mask)
    return {sequence.sequence_id: mask[None] for sequence, mask in zip(sequences, masks, strict=True)}


def _one_by_one(sequence: Sequence) -> NDArray[np.int32]:
    """int32 [1 + drafted, words]."""
    cursor = sequence.cursor
    assert cursor is not None  # for the type checker
    masks = [_without_excluded(sequence, cursor.allowed())]
    taken = 0
    for guess in sequence.token_ids[len(sequence.token_ids) - sequence.drafted :]:
        if not cursor.advance(guess):
            break
        taken += 1
        masks.append(cursor.allowed())
    cursor.rollback(taken)
    masks.extend([masks[-1]] * (1 + sequence.drafted - len(masks)))
    return np.stack(masks)


def _without_excluded(sequence: Sequence, mask: NDArray[np.int32]) -> NDArray[np.int32]:
    """The mask without tokens that led to an answer which failed, unless nothing else is left."""
    output = sequence.token_ids[sequence.prompt_length : len(sequence.token_ids) - sequence.drafted]
    banned = [token for before, token in sequence.excluded if before == output]
    if not banned:
        return mask
    left = mask.copy()
    for token in banned:
        left.view(np.uint32)[token // 32] &= ~np.uint32(1 << token % 32)
    return left if left.any() else mask
