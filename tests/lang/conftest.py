"""The backends that the surface is tested on: the scripted one, and the engine with the default model where it is at hand."""

from __future__ import annotations

import pytest

from agentrt.backends.scripted import ScriptedBackend


@pytest.fixture
def scripted():
    """Answers "ok"."""
    backend = ScriptedBackend("ok")
    yield backend
    backend.close()
