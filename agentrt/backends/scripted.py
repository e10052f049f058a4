"""A backend whose answers a function writes: for tests, and for measuring the language without a model.

It behaves like an engine in everything a caller can see: ids and deltas step by step, stop strings, lengths, seeds handed
to the function, log-probabilities, usage with the prefix found in a cache, deadlines, aborts, errors at the door and
on the way. It holds no model and enforces no grammar while it writes; an answer that breaks its constraint fails the
request, as an engine's would. Invariant: every request that `submit` accepts ends exactly once.
"""

from __future__ import annotations

import bisect
import codecs
import json
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any
from zlib import crc32

from agentrt.backend import Capabilities, FlushReport, Load, Sink
from agentrt.backends.byte_tokenizer import ByteTokenizer
from agentrt.backends.pending import given
from agentrt.errors import AgentrtError, ConstraintError, EngineError, PromptError, QueueFullError, TooLongError
from agentrt.request import FinishReason, Request, SamplingParams, TokenDelta, TokenLogprob, Usage


@dataclass(frozen=True, slots=True)
class Answer:
    """One scripted answer.

    Attributes:
        text: What is said.
        delay: Seconds before its first token.
        error: Fails the request after `text`, instead of ending it.
        forced: How many of its leading tokens count as forced by a grammar.
        ends: The answer ends with an end token; else it goes on to `max_tokens` as if cut there.
    """

    text: str
    delay: float = 0.0
    error: AgentrtError | None = None
    forced: int = 0
    ends: bool = True


IDLE_SECONDS = 0.2  #: after which the thread ends
KNOWN_ANSWERS = 1024  #: most answers whose steps are kept ready

Script = Callable[[str, Request], "str | Answer"]
Said = Script | str | Answer | Sequence[str | Answer]
Score = Callable[[Sequence[int], int], float]  #: (ids before, id) -> its log-probability


def default_score(before: Sequence[int], token_id: int) -> float:
    """A made-up log-probability between -4 and 0 that depends on the token and the one before it."""
    seed = f"{before[-1] if before else -1},{token_id}".encode()
    return -(crc32(seed) % 4000 + 1) / 1000


class PrefixSet:
    """Which token sequences are cached. Of sorted sequences, the longest common prefix with any is with a neighbour."""

    def __init__(self) -> None:
        self._sorted: dict[str, list[tuple[int, ...]]] = {}

    def match(self, ids: tuple[int, ...], salt: str) -> int:
        """Length of the longest beginning of `ids` that is cached."""
        known = self._sorted.get(salt, [])
        place = bisect.bisect_left(known, ids)
        return max((_common(ids, other) for other in known[max(place - 1, 0) : place + 1]), default=0)

    def insert(self, ids: tuple[int, ...], salt: str) -> int:
        """Caches `ids`; returns how many of them, from the beginning on, were cached already."""
        known = self._sorted.setdefault(salt, [])
        place = bisect.bisect_left(known, ids)
        after = _common(ids, known[place]) if place < len(known) else 0
        if after == len(ids):
            return after
        before = _common(ids, known[place - 1]) if place else 0
        if place and before == len(known[place - 1]):
            known[place - 1] = ids  # what is cached already is its beginning
        else:
            known.insert(place, ids)
        return max(before, after)

    def clear(self) -> int:
        """Forgets everything; returns how many tokens that were, counted once per sequence."""
        tokens = sum(len(ids) for known in self._sorted.values() for ids in known)
        self._sorted.clear()
        return tokens


def _common(a: tuple[int, ...], b: tuple[int, ...]) -> int:
    low, high = 0, min(len(a), len(b))
    if a[:high] == b[:high]:
        return high
    while high - low > 1:  # a[:low] == b[:low], a[:high] != b[:high]
        middle = (low + high) // 2
        low, high = (middle, high) if a[:middle] == b[:middle] else (low, middle)
    return low


@dataclass(slots=True)
class _Running:
    request: Request
    sink: Sink
    deltas: Iterator[TokenDelta]
    submitted: float
    starts: float
    aborted: bool = False
    cached_tokens: int = 0


