"""Every error crosses from the engine's process to its caller whole."""

from __future__ import annotations

import pickle

import pytest

from agentrt import errors


@pytest.mark.parametrize(
    "error",
    [
        errors.UserError("wrong", param="stop"),
        errors.TooLongError("too long", needed=3, limit=2, param="prompt"),
        errors.GrammarError("no", pointer="/a", keyword="not"),
        errors.QueueFullError("full", retry_after=2.5),
        errors.ConstraintError("failed", violations=("a", "b")),
        errors.EngineError("down"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_errors_pickle_with_their_fields(error):
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error)
    assert str(again) == str(error)
    assert vars(again) == vars(error)
