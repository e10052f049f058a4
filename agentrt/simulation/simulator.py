"""Runs a trace through the real scheduler, tree and pool, with a cost model in place of the model and a clock of its own.

Calls are submitted when they are due, or when the calls before them have ended; each step takes the seconds that the cost model
says; what is sampled is what the trace says. Decode steps in which nothing changes are taken at once (`coast`), to the same
effect: with `skip=False` they are taken one by one, and every time and token comes out the same.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache

from agentrt.cache.prefix_cache import PrefixCache
from agentrt.observe.trace import StepShape
from agentrt.request import Request, SamplingParams
from agentrt.scheduling.plan import Sampled, StepOutput, StepPlan
from agentrt.scheduling.scheduler import Scheduler, Update
from agentrt.scheduling.sequence import Sequence
from agentrt.simulation.cost_model import CostModel
from agentrt.simulation.timeline import Moment, Timeline
from agentrt.simulation.trace import Call, Trace


class Clock:
    """Virtual time, in seconds."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        """The time now."""
        return self.now


@dataclass(slots=True)
class CallRecord:
    """What became of a call.

    Attributes:
        call: The call.
        due: When it was submitted.
        admitted: When it first ran.
        first_token: When its first token was there.
        ended: When its last token was.
        cached_tokens: Prompt tokens found in the cache.
        output: What it gave.
        preemptions: Times it had to give way.
        error: Why it failed, or "".
    """

    call: Call
    due: float
    admitted: float = 0.0
    first_token: float = 0.0
    ended: float = 0.0
    cached_tokens: int = 0
    output: tuple[int, ...] = ()
    preemptions: int = 0
    error: str = ""


@dataclass(slots=True)
class Run:
    """What came of simulating a trace.

    Attributes:
        records: Of every call, in the order in which they ended.
        order: Numbers of the calls, in the order in which they were first admitted.
        timeline: State over time.
        gaps: (seconds, how often) between two tokens of a sequence.
        seconds: Virtual time from the first call to the last token.
        steps: Steps, skipped ones included.
        computed_tokens: Tokens that went through the model.
        preemptions: In all.
        evicted_tokens: In all.
        slots_filled: Mean share of the slots in use that hold a token.
    """

    records: list[CallRecord] = field(default_factory=list)
    order: list[int] = field(default_factory=list)
    timeline: Timeline = field(default_factory=Timeline)
    gaps: list[tuple[float, int]] = field(default_factory=list)
    seconds: float = 0.0
    steps: int = 0
    computed_tokens: int = 0
    preemptions: int = 0
    evicted_tokens: int = 0
    slots_filled: float = 1.0


@dataclass(slots=True)
class _Live:
    """A call that was submitted and has not ended."""

    record: CallRecord
    sequence: Sequence
    last_token: float = -1.0


class Simulator:
    """One run of one trace. The scheduler and the cache must have been made with `clock`."""

    def __init__(
        self, trace: Trace, scheduler: Scheduler, cache: PrefixCache, cost: CostModel, clock: Clock, *, skip: bool = True, check: bool = False
    ) -> None:
        """Makes a simulator that has not begun.

        Args:
            trace: What is asked.
            scheduler: Without sequences.
            cache: The scheduler's.
            cost: Seconds a step.
            clock: Theirs.
            skip: Take decode steps in which nothing changes at once.
            check: Verify the slot equation after every step.
        """
        self._scheduler = scheduler
        self._cache = cache
        self._cost = cost
        self._clock = clock
        self._skip = skip
        self._check = check
        self._calls = {call.call_id: call for call in trace.calls}
        self._missing = {call.call_id: len(set(call.after)) for call in trace.calls}
        self._next: defaultdict[int, list[int]] = defaultdict(list)
        for call in trace.calls:
            for before in set(call.after):
                self._next[before].append(call.call_id)
        self._due = [(call.at, call.call_id) for call in trace.calls if not call.after]
        heapq.heapify(self._due)
        self._live: dict[int, _Live] = {}  # by sequence id
        self._filled = [0.0, 0.0]  # slots that hold a token, and slots in use, each times seconds
        self.run = Run()

    @property
    def ended(self) -> int:
        """Calls that have ended."""
        return len(self.run.records)

    def advance(self) -> bool:
        """Takes one step, and the calm ones after it; False once everything has ended.

        Raises:
            RuntimeError: The scheduler has work and does none, or lost a page.
        """
        self._submit_due()
        plan = self._scheduler.plan()
        if plan is None:
            return self._wait()
        shape = StepShape.of((run.start, len(run.token_ids)) for run in plan.runs)
        self._pass(self._cost.seconds(shape), shape.tokens)
        self._take(self._scheduler.commit(plan, self._answer(plan)))
        if self._check:
            self._cache.check(self._scheduler.private_pages)
        if self._skip:
            self._coast()
        return True

    def finish(self) -> Run:
        """Adds up; to be called when `advance` has said False."""
        run = self.run
        run.seconds = self._clock.now
        run.preemptions = self._scheduler.preemptions
        run.evicted_tokens = self._cache.evicted_tokens_total
        run.slots_filled = self._filled[0] / self._filled[1] if self._filled[1] else 1.0
        run.timeline.add(self._moment, force=True)
        return run

    # -- calls --------------------------------------------------------------------------------------------------------

    def _submit_due(self) -> None:
        while self._due and self._due[0][0] <= self._clock.now:
            due, call_id = heapq.heappop(self._due)
            call = self._calls[call_id]
            sequence = self._sequence(call)
            self._live[sequence.sequence_id] = _Live(CallRecord(call, due), sequence)
            self._scheduler.add(sequence)

    def _sequence(self, call: Call) -> Sequence:
        prompt, output = tuple(call.prompt), len(call.output)
        allowed = max(call.max_tokens or 0, output)
        last = call.output[output - 1]
        ends = frozenset({last} if allowed > output and last not in call.output[: output - 1] else ())
        most = allowed if ends else output
        request = Request(
            prompt_ids=prompt, sampling=_sampling(most), cache_salt=call.salt, priority=call.priority, program=call.program, request_id=str(call.call_id)
        )
        return Sequence(call.call_id + 1, request, 0, 0, self._clock.now, len(prompt) + most, ends)

    def _wait(self) -> bool:
        self._take(self._scheduler.take_ended())
        if not self._scheduler.idle:
            raise RuntimeError(f"{self._scheduler.waiting} calls wait, none runs, and none is admitted")
        if not self._due:
            return False
        self._clock.now = max(self._clock.now, self._due[0][0])
        return True

    # -- what came of a step ------------------------------------------------------------------------------------------

    def _answer(self, plan: StepPlan) -> StepOutput:
        sampled = {}
        for run in plan.runs:
            live = self._live[run.sequence_id]
            tokens = (live.record.call.output[live.sequence.output_length],) if run.sample_at else ()
            sampled[run.sequence_id] = Sampled(tokens)
        return StepOutput(sampled)

    def _take(self, updates: list[Update]) -> None:
        for update in updates:
            live = self._live.get(update.sequence.sequence_id)
            if live is None:
                continue
            if update.token_ids:
                self._token(live)
            if update.ended:
                self._end(live)

    def _token(self, live: _Live) -> None:
        now, record = self._clock.now, live.record
        if live.last_token < 0:
            record.first_token = now
            record.admitted = live.sequence.first_admission or 0.0
            record.cached_tokens = live.sequence.cached_tokens or 0
            self.run.order.append(record.call.call_id)
        else:
            self.run.gaps.append((now - live.last_token, 1))
        live.last_token = now

    def _end(self, live: _Live) -> None:
        sequence, record = live.sequence, live.record
        del self._live[sequence.sequence_id]
        record.ended = self._clock.now
        record.output = tuple(sequence.token_ids[sequence.prompt_length :])
        record.preemptions = sequence.preemptions
        record.error = str(sequence.error or "")
        self.run.records.append(record)
        self._after(record.call)

    def _after(self, call: Call) -> None:
        if call.program is not None:
            if call.hold:
                self._cache.hold(call.program.program, call.hold)
            if call.last:
                self._cache.end_program(call.program.program)
        for following in self._next.pop(call.call_id, ()):
            self._missing[following] -= 1
            if not self._missing[following]:
                heapq.heappush(self._due, (self._clock.now + self._calls[following].at, following))

    # -- time ---------------------------------------------------------------------------------------------------------

    def _pass(self, seconds: float, tokens: int) -> None:
        """Lets the time of a step pass; what is in use now was in use all that time."""
        self._clock.now += seconds
        self.run.steps += 1
        self.run.computed_tokens += tokens
        self._fill(seconds, self._held() + tokens)
        self.run.timeline.add(self._moment)

    def _held(self) -> int:
        """Slots that hold a token whose KV was computed."""
        size = self._cache.page_size
        return self._cache.cached_tokens + sum(s.computed_tokens - s.shared_pages * size for s in self._scheduler.sequences())

    def _fill(self, seconds: float, held: int) -> None:
        """Counts slots over time: those that hold a token, and those in use."""
        used = self._cache.pool.total - self._cache.pool.free_count
        self._filled[0] += held * seconds
        self._filled[1] += used * self._cache.page_size * seconds

    def _coast(self) -> None:
        """Takes calm steps at once, up to the one in which the next call is due."""
        steps = self._scheduler.calm_steps()
        if steps < 2:
            return
        live = [self._live[sequence.sequence_id] for sequence in self._scheduler.sequences()]
        steps = min(steps, *(len(one.record.call.output) - one.sequence.output_length - 1 for one in live))
        shape = StepShape.of((one.sequence.computed_tokens, 1) for one in live)
        due = min(self._scheduler.calm_until, self._due[0][0] if self._due else float("inf"))
        taken, seconds = 0, []
        now = self._clock.now
        while taken < steps and now < due:
            count = len(live)
            grown = StepShape(count, count, shape.context + taken * count, shape.attention + taken * count)
            seconds.append(self._cost.seconds(grown))
            now += seconds[-1]
            taken += 1
        if not taken:
            return
        held = self._held()
        self._scheduler.coast(taken, lambda sequence: self._next_output(sequence, taken))
        for number, one in enumerate(seconds, 1):
            self._clock.now += one
            self._fill(one, held + number * len(live))
            self.run.gaps.append((one, len(live)))
        self.run.steps += taken
        self.run.computed_tokens += taken * len(live)
        for one_live in live:
            one_live.last_token = self._clock.now

    def _next_output(self, sequence: Sequence, count: int) -> list[int]:
        output, start = self._live[sequence.sequence_id].record.call.output, sequence.output_length
        return [output[start]] * count if hasattr(output, "blocks") else list(output[start : start + count])

    def _moment(self) -> Moment:
        cache = self._cache
        return Moment(
            time=self._clock.now,
            running=self._scheduler.running,
            waiting=self._scheduler.waiting,
            pages_used=cache.pool.total - cache.available_pages,
            pages_cached=cache.cached_tokens // cache.page_size,
            hit_tokens=cache.hit_tokens_total,
            asked_tokens=cache.queried_tokens_total,
            evicted_tokens=cache.evicted_tokens_total,
            preemptions=self._scheduler.preemptions,
            ended=len(self.run.records),
        )


@lru_cache(maxsize=4096)
def _sampling(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens)


def simulate_trace(simulator: Simulator, progress: Callable[[int], None] | None = None) -> Run:
    """Runs a simulator to its end, telling `progress` how many calls have ended."""
    told = 0
    while simulator.advance():
        if progress is not None and simulator.ended != told:
            told = simulator.ended
            progress(told)
    return simulator.finish()