_NOTHING: Iterator[TokenDelta] = iter(())


class ScriptedBackend:
    """Answers from a script; see the module's text.

    Args:
        script: Function of (prompt text, request) that returns a text or an `Answer`, or raises what the request fails
            with; or a text (or `Answer`) that is always said; or a list of them, said one after another and then again.
        tokens_per_delta: How many tokens a step adds to a request.
        step_seconds: How long a step takes.
        inline: Answer inside `submit`, without a thread of its own; delays are not waited for.
        score: Log-probability of a token after others.
        max_context: Most tokens of prompt and answer together.
        max_queued: Most requests under way; one more is refused.
        logprobs: Whether it gives log-probabilities.
        tokenizer: Its tokenizer.
        model: Name to show.

    Attributes:
        requests: What was asked, oldest first (the last 10,000).
        holds: Programs that asked for a hold.
        ended: Programs that said they are done.
        aborts: Requests that were aborted.
    """

    def __init__(
        self,
        script: Said = "ok",
        *,
        tokens_per_delta: int = 1,
        step_seconds: float = 0.0,
        inline: bool = False,
        score: Score = default_score,
        max_context: int = 1_000_000,
        max_queued: int = 1_000_000,
        logprobs: bool = True,
        tokenizer: ByteTokenizer | None = None,
        model: str = "scripted",
    ) -> None:
        self._score = score
        self._tokens_per_delta = tokens_per_delta
        self._step_seconds = step_seconds
        self._inline = inline
        self._max_queued = max_queued
        self._tokenizer = tokenizer or ByteTokenizer()
        self._script = _as_script(script, self._tokenizer)
        self._known: dict[tuple[Any, ...], _Said] = {}
        kinds = ("json_schema", "regex", "choices", "lark", "tools")
        self._capabilities = Capabilities(model, grammars=kinds, logprobs=logprobs, max_context=max_context)
        self._cache = PrefixSet()
        self._checked: tuple[int, ...] = ()
        self._lock = threading.RLock()  # a lost stream aborts its request wherever memory is collected, so perhaps inside
        self._running: dict[str, _Running] = {}
        self._inbox: queue.SimpleQueue[_Running | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._closed = False
        self._counters = dict.fromkeys(
            ("requests", "prompt_tokens", "cached_tokens", "generated_tokens", "forward_passes"), 0
        )
        self.requests: deque[Request] = deque(maxlen=10_000)
        self.holds: list[tuple[str, float]] = []
        self.ended: list[str] = []
        self.aborts: list[str] = []

    @property
    def capabilities(self) -> Capabilities:
        """What it can do."""
        return self._capabilities

    @property
    def tokenizer(self) -> ByteTokenizer:
        """Its tokenizer."""
        return self._tokenizer

    def submit(self, request: Request, sink: Sink) -> None:
        """Starts a request; see `agentrt.backend.Backend.submit`."""
        self._check(request)
        now = time.monotonic()
        running = _Running(request, sink, _NOTHING, now, now)
        with self._lock:
            if self._closed:
                raise EngineError("the scripted backend is closed")
            if len(self._running) >= self._max_queued:
                raise QueueFullError(
                    f"{len(self._running)} requests are under way, the limit is {self._max_queued}; try again later"
                )
            self.requests.append(request)
            self._counters["requests"] += 1
            cached = self._cache.insert(request.prompt_ids, request.cache_salt)
            if not self._inline:
                self._running[request.request_id] = running
        running.cached_tokens = min(cached, len(request.prompt_ids) - 1)
        running.deltas = self._answer(running)
        if self._inline:
            self._finish_inline(running)
        else:
            self._inbox.put(running)
            with self._lock:
                self._start_thread()

    def _check(self, request: Request) -> None:
        ids = request.prompt_ids
        if not ids:
            raise PromptError("the prompt is empty", param="prompt_ids")
        if ids is not self._checked:  # the branches of a fork ask with one and the same tuple
            low, high, size = min(ids), max(ids), self._tokenizer.vocab_size
            if low < 0 or high >= size:
                raise PromptError(
                    f"token id {low if low < 0 else high} is outside the vocabulary of {size}", param="prompt_ids"
                )
            self._checked = ids
        needed, limit = len(ids) + (request.sampling.max_tokens != 0), self._capabilities.max_context
        if needed > limit:
            raise TooLongError(f"the prompt has {len(ids)} tokens, the context {limit}", needed=needed, limit=limit)

    def _start_thread(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._loop, name="agentrt-scripted", daemon=True)
            self._thread.start()

    # ------------------------------------------------------------------- the steps

    def _finish_inline(self, running: _Running) -> None:
        sink, deltas = running.sink, running.deltas
        while True:
            try:
                delta = next(deltas, None)
            except Exception as error:
                delta = _failure(running.request, error)
            if delta is None:
                return
            sink(delta)

    def _guarded(self, running: _Running) -> Iterator[TokenDelta]:
        try:
            yield from running.deltas
        except Exception as error:
            yield _failure(running.request, error)

    def _loop(self) -> None:
        """Steps: one delta for each request that is under way."""
        active: list[tuple[_Running, Iterator[TokenDelta]]] = []
        while True:
            while not active or not self._inbox.empty():
                try:
                    arrived = self._inbox.get(timeout=IDLE_SECONDS)
                except queue.Empty:
                    if self._retire():
                        return
                    continue
                if arrived is None:
                    self._fail_all([running for running, _ in active])
                    return
                active.append((arrived, self._guarded(arrived)))
            active = [(running, deltas) for running, deltas in active if not self._step(running, deltas)]
            if self._step_seconds:
                time.sleep(self._step_seconds)
            elif active and all(running.starts > time.monotonic() for running, _ in active):
                time.sleep(0.001)

    def _retire(self) -> bool:
        """Ends the thread if there is nothing to do; the next request starts another."""
        with self._lock:
            if self._inbox.empty():
                self._thread = None
            return self._thread is None

    def _step(self, running: _Running, deltas: Iterator[TokenDelta]) -> bool:
        """Gives one request its next delta; True when that was its last."""
        request, now = running.request, time.monotonic()
        expired = request.deadline is not None and now - running.submitted > request.deadline
        if running.aborted or expired:
            delta = TokenDelta(request.request_id, finish_reason=FinishReason.ABORT, usage=self._usage(running, 0, 0))
        elif running.starts > now:
            return False
        else:
            delta = next(deltas)
            if delta.request_id == "":  # the answer asked for a delay
                return False
        if delta.last:
            with self._lock:
                self._running.pop(request.request_id, None)
        if given(running.sink, delta):
            return delta.last
        with self._lock:
            self._running.pop(request.request_id, None)
        return True

    def _fail_all(self, active: list[_Running]) -> None:
        for running in active:
            given(running.sink, TokenDelta(running.request.request_id, error=EngineError("the scripted backend was closed")))

    # ------------------------------------------------------------------ the answers

    def _answer(self, running: _Running) -> Iterator[TokenDelta]:
        request, sampling = running.request, running.request.sampling
        prompt_scores = self._prompt_scores(request)
        if sampling.max_tokens == 0:
            for index in range(sampling.n):
                last = index == sampling.n - 1
                yield TokenDelta(
                    request.request_id, index, prompt_logprobs=prompt_scores if index == 0 else None,
                    finish_reason=FinishReason.LENGTH, usage=self._usage(running, 0, 0) if last else None,
                )  # fmt: skip
            return
        generated = forced = 0
        for index in range(sampling.n):
            answer = self._script(request)
            if answer.delay and not self._inline:
                running.starts = time.monotonic() + answer.delay
                yield TokenDelta("")
            said = self._said(answer, request)
            generated, forced = generated + len(said.ids), forced + min(answer.forced, len(said.ids))
            last = index == sampling.n - 1
            for place, step in enumerate(said.steps):
                end = place == len(said.steps) - 1
                if end and answer.error is not None:
                    raise answer.error
                if end:
                    self._publish(request, said.ids)
                begin = place * self._tokens_per_delta
                yield TokenDelta(
                    request.request_id,
                    index,
                    step.ids,
                    step.text,
                    step.forced,
                    None if sampling.logprobs is None else self._scores(request, said.ids, begin, len(step.ids)),
                    prompt_scores if index == place == 0 else None,
                    said.reason if end else None,
                    said.match if end else None,
                    self._usage(running, generated, forced) if end and last else None,
                )

    def _said(self, answer: Answer, request: Request) -> _Said:
        """The answer as this request gets it; what depends on nothing but the answer, its length and the text it heals is worked out once."""
        sampling, tail = request.sampling, request.prompt_tail
        if answer.error is not None or not _is_plain(sampling):
            return _say(answer, sampling, self._tokenizer, tail, self._tokens_per_delta)
        key = (answer.text, answer.forced, answer.ends, sampling.max_tokens, sampling.ignore_eos, tail)
        said = self._known.get(key)
        if said is None:
            said = _say(answer, sampling, self._tokenizer, tail, self._tokens_per_delta)
            if len(self._known) < KNOWN_ANSWERS:
                self._known[key] = said
        return said

    def _publish(self, request: Request, ids: tuple[int, ...]) -> None:
        if len(ids) > 1:  # the last one was sampled and never fed
            with self._lock:
                self._cache.insert(request.prompt_ids + ids[:-1], request.cache_salt)

    def _prompt_scores(self, request: Request) -> tuple[TokenLogprob, ...] | None:
        sampling, ids = request.sampling, request.prompt_ids
        if sampling.prompt_logprobs is None:
            return None
        places = range(sampling.prompt_logprobs_start, len(ids))
        return tuple(TokenLogprob(ids[i], self._score(ids[:i], ids[i]) if i else None) for i in places)

    def _scores(self, request: Request, ids: tuple[int, ...], place: int, size: int) -> tuple[TokenLogprob, ...] | None:
        wanted = request.sampling.logprobs
        if wanted is None:
            return None
        found = []
        for i in range(place, place + size):
            before = request.prompt_ids + ids[:i]
            score = self._score(before, ids[i])
            others = sorted(((t, self._score(before, t)) for t in range(wanted)), key=lambda pair: -pair[1])
            found.append(TokenLogprob(ids[i], score, tuple(others)))
        return tuple(found)

    def _usage(self, running: _Running, generated: int, forced: int) -> Usage:
        prompt, cached, now = len(running.request.prompt_ids), running.cached_tokens, time.monotonic()
        passes = max(generated - forced, 1)
        with self._lock:
            counters = self._counters
            counters["prompt_tokens"] += prompt
            counters["cached_tokens"] += cached
            counters["generated_tokens"] += generated
            counters["forward_passes"] += passes
        return Usage(prompt, cached, generated, forced, passes, forced, run_seconds=now - running.submitted)

    # -------------------------------------------------------------------- the rest

    def abort(self, request_id: str) -> None:
        """Ends a request within a step."""
        with self._lock:
            running = self._running.get(request_id)
            if running is not None:
                running.aborted = True
                self.aborts.append(request_id)

    def hold(self, program: str, seconds: float) -> None:
        """Notes the hold."""
        self.holds.append((program, seconds))

    def end_program(self, program: str) -> None:
        """Notes the end."""
        self.ended.append(program)

    def cached_prefix(self, ids: Sequence[int], *, cache_salt: str = "") -> int:
        """How many leading tokens of `ids` are cached."""
        with self._lock:
            return self._cache.match(tuple(ids), cache_salt)

    def load(self) -> Load:
        """How busy it is."""
        return Load(len(self._running), 0, 0.0)

    def flush_cache(self) -> FlushReport:
        """Forgets every prefix."""
        with self._lock:
            return FlushReport(self._cache.clear(), 0)

    def stats(self) -> dict[str, Any]:
        """Counters since the start."""
        with self._lock:
            return dict(self._counters)

    def close(self) -> None:
        """Fails what is under way; a second call does nothing."""
        with self._lock:
            closed, self._closed = self._closed, True
            thread = self._thread
        if not closed:
            self._inbox.put(None)
            if thread is not None and thread is not threading.current_thread():
                thread.join(timeout=5)


def _failure(request: Request, error: Exception) -> TokenDelta:
    if not isinstance(error, AgentrtError):
        error = EngineError(f"the script failed: {type(error).__name__}: {error}")
    return TokenDelta(request.request_id, error=error)


@dataclass(frozen=True, slots=True)
class _Step:
    """What one step adds to an answer: ids, the text that becomes certain with them, and which of them are forced."""

    ids: tuple[int, ...]
    text: str
    forced: tuple[bool, ...]


@dataclass(frozen=True, slots=True)
class _Said:
    """An answer as a request gets it: its ids, the steps in which they come, and why it ends."""

    ids: tuple[int, ...]
    steps: tuple[_Step, ...]
    reason: FinishReason
    match: str | int | None


def _is_plain(sampling: SamplingParams) -> bool:
    """Whether nothing but a length and an end token can end an answer, and nothing constrains it."""
    return (
        not (sampling.stop or sampling.stop_regex or sampling.stop_token_ids or sampling.min_tokens)
        and sampling.grammar is None
        and sampling.json_schema is None
        and sampling.regex is None
        and sampling.choices is None
    )


def _say(answer: Answer, sampling: SamplingParams, tokenizer: ByteTokenizer, tail: bytes, size: int) -> _Said:
    speech = _Speech(answer, sampling, tokenizer, tail)
    ids = speech.ids
    steps = []
    for begin in range(0, max(len(ids), 1), size):
        part = ids[begin : begin + size]
        forced = tuple(place < answer.forced for place in range(begin, begin + len(part)))
        steps.append(_Step(part, speech.text_of(begin, begin + size, begin + size >= len(ids)), forced))
    return _Said(ids, tuple(steps), speech.reason, speech.match)


class _Speech:
    """An answer as ids and text, with stops and lengths applied."""

    def __init__(self, answer: Answer, sampling: SamplingParams, tokenizer: ByteTokenizer, tail: bytes) -> None:
        self.answer = answer
        self._tokenizer = tokenizer
        self._stops = sampling.stop
        tail_text = tail.decode("utf-8", "replace")
        ids = tokenizer.encode(tail_text + answer.text)
        self.reason, self.match = FinishReason.STOP, None  # type: FinishReason, str | int | None
        if answer.ends and answer.error is None and not sampling.ignore_eos:
            ids.append(tokenizer.eos_ids[0])
        elif not answer.ends:
            self.reason = FinishReason.LENGTH
        self._skip = len(tail_text)
        self.ids = tuple(ids)
        self.text = tokenizer.decode(self.ids)[self._skip :]
        self._stop(sampling)
        self._cut(sampling)
        self._verify(sampling)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._seen = ""
        self._given = 0

    def _stop(self, sampling: SamplingParams) -> None:
        """Applies the earliest stop: a token id, a string or a pattern."""
        ends = [i for i, token in enumerate(self.ids) if token in sampling.stop_token_ids and i >= sampling.min_tokens]
        if ends:
            self.match, self.ids = self.ids[ends[0]], self.ids[: ends[0] + 1]
            self.text = self._tokenizer.decode(self.ids[:-1])[self._skip :]
        earliest = _earliest_stop(self._text_from(sampling.min_tokens), sampling)
        if earliest is not None:
            begin, end, match = earliest
            self.match, self.reason = match, FinishReason.STOP
            self.ids = self._ids_covering(end)
            self.text = self.text[: end if sampling.include_stop else begin]

    def _text_from(self, tokens: int) -> tuple[str, int]:
        skipped = len(self._tokenizer.decode(self.ids[:tokens])) - self._skip if tokens else 0
        return self.text, max(skipped, 0)

    def _ids_covering(self, characters: int) -> tuple[int, ...]:
        needed = len(self.text[:characters].encode()) + len(self._tokenizer.decode(self.ids)[: self._skip].encode())
        total = 0
        for place, token_id in enumerate(self.ids):
            total += len(self._tokenizer.token_bytes(token_id) or b"")
            if total >= needed:
                return self.ids[: place + 1]
        return self.ids

    def _cut(self, sampling: SamplingParams) -> None:
        limit = sampling.max_tokens
        if limit is not None and len(self.ids) > limit:
            self.ids, self.reason, self.match = self.ids[:limit], FinishReason.LENGTH, None
            whole = b"".join(self._tokenizer.token_bytes(i) or b"" for i in self.ids).decode("utf-8", "ignore")
            self.text = whole[self._skip :]

    def _verify(self, sampling: SamplingParams) -> None:
        if self.reason is not FinishReason.STOP or self.answer.error is not None:
            return
        problem = _violation(self.text, sampling)
        if problem:
            raise ConstraintError(
                f"the scripted answer {self.text[:80]!r} breaks its constraint: {problem}", violations=(problem,)
            )

    def text_of(self, begin: int, end: int, last: bool) -> str:
        """The text that becomes certain with the ids from `begin` to `end`."""
        part = b"".join(self._tokenizer.token_bytes(i) or b"" for i in self.ids[begin:end])
        self._seen += self._decoder.decode(part)
        if last:
            certain = len(self.text)
        else:
            seen = self._seen[self._skip :]
            certain = min(len(seen) - _held_back(seen, self._stops), len(self.text))
        text = self.text[self._given : max(certain, self._given)]
        self._given += len(text)
        return text


def _held_back(text: str, stops: tuple[str, ...]) -> int:
    """Length of the longest end of `text` that begins a stop string."""
    return max((n for stop in stops for n in range(1, len(stop)) if text.endswith(stop[:n])), default=0)


def _earliest_stop(searched: tuple[str, int], sampling: SamplingParams) -> tuple[int, int, str] | None:
    text, start = searched
    found = [(text.find(stop, start), stop) for stop in sampling.stop]
    matches = [(place, place + len(stop), stop) for place, stop in found if place >= 0]
    if sampling.stop_regex:
        import regex

        for pattern in sampling.stop_regex:
            match = regex.search(pattern, text, pos=start)
            if match is not None:
                matches.append((match.start(), match.end(), pattern))
    return min(matches, default=None)


def _violation(text: str, sampling: SamplingParams) -> str:
    """What is wrong with a finished answer, or ""."""
    if sampling.choices is not None and text not in sampling.choices:
        return f"it is none of {list(sampling.choices)}"
    spec = sampling.grammar
    pattern = spec.source if spec is not None and spec.kind == "regex" else sampling.regex
    if pattern is not None:
        import regex

        if regex.fullmatch(pattern, text) is None:
            return f"it does not match {pattern!r}"
    if sampling.json_schema is not None:
        return _schema_violation(text, sampling.json_schema)
    return ""


def _schema_violation(text: str, schema: Any) -> str:
    import jsonschema

    if hasattr(schema, "model_json_schema"):
        schema = schema.model_json_schema()
    try:
        jsonschema.validate(json.loads(text), schema)
    except (ValueError, jsonschema.ValidationError) as error:
        return str(error).splitlines()[0]
    return ""


def _as_script(script: Said, tokenizer: ByteTokenizer) -> Callable[[Request], Answer]:
    if isinstance(script, str | Answer):
        always = _as_answer(script)
        return lambda request: always
    if callable(script):
        return partial(_ask_script, script, tokenizer)
    answers, turn = [_as_answer(said) for said in script], count()
    return lambda request: answers[next(turn) % len(answers)]


def _ask_script(script: Script, tokenizer: ByteTokenizer, request: Request) -> Answer:
    prompt = tokenizer.decode(request.prompt_ids, skip_special=False) + request.prompt_tail.decode("utf-8", "replace")
    return _as_answer(script(prompt, request))


def _as_answer(said: str | Answer) -> Answer:
    return said if isinstance(said, Answer) else Answer(said)
