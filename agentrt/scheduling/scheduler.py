"""The scheduler: decides what each step computes, and takes in what came of it. No tensors, no text, no clock of its own.

One rule for all work: in a step every chosen sequence contributes a run of new tokens on top of its computed ones, under
a budget of tokens. The order is: sequences that run, oldest first; then waiting ones, in the policy's order. When the
pool is empty the running sequence of least priority, and of these the youngest, gives its pages back and waits again (preemption by
recompute; what it had published stays in the tree while there is room). One that had to give way `PATIENCE` times goes before all
priorities, so the oldest of these can always go on, and nothing waits, or begins anew, for ever.
"""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from agentrt.cache.prefix_cache import PrefixCache
from agentrt.cache.radix_tree import Match
from agentrt.errors import AgentrtError, ConstraintError, TooLongError, as_request_error
from agentrt.request import FinishReason, TokenLogprob
from agentrt.scheduling.absence import Absences
from agentrt.scheduling.admission import WaitingQueue
from agentrt.scheduling.growth import Growth
from agentrt.scheduling.in_flight import InFlight
from agentrt.scheduling.plan import Admission, Remap, Run, Sampled, Slots, StepOutput, StepPlan
from agentrt.scheduling.policy import Policy, program
from agentrt.scheduling.sequence import Sequence, Status
from agentrt.scheduling.view import Crowd, LiveView, ProgramWork

#: Decoded tokens after which a sequence publishes, so that siblings and later turns can use them.
PUBLISH_EVERY = 32

#: Largest share of the pool that admission leaves to programs that will be back.
ABSENT_SHARE = 0.5

#: Sequences that one step parks beside a sibling: 10,000 may wait for one prefix.
PARKED_PER_STEP = 16

#: Where a run samples whose only token is the last one.
_LAST = (0,)

#: Times that a sequence gives way to higher priorities; after these, only to an older one of the same fate.
PATIENCE = 4


@dataclass(frozen=True, slots=True)
class Budget:
    """Bounds on one step.

    Attributes:
        step_tokens: Most new tokens, over all sequences.
        prefill_tokens: Most of those in prefill chunks while another sequence decodes.
        max_running: Most sequences.
    """

    step_tokens: int
    prefill_tokens: int
    max_running: int


