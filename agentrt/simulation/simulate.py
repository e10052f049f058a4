"""`simulate`: a trace in, a report out. What the command line calls."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from agentrt.errors import UserError
from agentrt.simulation.cost_model import CostModel, cost_model, fit
from agentrt.simulation.page import page
from agentrt.simulation.report import Report, report
from agentrt.simulation.setup import Setup
from agentrt.simulation.simulator import simulate_trace
from agentrt.simulation.trace import Trace, load_trace
from agentrt.simulation.workloads import WORKLOADS, workload

MOONCAKE_STEP_TOKENS = 8192
"""Step size for traces with pages of hundreds of tokens, whose prompts are tens of thousands long."""


def simulate(
    trace: str | Path | Trace,
    *,
    policy: str = "program",
    eviction: str = "program",
    pool: int | None = None,
    cost: str | CostModel = "gpu-8b",
    page_size: int | None = None,
    step_tokens: int | None = None,
    prefill_tokens: int | None = None,
    max_running: int = 256,
    max_wait: float = 5.0,
    seed: int = 0,
    rate: float | None = None,
    programs: int | None = None,
    out: Path | None = None,
    html: Path | None = None,
    progress: bool = False,
) -> Report:
    """Runs a trace through the real scheduler, tree and pool, in virtual time.

    Args:
        trace: A file in the project's or Mooncake's form, gzipped or not; the name of a generated workload; or a trace.
        policy: Order of admission.
        eviction: Which cached prefixes go first.
        pool: Token slots of the KV store; None: 131,072.
        cost: A preset, a JSON file of prices, a recorded trace to fit ("recorded": this very trace), or a model.
        page_size: Tokens a page; None: what suits the trace.
        step_tokens: Most new tokens a step; None: 2,048, or 8,192 for traces of large pages.
        prefill_tokens: Most of them in prefill chunks while others decode; None: half.
        max_running: Most sequences a step.
        max_wait: Seconds after which the oldest waiting request gets its turns.
        seed: Of a generated workload.
        rate: Programs of a generated workload that begin each second; None: all at once.
        programs: How many of them.
        out: Where to write the report as JSON.
        html: Where to write it as a page.
        progress: Draw a progress bar on stderr.

    Raises:
        UserError: The trace cannot be read, or an option is wrong.
    """
    asked = _trace(trace, seed, rate, programs)
    size = asked.page_size if page_size is None else page_size
    if step_tokens is None:
        step_tokens = MOONCAKE_STEP_TOKENS if size >= 256 else 2048
    prices = fit(asked.steps) if cost == "recorded" else cost if isinstance(cost, CostModel) else cost_model(cost)
    setup = Setup(
        policy=policy,
        eviction=eviction,
        pool_tokens=(1 << 17 if pool is None else pool) // size * size,
        page_size=size,
        step_tokens=step_tokens,
        prefill_tokens=prefill_tokens,
        max_running=max_running,
        max_wait=max_wait,
        cost=prices,
    )
    _check_fits(asked, setup)
    with _bar(len(asked.calls), progress) as told:
        run = simulate_trace(setup.simulator(asked), told)
    found = report(asked, _shown(setup), run)
    if out is not None:
        found.save(out)
    if html is not None:
        html.write_text(page(found, run.records), encoding="utf-8")
    return found


def _trace(trace: str | Path | Trace, seed: int, rate: float | None, programs: int | None) -> Trace:
    if isinstance(trace, Trace):
        return trace
    if str(trace) in WORKLOADS:
        return workload(str(trace), seed=seed, rate=rate, programs=programs)
    if not Path(trace).exists():
        raise UserError(f"trace is {str(trace)!r}; it must be a file, or one of the workloads {', '.join(WORKLOADS)}", param="trace")
    return load_trace(Path(trace))


def _check_fits(trace: Trace, setup: Setup) -> None:
    longest = max(trace.calls, key=lambda call: len(call.prompt) + len(call.output))
    needed = len(longest.prompt) + len(longest.output)
    if needed > setup.pool_tokens:
        raise UserError(f"the pool has {setup.pool_tokens:,} tokens, but call {longest.call_id} alone needs {needed:,}", param="pool")


def _shown(setup: Setup) -> dict[str, Any]:
    return {name: value for name, value in asdict(setup).items() if name not in ("skip", "check")}


@contextmanager
def _bar(total: int, shown: bool) -> Iterator[Callable[[int], None] | None]:
    if not shown:
        yield None
        return
    columns = (TextColumn("simulating"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns) as bar:
        task = bar.add_task("", total=total)
        yield lambda ended: bar.update(task, completed=ended)
