"""What Prometheus scrapes: counts and times of requests, and gauges of the engine, under the names that the field uses.

Each `Metrics` has a registry of its own, so that two servers in one process never mix. It measures what it is told and
asks nobody; the gauges' values come with the scrape. Invariant: a request that was begun is ended exactly once, in
`agentrt:request_success_total` or `agentrt:request_failure_total`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric, generate_latest
from prometheus_client.core import SummaryMetricFamily
from prometheus_client.registry import Collector

from agentrt.backend import Load
from agentrt.request import Usage

#: Seconds; from a step on a GPU to a long prompt on a CPU.
_LATENCIES = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)

#: Gauge or counter -> (the backend's own name for it in `stats()`, what it says).
_FROM_STATS = {
    "prefix_cache_queries": ("prefix_cache_queries", "Prompt tokens looked up in the prefix cache."),
    "prefix_cache_hits": ("prefix_cache_hits", "Prompt tokens found in the prefix cache."),
    "num_preemptions": ("preemptions", "Times a running sequence gave its pages back."),
    "evicted_tokens": ("evicted_tokens", "Tokens evicted from the prefix cache."),
    "engine_steps": ("steps", "Steps of the engine, each one forward pass of the model."),
    "engine_computed_tokens": ("computed_tokens", "Tokens that went through the model."),
    "spec_decode_num_draft_tokens": ("drafted_tokens", "Tokens proposed by a draft."),
    "spec_decode_num_accepted_tokens": ("accepted_tokens", "Tokens proposed by a draft and accepted."),
}


class _Compiles(Collector):
    """The compiling of constraints, which the engine adds up: how often, and how long in all."""

    def __init__(self, model: str) -> None:
        self._model = model
        self._count, self._seconds = 0, 0.0

    def follow(self, stats: Mapping[str, Any]) -> None:
        self._count, self._seconds = int(stats.get("compiles", self._count)), float(stats.get("compile_seconds", self._seconds))

    def collect(self) -> Iterable[Metric]:
        family = SummaryMetricFamily("agentrt:grammar_compile_seconds", "Time to compile a constraint, or to find it compiled.", labels=("model_name",))
        family.add_metric((self._model,), self._count, self._seconds)
        return (family,)


@dataclass(frozen=True, slots=True)
class RequestTimes:
    """When things happened to one request, in seconds from its arrival; None for what never did."""

    first_token: float | None
    last_token: float | None
    end: float


class Metrics:
    """Counters and histograms of one server."""

    def __init__(self, model: str) -> None:
        """Makes them; `model` labels each."""
        self.registry = CollectorRegistry()
        self._model = model
        self._seen: dict[str, float] = {}
        self._running = self._gauge("num_requests_running", "Requests that are in the engine's steps.")
        self._waiting = self._gauge("num_requests_waiting", "Requests that wait to be admitted.")
        self._usage = self._gauge("kv_cache_usage_perc", "Share of the KV pool in use, 0 to 1.")
        self._prompt = self._counter("prompt_tokens", "Tokens of prompts.")
        self._cached = self._counter("cached_tokens", "Tokens of prompts whose KV was found in the cache.")
        self._generated = self._counter("generation_tokens", "Tokens generated, forced ones included.")
        self._forced = self._counter("forced_tokens", "Tokens that a grammar left no choice about.")
        self._passes = self._counter("forward_passes", "Steps in which a request took part, added up over requests.")
        self._saved = self._counter("forward_passes_saved", "Steps made unnecessary by forced or accepted drafted tokens.")
        self._resamples = self._counter("resamples", "Answers generated anew since they failed their final check.")
        self._first = self._histogram("time_to_first_token_seconds", "From arrival to the first token.")
        self._between = self._histogram("inter_token_latency_seconds", "Mean time between a request's tokens.")
        self._whole = self._histogram("e2e_request_latency_seconds", "From arrival to the end.")
        self._queue = self._histogram("queue_time_seconds", "From arrival to admission.")
        self._compiles = _Compiles(model)
        self.registry.register(self._compiles)
        self._success = Counter("agentrt:request_success", "Requests that ended well.", ("model_name", "finish_reason"), registry=self.registry)
        self._failure = Counter("agentrt:request_failure", "Requests refused or failed.", ("model_name", "code"), registry=self.registry)
        self._stats: dict[str, Counter] = {}

    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(f"agentrt:{name}", text, ("model_name",), registry=self.registry).labels(self._model)

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(f"agentrt:{name}", text, ("model_name",), registry=self.registry).labels(self._model)

    def _histogram(self, name: str, text: str) -> Histogram:
        return Histogram(f"agentrt:{name}", text, ("model_name",), registry=self.registry, buckets=_LATENCIES).labels(self._model)

    def ended(self, usage: Usage, times: RequestTimes, finish_reasons: tuple[str, ...]) -> None:
        """Counts a request that ended well.

        Args:
            usage: What it cost.
            times: When things happened.
            finish_reasons: One a sample.
        """
        self._prompt.inc(usage.prompt_tokens)
        self._cached.inc(usage.cached_tokens)
        self._generated.inc(usage.completion_tokens)
        self._forced.inc(usage.forced_tokens)
        self._passes.inc(usage.forward_passes)
        self._saved.inc(usage.passes_saved)
        self._resamples.inc(usage.resamples)
        self._queue.observe(usage.queue_seconds)
        self._whole.observe(times.end)
        if times.first_token is not None and times.last_token is not None:
            self._first.observe(times.first_token)
            if usage.completion_tokens > 1:
                self._between.observe((times.last_token - times.first_token) / (usage.completion_tokens - 1))
        for reason in finish_reasons:
            self._success.labels(self._model, reason).inc()

    def failed(self, code: str) -> None:
        """Counts a request that was refused or failed, by the short word that its client was told."""
        self._failure.labels(self._model, code).inc()

    def text(self, load: Load | None, stats: Mapping[str, Any]) -> bytes:
        """The exposition text.

        Args:
            load: How busy the backend is; None if it could not be asked, which leaves the gauges as they were.
            stats: The backend's counters since its start.
        """
        if load is not None:
            self._running.set(load.running)
            self._waiting.set(load.waiting)
            self._usage.set(load.kv_usage)
        for name, (key, text) in _FROM_STATS.items():
            value = stats.get(key)
            if isinstance(value, int | float):
                self._follow(name, float(value), text)
        self._compiles.follow(stats)
        return generate_latest(self.registry)

    def _follow(self, name: str, value: float, text: str) -> None:
        """Brings a counter up to the backend's own; a backend that was started anew begins anew."""
        if name not in self._stats:
            self._stats[name] = self._counter(name, text)
        before = self._seen.get(name, 0.0)
        self._stats[name].inc(value - before if value >= before else value)
        self._seen[name] = value
