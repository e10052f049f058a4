"""The backends that programs are tested on: the scripted one, and the engine with the default model where it is at hand."""

from __future__ import annotations

import pytest

from agentrt.backends.scripted import ScriptedBackend
from agentrt.errors import ModelError


@pytest.fixture
def scripted():
    """Answers "ok"."""
    backend = ScriptedBackend("ok")
    yield backend
    backend.close()


@pytest.fixture(scope="module")
def engine():
    """The engine with the default model, float32."""
    from agentrt import Engine

    try:
        made = Engine(dtype="float32")
    except ModelError as error:
        pytest.skip(f"the default model is not at hand: {error}")
    yield made
    made.close()
