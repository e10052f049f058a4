"""The sampler against a slow float64 model of the whole distribution, and against itself in any other company."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from agentrt.engine.penalties import Penalties, wants_penalties
from agentrt.engine.sampler import Row, Sampler, token_logprob, uniform
from agentrt.request import SamplingParams

EOS = (2, 3)
LARGEST = float(np.finfo(np.float32).max)
TIE = 1e-6  # of a cumulative sum: float32 cannot be asked for more


# The model. One row at a time, every token, float64.


def allowed(row: Row, valid: np.ndarray) -> np.ndarray:
    if row.mask is None:
        return valid
    bits = np.unpackbits(row.mask.view(np.uint8), bitorder="little")[: len(valid)].astype(bool)
    return valid & np.pad(bits, (0, len(valid) - len(bits)))


def steered(logits: np.ndarray, row: Row, history: list[int], prompt_length: int, valid: np.ndarray) -> np.ndarray:
    """The logits after mask, penalties, bias and min_tokens, each stage rounded to a finite float32."""
    sampling, may = row.sampling, allowed(row, valid)
    known = history[: len(history) - len(row.later)]
    output, seen = Counter(known[prompt_length:]), set(known)
    out = [float(logit) for logit in logits]

    def put(token: int, value: float) -> None:
        out[token] = float(np.float32(min(max(value, -LARGEST), LARGEST)))

    for token in seen:
        value = out[token]
        if sampling.repetition_penalty != 1:
            value = value / sampling.repetition_penalty if value > 0 else value * sampling.repetition_penalty
        put(token, value - (sampling.frequency_penalty * output[token] + sampling.presence_penalty * (output[token] > 0)))
    for token, bias in (sampling.logit_bias or {}).items():
        put(token, out[token] + bias)
    result = np.where(may, out, -np.inf)
    if row.output_length < sampling.min_tokens:
        without = result.copy()
        without[[end for end in (*EOS, *sampling.stop_token_ids) if end < len(out)]] = -np.inf
        if without.max() > -np.inf:
            result = without
    return result


def acceptable(logits: np.ndarray, row: Row) -> set[int]:
    """The token that the row's number draws, and those it would draw if sums were off by `TIE`."""
    sampling = row.sampling
    order = np.lexsort((np.arange(len(logits)), -logits))
    if sampling.temperature < 1e-5 or sampling.top_k == 1:
        return {int(order[0])}
    number = uniform(row.seed, row.position)
    with np.errstate(over="ignore"):
        weights = np.exp((logits - logits.max()) / sampling.temperature)
    if not (sampling.top_k or sampling.top_p < 1 or sampling.min_p):
        return drawn(np.arange(len(logits)), weights, number)
    order = order[: sampling.top_k or None]
    weights_in_order = weights[order]
    total = weights_in_order.sum()
    before = np.cumsum(weights_in_order) - weights_in_order
    tokens: set[int] = set()
    for slip in (-TIE, 0, TIE):
        kept = weights_in_order >= sampling.min_p * (1 + slip if slip < 0 else 1)
        if sampling.top_p < 1:
            kept &= (before < max(sampling.top_p + slip, 0) * total) | (before == 0)
        tokens |= drawn(order[kept], weights_in_order[kept], number)
    return tokens


def drawn(ids: np.ndarray, weights: np.ndarray, number: float) -> set[int]:
    ends = np.cumsum(weights) / weights.sum()
    starts = np.concatenate(([0.0], ends[:-1]))
    return {int(token) for token in ids[(weights > 0) & (starts <= number + TIE) & (ends >= number - TIE)]}


# What is drawn by hypothesis: logits of many shapes, rows that ask for everything there is.


