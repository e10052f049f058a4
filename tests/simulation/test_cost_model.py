"""Prices are recovered from steps that were made with them."""

from __future__ import annotations

import numpy as np
import pytest

from agentrt.errors import UserError
from agentrt.observe.trace import StepShape
from agentrt.simulation.cost_model import CostModel, cost_model, fit, save_cost_model


def steps(model, noise=0.0, count=200):
    random = np.random.default_rng(1)
    for _ in range(count):
        runs = [(int(random.integers(0, 4000)), int(random.choice([1, 1, 1, 256]))) for _ in range(random.integers(1, 20))]
        shape = StepShape.of(runs)
        yield shape, model.seconds(shape) * float(1 + noise * random.normal())


def test_fit_recovers_the_prices():
    true = CostModel(step=0.05, token=0.004, sequence=0.0005, context=1e-6, attention=1e-7)
    exact = fit(steps(true))
    for name in ("step", "token", "sequence", "context", "attention"):
        assert getattr(exact, name) == pytest.approx(getattr(true, name), rel=1e-4)
    noisy = fit(steps(true, noise=0.05))
    errors = [abs(noisy.seconds(shape) / seconds - 1) for shape, seconds in steps(true)]
    assert max(errors) < 0.1


def test_no_price_is_negative_and_what_does_not_show_is_free():
    found = fit(steps(CostModel(step=0.01, token=0.001), noise=0.01))
    assert min(found.step, found.token, found.sequence, found.context, found.attention) >= 0
    assert found.seconds(StepShape(1, 1, 0, 1)) == pytest.approx(0.011, rel=0.05)


def test_names_files_and_errors(tmp_path):
    model = CostModel(step=0.01, token=0.002)
    save_cost_model(model, tmp_path / "prices.json")
    assert cost_model(str(tmp_path / "prices.json")) == model
    with pytest.raises(UserError, match="gpu-8b"):
        cost_model("abacus")
    with pytest.raises(UserError, match="too few"):
        fit([])
    with pytest.raises(UserError, match="0 seconds or more"):
        CostModel(step=-1, token=0)
