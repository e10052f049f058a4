"""What a step costs does not grow with the queue: counted in bytecode instructions and in matches, never in seconds."""

from __future__ import annotations

import gc
import sys

import pytest

from agentrt.cache.eviction import eviction_policy
from agentrt.cache.page_pool import PagePool
from agentrt.cache.prefix_cache import PrefixCache
from agentrt.request import ProgramTag, Request, SamplingParams
from agentrt.scheduling.admission import LOOKS_PER_STEP
from agentrt.scheduling.plan import Sampled, StepOutput
from agentrt.scheduling.policy import POLICIES
from agentrt.scheduling.scheduler import PARKED_PER_STEP, Budget, Scheduler
from agentrt.scheduling.sequence import Sequence

RUNNING = 8


def instructions(call):
    """Runs `call`; returns what it gave, and how many bytecode instructions it took."""
    taken = 0

    def count(frame, event, argument):
        nonlocal taken
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        taken += event == "opcode"
        return count

    before = sys.gettrace()
    sys.settrace(count)
    try:
        return call(), taken
    finally:
        sys.settrace(before)


def steps(policy, waiting, count=30):
    """Instructions and matches of each of the first steps with so many waiting, who share 10 prefixes."""
    cache = PrefixCache(PagePool(20_000, 16), eviction_policy("program"), clock=lambda: 0.0)
    matches = []
    match = cache.match

    def counted(*arguments):
        matches.append(1)
        return match(*arguments)

    cache.match = counted
    scheduler = Scheduler(cache, Budget(512, 256, RUNNING), POLICIES[policy], clock=lambda: 0.0, max_wait=1e9)
    for number in range(waiting):
        prompt = (*[number % 10] * 96, *[number % 251, number // 251] * 8)
        request = Request(prompt_ids=prompt, sampling=SamplingParams(max_tokens=4), program=ProgramTag(f"p{number % 100}", expected_calls=number % 3))
        scheduler.add(Sequence(number + 1, request, 0, 0, float(number), len(prompt) + 4, frozenset()))
    taken, looked = [], []
    for _ in range(count):
        matches.clear()
        plan, planning = instructions(scheduler.plan)
        output = StepOutput({run.sequence_id: Sampled((7,) if run.sample_at else ()) for run in plan.runs})
        _, committing = instructions(lambda plan=plan, output=output: scheduler.commit(plan, output))
        taken.append(planning + committing)
        looked.append(len(matches))
    assert scheduler.waiting > waiting - count * RUNNING
    return taken, looked


@pytest.fixture
def no_collections():
    """What other tests have left is not cleared away, at so many instructions, while a step is counted."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_collections")
@pytest.mark.parametrize("policy", ["program", *(pytest.param(name, marks=pytest.mark.slow) for name in ("fcfs", "lpm", "dfs"))])
def test_a_step_costs_the_same_with_10_000_waiting_as_with_500(policy):
    few, looked_few = steps(policy, 500)
    many, looked_many = steps(policy, 10_000)
    bound = LOOKS_PER_STEP + PARKED_PER_STEP + RUNNING + 2
    assert max(looked_few) <= bound
    assert max(looked_many) <= bound
    assert sum(many) <= 1.25 * sum(few)
    assert max(many) <= 1.5 * max(few)
