"""The simulator is the engine on another clock: the same tokens at the same times, skipped steps or not, and no page is ever lost."""

from __future__ import annotations

import json
from dataclasses import replace
from importlib.resources import files

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrt.observe.trace import StepShape, TraceRecorder
from agentrt.request import ProgramTag
from agentrt.simulation.cost_model import PRESETS, CostModel
from agentrt.simulation.setup import Setup
from agentrt.simulation.simulator import simulate_trace
from agentrt.simulation.trace import Blocks, Call, Trace, load_trace
from agentrt.simulation.workloads import END, WORKLOADS, workload

COST = CostModel(step=0.01, token=0.001, sequence=0.0005, context=1e-5, attention=1e-6)


def told(run):
    """Everything about every call that a user could see."""
    return {
        record.call.call_id: (record.due, record.admitted, record.first_token, record.ended, record.cached_tokens, record.output, record.preemptions)
        for record in run.records
    }


@pytest.mark.parametrize("policy", ["fcfs", "program"])
@pytest.mark.parametrize("name", ["react", "map-reduce"])
def test_skipping_calm_steps_changes_no_time_and_no_token(name, policy):
    trace = workload(name, programs=12, rate=3.0, seed=5)
    setup = Setup(policy=policy, eviction="program", pool_tokens=9_216, page_size=64, max_running=12, max_wait=1.0, cost=PRESETS["gpu-8b"])
    skipping, plain = (simulate_trace(replace(setup, skip=skip).simulator(trace)) for skip in (True, False))
    assert told(skipping) == told(plain)
    assert (skipping.steps, skipping.computed_tokens, skipping.evicted_tokens) == (plain.steps, plain.computed_tokens, plain.evicted_tokens)
    assert skipping.order == plain.order
    assert skipping.slots_filled == pytest.approx(plain.slots_filled, rel=1e-9)
    assert all(record.output == tuple(record.call.output) for record in skipping.records)


text = st.lists(st.integers(3, 5), min_size=1, max_size=24).map(tuple)
tags = st.none() | st.builds(ProgramTag, st.sampled_from(["p", "q", "r"]), expected_calls=st.integers(0, 4), will_fork=st.integers(0, 3))


@st.composite
def traces(draw):
    calls = []
    for number in range(draw(st.integers(1, 14))):
        before = draw(st.lists(st.integers(0, number - 1), max_size=2)) if number else []
        prompt = draw(text)
        if before and draw(st.booleans()):  # the next turn of an earlier call
            prompt = (*calls[before[0]].prompt, *calls[before[0]].output, *prompt)[:60]
        call = Call(
            number, draw(st.sampled_from([0.0, 0.05, 1.0, 30.0])), prompt, (*draw(text), END), tuple(before), draw(st.sampled_from([None, 100])),
            draw(st.sampled_from(["", "a"])), draw(st.integers(0, 2)), draw(tags), draw(st.sampled_from([0.0, 0.1, 100.0])), draw(st.booleans()),
        )  # fmt: skip
        calls.append(call)
    return Trace("random", tuple(calls))


