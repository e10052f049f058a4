"""The examples as modules, and one engine for each of the two models they run on."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path

import pytest

from agentrt import Engine, set_default_backend

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.fixture
def example(monkeypatch):
    """Imports an example by its name, as a script beside it would."""
    monkeypatch.setattr(sys, "path", [str(EXAMPLES), *sys.path])
    return import_module


@pytest.fixture(scope="module")
def engines():
    """Starts each model once, when the first example asks for it."""
    started: dict[str, Engine] = {}
    yield lambda name: started.get(name) or started.setdefault(name, Engine(name))
    for engine in started.values():
        engine.close()


@pytest.fixture
def small(engines):
    """The default model, as the backend of every program."""
    yield from _as_default(engines("smollm2-135m"))


@pytest.fixture
def larger(engines):
    """The model that calls tools, as the backend of every program."""
    yield from _as_default(engines("qwen2.5-coder-0.5b"))


def _as_default(engine):
    engine.flush_cache()
    set_default_backend(engine)
    yield engine
    set_default_backend(None)