def logits_of(kind: str, random: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
    normal = random.standard_normal(shape)
    made = {
        "normal": normal * 3,
        "steep": normal * 30,
        "flat": normal * 0.01,
        "halves": np.round(normal * 4) / 2,  # ties everywhere
        "equal": np.zeros(shape) - 7,
        "signed zeros": np.where(normal > 0, 0.0, -0.0),
        "huge": np.where(random.random(shape) < 0.01, 3e38, -3e38) * random.random(shape),
    }
    return made[kind].astype(np.float32)


KINDS = ("normal", "steep", "flat", "halves", "equal", "signed zeros", "huge")


def row_of(data: dict, vocab: int, random: np.random.Generator) -> tuple[Row, list[int], int]:
    """A row, the tokens so far, and how many of them are the prompt."""
    some = random.integers(0, vocab, 6).tolist()
    biases = dict(zip(some, data["biases"], strict=False))
    sampling = SamplingParams(
        **data["sampling"],
        max_tokens=64,
        logit_bias=biases or None,
        stop_token_ids=tuple(range(vocab)) if data["all_stop"] else tuple(some[:2]),
    )
    history = random.integers(0, vocab, 30).tolist() + random.integers(0, 5, 10).tolist()
    prompt_length = 20
    later = tuple(history[len(history) - data["later"] :])
    penalties = Penalties(vocab, history, prompt_length) if wants_penalties(sampling) else None
    mask = None
    if data["density"] is not None:
        bits = random.random(vocab) < data["density"]
        if data["density"] == 0 and data["only_ends"]:
            bits[list(EOS)] = True
        mask = np.packbits(np.pad(bits, (0, -vocab % 32)), bitorder="little").view(np.int32)
    position = len(history) - len(later)
    row = Row(sampling, int(random.integers(1 << 40)), position, position - prompt_length, penalties, later, mask)
    return row, history, prompt_length


SAMPLING = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.0, 1e-46, 9e-6, 1e-5, 0.3, 1.0, 1.0, 2.0, 100.0]),
        "top_k": st.sampled_from([0, 0, 0, 1, 2, 20, 60, 100, 600, 5000]),
        "top_p": st.sampled_from([1.0, 1.0, 0.9999999, 0.95, 0.8, 0.3, 1e-300]),
        "min_p": st.sampled_from([0.0, 0.0, 1e-40, 0.001, 0.2, 1.0]),
        "repetition_penalty": st.sampled_from([1.0, 1.0, 1.1, 0.5, 1e-40, 1e-320, 1e300]),
        "frequency_penalty": st.sampled_from([0.0, 0.0, 0.7, -2.0]),
        "presence_penalty": st.sampled_from([0.0, 0.0, 1.5]),
        "min_tokens": st.sampled_from([0, 0, 50]),
        "logprobs": st.sampled_from([None, None, 0, 3, 64, 700]),
    }
)
ROW = st.fixed_dictionaries(
    {
        "sampling": SAMPLING,
        "biases": st.sampled_from([(), (), (1.5, -3.0), (1e308,), (-1e308, 5.0), (-1e308, 1e308, 1e308), (100.0,)]),
        "all_stop": st.sampled_from([False, False, False, True]),
        "later": st.integers(0, 3),
        "density": st.sampled_from([None, None, 0.0, 0.02, 0.5, 0.98]),
        "only_ends": st.booleans(),
    }
)
BATCH = st.tuples(st.integers(0, 1 << 30), st.sampled_from([7, 64, 100, 640, 1500]), st.sampled_from(KINDS), st.lists(ROW, min_size=1, max_size=8))


def a_row(**sampling) -> dict:
    asked = {"temperature": 1.0} | sampling
    return {"sampling": asked, "biases": (), "all_stop": False, "later": 0, "density": None, "only_ends": False}


