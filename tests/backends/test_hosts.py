"""What the worker's process is given."""

from __future__ import annotations

import pytest

from agentrt.backends import hosts


@pytest.mark.parametrize("chosen", [{}, {"OMP_WAIT_POLICY": "ACTIVE"}, {"GOMP_SPINCOUNT": "7"}])
def test_how_threads_wait_is_ours_to_say_unless_somebody_did(chosen, monkeypatch):
    for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in chosen.items():
        monkeypatch.setenv(name, value)
    given = hosts._environment()
    said = {name: given[name] for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT") if name in given}
    assert said == (chosen or {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": hosts.SPINS})
