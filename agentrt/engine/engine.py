"""The step loop: plan, run, sample, commit. One thread calls everything here.

A request comes in as ids and leaves as deltas. Its grammar is compiled elsewhere, by threads of their own, and the
request waits for it while others run. A device that computes by itself is not left waiting for what its tokens do not need: what the
step before gave is told, and who comes is taken in, once the next step is launched.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from collections.abc import Sequence as Many
from functools import partial
from typing import TYPE_CHECKING, Any

from agentrt.backend import FlushReport, Load, Tokenizer
from agentrt.cache.prefix_cache import HotPath, PrefixCache
from agentrt.engine.deadlines import Deadlines
from agentrt.engine.executor import Executor, PendingStep
from agentrt.engine.live_request import LiveRequest, UnderWay
from agentrt.engine.masks import MaskMaker
from agentrt.engine.output import SampleOutput
from agentrt.errors import AbortedError, AgentrtError
from agentrt.observe.trace import TraceRecorder
from agentrt.request import FinishReason, Request, TokenDelta, Usage
from agentrt.scheduling.plan import Sampled, StepOutput, StepPlan
from agentrt.scheduling.scheduler import Scheduler, Update
from agentrt.scheduling.sequence import Cursor, Sequence

if TYPE_CHECKING:
    from agentrt.grammar.compiler import CompiledGrammar


class EngineCore:
    """Answers requests, step by step."""

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        cache: PrefixCache,
        tokenizer: Tokenizer,
        *,
        eos_ids: Many[int],
        max_length: int,
        check: bool = False,
        recorder: TraceRecorder | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Makes an engine without requests.

        Args:
            scheduler: Plans steps.
            executor: Runs them.
            cache: The scheduler's cache.
            tokenizer: Gives the bytes of tokens.
            eos_ids: The model's end tokens.
            max_length: Most tokens of prompt and output together: the context's or the pool's, whichever is less.
            check: Check the slot equation after every step.
            recorder: Writes a trace of what is asked and done.
            clock: Seconds.
        """
        self._scheduler = scheduler
        self._executor = executor
        self._cache = cache
        self._tokenizer = tokenizer
        self._eos_ids = frozenset(eos_ids)
        self._max_length = max_length
        self._check = check
        self._recorder = recorder
        self._clock = clock
        self._masks = MaskMaker()
        self._live: dict[str, LiveRequest] = {}
        self._deadlines: Deadlines[LiveRequest] = Deadlines()
        self._next_sequence = 0
        self._pending = False  # a step is launched and not committed
        self._late: list[tuple[Sequence, AgentrtError | None]] = []  # to be aborted once it is
        self._untold: list[Update] = []
        self._counts: Counter[str] = Counter()
        self._model_seconds = 0.0
        self._compile_seconds = 0.0

    @property
    def now(self) -> float:
        """The engine's clock, seconds."""
        return self._clock()

    @property
    def idle(self) -> bool:
        """Whether there is nothing to do, nor anything to tell."""
        return self._scheduler.idle and not self._untold

    def submit(self, request: Request, grammar: CompiledGrammar | None = None, arrival: float | None = None) -> None:
        """Takes a request; the next steps answer it. It was checked at the door, and its grammar is compiled.

        Args:
            request: The ask.
            grammar: What its output must satisfy.
            arrival: When it came, on the engine's clock; None: now.

        Raises:
            Exception: Something about it is wrong after all; nothing was begun.
        """
        now = self._clock() if arrival is None else arrival
        outputs = [self._output(request, grammar) for _ in range(request.sampling.n)]
        sequences = [self._sequence(request, index, output, grammar, now) for index, output in enumerate(outputs)]
        checked = grammar is not None and grammar.checked
        if self._recorder is not None:
            self._recorder.arrived(request, now)
        live = self._live[request.request_id] = LiveRequest(request, sequences, outputs, checked=checked, now=now)
        if request.deadline is not None:
            self._deadlines.add(now + request.deadline, live)
        for sequence in sequences:
            self._scheduler.add(sequence)

    def _output(self, request: Request, grammar: CompiledGrammar | None) -> SampleOutput:
        verify = grammar.verify if grammar is not None and grammar.checked else None
        new_cursor = partial(self._cursor, request, grammar)
        return SampleOutput(self._tokenizer, request.sampling, skip=len(request.prompt_tail), new_cursor=new_cursor, verify=verify)

    def _cursor(self, request: Request, grammar: CompiledGrammar | None) -> Cursor | None:
        """A cursor at the beginning of what the request's output must satisfy; None if it is free."""
        inner = None if grammar is None else grammar.cursor()
        if request.prompt_tail:
            from agentrt.grammar.healing import HealingCursor  # most starts never need it
            from agentrt.grammar.vocabulary import vocabulary_of

            return HealingCursor(request.prompt_tail, vocabulary_of(self._tokenizer), inner)
        return inner

    def _sequence(
        self, request: Request, index: int, output: SampleOutput, grammar: CompiledGrammar | None, now: float
    ) -> Sequence:
        sampling = request.sampling
        limit = self._max_length if sampling.max_tokens is None else len(request.prompt_ids) + sampling.max_tokens
        ends = frozenset(sampling.stop_token_ids) | (frozenset() if sampling.ignore_eos else self._eos_ids)
        self._next_sequence += 1
        return Sequence(
            sequence_id=self._next_sequence,
            request=request,
            index=index,
            seed=(sampling.seed or 0) * 1_000_003 + index * 7919,
            arrival=now,
            max_length=min(limit, self._max_length),
            end_ids=ends,
            watch=output,
            cursor=self._cursor(request, grammar),
        )

    def abort(self, request_id: str, error: AgentrtError | None = None) -> None:
        """Ends a request now, with `error` or FinishReason.ABORT; unknown ids are ignored."""
        live = self._live.get(request_id)
        for sequence in live.sequences if live else ():
            self._abort(sequence, error)

    def _abort(self, sequence: Sequence, error: AgentrtError | None = None) -> None:
        """Ends a sequence, once its step is no longer pending."""
        if self._pending:
            self._late.append((sequence, error))
        else:
            self._scheduler.abort(sequence, error)

    def never_started(self, request_id: str) -> TokenDelta:
        """The last delta of a request that was cancelled before it was submitted here."""
        return TokenDelta(request_id, finish_reason=FinishReason.ABORT, usage=Usage())

    def abort_all(self, error: AgentrtError) -> list[TokenDelta]:
        """Ends every request with `error`."""
        for request_id in list(self._live):
            self.abort(request_id, error)
        return self._tell(self._take_untold() + self._scheduler.take_ended())

    def step(self, meanwhile: Callable[[list[TokenDelta]], None] | None = None) -> list[TokenDelta]:
        """Runs one step, if there is anything to compute; returns what it gave.

        Args:
            meanwhile: For a device that computes by itself: called when the step is launched, with what the step before gave. It may
                submit and abort. What this step gives is then told in the next call, and not returned by this one.
        """
        self._abort_overdue()
        plan = self._scheduler.plan()
        if plan is None:
            return self._tell(self._take_untold() + self._scheduler.take_ended())
        masks = self._masks.start(plan, self._scheduler.sequences())
        pending = self._executor.launch(plan)
        overlapped = meanwhile if self._executor.asynchronous else None
        if overlapped is not None:
            self._overlap(pending, overlapped)
        made = masks.result()
        output = pending.finish(made.masks)
        for sequence_id, error in made.errors.items():
            output.sampled[sequence_id] = Sampled(error=error)
        updates = self._commit(plan, output)
        if overlapped is not None:
            self._untold, updates = updates, []
        deltas = self._tell(updates)
        if self._check:
            self.check()
        elif self._scheduler.idle:
            self._cache.check_counts(self._scheduler.private_pages)
        return deltas

    def _overlap(self, pending: PendingStep, meanwhile: Callable[[list[TokenDelta]], None]) -> None:
        """Does what the step's tokens are not needed for, while the device computes them."""
        self._pending = True
        meanwhile(self._tell(self._take_untold()))
        pending.foresee()
        self._pending = False

    def _commit(self, plan: StepPlan, output: StepOutput) -> list[Update]:
        updates = self._scheduler.commit(plan, output)
        late, self._late = self._late, []
        for sequence, error in late:
            self._scheduler.abort(sequence, error)
        self._masks.foresee(self._scheduler.sequences())
        if self._recorder is not None:
            self._recorder.step(((run.start, len(run.token_ids)) for run in plan.runs), output.seconds)
        self._counts["steps"] += 1
        self._counts["computed_tokens"] += plan.tokens
        self._model_seconds += output.seconds
        return updates

    def _take_untold(self) -> list[Update]:
        untold, self._untold = self._untold, []
        return untold

    def _tell(self, updates: list[Update]) -> list[TokenDelta]:
        """Turns updates into deltas; a request of which one sample failed ends with it."""
        now = self._clock()
        deltas: list[TokenDelta] = []
        while updates:
            for update in updates:
                live = self._live.get(update.sequence.request.request_id)
                if live is None or live.request is not update.sequence.request:
                    continue  # it is over, and its id perhaps in use again before its last step was done
                deltas.extend(live.deltas(update, now))
                if live.over:
                    self._end(live, now)
            updates = self._scheduler.take_ended()
        return deltas

    def _end(self, live: LiveRequest, now: float) -> None:
        del self._live[live.request.request_id]
        if live.request.deadline is not None:
            self._deadlines.discard(live)
        for sequence in live.sequences:
            self._abort(sequence)
        if self._recorder is not None:
            self._recorder.ended(live.request.request_id, (tuple(s.token_ids[s.prompt_length :]) for s in live.sequences))
        usage = live.usage(now)
        self._counts.update(
            requests=1,
            prompt_tokens=usage.prompt_tokens,
            cached_tokens=usage.cached_tokens,
            completion_tokens=usage.completion_tokens,
            forced_tokens=usage.forced_tokens,
            passes_saved=usage.passes_saved,
            resamples=usage.resamples,
        )

    def note_compile(self, seconds: float) -> None:
        """Counts a constraint that was compiled, or found compiled."""
        self._counts.update(compiles=1)
        self._compile_seconds += seconds

    def _abort_overdue(self) -> None:
        for live in self._deadlines.passed(self._clock()):
            if self._live.get(live.request.request_id) is live:
                self.abort(live.request.request_id, AbortedError(f"the deadline of {live.request.deadline:g} s passed"))

    def check(self) -> None:
        """Checks that every page is in exactly one place.

        Raises:
            RuntimeError: One is not.
        """
        self._cache.check(self._scheduler.private_pages)

    # -- what may be asked of it between steps ---------------------------------------------------------------------------

    def flush_cache(self) -> FlushReport:
        """Frees every cached token that no sequence uses."""
        return FlushReport(*self._cache.flush())

    def cached_prefix(self, ids: Many[int], cache_salt: str) -> int:
        """How many leading tokens of `ids` are cached."""
        return self._cache.match_length(list(ids), cache_salt)

    def hold(self, program: str, seconds: float) -> None:
        """Keeps a program's prefixes while it waits."""
        self._cache.hold(program, seconds)

    def end_program(self, program: str) -> None:
        """A program will make no more calls."""
        self._cache.end_program(program)

    def load(self) -> Load:
        """How busy it is."""
        used = 1 - self._cache.available_pages / self._cache.pool.total
        return Load(self._scheduler.running, self._scheduler.waiting, used)

    def under_way(self) -> dict[str, UnderWay]:
        """Where each request stands, by id, for an inspector."""
        return {request_id: live.under_way() for request_id, live in self._live.items()}

    def hot_paths(self, limit: int) -> list[HotPath]:
        """The hottest branches of the prefix tree, for an inspector."""
        return self._cache.hot_paths(limit)

    def stats(self) -> dict[str, Any]:
        """Counters since the start."""
        return {
            **self._counts,
            "model_seconds": self._model_seconds,
            "compile_seconds": self._compile_seconds,
            "running": self._scheduler.running,
            "waiting": self._scheduler.waiting,
            "preemptions": self._scheduler.preemptions,
            "prefix_cache_queries": self._cache.queried_tokens_total,
            "prefix_cache_hits": self._cache.hit_tokens_total,
            "cached_tokens_now": self._cache.cached_tokens,
            "locked_tokens_now": self._cache.locked_tokens,
            "kv_tokens": self._cache.pool.total * self._cache.page_size,
            "evicted_tokens": self._cache.evicted_tokens_total,
            "tree_nodes": self._cache.nodes,
        }

    def close(self) -> None:
        """Ends its threads, and the trace."""
        self._masks.close()
        if self._recorder is not None:
            self._recorder.close()
