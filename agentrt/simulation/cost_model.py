"""How long a step takes, in place of the model: a linear model of a step's shape, given or fitted from a recorded run.

A step reads the weights once (`step`), multiplies each new token with them (`token`), keeps a little book for each sequence
(`sequence`), reads the KV of every context once (`context`), and multiplies each new token with all that it attends to
(`attention`). That is the roofline of a transformer, with each term's unit price in seconds.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from agentrt.errors import UserError
from agentrt.observe.trace import StepShape
from agentrt.simulation.trace import load_trace

_TERMS = ("step", "token", "sequence", "context", "attention")


@dataclass(frozen=True, slots=True)
class CostModel:
    """Prices, in seconds.

    Attributes:
        step: Of any step.
        token: Of a new token.
        sequence: Of a run.
        context: Of a token of KV that is read.
        attention: Of a pair of a new token and one that it attends to.
    """

    step: float
    token: float
    sequence: float = 0.0
    context: float = 0.0
    attention: float = 0.0

    def __post_init__(self) -> None:
        for name in _TERMS:
            value = getattr(self, name)
            if not value >= 0:
                raise UserError(f"the cost of {name} is {value!r}; it must be 0 seconds or more", param="cost_model")
        if not self.step + self.token + self.sequence > 0:
            raise UserError("a cost model in which a step costs nothing would let time stand still", param="cost_model")

    def seconds(self, shape: StepShape) -> float:
        """How long a step of that shape takes."""
        return (
            self.step
            + self.token * shape.tokens
            + self.sequence * shape.sequences
            + self.context * shape.context
            + self.attention * shape.attention
        )


PRESETS = {
    # An estimate, not a fit: a 360M-parameter model in float32 on two cores. A trace recorded with `--record-trace` gives your own prices.
    "cpu-360m": CostModel(step=0.055, token=0.0045, sequence=0.0005, context=1.5e-6, attention=1.5e-7),
    # Arithmetic, not measured: 8B weights in bfloat16 at 3.3 TB/s and 500 TFLOP/s, 128 KiB of KV a token.
    "gpu-8b": CostModel(step=0.006, token=3.2e-5, sequence=1e-5, context=4e-8, attention=1e-9),
    # Arithmetic: the same model on eight such devices at six times the speed.
    "node-8b": CostModel(step=0.003, token=5.4e-6, sequence=1e-5, context=7e-9, attention=1.7e-10),
}


def fit(steps: Iterable[tuple[StepShape, float]]) -> CostModel:
    """Fits prices to recorded steps: least squares of the relative error, no price below 0.

    Raises:
        UserError: There are too few steps to tell.
    """
    recorded = [(shape, seconds) for shape, seconds in steps if seconds > 0]
    if len(recorded) < 2 * len(_TERMS):
        raise UserError(f"{len(recorded)} recorded steps are too few to fit a cost model; at least {2 * len(_TERMS)} are needed", param="cost_model")
    rows = np.array([[1, s.tokens, s.sequences, s.context, s.attention] for s, _ in recorded], dtype=np.float64)
    rows /= np.array([seconds for _, seconds in recorded])[:, None]
    wanted = np.ones(len(rows))
    kept = list(range(len(_TERMS)))
    while True:  # drop the most negative price until none is: a term that does not show in the steps costs nothing
        prices, *_ = np.linalg.lstsq(rows[:, kept], wanted, rcond=None)
        worst = int(np.argmin(prices * rows[:, kept].mean(axis=0)))
        if prices[worst] >= 0 or len(kept) == 1:
            break
        del kept[worst]
    found = dict.fromkeys(_TERMS, 0.0) | {_TERMS[term]: max(float(price), 0.0) for term, price in zip(kept, prices, strict=True)}
    return CostModel(**found)


def cost_model(name: str) -> CostModel:
    """A cost model by the name of a preset, a JSON file of prices, or a recorded trace to fit.

    Raises:
        UserError: It is none of these.
    """
    if name in PRESETS:
        return PRESETS[name]
    path = Path(name)
    if not path.exists():
        raise UserError(f"cost_model is {name!r}; it must be one of {', '.join(PRESETS)}, or a file of prices or recorded steps", param="cost_model")
    if path.suffix != ".json":
        return fit(load_trace(path).steps)
    try:
        return CostModel(**json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, TypeError) as error:
        raise UserError(f"{path} is not a file of prices ({', '.join(_TERMS)}): {error!s}", param="cost_model") from None


def save_cost_model(model: CostModel, path: Path) -> None:
    """Writes the prices, for `cost_model` to read."""
    path.write_text(json.dumps(asdict(model), indent=1) + "\n", encoding="utf-8")
