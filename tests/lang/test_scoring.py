"""Selecting: exactly the choices' own tokens are scored."""

from __future__ import annotations

import pytest

import agentrt as sgl  # noqa: F401  (a program written for sgl: text before a gen stays as it is)
from agentrt.backends.scripted import ScriptedBackend
from agentrt.lang.expressions import select
from agentrt.lang.program import function


def test_select_scores_only_the_choices_own_tokens_exactly_at_the_text_boundary():
    asked = []
    backend = ScriptedBackend(score=lambda before, token: asked.append((tuple(before), token)) or -1.0)

    @function
    def program(s):
        s += "is it a" + select("x", ["b", "bc"])  # "ab" and "abc" are tokens of their own

    program.run(backend=backend)
    prompt = tuple(backend.tokenizer.encode("is it a"))
    assert asked == [(prompt, ord("b")), (prompt, ord("b")), ((*prompt, ord("b")), ord("c"))]


@pytest.mark.parametrize(
    "method", ["token_length_normalized", "greedy_token_selection", "unconditional_likelihood_normalized"]
)
def test_a_zero_log_probability_never_divides_by_zero(method):
    backend = ScriptedBackend(score=lambda before, token: 0.0)

    @function
    def program(s):
        s += "Q" + select("x", ["aa", "b"], choices_method=method)
        return s["x"]

    assert program.run(backend=backend).ret_value in ("aa", "b")


def test_choices_that_share_a_prefix_are_scored_from_one_shared_prefill():
    backend = ScriptedBackend()

    @function
    def program(s):
        s += "A prompt that is long enough to matter. " + select("x", ["red apple", "red pear", "red plum"])

    program.run(backend=backend)
    computed = backend.stats()["prompt_tokens"] - backend.stats()["cached_tokens"]
    prompt = len(backend.tokenizer.encode("A prompt that is long enough to matter. "))
    assert computed <= prompt + len("red apple") + 3 * len("pear")
