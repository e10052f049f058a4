"""One request that is being answered: its sequences, and the deltas that their updates become."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from agentrt.engine.output import SampleOutput
from agentrt.errors import AgentrtError, as_request_error
from agentrt.request import Request, TokenDelta, TokenLogprob, Usage
from agentrt.scheduling.scheduler import Update
from agentrt.scheduling.sequence import Sequence, Status


@dataclass(slots=True)
class _Held:
    """What a sample may not tell before its final check passed."""

    token_ids: list[int] = field(default_factory=list)
    forced: list[bool] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class UnderWay:
    """Where a request stands, for an inspector.

    Attributes:
        running: A sample of it is in the engine's steps.
        cached_tokens: Prefix that was found in the tree; None before its admission.
        computed_tokens: Tokens of its first sample whose KV exists now.
        forward_passes: Steps it took part in.
    """

    running: bool
    cached_tokens: int | None
    computed_tokens: int
    forward_passes: int


class LiveRequest:
    """Turns updates into deltas, and knows when the request is over. It ends exactly once."""

    def __init__(self, request: Request, sequences: list[Sequence], outputs: list[SampleOutput], *, checked: bool, now: float) -> None:
        """Begins a request.

        Args:
            request: The ask.
            sequences: One per sample.
            outputs: The text of each.
            checked: Whether the answer is held back until its final check.
            now: When it was submitted.
        """
        self.request = request
        self.sequences = sequences
        self._outputs = outputs
        self._held = [_Held() for _ in sequences] if checked else None
        self._running = len(sequences)
        self._scores_told = request.sampling.prompt_logprobs is None
        self._submitted = now
        self.over = False

    def deltas(self, update: Update, now: float) -> Iterator[TokenDelta]:
        """What an update tells the caller; nothing once the request is over. The sequence may have ended since the update."""
        if self.over:
            return
        sequence = update.sequence
        if update.ended and sequence.error is not None:
            yield self.fail(sequence.error)
            return
        if update.restarted:
            if self._held is not None:
                self._held[sequence.index] = _Held()
            return
        self._running -= update.ended
        try:
            delta = self._delta(update, now)
        except Exception as error:  # a stop pattern that takes too long, say: that request's fault alone
            yield self.fail(as_request_error(error))
            return
        if delta.token_ids or delta.text or delta.last or delta.finish_reason or delta.prompt_logprobs is not None:
            yield delta

    def under_way(self) -> UnderWay:
        """Where it stands."""
        first = self.sequences[0]
        running = any(sequence.status is Status.RUNNING for sequence in self.sequences)
        return UnderWay(running, first.cached_tokens, first.computed_tokens, sum(sequence.forward_passes for sequence in self.sequences))

    def fail(self, error: AgentrtError) -> TokenDelta:
        """Ends the request with an error."""
        self.over = True
        return TokenDelta(self.request.request_id, error=error)

    def _delta(self, update: Update, now: float) -> TokenDelta:
        sequence = update.sequence
        output = self._outputs[sequence.index]
        token_ids, forced, logprobs = update.token_ids, update.forced, update.logprobs
        if self._held is not None:
            token_ids, forced, logprobs = self._hold(update)
        self.over = update.ended and not self._running
        return TokenDelta(
            request_id=self.request.request_id,
            index=sequence.index,
            token_ids=token_ids,
            text=output.finish() if update.ended else output.take(),
            forced=forced,
            logprobs=logprobs if self.request.sampling.logprobs is not None else None,
            prompt_logprobs=self._scores(sequence, update),
            finish_reason=sequence.finish_reason if update.ended else None,
            stop_match=sequence.stop_match if update.ended else None,
            usage=self.usage(now) if self.over else None,
        )

    def _hold(self, update: Update) -> tuple[tuple[int, ...], tuple[bool, ...], tuple[TokenLogprob, ...]]:
        assert self._held is not None
        held = self._held[update.sequence.index]
        held.token_ids.extend(update.token_ids)
        held.forced.extend(update.forced)
        held.logprobs.extend(update.logprobs)
        if not update.ended:
            return (), (), ()
        return tuple(held.token_ids), tuple(held.forced), tuple(held.logprobs)

    def _scores(self, sequence: Sequence, update: Update) -> tuple[TokenLogprob, ...] | None:
        """The prompt's scores, once, when the first sample has computed its prompt."""
        if self._scores_told or sequence.index or not (update.token_ids or update.ended):
            return None
        self._scores_told = True
        sampling = self.request.sampling
        first = [TokenLogprob(self.request.prompt_ids[0], None)] if sampling.prompt_logprobs_start == 0 else []
        return tuple(first + sequence.scores)

    def usage(self, now: float) -> Usage:
        """What the request cost so far."""
        first = min((s.first_admission for s in self.sequences if s.first_admission is not None), default=now)
        return Usage(
            prompt_tokens=len(self.request.prompt_ids),
            # With forced tokens at its start a sequence may find more than its prompt.
            cached_tokens=min(self.sequences[0].cached_tokens or 0, len(self.request.prompt_ids)),
            completion_tokens=sum(s.output_length for s in self.sequences),
            forced_tokens=sum(sum(s.output_forced) for s in self.sequences),
            forward_passes=sum(s.forward_passes for s in self.sequences),
            passes_saved=sum(s.passes_saved for s in self.sequences),
            preemptions=sum(s.preemptions for s in self.sequences),
            resamples=sum(s.resamples for s in self.sequences),
            queue_seconds=first - self._submitted,
            run_seconds=now - first,
        )
