"""The scheduler under random schedules: no page is lost, no context is wrong, and every answer equals the cache-less one."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agentrt.cache.eviction import eviction_policy
from agentrt.cache.page_pool import PagePool
from agentrt.cache.prefix_cache import PrefixCache
from agentrt.request import FinishReason, Request, SamplingParams
from agentrt.scheduling.admission import TURNS
from agentrt.scheduling.growth import Growth
from agentrt.scheduling.policy import POLICIES
from agentrt.scheduling.scheduler import PATIENCE, Budget, Scheduler
from agentrt.scheduling.sequence import Sequence

ENDS = frozenset({7})


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def make_scheduler(pages=64, page_size=1, step_tokens=16, max_running=4, policy="lpm", enabled=True, max_wait=1e9, clock=None, growth=None):
    clock = clock or Clock()
    cache = PrefixCache(PagePool(pages, page_size), eviction_policy("lru"), enabled=enabled, clock=clock)
    budget = Budget(step_tokens, max(step_tokens // 2, 1), max_running)
    return Scheduler(cache, budget, POLICIES[policy], clock=clock, max_wait=max_wait, growth=growth), cache


class Hopeful(Growth):
    """Thinks that every answer is about to end, so that the pool is overfilled and sequences are preempted all the time."""

    def length(self, sequence):
        return len(sequence.token_ids)


_ids = itertools.count(1)


def make_sequence(prompt, max_tokens=8, arrival=0.0, salt="", priority=0, **sampling):
    params = SamplingParams(max_tokens=max_tokens, **sampling)
    request = Request(prompt_ids=tuple(prompt), sampling=params, cache_salt=salt, priority=priority)
    return Sequence(next(_ids), request, 0, 0, arrival, len(prompt) + max_tokens, ENDS)


def step(scheduler, cache, model):
    """One step; checks the slot equation after it."""
    plan = scheduler.plan()
    updates = scheduler.take_ended() if plan is None else scheduler.commit(plan, model.run(plan))
    cache.check(scheduler.private_pages)
    return plan, updates


def run_all(scheduler, cache, model, limit=10_000):
    for _ in range(limit):
        if scheduler.idle:
            return
        step(scheduler, cache, model)
    raise AssertionError("the scheduler did not come to an end")


def output(sequence):
    return tuple(sequence.token_ids[sequence.prompt_length :])


families = st.lists(st.integers(0, 3), min_size=1, max_size=30).map(tuple)  # few ids: many shared prefixes


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(
    prompts=st.lists(st.tuples(families, st.integers(0, 10), st.sampled_from(["", "a"]), st.integers(0, 6)), min_size=1, max_size=14),
    page_size=st.sampled_from([1, 1, 2, 4]),
    spare=st.integers(0, 40),
    step_tokens=st.sampled_from([1, 3, 16, 64]),
    policy=st.sampled_from(sorted(POLICIES)),
    enabled=st.booleans(),
    hopeful=st.booleans(),
    data=st.data(),
)
def test_any_schedule_of_submits_aborts_and_flushes_gives_the_cacheless_answers(
    prompts, page_size, spare, step_tokens, policy, enabled, hopeful, data, reference, new_model
):
    model = new_model()

    longest = max(len(prompt) + max_tokens for prompt, max_tokens, _, _ in prompts)
    pages = -(-longest // page_size) + spare  # the largest request just fits: others are preempted for it
    growth = Hopeful() if hopeful else None
    scheduler, cache = make_scheduler(pages, page_size, step_tokens, policy=policy, enabled=enabled, growth=growth)
    waiting = [(delay, make_sequence(p, m, arrival=float(i), salt=s)) for i, (p, m, s, delay) in enumerate(prompts)]
    every = [sequence for _, sequence in waiting]
    aborted = set()
    for tick in range(20_000):
        due, waiting = [s for d, s in waiting if d <= tick], [(d, s) for d, s in waiting if d > tick]
        for sequence in due:
            scheduler.add(sequence)
        if scheduler.idle and not waiting:
            break
        action = data.draw(st.sampled_from(["", "", "", "", "abort", "flush"])) if tick < 40 else ""
        if action == "abort":
            victim = data.draw(st.sampled_from(every))
            if victim not in [s for _, s in waiting] and victim.finish_reason is None:
                scheduler.abort(victim)
                aborted.add(victim)
        elif action == "flush":
            cache.flush()
        step(scheduler, cache, model)
    assert scheduler.idle, "a request hangs"
    for sequence in every:
        wanted = reference(sequence.request.prompt_ids, sequence.request.sampling.max_tokens, ENDS)
        if sequence in aborted:
            assert sequence.finish_reason is FinishReason.ABORT
            assert output(sequence) == wanted[: len(output(sequence))]
        else:
            assert output(sequence) == wanted
            assert sequence.finish_reason is (FinishReason.STOP if wanted and wanted[-1] in ENDS else FinishReason.LENGTH)
    assert cache.locked_tokens == 0
    assert cache.pool.free_count + cache.cached_tokens // page_size == cache.pool.total


def test_32_simultaneous_requests_compute_their_new_prefix_once(model):
    scheduler, cache = make_scheduler(pages=8000, step_tokens=256, max_running=64)
    prefix = [n % 47 for n in range(1000)]
    for n in range(32):
        scheduler.add(make_sequence([*prefix, 48, n % 8, n // 8], max_tokens=2))
    run_all(scheduler, cache, model)
    # The prefix once, then each one's own three tokens (up to a block of the prefix again) and one generated.
    assert model.computed <= 1000 + 32 * (3 + 16 + 1)


def test_a_whole_prompt_hit_recomputes_one_token(model):
    scheduler, cache = make_scheduler(pages=200)
    prompt = list(range(40))
    for _ in range(2):
        before = model.computed
        sequence = make_sequence(prompt, max_tokens=1)
        scheduler.add(sequence)
        run_all(scheduler, cache, model)
    assert model.computed - before == 1
    assert sequence.cached_tokens == 39


def test_the_next_turn_reuses_generated_tokens(model):
    scheduler, cache = make_scheduler(pages=200)
    first = make_sequence([1, 2, 3], max_tokens=20)
    scheduler.add(first)
    run_all(scheduler, cache, model)
    second = make_sequence([*first.token_ids, 9, 9], max_tokens=1)
    scheduler.add(second)
    run_all(scheduler, cache, model)
    assert second.cached_tokens == len(first.token_ids) - 1  # the last token was sampled, never fed


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_the_oldest_gets_its_turns_while_better_ones_keep_coming(model, policy):
    """An adversary always brings longer matches and higher priorities, faster than they can be served."""
    clock = Clock()
    scheduler, cache = make_scheduler(pages=400, step_tokens=64, max_running=2, policy=policy, max_wait=10.0, clock=clock)
    hot = list(range(30))
    scheduler.add(make_sequence(hot, max_tokens=1))
    run_all(scheduler, cache, model)
    lonely = [make_sequence([45 + n] * 20, max_tokens=4, arrival=clock.now) for n in range(3)]
    stream = []
    for sequence in lonely:
        scheduler.add(sequence)
    while any(sequence.first_admission is None for sequence in lonely):
        clock.now += 1.0
        for n in range(3):
            stream.append(make_sequence([*hot, n, int(clock.now) % 50], max_tokens=3, arrival=clock.now, priority=n))
            scheduler.add(stream[-1])
        step(scheduler, cache, model)
        assert clock.now < 200, "it starves"
    for older, sequence in enumerate(lonely):
        overtook = [s for s in stream if s.first_admission is not None and 10 < s.first_admission < sequence.first_admission]
        assert len(overtook) <= TURNS * (older + 1)
    assert lonely[0].first_admission > 10  # the policy had its way until then
    run_all(scheduler, cache, model)


def test_one_of_low_priority_is_not_preempted_for_ever(model):
    """High priorities fill the pool again and again: whoever had to give way often enough for them is left to end."""
    clock = Clock()
    scheduler, cache = make_scheduler(pages=56, step_tokens=64, max_running=3, max_wait=5.0, clock=clock, growth=Hopeful())
    low = make_sequence([45] * 10, max_tokens=45)
    low.end_ids = frozenset()
    scheduler.add(low)
    while low.finish_reason is None:
        clock.now += 1.0
        if scheduler.waiting < 10:
            high = make_sequence([int(clock.now) % 40, int(clock.now) // 40] * 5, max_tokens=30, arrival=clock.now, priority=1)
            high.end_ids = frozenset()
            scheduler.add(high)
        step(scheduler, cache, model)
        assert clock.now < 4_000, "it starves"
    assert low.preemptions == PATIENCE  # 11 times without it
    assert len(output(low)) == 45


def test_a_chunked_prefill_leaves_room_for_those_that_decode(model):
    scheduler, cache = make_scheduler(pages=2000, step_tokens=32, max_running=4)
    decoder = make_sequence([1, 2, 3], max_tokens=60)
    decoder.end_ids = frozenset()
    scheduler.add(decoder)
    step(scheduler, cache, model)
    scheduler.add(make_sequence(list(range(50)) * 8, max_tokens=1))
    for _ in range(10):
        plan, _ = step(scheduler, cache, model)
        by_id = {run.sequence_id: run for run in plan.runs}
        assert len(by_id[decoder.sequence_id].token_ids) == 1
        assert sum(len(run.token_ids) for run in plan.runs) <= 17  # half of the step's tokens for the prefill


def test_no_step_is_calm_in_which_one_that_waits_could_be_admitted(model):
    """The last chunk of a prompt leaves no budget to look at who waits, fills no page, and so publishes nothing."""
    scheduler, cache = make_scheduler(pages=10, page_size=64, step_tokens=8, policy="fcfs")
    decoder, prompt, waiting = (make_sequence([n] * length, max_tokens=20, arrival=float(n)) for n, length in ((1, 3), (2, 8), (3, 3)))
    for sequence in (decoder, prompt, waiting):
        sequence.end_ids = frozenset()
    scheduler.add(decoder)
    step(scheduler, cache, model)
    scheduler.add(prompt)
    scheduler.add(waiting)
    for _ in range(2):
        step(scheduler, cache, model)
    assert not prompt.prefilling
    assert scheduler.calm_steps() == 0
    plan, _ = step(scheduler, cache, model)
    assert [admission.sequence_id for admission in plan.admitted] == [waiting.sequence_id]
    assert scheduler.calm_steps() > 0


def test_priority_goes_before_the_policy(model):
    scheduler, cache = make_scheduler(pages=500, max_running=1, step_tokens=64)
    low = [make_sequence([n, n, n], max_tokens=2, arrival=float(n)) for n in range(5)]
    high = make_sequence([9, 9, 9], max_tokens=2, arrival=9.0, priority=1)
    for sequence in [*low, high]:
        scheduler.add(sequence)
    plan, _ = step(scheduler, cache, model)
    assert [run.sequence_id for run in plan.runs] == [high.sequence_id]


def test_priority_need_not_wait_until_all_that_came_before_are_ranked(model):
    scheduler, cache = make_scheduler(pages=500, max_running=1, step_tokens=64)
    for n in range(500):
        scheduler.add(make_sequence([n % 40, n // 40, 3], max_tokens=2, arrival=float(n)))
    high = make_sequence([9, 9, 9], max_tokens=2, arrival=500.0, priority=1)
    scheduler.add(high)
    plan, _ = step(scheduler, cache, model)
    assert [run.sequence_id for run in plan.runs] == [high.sequence_id]


@pytest.mark.parametrize("page_size", [1, 16])
def test_salts_keep_tenants_apart(model, page_size):
    scheduler, cache = make_scheduler(pages=200, page_size=page_size, step_tokens=64)
    prompt = list(range(33))
    for salt, cached in (("a", 0), ("b", 0), ("a", 32)):
        sequence = make_sequence(prompt, max_tokens=1, salt=salt)
        scheduler.add(sequence)
        run_all(scheduler, cache, model)
        assert sequence.cached_tokens == cached


def test_a_hopeful_scheduler_preempts_and_loses_nothing(model, reference):
    scheduler, cache = make_scheduler(pages=70, step_tokens=64, max_running=16, growth=Hopeful())
    sequences = [make_sequence([n] * 10, max_tokens=40, arrival=float(n)) for n in range(12)]
    for sequence in sequences:
        scheduler.add(sequence)
    run_all(scheduler, cache, model)
    assert scheduler.preemptions > 12
    for sequence in sequences:
        assert output(sequence) == reference(sequence.request.prompt_ids, 40, ENDS)
