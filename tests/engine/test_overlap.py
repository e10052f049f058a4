"""On a device that computes by itself the host's work goes on between launch and wait, and nothing about the answers changes."""

from __future__ import annotations

import queue
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from agentrt.config import CacheConfig, EngineConfig, Limits, SchedulerConfig
from agentrt.engine import executor as executors
from agentrt.engine.assembly import build_engine
from agentrt.engine.batch import ForwardBatch, NextDecode, SequenceStates, forward_batch, next_decode
from agentrt.engine.live_request import LiveRequest
from agentrt.engine.worker import Worker
from agentrt.grammar import json_schema_spec
from agentrt.request import FinishReason, Request, SamplingParams, TokenDelta
from agentrt.scheduling.plan import StepPlan
from agentrt.text import load_tokenizer

SCHEMA = {"type": "object", "properties": {"kind": {"enum": ["one", "other"]}, "count": {"type": "integer"}}, "required": ["kind", "count"]}


class Device:
    """An executor whose device computes by itself, as far as its caller can tell; writes down what is called, in order."""

    def __init__(self, executor: Any, events: list[Any], asynchronous: bool, meanwhile: dict[int, Callable[[], None]]) -> None:
        self._executor, self._events, self._meanwhile = executor, events, meanwhile
        self.asynchronous = asynchronous
        self._launched = 0
        self.plans: list[StepPlan] = []

    def launch(self, plan: StepPlan) -> Device:
        self._step = self._executor.launch(plan)
        self._launched += 1
        self.plans.append(plan)
        self._events.append(("launched", self._launched))
        self._meanwhile.get(self._launched, lambda: None)()
        return self

    def foresee(self) -> None:
        self._step.foresee()

    def finish(self, masks: Any) -> Any:
        self._events.append(("waited", self._launched))
        return self._step.finish(masks)


def run(
    folder: Path, requests: list[Request], *, asynchronous: bool, meanwhile: dict[int, list[tuple[Any, ...]]], **options: Any
) -> tuple[list[Any], dict[str, list[TokenDelta]], list[StepPlan]]:
    """Answers requests, and messages that come while the step of their number runs; returns events, deltas by request, and plans."""
    cache, scheduler = CacheConfig(check=True, **options), SchedulerConfig(max_running=8, max_wait=1e6)  # nothing may depend on time
    tokenizer = load_tokenizer(str(folder))
    core, _ = build_engine(EngineConfig(model=str(folder), dtype="float32", threads=1, cache=cache, scheduler=scheduler), folder, tokenizer)
    inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
    for request in requests:
        inbox.put(("submit", request))
    wanted = len({request.request_id for request in requests} | {m[1].request_id for messages in meanwhile.values() for m in messages if m[0] == "submit"})
    events: list[Any] = []
    deltas: dict[str, list[TokenDelta]] = {}

    def send(message: Any) -> None:
        assert message[0] == "deltas", message
        events.append(("sent", [delta.request_id for delta in message[1]]))
        for delta in message[1]:
            deltas.setdefault(delta.request_id, []).append(delta)
        if sum(own[-1].usage is not None or own[-1].error is not None for own in deltas.values()) == wanted:
            inbox.put(("close",))

    arrivals = {step: lambda messages=messages: [inbox.put(message) for message in messages] for step, messages in meanwhile.items()}
    core._executor = device = Device(core._executor, events, asynchronous, arrivals)
    submit = core.submit
    core.submit = lambda request, *rest: (events.append(("submitted", request.request_id)), submit(request, *rest))  # type: ignore[method-assign]
    worker = Worker(core, tokenizer, Limits(), inbox, send)
    worker._cache().compile(json_schema_spec(SCHEMA), tokenizer)  # so that nobody waits for it, for however long
    worker.run()
    return events, deltas, device.plans


def answer(deltas: list[TokenDelta]) -> Any:
    """What does not depend on when it was told."""
    samples: dict[int, Any] = {}
    for delta in deltas:
        ids, text, ends = samples.get(delta.index, ((), "", ()))
        samples[delta.index] = (ids + delta.token_ids, text + delta.text, (*ends, *([(delta.finish_reason, delta.stop_match)] if delta.finish_reason else [])))
    last = deltas[-1].usage
    assert last is not None
    return samples, (last.prompt_tokens, last.cached_tokens, last.completion_tokens, last.forced_tokens, last.forward_passes, last.preemptions)


def request(name: str, prompt: list[int], **sampling: Any) -> Request:
    return Request(request_id=name, prompt_ids=tuple(prompt), sampling=SamplingParams(**{"temperature": 0, "max_tokens": 20, **sampling}))


def everything() -> list[Request]:
    return [
        request("free", list(range(40))),
        request("samples", [*range(30), 7], n=3, temperature=1, seed=4, ignore_eos=True),
        request("typed", [5, 6, 7], max_tokens=40, temperature=1, seed=2, grammar=json_schema_spec(SCHEMA)),
        request("long", [(7 * place) % 300 for place in range(150)], max_tokens=50, ignore_eos=True),
        request("stopped", [9, 8], max_tokens=40, temperature=1, seed=1, stop=("e", "a")),
        request("scored", [1, 2, 3, 4], prompt_logprobs=1, logprobs=2),
    ]


