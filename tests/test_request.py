"""Requests are checked when they are made, cross processes, and add up to completions."""

from __future__ import annotations

import pickle

import pytest

from agentrt import FinishReason, Request, SamplingParams, TokenDelta, Usage
from agentrt.backend import Collector
from agentrt.errors import EngineError, UserError


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": -1}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.5}, "top_p"),
        ({"min_p": -0.1}, "min_p"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"max_tokens": 2, "min_tokens": 3}, "min_tokens"),
        ({"n": 0}, "n"),
        ({"stop": ""}, "stop"),
        ({"stop": [""]}, "stop"),
        ({"stop_token_ids": [-4]}, "stop_token_ids"),
        ({"logit_bias": {3: float("inf")}}, "logit_bias"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"frequency_penalty": 3}, "frequency_penalty"),
        ({"regex": "a", "choices": ["b"]}, "choices"),
    ],
)
def test_a_bad_value_is_refused_by_name(fields, param):
    with pytest.raises(UserError, match=param) as caught:
        SamplingParams(**fields)
    assert caught.value.param == param


def test_requests_pickle_and_have_ids_of_their_own():
    one, two = Request(prompt_ids=(1,), sampling=SamplingParams(stop="x", json_schema={"type": "null"})), Request(prompt_ids=(1,))
    assert pickle.loads(pickle.dumps(one)) == one
    assert one.request_id != two.request_id
    assert one.sampling.stop == ("x",)


def test_a_collector_keeps_samples_apart():
    collector = Collector(Request(prompt_ids=(1,), sampling=SamplingParams(n=2)))
    rid = "r"
    assert collector.add(TokenDelta(rid, 1, (5,), "b", (True,))) is None
    assert collector.add(TokenDelta(rid, 0, (4,), "a", (False,), finish_reason=FinishReason.STOP, stop_match="x")) is None
    completion = collector.add(TokenDelta(rid, 1, (6,), "c", (False,), finish_reason=FinishReason.LENGTH, usage=Usage(3)))
    assert [(s.text, s.token_ids, s.finish_reason) for s in completion.samples] == [("a", (4,), "stop"), ("bc", (5, 6), "length")]
    assert completion.samples[0].stop_match == "x"
    assert completion.text == "a"
    with pytest.raises(EngineError):
        Collector(Request(prompt_ids=(1,))).add(TokenDelta(rid, error=EngineError("down")))