@dataclass(frozen=True, slots=True)
class Update:
    """What a step gave one sequence.

    Attributes:
        sequence: Whose it is.
        token_ids: Tokens appended to it: sampled, then forced.
        forced: For each, whether it was forced.
        logprobs: For each, if asked for.
        ended: Whether it finished or failed in this step.
        restarted: Whether its answer was begun anew: what was told before is void.
    """

    sequence: Sequence
    token_ids: tuple[int, ...] = ()
    forced: tuple[bool, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    ended: bool = False
    restarted: bool = False


class Scheduler:
    """Plans steps over sequences; owns every page that is not free or in the tree."""

    def __init__(
        self,
        cache: PrefixCache,
        budget: Budget,
        policy: Policy,
        *,
        clock: Callable[[], float],
        max_wait: float,
        hold_seconds: float = 60.0,
        growth: Growth | None = None,
    ) -> None:
        """Makes a scheduler without sequences.

        Args:
            cache: Pages and prefixes.
            budget: Bounds on a step.
            policy: Order of admission.
            clock: Seconds; the simulator gives a virtual one.
            max_wait: Seconds of waiting after which the oldest sequence gets every sixteenth admission.
            growth: Guesses how long answers will be; None: learns it.
            hold_seconds: How long the cache keeps a program's prefixes, softly, while its next call is expected.
        """
        self._cache = cache
        self._page_size = cache.page_size
        self._in_page = np.arange(cache.page_size, dtype=np.int32)
        self._budget = budget
        self._clock = clock
        self._hold_seconds = hold_seconds
        self._in_flight = InFlight(cache.page_size)
        self._growth = growth or Growth()
        reserved = int(cache.pool.total * ABSENT_SHARE) if policy is program else 0
        self._absences = Absences(hold_seconds, reserved, cache.pool.total * cache.page_size)
        self._planned_at = 0.0
        self._crowd = Crowd()
        self._work = ProgramWork()
        self._waiting = WaitingQueue(policy, self._view, max_wait)
        cache.on_change = self._waiting.touch
        self._running: dict[int, Sequence] = {}  # in order of admission
        self._runs: dict[int, Run] = {}  # of the step being planned
        self._released: list[int] = []
        self._remaps: list[Remap] = []
        self._ended: list[Update] = []  # ended between steps
        self._closed = False  # to admission in this step, since somebody had to give way
        self._quiet = False  # nothing has changed since a step that could admit nobody of all that wait
        self.preemptions = 0

    # -- what there is ------------------------------------------------------------------------------------------------

    @property
    def running(self) -> int:
        """Sequences that take part in steps."""
        return len(self._running)

    @property
    def waiting(self) -> int:
        """Sequences that wait for admission."""
        return len(self._waiting)

    @property
    def idle(self) -> bool:
        """Whether there is nothing to do, nor anything to tell."""
        return not (self._running or len(self._waiting) or self._ended)

    @property
    def private_pages(self) -> int:
        """Pages that belong to one sequence only."""
        return sum(len(s.pages) - s.shared_pages for s in self._running.values())

    def sequences(self) -> Iterator[Sequence]:
        """The running sequences, oldest admission first."""
        return iter(list(self._running.values()))

    # -- coming and going ---------------------------------------------------------------------------------------------

    def add(self, sequence: Sequence) -> None:
        """Takes a new sequence; it waits. What its grammar forces at the beginning is fed with the prompt."""
        sequence.status = Status.WAITING
        self._quiet = False
        self._absences.back(sequence, self._clock())
        self._begin(sequence)
        if sequence.status is Status.WAITING:
            self._waiting.push(sequence)

    def abort(self, sequence: Sequence, error: AgentrtError | None = None) -> None:
        """Ends a sequence now, with `error` or FinishReason.ABORT; nothing if it has ended. Not while its step is pending."""
        if sequence.status is Status.FINISHED:
            return
        sequence.error = error
        sequence.finish_reason = None if error else FinishReason.ABORT
        self._retire(sequence)
        self._ended.append(Update(sequence, ended=True))

    # -- planning -----------------------------------------------------------------------------------------------------

    def plan(self) -> StepPlan | None:
        """Chooses the next step; None if no sequence has anything to compute."""
        self._planned_at = self._clock()
        self._runs = {}
        self._closed = False
        left = self._budget.step_tokens
        decoding = any(not sequence.prefilling for sequence in self._running.values())
        prefill_left = min(self._budget.prefill_tokens, left) if decoding else left
        for sequence in list(self._running.values()):
            if sequence.status is not Status.RUNNING:
                continue  # preempted for an older one, in this loop
            prefilling = sequence.prefilling
            run = self._run(sequence, min(left, prefill_left) if prefilling else left)
            left -= run
            prefill_left -= run if prefilling else 0
        self._quiet = False
        admitted = [] if self._closed else self._admit(min(left, prefill_left))
        if not self._runs:
            return None
        plan = StepPlan(tuple(self._runs.values()), tuple(admitted), tuple(self._released), tuple(self._remaps))
        self._runs, self._released, self._remaps = {}, [], []
        return plan

    def _run(self, sequence: Sequence, allowed: int) -> int:
        """Plans the sequence's run of at most `allowed` tokens; returns how many, 0 if none or if it had to give way."""
        start = sequence.computed_tokens
        pending = len(sequence.token_ids) - start
        count = min(pending, allowed)
        if count <= 0:
            return 0
        if sequence.drafted and count < pending:  # a draft is cut to what fits
            del sequence.token_ids[count - pending :]
            sequence.drafted -= pending - count
        if start + count > len(sequence.pages) * self._page_size and not self._reserve(sequence, start + count):
            return 0
        self._runs[sequence.sequence_id] = self._decode(sequence, start) if pending == 1 else self._several(sequence, start, count)
        return count

    def _decode(self, sequence: Sequence, start: int) -> Run:
        """The run of a last token, which is most of what a step plans: nothing is drafted behind it, and no prompt token to be scored."""
        page, place = divmod(start, self._page_size)
        slot = sequence.pages[page] * self._page_size + place
        samples = () if sequence.request.sampling.max_tokens == 0 else _LAST
        return Run(sequence.sequence_id, (sequence.token_ids[start],), start, (slot,), samples)

    def _several(self, sequence: Sequence, start: int, count: int) -> Run:
        """The run of `count` tokens at `start`: a chunk of a prompt, what a grammar forces, a draft."""
        complete = start + count == len(sequence.token_ids) and sequence.request.sampling.max_tokens != 0
        return Run(
            sequence.sequence_id,
            tuple(sequence.token_ids[start : start + count]),
            start,
            self._slots(sequence, start, start + count),
            tuple(range(count - 1 - sequence.drafted, count)) if complete else (),
            sequence.score_offsets(start, count),
        )

    def _reserve(self, sequence: Sequence, tokens: int) -> bool:
        """Sets pages aside for the first `tokens` tokens, preempting younger sequences if need be; False if it gave way itself."""
        needed = self._pages_for(tokens)
        count, last = needed - len(sequence.pages), sequence.pages[-1] if sequence.pages else None
        expected = self._pages_for(self._growth.length(sequence)) - needed
        while (pages := self._cache.allocate(count, last, expect=expected)) is None:
            victim = self._victim()
            if len(self._running) == 1:
                limit = self._cache.pool.total * self._page_size
                self.abort(sequence, TooLongError(f"{tokens} tokens do not fit the KV store of {limit}", needed=tokens, limit=limit))
                return False
            self._preempt(victim)
            if victim is sequence:
                return False
        sequence.pages.extend(pages)
        return True

    def _victim(self) -> Sequence:
        """Whoever gives way: least priority, then the latest to have arrived; last those whose patience is at an end."""
        return min(self._running.values(), key=_standing)

    def _preempt(self, sequence: Sequence) -> None:
        sequence.preemptions += 1
        self.preemptions += 1
        self._closed = True
        self._runs.pop(sequence.sequence_id, None)
        self._leave(sequence)
        sequence.status = Status.WAITING
        self._waiting.push(sequence)

    # -- admission ----------------------------------------------------------------------------------------------------

    def _admit(self, left: int) -> list[Admission]:
        """Admits waiting sequences, in order, while there is budget, room and memory, and plans their first runs."""
        admitted: list[Admission] = []
        if not len(self._waiting) or left <= 0 or len(self._running) >= self._budget.max_running:
            return admitted
        self._waiting.refresh()
        now = self._clock()
        spare = self._cache.available_pages - self._promised() - self._absences.pages(now)
        parked = 0
        while left > 0 and len(self._running) < self._budget.max_running and parked < PARKED_PER_STEP:
            sequence = self._waiting.first(now)
            if sequence is None:
                self._quiet = self._waiting.settled and not admitted
                break
            match = self._cache.match(sequence.key, sequence.reuse_limit)
            if self._wait_for_sibling(sequence, match):
                parked += 1
                continue
            spare -= self._need(sequence, match)
            if spare < 0 and self._running:
                self._quiet = self._waiting.settled and not admitted
                break
            admitted.append(self._start(sequence, match))
            left -= self._run(sequence, left)
            if self._closed:
                break
        return [admission for admission in admitted if admission.sequence_id in self._running]

    def _wait_for_sibling(self, sequence: Sequence, match: Match) -> bool:
        name = self._in_flight.awaited(sequence, match.length)
        if name is None:
            return False
        self._in_flight.park(sequence, name)
        self._waiting.park(sequence)
        return True

    def _need(self, sequence: Sequence, match: Match) -> int:
        """Pages that would not be available any more if the sequence ran: what it computes, and what it locks of the tree."""
        unlocked, node, tokens = 0, match.node, match.offset
        while node is not None and not node.locks:
            unlocked += tokens
            node = node.parent
            tokens = node.tokens if node is not None else 0
        return self._pages_for(self._growth.length(sequence)) - (match.length - unlocked) // self._page_size

    def _promised(self) -> int:
        """Pages that running sequences are likely to need still."""
        length, size = self._growth.length, self._page_size
        return sum(max(-(-length(s) // size) - len(s.pages), 0) for s in self._running.values())

    def _start(self, sequence: Sequence, match: Match) -> Admission:
        """Locks the sequence's cached prefix, which `match` found just now, and makes it run."""
        lease = self._cache.acquire(sequence.key, program=sequence.program, match=match)
        self._waiting.admitted(sequence)
        self._crowd.leave(sequence)
        sequence.lease = lease
        sequence.pages = array("i", lease.found_pages.tobytes())
        sequence.shared_pages = len(sequence.pages)
        sequence.computed_tokens = lease.cached_tokens
        sequence.admitted_length = len(sequence.token_ids)
        sequence.status = Status.RUNNING
        if sequence.cached_tokens is None:
            sequence.cached_tokens = lease.cached_tokens
            sequence.first_admission = self._clock()
        self._running[sequence.sequence_id] = sequence
        if self._cache.enabled:
            self._in_flight.start(sequence)
        sequence.forget_key()
        return Admission(
            sequence.sequence_id,
            self._slots(sequence, 0, lease.cached_tokens),
            tuple(sequence.token_ids) if sequence.output_length else sequence.request.prompt_ids,
            sequence.prompt_length,
            sequence.request.sampling,
            sequence.seed,
        )

    def _pages_for(self, tokens: int) -> int:
        return -(-tokens // self._page_size)

    def _view(self, sequence: Sequence) -> LiveView:
        return LiveView(sequence, self._cache, self._crowd, self._work)

    # -- what came of it ----------------------------------------------------------------------------------------------

    def commit(self, plan: StepPlan, output: StepOutput) -> list[Update]:
        """Takes in a step's output: appends tokens, publishes KV, ends what has ended."""
        prefilled = sum(len(run.token_ids) for run in plan.runs if len(run.token_ids) > 1)
        self._absences.step(plan.tokens, prefilled, self._clock() - self._planned_at)
        updates = [self._commit_run(self._running[run.sequence_id], run, output.sampled[run.sequence_id]) for run in plan.runs]
        return self.take_ended() + updates

    def take_ended(self) -> list[Update]:
        """Sequences that ended between steps; each is told once."""
        ended, self._ended = self._ended, []
        return ended

    def _commit_run(self, sequence: Sequence, run: Run, sampled: Sampled) -> Update:
        sequence.forward_passes += 1
        if sampled.error:
            return self._fail(sequence, sampled.error)
        prefilled = sequence.prefilling
        sequence.computed_tokens += len(run.token_ids)
        if sequence.program is not None:
            self._work.add(sequence.program, len(run.token_ids))
        sequence.scores.extend(sampled.scores)
        update = self._append(sequence, *self._accept(sequence, run, sampled))
        if update.ended or update.restarted:
            return update
        if not sequence.pending:  # max_tokens is 0: the prompt was all
            return self._finish(sequence, update, FinishReason.LENGTH)
        if prefilled or sequence.computed_tokens - sequence.shared_pages * self._page_size >= PUBLISH_EVERY:
            self._publish(sequence)
        return update

    def _accept(self, sequence: Sequence, run: Run, sampled: Sampled) -> tuple[list[int], list[TokenLogprob]]:
        """Keeps the guesses that equal what was sampled before them; drops the rest, and their KV."""
        drafted, sequence.drafted = sequence.drafted, 0
        if not drafted:
            return list(sampled.token_ids), list(sampled.logprobs)
        guesses = run.token_ids[len(run.token_ids) - drafted :]
        kept = next((i for i, guess in enumerate(guesses) if guess != sampled.token_ids[i]), drafted)
        del sequence.token_ids[len(sequence.token_ids) - drafted :]  # the kept ones come back as sampled tokens
        sequence.computed_tokens -= drafted - kept
        sequence.passes_saved += kept
        return list(sampled.token_ids[: kept + 1]), list(sampled.logprobs[: kept + 1])

    def _begin(self, sequence: Sequence) -> None:
        """Appends what the grammar forces before anything is sampled; ends the sequence if that is all there is."""
        try:
            reason = self._append_forced(sequence)
        except Exception as error:
            self._ended.append(self._fail(sequence, as_request_error(error)))
            return
        if reason is not None:
            self._ended.append(self._finish(sequence, self._tell(sequence, []), reason))

    def _append(self, sequence: Sequence, sampled: list[int], logprobs: list[TokenLogprob]) -> Update:
        """Appends sampled tokens and the run that the grammar forces after them, up to whatever ends the sequence."""
        reason: FinishReason | None = None
        try:
            for token in sampled:
                reason = reason or self._append_one(sequence, token, forced=False)
            if reason is None and sampled:
                reason = self._append_forced(sequence)
        except Exception as error:  # of its grammar or its stop patterns: that request's fault alone
            return self._fail(sequence, as_request_error(error))
        update = self._tell(sequence, logprobs)
        return update if reason is None else self._finish(sequence, update, reason)

    def _append_one(self, sequence: Sequence, token: int, *, forced: bool) -> FinishReason | None:
        sequence.token_ids.append(token)
        sequence.output_forced.append(forced)
        return self._ends(sequence, token)

    def _append_forced(self, sequence: Sequence) -> FinishReason | None:
        """Appends the forced run, or drafts it where the plain masked distribution was asked for."""
        if sequence.cursor is None:
            return None
        spec = sequence.request.sampling.grammar
        mode = spec.jump_forward if spec else "on"
        if mode == "off" or (mode == "exact_masked" and not sequence.output_length):
            return None
        room = sequence.max_length - len(sequence.token_ids)
        forced = sequence.cursor.forced()[:room]
        if mode == "exact_masked":
            guesses = forced[: max(room - 1, 0)]
            sequence.token_ids.extend(guesses)
            sequence.drafted = len(guesses)
            return None
        for token in forced:
            sequence.passes_saved += 1
            reason = self._append_one(sequence, token, forced=True)
            if reason is not None:
                return reason
        return None

    def _tell(self, sequence: Sequence, logprobs: list[TokenLogprob]) -> Update:
        """What the caller has not been told yet. Forced tokens have probability 1."""
        untold = len(sequence.output_forced) - sequence.told
        stop = len(sequence.token_ids) - sequence.drafted
        token_ids = tuple(sequence.token_ids[stop - untold : stop])
        forced = tuple(sequence.output_forced[sequence.told :])
        sequence.told += untold
        told: tuple[TokenLogprob, ...] = ()
        if sequence.request.sampling.logprobs is not None:
            sampled = iter(logprobs)
            told = tuple(TokenLogprob(t, 0.0, ((t, 0.0),)) if f else next(sampled) for t, f in zip(token_ids, forced, strict=True))
        return Update(sequence, token_ids, forced, told)

    def _ends(self, sequence: Sequence, token: int) -> FinishReason | None:
        """Advances grammar and stop strings by one token; says whether the sequence ends with it."""
        sampling = sequence.request.sampling
        if token in sequence.end_ids and sequence.output_length > sampling.min_tokens:
            sequence.stop_match = token if token in sampling.stop_token_ids else None
            return FinishReason.STOP
        if sequence.cursor is not None and not sequence.cursor.advance(token):
            raise ConstraintError(f"token {token} at output position {sequence.output_length - 1} is not allowed by the grammar")
        if sequence.watch is not None:
            match = sequence.watch.push(token)
            if match is not None and sequence.output_length >= sampling.min_tokens:
                sequence.stop_match = match
                return FinishReason.STOP
        if sequence.cursor is not None and sequence.cursor.finished:
            return FinishReason.STOP
        return FinishReason.LENGTH if len(sequence.token_ids) >= sequence.max_length else None

    # -- many plain decodes at once, for a simulation -------------------------------------------------------------------

    @property
    def calm_until(self) -> float:
        """When time alone may change what `calm_steps` says."""
        return min(self._waiting.turn_comes(self._clock()), self._absences.changes_at())

    def calm_steps(self) -> int:
        """How many coming steps are sure to give every running sequence one sampled token and to change nothing else.

        In these nobody arrives (the caller knows), is admitted (before `calm_until`), ends by length, publishes or needs a page.
        """
        full = len(self._running) >= self._budget.max_running  # and nobody leaves in these steps
        blocked = full or not len(self._waiting) or (self._quiet and self._waiting.settled)
        if self._ended or not blocked or not 0 < len(self._running) <= self._budget.step_tokens:
            return 0
        return max(min(self._calm(sequence) for sequence in self._running.values()), 0)

    def _calm(self, sequence: Sequence) -> int:
        if sequence.pending != 1 or sequence.prefilling or sequence.cursor is not None or sequence.watch is not None:
            return 0
        size, shared = self._page_size, sequence.shared_pages * self._page_size
        publishes_at = max(shared + PUBLISH_EVERY, shared + size) if self._cache.enabled else sequence.max_length
        return min(
            sequence.max_length - len(sequence.token_ids) - 1,
            len(sequence.pages) * size - sequence.computed_tokens,
            publishes_at - sequence.computed_tokens - 1,
        )

    def coast(self, steps: int, sampled: Callable[[Sequence], list[int]]) -> None:
        """Takes in `steps` calm steps at once.

        Args:
            steps: At most `calm_steps()`.
            sampled: The tokens that a sequence was given in them, one a step, none of which ends it.
        """
        for sequence in self._running.values():
            sequence.token_ids.extend(sampled(sequence))
            sequence.output_forced.extend(itertools.repeat(False, steps))
            sequence.told += steps
            sequence.computed_tokens += steps
            sequence.forward_passes += steps
            if sequence.program is not None:
                self._work.add(sequence.program, steps)

    # -- pages changing hands -----------------------------------------------------------------------------------------

    def _publish(self, sequence: Sequence) -> None:
        """Gives the tree every whole computed page; where the tree has one already, ours is freed and its own is used.

        pages  [0, shared)        the tree's already
               [shared, whole)    ours; now the tree's (kept, or swapped for its own)
               [whole, len)       ours still: not whole, or not computed
        """
        size, computed = self._page_size, sequence.computed_tokens
        if not self._cache.enabled or sequence.lease is None or computed // size <= sequence.shared_pages:
            return
        publication = self._cache.publish(sequence.lease, sequence.token_ids, sequence.pages, limit=computed, program=sequence.program)
        if publication.moved_pages:
            first, moved = publication.moved_from, publication.moved_pages
            sequence.pages[first : first + len(moved)] = array("i", moved)
            slots = self._slots(sequence, first * size, (first + len(moved)) * size)
            self._remaps.append(Remap(sequence.sequence_id, first * size, slots))
        sequence.shared_pages = publication.published_tokens // size
        self._quiet = False
        self._waiting.wake(self._in_flight.progress(sequence))

    def _leave(self, sequence: Sequence) -> None:
        """Takes a sequence out of the running ones: whole pages go to the tree, the rest to the pool."""
        if sequence.lease is None:
            return
        self._publish(sequence)
        self._cache.free(sequence.pages[sequence.shared_pages :])
        self._cache.release(sequence.lease)
        sequence.lease = None
        sequence.pages = array("i")
        sequence.shared_pages = sequence.computed_tokens = 0
        if sequence.drafted:  # guesses are not part of it
            del sequence.token_ids[-sequence.drafted :]
            sequence.drafted = 0
        del self._running[sequence.sequence_id]
        self._quiet = False
        self._released.append(sequence.sequence_id)
        self._remaps = [remap for remap in self._remaps if remap.sequence_id != sequence.sequence_id]
        self._waiting.wake(self._in_flight.stop(sequence))

    def _retire(self, sequence: Sequence) -> None:
        self._waiting.remove(sequence)
        self._crowd.leave(sequence)
        self._leave(sequence)
        self._waiting.wake(self._in_flight.stop(sequence))
        sequence.status = Status.FINISHED

    def _finish(self, sequence: Sequence, update: Update, reason: FinishReason) -> Update:
        try:
            violations = sequence.watch.violations() if sequence.watch and reason is FinishReason.STOP else ()
        except Exception as error:
            return self._fail(sequence, as_request_error(error))
        if violations:
            return self._restart(sequence, violations)
        sequence.finish_reason = reason
        self._growth.ended(sequence)
        self._retire(sequence)
        self._expect_next_call(sequence)
        return Update(sequence, update.token_ids, update.forced, update.logprobs, ended=True)

    def _expect_next_call(self, sequence: Sequence) -> None:
        """Asks the cache to keep a program's prefixes while the call after this one is on its way."""
        tag = sequence.request.program
        if tag is not None and tag.expected_calls:
            self._cache.hold(tag.program, self._hold_seconds)
            self._absences.leave(sequence, self._pages_for(len(sequence.token_ids)), self._clock())

    def _restart(self, sequence: Sequence, violations: tuple[str, ...]) -> Update:
        """Begins an answer that failed its final check anew, as often as the request allows: with another seed, or, where the
        same tokens would be chosen again, without the answers that failed.
        """
        if sequence.resamples >= sequence.request.sampling.max_resamples or sequence.watch is None:
            what = "; ".join(violations[:3])
            message = f"after {sequence.resamples + 1} tries the output still fails its final check: {what}"
            return self._fail(sequence, ConstraintError(message, violations=violations))
        self._waiting.remove(sequence)
        self._leave(sequence)
        if sequence.request.sampling.temperature == 0:
            sequence.exclude_answer()
        del sequence.token_ids[sequence.prompt_length :]
        sequence.output_forced.clear()
        sequence.told = 0
        sequence.resamples += 1
        sequence.seed += 1
        sequence.stop_match = None
        sequence.forget_key()
        sequence.cursor = sequence.watch.restart()
        self.add(sequence)
        return Update(sequence, restarted=True)

    def _fail(self, sequence: Sequence, error: AgentrtError) -> Update:
        sequence.error = error
        self._retire(sequence)
        return Update(sequence, ended=True)

    def _slots(self, sequence: Sequence, start: int, stop: int) -> Slots:
        """KV slots of positions [start, stop)."""
        size = self._page_size
        if stop - start == 1:
            return (sequence.pages[start // size] * size + start % size,)
        if size == 1:
            return sequence.pages[start:stop]
        first = start // size
        pages = np.frombuffer(sequence.pages[first : self._pages_for(stop)], dtype=np.int32)
        slots = (pages[:, None] * size + self._in_page).ravel()
        return array("i", slots[start - first * size : stop - first * size].tobytes())


def _standing(sequence: Sequence) -> tuple[bool, int, float, int]:
    """Who keeps its pages: the greater of two. Once patience has ended, age alone counts, so of any two the same one always goes on."""
    enough = sequence.preemptions >= PATIENCE
    return enough, 0 if enough else sequence.request.priority, -sequence.arrival, -sequence.sequence_id