def fail_at_fifth_delta(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What makes a request's deltas fails once, at its fifth."""
    take, told = LiveRequest._delta, []

    def failing(self: LiveRequest, *arguments: Any) -> TokenDelta:
        told.append(self.request.request_id)
        if self.request.request_id == name and told.count(name) == 5:
            raise ValueError("its stop pattern, say")
        return take(self, *arguments)

    monkeypatch.setattr(LiveRequest, "_delta", failing)


@pytest.mark.parametrize("kv_tokens", [4096, 240])
def test_the_same_answers_and_what_was_foreseen_is_what_comes(tiny_model: Path, monkeypatch: pytest.MonkeyPatch, kv_tokens: int) -> None:
    states: list[SequenceStates] = []
    made: list[bool] = []

    def foreseeing(plan: StepPlan, known: SequenceStates) -> NextDecode | None:
        states[:] = [known]
        return next_decode(plan, known)

    def checked(foreseen: NextDecode, plan: StepPlan) -> ForwardBatch:
        batch, fresh = batch_of(foreseen, plan), forward_batch(plan, states[0])
        for name in ("token_ids", "positions", "logits_rows"):
            assert torch.equal(getattr(batch, name), getattr(fresh, name))
        ours, theirs = batch.attention, fresh.attention
        assert (ours.query_lengths, ours.context_lengths, ours.shared) == (theirs.query_lengths, theirs.context_lengths, theirs.shared)
        assert torch.equal(ours.new_slots, theirs.new_slots)
        assert all(torch.equal(mine, other) for mine, other in zip(ours.slots, theirs.slots, strict=True))
        made.append(True)
        return batch

    late = {4: [("submit", request("late", list(range(35))))], 9: [("submit", request("later", [3, 4]))]}
    _, plain, plans = run(tiny_model, everything(), asynchronous=False, meanwhile=late, kv_tokens=kv_tokens)
    batch_of = NextDecode.batch
    monkeypatch.setattr(executors, "next_decode", foreseeing)
    monkeypatch.setattr(NextDecode, "batch", checked)
    _, ours, same_plans = run(tiny_model, everything(), asynchronous=True, meanwhile=late, kv_tokens=kv_tokens)
    assert same_plans == plans
    assert {name: answer(told) for name, told in ours.items()} == {name: answer(told) for name, told in plain.items()}
    if kv_tokens > 1000:
        assert len(made) > len(plans) // 3


def test_deltas_go_out_and_requests_come_in_before_the_wait(tiny_model: Path) -> None:
    endless = request("endless", [1, 2, 3], max_tokens=3000, ignore_eos=True)
    ended = request("ended", [4, 5], max_tokens=12, ignore_eos=True)
    meanwhile = {5: [("submit", request("late", [6, 7], max_tokens=2, ignore_eos=True))], 8: [("abort", "endless")]}
    events, deltas, _ = run(tiny_model, [endless, ended], asynchronous=True, meanwhile=meanwhile, kv_tokens=4096)

    def at(*event: Any) -> int:
        return events.index(event)

    for step in range(2, 8):  # what a step gave is sent when the next one is launched, and before anybody waits for that
        between = events[at("launched", step) : at("waited", step)]
        assert {"endless", "ended"} <= {name for event in between if event[0] == "sent" for name in event[1]}
        assert events[at("waited", step) + 1] == ("launched", step + 1)
    assert at("launched", 5) < at("submitted", "late") < at("waited", 5)
    # An abort while a step runs takes that step's token along, and is told once.
    assert [delta.finish_reason for delta in deltas["endless"] if delta.finish_reason] == [FinishReason.ABORT]
    assert sum(len(delta.token_ids) for delta in deltas["endless"]) == 8
    assert [sum(len(delta.token_ids) for delta in deltas[name]) for name in ("ended", "late")] == [12, 2]


def test_a_request_that_fails_while_a_step_runs_takes_only_itself_along(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    requests = [request("good", [1, 2, 3], ignore_eos=True), request("bad", [4, 5], n=2, ignore_eos=True)]
    fail_at_fifth_delta("bad", monkeypatch)
    _, deltas, plans = run(tiny_model, requests, asynchronous=True, meanwhile={}, kv_tokens=4096)
    assert [delta.error is not None for delta in deltas["bad"]] == [False] * 4 + [True]
    assert sum(len(delta.token_ids) for delta in deltas["good"]) == 20
    assert [len(plan.runs) for plan in plans[2:8]] == [3, 3, 1, 1, 1, 1]  # the step that ran when it failed was its last


def test_an_id_that_is_used_again_while_the_step_of_its_first_use_runs_is_another_request(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    requests = [request("good", [1, 2, 3], max_tokens=30, ignore_eos=True), request("again", [4, 5], n=2, ignore_eos=True)]
    fail_at_fifth_delta("again", monkeypatch)
    # The failure is told while the fourth step runs, whose tokens of both samples come after the second use has begun.
    meanwhile: dict[int, list[tuple[Any, ...]]] = {4: [("submit", request("again", [6, 7, 8], max_tokens=5, ignore_eos=True))]}
    events, deltas, _ = run(tiny_model, requests, asynchronous=True, meanwhile=meanwhile, kv_tokens=4096)
    assert events.index(("launched", 4)) < [place for place, event in enumerate(events) if event == ("submitted", "again")][1] < events.index(("waited", 4))
    failed = next(place for place, delta in enumerate(deltas["again"]) if delta.error is not None)
    second = deltas["again"][failed + 1 :]
    assert sum(len(delta.token_ids) for delta in second) == 5
    assert [delta.finish_reason for delta in second if delta.finish_reason] == [FinishReason.LENGTH]
    assert second[-1].usage is not None
    assert second[-1].usage.completion_tokens == 5
