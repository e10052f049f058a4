"""The masks of a step are those that each sequence's cursor gives by itself, made together or not; one that fails fails alone."""

from __future__ import annotations

import json
from collections.abc import Iterable

import numpy as np
import pytest

from agentrt.engine.masks import MaskMaker
from agentrt.errors import ConstraintError
from agentrt.grammar import compile, json_schema_spec, regex_spec
from agentrt.grammar.check import byte_tokenizer
from agentrt.grammar.healing import HealingCursor
from agentrt.grammar.vocabulary import vocabulary_of
from agentrt.request import Request, SamplingParams
from agentrt.scheduling.plan import Run, StepPlan
from agentrt.scheduling.sequence import Sequence

SCHEMA = {"type": "object", "properties": {"a": {"enum": ["x", "xy"]}, "b": {"type": "string"}}, "required": ["a", "b"], "additionalProperties": False}
TEXT = json.dumps({"a": "xy", "b": "é"}, ensure_ascii=False)


@pytest.fixture
def maker():
    maker = MaskMaker()
    yield maker
    maker.close()


def sequence_of(number: int, cursor, output: bytes = b"", drafted: int = 0) -> Sequence:
    """One whose cursor has taken its output, but for the guesses at its end."""
    sequence = Sequence(number, Request(prompt_ids=(1, 2), sampling=SamplingParams()), 0, 0, 0.0, 1000, frozenset(), cursor=cursor, drafted=drafted)
    sequence.token_ids.extend(output)
    for token in output[: len(output) - drafted]:
        assert cursor.advance(token)
    return sequence


def masks_of(maker: MaskMaker, sequences: list[Sequence], foreseen: Iterable[Sequence] = ()):
    maker.foresee(foreseen)
    runs = [Run(s.sequence_id, (0,) * (1 + s.drafted), 0, (0,) * (1 + s.drafted), tuple(range(1 + s.drafted))) for s in sequences]
    return maker.start(StepPlan(tuple(runs)), sequences).result()


def everyone() -> list[Sequence]:
    """Both engines at many places, a draft that is right and one that is not, healing, an answer that must not come again."""
    tokens = byte_tokenizer()
    schema, pattern = compile(json_schema_spec(SCHEMA), tokens), compile(regex_spec("[ab]{3}(c|de)"), tokens)
    text = TEXT.encode()
    sequences = [sequence_of(n, schema.cursor(), text[:n]) for n in range(len(text) + 1)]
    sequences += [sequence_of(100 + n, pattern.cursor(), b"abade"[:n]) for n in range(6)]
    sequences += [sequence_of(200, schema.cursor(), text[:8], drafted=3), sequence_of(201, pattern.cursor(), b"abx", drafted=2)]
    sequences.append(sequence_of(300, HealingCursor(b"no", vocabulary_of(tokens), pattern.cursor())))
    banned = sequence_of(301, pattern.cursor(), b"a")
    banned.excluded.append((banned.token_ids[2:], ord("b")))
    return [*sequences, banned]


@pytest.mark.parametrize("foreseen", [0, 9, 100])
def test_masks_are_each_cursors_own(maker, foreseen):
    sequences = everyone()
    made = masks_of(maker, sequences, sequences[:foreseen])
    assert made.errors == {}
    assert set(made.masks) == {s.sequence_id for s in sequences}
    for sequence in sequences:
        masks = made.masks[sequence.sequence_id]
        assert masks.shape == (1 + sequence.drafted, 9)
        if sequence.sequence_id == 301:
            assert (masks[0] ^ sequence.cursor.allowed()).view(np.uint32).tolist() == [0, 0, 0, 1 << ord("b") % 32, 0, 0, 0, 0, 0]
        else:
            np.testing.assert_array_equal(masks[0], sequence.cursor.allowed())
    after = sequence_of(1, compile(json_schema_spec(SCHEMA), byte_tokenizer()).cursor(), TEXT.encode()[:7])
    np.testing.assert_array_equal(made.masks[200][2], after.cursor.allowed())
    np.testing.assert_array_equal(made.masks[201][1], made.masks[201][2])  # the last guess could not be taken


def test_what_was_foreseen_is_made_anew_where_it_no_longer_holds(maker):
    """A sequence that has gone on, and one that was begun anew."""
    tokens = byte_tokenizer()
    pattern, text = compile(json_schema_spec(SCHEMA), tokens), TEXT.encode()
    gone_on, anew, same = (sequence_of(number, pattern.cursor(), text[:8]) for number in range(3))
    maker.foresee([gone_on, anew, same])
    maker.start(StepPlan(()), []).result()  # nobody samples in this step
    maker.foresee([gone_on, anew, same])
    maker._foreseen.result()
    gone_on.cursor.advance(text[8])
    gone_on.token_ids.append(text[8])
    anew.cursor = compile(regex_spec("[0-9]{20}"), tokens).cursor()
    runs = tuple(Run(s.sequence_id, (0,), 0, (0,), (0,)) for s in (gone_on, anew, same))
    made = maker.start(StepPlan(runs), [gone_on, anew, same]).result()
    for sequence in (gone_on, anew, same):
        np.testing.assert_array_equal(made.masks[sequence.sequence_id][0], sequence.cursor.allowed())


@pytest.mark.parametrize("foreseen", [0, 100])
def test_a_cursor_that_fails_fails_alone(maker, monkeypatch, foreseen):
    sequences = everyone()[:20]
    broken = sequences[3]

    def fail() -> None:
        raise ConstraintError("it cannot be followed any further")

    monkeypatch.setattr(broken.cursor._matcher, "check", fail)
    made = masks_of(maker, sequences, sequences[:foreseen])
    assert set(made.errors) == {broken.sequence_id}
    assert "any further" in str(made.errors[broken.sequence_id])
    for sequence in sequences:
        if sequence is not broken:
            np.testing.assert_array_equal(made.masks[sequence.sequence_id][0], sequence.cursor.allowed())


def test_free_sequences_have_none(maker):
    assert masks_of(maker, [sequence_of(1, None)]).masks == {}