@settings(max_examples=120, deadline=None)
@given(BATCH, st.randoms(use_true_random=False))
@example((1, 1500, "flat", [a_row(top_p=0.95), a_row(top_p=0.3), a_row(min_p=0.2), a_row(top_k=600), a_row()]), np.random)
@example((2, 1500, "halves", [a_row(top_k=20), a_row(top_k=100, top_p=0.5), a_row(logprobs=5), a_row(logprobs=600)]), np.random)
@example((3, 640, "equal", [a_row(top_k=20), a_row(top_k=600), a_row(top_p=0.5), a_row(logprobs=3), a_row(min_p=1.0)]), np.random)
@pytest.mark.slow
def test_every_row_gets_the_models_token_alone_and_in_any_company(batch, shuffler):
    seed, vocab, kind, asked = batch
    random = np.random.default_rng(seed)
    logits = logits_of(kind, random, (len(asked), vocab))
    valid = random.random(vocab) < 0.9
    valid[:5] = True
    made = [row_of(one, vocab, random) for one in asked]
    rows = [row for row, _, _ in made]
    sampler = Sampler(torch.from_numpy(valid), EOS)
    choices = sampler.sample(torch.from_numpy(logits.copy()), rows)

    for choice, one, (row, history, prompt_length) in zip(choices, logits, made, strict=True):
        if not allowed(row, valid).any():
            assert choice.token_id == -1
            assert "no token is allowed" in str(choice.error)
            continue
        assert choice.error is None
        assert choice.token_id in acceptable(steered(one, row, history, prompt_length, valid), row)
        check_logprob(choice, one, row, valid)

    order = list(range(len(rows)))
    shuffler.shuffle(order)
    for company in (order, order[: max(1, len(order) // 2)], *([index] for index in order)):
        again = sampler.sample(torch.from_numpy(logits[company]), [rows[index] for index in company])
        assert [told(choice) for choice in again] == [told(choices[index]) for index in company]


def told(choice) -> tuple:
    """What a choice says; errors are compared by what they say."""
    return choice.token_id, choice.logprob, str(choice.error)


def check_logprob(choice, logits: np.ndarray, row: Row, valid: np.ndarray) -> None:
    asked = row.sampling.logprobs
    if asked is None:
        assert choice.logprob is None
        return
    own = np.where(allowed(row, valid), logits.astype(np.float64), -np.inf)
    expected = own - own.max() - math.log(np.exp(own - own.max()).sum())
    order = np.lexsort((np.arange(len(own)), -own))[:asked]
    order = order[own[order] > -np.inf]
    assert choice.logprob.token_id == choice.token_id
    np.testing.assert_allclose(choice.logprob.logprob, max(expected[choice.token_id], -1e30), rtol=1e-6, atol=1e-5)
    assert [token for token, _ in choice.logprob.top] == order.tolist()
    np.testing.assert_allclose([value for _, value in choice.logprob.top], expected[order], rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("threads", [1, 2])
def test_a_wide_row_gets_the_same_alone_and_among_many(threads):
    """At real widths, where torch divides the work among threads and vector lanes by the shape of the batch."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        random = np.random.default_rng(0)
        logits = (random.standard_normal((9, 50_257)) * 2).astype(np.float32)
        shapes = [{}, {"top_p": 0.9}, {"top_p": 0.4, "logprobs": 3}, {"min_p": 0.01}, {"top_k": 40}, {"logprobs": 20}, {"temperature": 0.5}]
        rows = [Row(SamplingParams(**shapes[i % len(shapes)]), i, 9, 3) for i in range(9)]
        sampler = Sampler(torch.ones(50_257, dtype=torch.bool), EOS)
        together = sampler.sample(torch.from_numpy(logits.copy()), rows)
        alone = [sampler.sample(torch.from_numpy(logits[i : i + 1].copy()), rows[i : i + 1])[0] for i in range(9)]
        assert together == alone
        for choice, one, row in zip(together, logits, rows, strict=True):
            assert choice.token_id in acceptable(one.astype(np.float64), row)
    finally:
        torch.set_num_threads(before)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_rows_without_finite_logits_fail_by_themselves(data):
    vocab = data.draw(st.sampled_from([7, 100, 640]))
    random = np.random.default_rng(data.draw(st.integers(0, 1000)))
    logits = logits_of("normal", random, (4, vocab))
    rows = [row_of(data.draw(ROW) | {"density": 0.5}, vocab, random)[0] for _ in range(4)]
    sampler = Sampler(torch.from_numpy(np.arange(vocab) != 6), EOS)
    good = sampler.sample(torch.from_numpy(logits.copy()), rows)
    spoilt = logits.copy()
    spoilt[1, data.draw(st.integers(0, vocab - 1))] = data.draw(st.sampled_from([math.nan, math.inf, -math.inf]))
    choices = sampler.sample(torch.from_numpy(spoilt), rows)
    assert choices[1].token_id == -1
    assert "NaN or infinite" in str(choices[1].error)
    assert [told(choices[i]) for i in (0, 2, 3)] == [told(good[i]) for i in (0, 2, 3)]


def choose(logits: list[float], *, valid: list[bool] | None = None, **sampling) -> set[int]:
    """What forty positions give."""
    sampler = Sampler(torch.tensor(valid or [True] * len(logits)), EOS)
    rows = [Row(SamplingParams(**sampling), 1, position, 0) for position in range(40)]
    choices = sampler.sample(torch.tensor([logits] * 40, dtype=torch.float32), rows)
    assert not any(choice.error for choice in choices)
    return {choice.token_id for choice in choices}


def test_values_at_the_edge_of_float32():
    assert choose([1.0, 2.0, 2.0, 0.0], temperature=1e-46) == {1}
    assert choose([1.0, 2.0, 5.0, 0.0], logit_bias={0: 1e308}) == {0}
    assert choose([1.0, 2.0, 5.0, 0.0], logit_bias={2: -1e308}, top_p=0.9999) <= {0, 1, 3}
    assert choose([3e38] * 9, temperature=0) == {0}, "finite logits whose sum is not"
    assert choose([0.0, 900.0, 900.0, 900.0], valid=[True, False, False, False], logit_bias={1: 1e308}) == {0}
    assert choose([-3e38, 3e38, -3e38], valid=[True, False, True]) == {0, 2}
    assert choose([0.0, -1.0, 1.0, 0.0], min_tokens=1, top_p=1e-300) == {0}


def test_of_tokens_tied_at_the_edge_of_top_k_the_first_stay():
    assert choose([1.0] * 50 + [1.25, 1.125, 1.375] + [1.0] * 47, top_k=4) == {0, 50, 51, 52}
    assert choose([1.0] * 900 + [1.25] + [1.0] * 99, top_k=2) == {0, 900}


def test_an_end_may_come_early_where_nothing_else_is_allowed():
    mask = np.array([0b1100], dtype=np.int32)
    sampler = Sampler(torch.ones(70, dtype=torch.bool), EOS)
    row = Row(SamplingParams(min_tokens=9), 1, 1, 0, mask=mask)
    choice = sampler.sample(torch.zeros(1, 70), [row])[0]
    assert choice.token_id in EOS


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 99)), st.lists(st.tuples(st.booleans(), st.lists(st.integers(0, 199), max_size=80))))
def test_penalties_count_and_uncount(prompt, changes):
    """Against a Counter; ids from 100 on are beyond the logits."""
    sampling = SamplingParams(repetition_penalty=1.5, frequency_penalty=0.5, presence_penalty=0.25)
    penalties = Penalties(100, prompt, len(prompt))
    output: list[int] = []
    for adds, tokens in changes:
        if adds:
            penalties.add(tokens)
            output += tokens
        else:
            removed = output[max(len(output) - len(tokens), 0) :]
            penalties.remove(removed)
            del output[len(output) - len(removed) :]
    later = output[-2:]
    counts = Counter(output[: len(output) - len(later)])
    effect = penalties.effect(sampling, later)
    assert len(set(effect.ids.tolist())) == len(effect.ids)
    found = {i: (f, loss) for i, f, loss in zip(effect.ids.tolist(), effect.factor.tolist(), effect.loss.tolist(), strict=True)}
    for token in range(100):
        factor = 1.5 if token in prompt or counts[token] else 1.0
        assert found.pop(token, (1.0, 0.0)) == (factor, 0.5 * counts[token] + 0.25 * (counts[token] > 0))
    assert not found


def test_token_logprob_leaves_out_what_is_impossible():
    logprobs = torch.tensor([0.5, 0.25, 0.25, 0.0]).log()
    score = token_logprob(logprobs, 1, 9)
    assert score.logprob == pytest.approx(math.log(0.25))
    assert {token for token, _ in score.top} == {0, 1, 2}
    assert score.top[0] == (0, pytest.approx(math.log(0.5)))
