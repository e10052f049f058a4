"""The garbage collector rests while an engine starts, and is afterwards as it was."""

from __future__ import annotations

import gc
import runpy

import pytest

from agentrt import Engine, ModelError
from agentrt.engine import collector


@pytest.mark.parametrize("was_on", [True, False])
def test_it_is_afterwards_as_it_was_however_starts_overlap(was_on):
    on = gc.isenabled()
    (gc.enable if was_on else gc.disable)()
    try:
        first, second = collector.resting(), collector.resting()
        first.__enter__()
        second.__enter__()
        first.__exit__(None, None, None)
        assert not gc.isenabled()
        second.__exit__(None, None, None)
        assert gc.isenabled() is was_on
        with pytest.raises(ModelError):
            Engine("no such model")
        assert gc.isenabled() is was_on
    finally:
        (gc.enable if on else gc.disable)()


def test_what_a_start_made_is_not_walked_by_the_next_young_pass():
    with collector.resting():
        made = [[] for _ in range(1000)]
        assert gc.get_count()[0] >= len(made)
    assert gc.get_count()[0] < len(made)


def test_a_process_of_the_engines_own_begins_without_and_ends_with_it(monkeypatch):
    thresholds, on = gc.get_threshold(), gc.isenabled()
    seen = []
    monkeypatch.setattr("agentrt.engine.worker.main", lambda: seen.append(gc.isenabled()))
    try:
        runpy.run_module("agentrt.engine", run_name="__main__")
        collector.settle()
        assert seen == [False]
        assert gc.isenabled()
        assert gc.get_threshold() == collector.THRESHOLDS
    finally:
        gc.unfreeze()
        gc.set_threshold(*thresholds)
        (gc.enable if on else gc.disable)()