@settings(max_examples=60, deadline=None)
@given(
    trace=traces(),
    policy=st.sampled_from(["fcfs", "lpm", "dfs", "program"]),
    eviction=st.sampled_from(["lru", "lfu", "slru", "adaptive", "program"]),
    page_size=st.sampled_from([1, 2, 16]),
    spare=st.integers(0, 60),
    step_tokens=st.sampled_from([2, 7, 64]),
)
@pytest.mark.slow
def test_no_trace_hangs_starves_or_loses_a_page(trace, policy, eviction, page_size, spare, step_tokens):
    """With holds, salts, priorities, dependent calls and a pool in which the longest call just fits; checked after every step."""
    longest = max(len(call.prompt) + max(len(call.output), call.max_tokens or 0) for call in trace.calls)
    pool = (-(-longest // page_size) + spare // page_size) * page_size
    setup = Setup(
        policy=policy, eviction=eviction, pool_tokens=pool, page_size=page_size, step_tokens=step_tokens, max_running=4, max_wait=0.2, cost=COST, check=True
    )
    run, plain = (simulate_trace(replace(setup, skip=skip).simulator(trace)) for skip in (True, False))
    assert told(run) == told(plain)  # no step in which something could have changed is skipped
    assert sorted(record.call.call_id for record in run.records) == [call.call_id for call in trace.calls]
    for record in run.records:
        assert not record.error
        assert record.output == tuple(record.call.output)
        assert record.cached_tokens < len(record.call.prompt)
        assert record.due <= record.admitted <= record.first_token <= record.ended


class PrefixExecutor:
    """An executor without tensors: a token is a hash of all that comes before it, read back through the slots. It moves the clock."""

    asynchronous = False

    def __init__(self, clock):
        self.clock = clock
        self.store, self.slots = {}, {}

    def launch(self, plan):
        self.plan = plan
        return self

    def finish(self, masks):
        from agentrt.scheduling.plan import Sampled, StepOutput

        plan, sampled = self.plan, {}
        for sequence_id in plan.released:
            self.slots.pop(sequence_id, None)
        for admission in plan.admitted:
            self.slots[admission.sequence_id] = list(admission.slots)
        for remap in plan.remaps:
            self.slots[remap.sequence_id][remap.start : remap.start + len(remap.slots)] = remap.slots
        for run in plan.runs:
            slots = self.slots[run.sequence_id]
            assert len(slots) == run.start
            prefix = self.store[slots[-1]] if slots else ()
            tokens = []
            for offset, (token, slot) in enumerate(zip(run.token_ids, run.slots, strict=True)):
                prefix = self.store[slot] = (*prefix, token)
                if offset in run.sample_at:
                    tokens.append(3 + hash((*prefix, 99)) % 40)
            slots.extend(run.slots)
            sampled[run.sequence_id] = Sampled(tuple(tokens))
        shape = StepShape.of((run.start, len(run.token_ids)) for run in plan.runs)
        self.clock.now += COST.seconds(shape)
        return StepOutput(sampled, COST.seconds(shape))


class Letters:
    """The least of a tokenizer."""

    vocab_size, bos_id, eos_ids = 64, None, (7,)

    def decode(self, ids, *, skip_special=True):
        return "x" * len(list(ids))

    def token_bytes(self, token_id):
        return b"x"


def run_engine(setup, asks, path):
    """Runs requests through the engine's own loop on a virtual clock, recorded; returns what each was told, by number."""
    from agentrt.cache.eviction import eviction_policy
    from agentrt.cache.page_pool import PagePool
    from agentrt.cache.prefix_cache import PrefixCache
    from agentrt.engine.engine import EngineCore
    from agentrt.scheduling.policy import POLICIES
    from agentrt.scheduling.scheduler import Budget, Scheduler
    from agentrt.simulation.simulator import Clock

    clock, pages = Clock(), setup.pool_tokens // setup.page_size
    cache = PrefixCache(PagePool(pages, setup.page_size), eviction_policy(setup.eviction), clock=clock)
    budget = Budget(setup.step_tokens, setup.step_tokens // 2, setup.max_running)
    scheduler = Scheduler(cache, budget, POLICIES[setup.policy], clock=clock, max_wait=setup.max_wait)
    recorder = TraceRecorder(path, model="letters", page_size=setup.page_size, kv_tokens=setup.pool_tokens)
    core = EngineCore(scheduler, PrefixExecutor(clock), cache, Letters(), eos_ids=(7,), max_length=10_000, check=True, clock=clock, recorder=recorder)
    numbers = {request.request_id: number for number, (_, request) in enumerate(asks)}
    seen = {number: ([], [], []) for number in numbers.values()}
    asks = list(asks)
    while asks or not core.idle:
        if core.idle:
            clock.now = max(clock.now, asks[0][0])
        while asks and asks[0][0] <= clock.now:
            core.submit(asks.pop(0)[1])
        for delta in core.step():
            tokens, times, cached = seen[numbers[delta.request_id]]
            tokens.extend(delta.token_ids)
            times.extend([clock.now] * bool(delta.token_ids))
            if delta.usage is not None:
                cached.append(delta.usage.cached_tokens)
    core.close()
    recorder.close()
    return {number: (tuple(tokens), times[0], times[-1], cached[0]) for number, (tokens, times, cached) in seen.items()}


@pytest.mark.parametrize("policy", ["lpm", "program"])
@pytest.mark.parametrize("page_size", [1, 16])
def test_simulator_and_engine_agree_token_for_token(tmp_path, policy, page_size):
    """The engine's loop and the simulator on one clock: the same tokens, at the same times, with the same hits. The pool is too small."""
    from agentrt.request import Request, SamplingParams

    shared = tuple(range(10, 50))
    asks = []
    for number in range(40):
        prompt = (*shared[: 10 * (number % 5)], *((number * 7 + n) % 31 + 3 for n in range(5 + number % 23)))
        tag = ProgramTag(f"p{number % 6}", expected_calls=number % 3) if number % 2 else None
        params = SamplingParams(max_tokens=5 + number % 30, temperature=0)
        asks.append((0.07 * (number // 3), Request(prompt_ids=prompt, sampling=params, program=tag, priority=number % 2)))
    setup = Setup(policy=policy, eviction="program", pool_tokens=320, page_size=page_size, step_tokens=24, max_running=8, max_wait=0.5, cost=COST)
    wanted = run_engine(setup, asks, tmp_path / "run.jsonl")
    trace = load_trace(tmp_path / "run.jsonl")
    run = simulate_trace(setup.simulator(trace))
    found = {record.call.call_id: (record.output, record.first_token, record.ended, record.cached_tokens) for record in run.records}
    assert run.evicted_tokens > 0
    assert found.keys() == wanted.keys()
    for number, (output, first, ended, cached) in wanted.items():
        assert found[number][0] == output
        assert found[number][1:3] == pytest.approx((first, ended), abs=1e-9)
        assert found[number][3] == cached
    assert sum(shape.tokens for shape, _ in trace.steps) == run.computed_tokens
    valid = jsonschema.Draft202012Validator(json.loads((files("agentrt.schemas") / "trace.json").read_text()))
    for line in (tmp_path / "run.jsonl").read_text().splitlines():
        valid.validate(json.loads(line))


def test_a_prompt_of_4000_tokens_does_not_stall_those_who_decode():
    """The gap between two tokens is bounded by what half a step takes; without the bound it is what the whole prompt takes."""
    decoders, step_tokens = 12, 512
    calls = [Call(n, 0.0, tuple(range(3 + n, 103 + n)), (*[4] * 300, END)) for n in range(decoders)]
    calls += [Call(decoders + n, 2.0 + 4 * n, tuple(5 + (n + 7 * place) % 900 for place in range(4000)), (3, END)) for n in range(2)]
    trace, setup = Trace("stall", tuple(calls)), Setup(pool_tokens=32_768, step_tokens=step_tokens, cost=COST)
    bounded, halved, whole = (
        simulate_trace(setup_of.simulator(trace))
        for setup_of in (setup, replace(setup, prefill_tokens=step_tokens // 4), replace(setup, step_tokens=8192, prefill_tokens=8192))
    )

    def worst(run):  # once all decode, until the last of them has ended
        begun = max(record.first_token for record in run.records if record.call.call_id < decoders)
        assert begun < 2.0
        return max(gap for gap, _ in run.gaps)

    def step_of(prefill):  # both prompts and all decoders at once: more than any step of the run had
        return COST.seconds(StepShape.of([*((400, 1) for _ in range(decoders)), (4000, prefill)]))

    assert worst(bounded) <= step_of(step_tokens // 2)
    assert worst(halved) <= step_of(step_tokens // 4)
    assert worst(whole) >= 4 * worst(bounded) >= 4 * worst(halved)
    for run in (bounded, halved, whole):
        assert all(record.output == tuple(record.call.output) for record in run.records)


def test_a_pool_four_times_too_small_ends_every_program():
    """Programs of every kind at once, in the room of one context or two."""
    for name in WORKLOADS:
        trace = workload(name, programs=5)
        longest = max(len(call.prompt) + 512 for call in trace.calls)
        run = simulate_trace(Setup(policy="program", eviction="program", pool_tokens=longest // 16 * 16 + 16, max_running=64).simulator(trace))
        assert len(run.records) == len(trace.calls)
        assert all(record.output == tuple(record.call.output) for record in run.records)


def test_blocks_are_the_tokens_they_stand_for():
    blocks = Blocks((5, 6, 7), 4, 10)
    assert tuple(blocks) == (5, 5, 5, 5, 6, 6, 6, 6, 7, 7)
    assert [blocks[n] for n in range(10)] == list(blocks)
    assert blocks[-1] == 7
    assert blocks[3:6] == (5, 6, 6)
