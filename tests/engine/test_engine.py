"""The engine end to end on a tiny random model, in a thread, with the slot equation checked after every step."""

from __future__ import annotations

import asyncio
import json
import random
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

import agentrt
from agentrt import Engine, FinishReason, SamplingParams
from agentrt.backend import collect, stream
from agentrt.config import Limits
from agentrt.engine.sampler import uniform

GREEDY = SamplingParams(temperature=0, max_tokens=24)


def engine_on(folder: Path, **options) -> Engine:
    return Engine(str(folder), **{"process": False, "check": True, "dtype": "float32", "kv_tokens": 4096, "threads": 1, **options})


@pytest.fixture(scope="module")
def engine(tiny_model):
    with engine_on(tiny_model) as engine:
        yield engine


def mixed_prompts(count: int, seed: int = 1) -> list[list[int]]:
    """Prompts of many lengths; half of them begin like another."""
    rng = random.Random(seed)
    prompts: list[list[int]] = []
    for _ in range(count):
        head = rng.choice(prompts)[: rng.randrange(1, 80)] if prompts and rng.random() < 0.5 else []
        prompts.append(head + [rng.randrange(300) for _ in range(rng.randrange(1, 60))])
    return prompts


@pytest.fixture(scope="module")
def expected(tiny_model):
    """Each prompt alone, without a cache, in one piece."""
    prompts = mixed_prompts(50)
    with engine_on(tiny_model, prefix_cache=False, step_tokens=4096) as engine:
        return prompts, [engine.generate(prompt, GREEDY).token_ids for prompt in prompts]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"prefix_cache": False},
        {"step_tokens": 16},
        {"attention": "torch"},
        {"attention": "torch", "step_tokens": 16},
        {"page_size": 16},
        {"page_size": 16, "step_tokens": 16},
        {"kv_tokens": 200, "max_running": 16},
        {"kv_tokens": 208, "page_size": 16, "step_tokens": 16, "policy": "fcfs"},
        {"max_running": 3, "policy": "lpm", "kv_tokens": 400},
    ],
    ids=lambda options: ",".join(f"{k}={v}" for k, v in options.items()) or "default",
)
def test_greedy_answers_do_not_depend_on_how_they_are_computed(tiny_model, expected, options):
    prompts, answers = expected
    with engine_on(tiny_model, **options) as engine:
        together = engine.generate(prompts, GREEDY)
        again = engine.generate(prompts[:10], GREEDY)  # from a warm cache
    assert [completion.token_ids for completion in together] == answers
    assert [completion.token_ids for completion in again] == answers[:10]


def test_greedy_answers_survive_constant_preemption(tiny_model, expected):
    """Admission leaves room for what answers have been like; after many short ones it is too hopeful, and preempts."""
    prompts, answers = expected
    with engine_on(tiny_model, kv_tokens=180, max_running=32) as engine:
        for start in range(0, 50, 10):
            engine.generate([[n] for n in range(150)], SamplingParams(max_tokens=1))
            together = engine.generate(prompts[start : start + 10], GREEDY)
            assert [completion.token_ids for completion in together] == answers[start : start + 10]
        assert engine.stats()["preemptions"] >= 3


def test_the_process_gives_what_the_thread_gives(tiny_model, expected):
    prompts, answers = expected
    with engine_on(tiny_model, process=True) as engine:
        assert [completion.token_ids for completion in engine.generate(prompts, GREEDY)] == answers


def test_a_whole_prompt_that_is_cached_recomputes_one_token(engine):
    prompt = list(range(100, 160))
    engine.generate(prompt, GREEDY)
    before = engine.stats()["computed_tokens"]
    completion = engine.generate(prompt, SamplingParams(temperature=0, max_tokens=1))
    assert completion.usage.cached_tokens == 59
    assert engine.stats()["computed_tokens"] - before == 1


def test_samples_share_one_prompt(engine):
    prompt = [random.Random(5).randrange(300) for _ in range(200)]
    before = engine.stats()["computed_tokens"]
    completion = engine.generate(prompt, SamplingParams(n=8, max_tokens=6, seed=3, ignore_eos=True))
    assert engine.stats()["computed_tokens"] - before <= 200 + 8 * (6 + 16)
    assert len({sample.token_ids for sample in completion.samples}) > 1
    assert completion.usage.completion_tokens == 48


def test_the_same_seed_gives_the_same_text_whatever_else_runs(engine):
    sampling = SamplingParams(temperature=1.3, top_p=0.95, max_tokens=20, seed=11, n=2)
    alone = engine.generate([5, 6, 7], sampling)
    crowd = [(p, SamplingParams(max_tokens=20, temperature=1.0)) for p in mixed_prompts(10, seed=9)]
    prompts, params = [p for p, _ in crowd] + [[5, 6, 7]], [s for _, s in crowd] + [sampling]
    together = engine.generate(prompts, params)[-1]
    assert [s.token_ids for s in together.samples] == [s.token_ids for s in alone.samples]
    assert alone.samples[0].token_ids != alone.samples[1].token_ids


def test_sampling_follows_the_distribution(engine):
    """Chi-square over the first token's likeliest values, against the softmax that logprobs report."""
    prompt = [17, 18, 19]
    first = engine.generate(prompt, SamplingParams(max_tokens=1, logprobs=8, temperature=0)).logprobs[0]
    n = 800
    drawn = engine.generate(prompt, SamplingParams(max_tokens=1, n=n, seed=2)).samples
    counts = {token: sum(s.token_ids[0] == token for s in drawn) for token, _ in first.top}
    chi2 = sum((counts[t] - n * p) ** 2 / (n * p) for t, p in ((t, float(torch.tensor(lp).exp())) for t, lp in first.top))
    assert chi2 < 30  # 8 degrees of freedom: 1 in 5,000


@pytest.mark.parametrize("limits", [{"top_k": 3}, {"top_p": 0.4}, {"min_p": 0.3}])
def test_truncated_sampling_stays_inside(engine, limits):
    prompt = [17, 18, 19]
    top = engine.generate(prompt, SamplingParams(max_tokens=1, logprobs=20, temperature=0)).logprobs[0].top
    probabilities = [(token, float(torch.tensor(lp).exp())) for token, lp in top]
    if "top_k" in limits:
        inside = {token for token, _ in probabilities[:3]}
    elif "top_p" in limits:
        inside, total = set(), 0.0
        for token, p in probabilities:
            if total >= 0.4:
                break
            inside.add(token)
            total += p
    else:
        inside = {token for token, p in probabilities if p >= 0.3 * probabilities[0][1]}
    drawn = {s.token_ids[0] for s in engine.generate(prompt, SamplingParams(max_tokens=1, n=200, seed=1, **limits)).samples}
    assert drawn == inside


def test_uniform_is_uniform_and_depends_on_both_arguments():
    values = [uniform(seed, position) for seed in range(30) for position in range(100)]
    assert len(set(values)) == len(values)
    assert abs(sum(values) / len(values) - 0.5) < 0.02


def reference_logprobs(folder: Path, ids: list[int], *, masked: bool) -> torch.Tensor:
    """log-probabilities [len(ids), vocab] by the model in one piece, without engine or store of pages."""
    from agentrt.attention.base import AttentionBatch
    from agentrt.attention.reference import ReferenceAttention
    from agentrt.engine.kv_store import KVStore
    from agentrt.models.loader import load_model

    model = load_model(folder, torch.float32)
    slots = torch.arange(len(ids))
    batch = AttentionBatch((len(ids),), (0,), (slots,), slots, prepared={})
    store = KVStore(model.config, len(ids), torch.float32)
    with torch.inference_mode():
        hidden = model.decoder.forward(torch.tensor(ids), slots, batch, ReferenceAttention(), store)
        logits = model.decoder.logits(hidden)
        if masked:  # ids without a token are never chosen
            logits[:, model.config.vocab_size - 7 :] = -torch.inf
        return logits.log_softmax(-1)


def test_logprobs_are_the_models_own(engine, tiny_model):
    prompt = list(range(40, 90))
    completion = engine.generate(prompt, SamplingParams(temperature=0, max_tokens=5, logprobs=3, prompt_logprobs=2))
    ids = [*prompt, *completion.token_ids]
    reference = reference_logprobs(tiny_model, ids, masked=True)
    for at, entry in enumerate(completion.logprobs, len(prompt) - 1):
        assert entry.logprob == pytest.approx(float(reference[at, entry.token_id]), abs=1e-3)
        assert [t for t, _ in entry.top] == reference[at].topk(3).indices.tolist()
    assert completion.prompt_logprobs[0] == agentrt.TokenLogprob(prompt[0], None)
    full = reference_logprobs(tiny_model, prompt, masked=False)
    for position, entry in enumerate(completion.prompt_logprobs[1:], 1):
        assert entry.token_id == prompt[position]
        assert entry.logprob == pytest.approx(float(full[position - 1, prompt[position]]), abs=1e-3)


@pytest.mark.parametrize("step_tokens", [8, 512])
def test_prompt_logprobs_survive_chunks_and_a_warm_cache(tiny_model, step_tokens):
    prompt = list(range(60))
    with engine_on(tiny_model, step_tokens=step_tokens) as engine:
        cold = engine.generate(prompt, SamplingParams(max_tokens=0, prompt_logprobs=1))
        before = engine.stats()["computed_tokens"]
        warm = engine.generate(prompt, SamplingParams(max_tokens=0, prompt_logprobs=1, prompt_logprobs_start=50))
        computed = engine.stats()["computed_tokens"] - before
    assert len(cold.prompt_logprobs) == 60
    assert cold.token_ids == ()
    assert [e.logprob for e in warm.prompt_logprobs] == pytest.approx([e.logprob for e in cold.prompt_logprobs[50:]], abs=1e-4)
    assert computed == 11  # what is scored needs the logits before it; the rest is reused


def test_score_prefers_what_the_model_would_say(engine):
    prompt = list(range(30, 60))
    best = engine.generate(prompt, SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)).token_ids
    scores = engine.score(prompt, [list(best), [1, 2, 3], "ab"])
    assert scores[0].logprob > scores[1].logprob
    assert [token.token_id for token in scores[1].tokens] == [1, 2, 3]
    assert sum(token.logprob for token in scores[2].tokens) == pytest.approx(scores[2].logprob)


def test_penalties_and_biases_steer(engine):
    prompt = [9, 8, 7]
    plain = engine.generate(prompt, GREEDY.replace(ignore_eos=True, max_tokens=40)).token_ids
    banned = engine.generate(prompt, GREEDY.replace(logit_bias={plain[0]: -1e4})).token_ids
    assert banned[0] != plain[0]
    forced = engine.generate(prompt, GREEDY.replace(logit_bias={5: 1e4}, max_tokens=4)).token_ids
    assert forced == (5, 5, 5, 5)
    fresh = engine.generate(prompt, GREEDY.replace(logit_bias={5: 1e4}, presence_penalty=2, frequency_penalty=2, max_tokens=4)).token_ids
    assert fresh == (5, 5, 5, 5)
    varied = engine.generate(prompt, GREEDY.replace(repetition_penalty=1e6, max_tokens=20, ignore_eos=True)).token_ids
    assert len(set(varied)) == len(varied)
    assert not set(varied) & set(prompt)


def test_stops(engine):
    prompt = [9, 8, 7]
    free = engine.generate(prompt, GREEDY.replace(ignore_eos=True, max_tokens=30))
    text = free.text
    needle = text[10:13]
    cut = engine.generate(prompt, GREEDY.replace(ignore_eos=True, max_tokens=30, stop=needle))
    assert cut.text == text[: text.index(needle)]
    assert cut.finish_reason is FinishReason.STOP
    assert cut.samples[0].stop_match == needle
    assert free.token_ids[: len(cut.token_ids)] == cut.token_ids
    kept = engine.generate(prompt, GREEDY.replace(ignore_eos=True, max_tokens=30, stop=(needle,), include_stop=True))
    assert kept.text == text[: text.index(needle)] + needle
    token = free.token_ids[4]
    by_id = engine.generate(prompt, GREEDY.replace(ignore_eos=True, max_tokens=30, stop_token_ids=(token,)))
    assert by_id.token_ids == free.token_ids[: free.token_ids.index(token) + 1]
    assert by_id.samples[0].stop_match == token
    late = engine.generate(prompt, GREEDY.replace(ignore_eos=True, max_tokens=30, stop=needle, min_tokens=30))
    assert len(late.token_ids) == 30


def test_a_stream_gives_the_whole_text_and_never_half_a_character(engine):
    sampling = SamplingParams(temperature=1.5, max_tokens=60, seed=4, ignore_eos=True)
    whole = engine.generate([50, 60], sampling)
    request = engine.request([50, 60], sampling)
    deltas = list(stream(engine, request))
    assert "".join(delta.text for delta in deltas) == whole.text
    assert tuple(token for delta in deltas for token in delta.token_ids) == whole.token_ids
    assert deltas[-1].usage is not None
    assert collect(request, deltas).text == whole.text


def test_leaving_a_stream_aborts_it(engine):
    deltas = engine.stream([1, 2, 3], SamplingParams(max_tokens=1500, ignore_eos=True, seed=0))
    next(deltas)
    deltas.close()
    assert wait_until(lambda: engine.load().running == 0)


def wait_until(condition, seconds: float = 60) -> bool:
    done = threading.Event()
    for _ in range(int(seconds / 0.02)):
        if condition():
            return True
        done.wait(0.02)
    return False


def test_abort_tells_what_there_was(engine):
    request = engine.request([1, 2, 3], SamplingParams(max_tokens=1500, ignore_eos=True, seed=0, n=2))
    deltas = stream(engine, request)
    got = [next(deltas)]
    engine.abort(request.request_id)
    got += list(deltas)
    completion = collect(request, got)
    assert completion.finish_reason is FinishReason.ABORT
    engine.abort(request.request_id)  # a second time, and an unknown one, are nothing
    engine.abort("nobody")


def test_a_deadline_fails_the_request_and_no_other(engine):
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(engine.generate, [4, 5], SamplingParams(max_tokens=30, ignore_eos=True, seed=1))
        with pytest.raises(agentrt.AbortedError, match=r"deadline of 0\.05 s"):
            engine.generate([1, 2, 3], SamplingParams(max_tokens=2000, ignore_eos=True, seed=0), deadline=0.05)
        assert len(other.result().token_ids) == 30


BAD = [
    ([], {}, agentrt.UserError, "empty"),
    ("", {}, agentrt.PromptError, "empty"),
    ([5, 100_000], {}, agentrt.PromptError, "100000"),
    ([5, -1], {}, agentrt.PromptError, "-1"),
    ([5, None], {}, agentrt.PromptError, "None"),
    ([5], {"logit_bias": {99_999: 1.0}}, agentrt.UserError, "99999"),
    ([5] * 3000, {}, agentrt.TooLongError, "2048"),
    ([5] * 2000, {"max_tokens": 100}, agentrt.TooLongError, "2100.*2048"),
    ([5], {"n": 5000}, agentrt.UserError, "5000.*1024"),
    ([5], {"logprobs": 1000}, agentrt.UserError, "1000"),
    ([5], {"stop": ["x" * 5000]}, agentrt.UserError, "5000"),
    ([5], {"prompt_logprobs": 0, "prompt_logprobs_start": 9}, agentrt.UserError, "prompt_logprobs_start is 9"),
]


@pytest.mark.parametrize(("prompt", "sampling", "error", "words"), BAD, ids=lambda v: str(v)[:30])
def test_bad_input_is_refused_at_the_door(engine, prompt, sampling, error, words):
    if prompt == []:
        prompt = ()
    with pytest.raises(error, match=words):
        engine.submit(engine.request(prompt, SamplingParams(**sampling)), lambda delta: None)
    assert len(engine.generate([5], SamplingParams(max_tokens=2, ignore_eos=True)).token_ids) == 2


def test_what_fits_the_context_but_not_the_pool_is_refused_with_both_numbers(tiny_model):
    with engine_on(tiny_model, kv_tokens=64) as engine:
        with pytest.raises(agentrt.TooLongError, match="needs 100 tokens, but the KV store has 64") as caught:
            engine.generate([5] * 90, SamplingParams(max_tokens=10))
        assert (caught.value.needed, caught.value.limit) == (100, 64)
        open_end = engine.generate([5] * 50, SamplingParams(temperature=0, ignore_eos=True))  # up to what there is
        assert len(open_end.token_ids) == 14
        assert open_end.finish_reason is FinishReason.LENGTH


def test_a_full_queue_says_so(tiny_model):
    with engine_on(tiny_model, limits=Limits(queued=2), max_running=1) as engine:
        running = [engine.stream([n], SamplingParams(max_tokens=1900, ignore_eos=True, seed=0)) for n in range(3)]
        with pytest.raises(agentrt.QueueFullError, match="3 requests are pending"):
            engine.generate([9], GREEDY)
        for deltas in running:
            next(deltas)  # a generator that never began has nothing to clean up
            deltas.close()
        assert wait_until(lambda: engine.load().running == 0)
        assert engine.generate([9], GREEDY).token_ids


def test_nan_logits_fail_that_request_by_name(tiny_model, tmp_path):
    folder = tmp_path / "nan"
    shutil.copytree(tiny_model, folder)
    weights = load_file(folder / "model.safetensors")
    weights["model.embed_tokens.weight"][33] = torch.nan
    save_file(weights, folder / "model.safetensors")
    with engine_on(folder) as engine, ThreadPoolExecutor(2) as pool:
        good = pool.submit(engine.generate, [1, 2, 3], GREEDY.replace(ignore_eos=True))
        with pytest.raises(agentrt.NumericalError, match="NaN"):
            engine.generate([1, 2, 33], GREEDY)
        assert len(good.result().token_ids) == 24
        assert engine.generate([1, 2, 4], GREEDY.replace(ignore_eos=True)).finish_reason is FinishReason.LENGTH


def test_ids_without_a_token_are_never_chosen(engine):
    vocab = engine.facts.vocab_size
    hole = vocab - 3
    completion = engine.generate([3, 4], SamplingParams(temperature=0, max_tokens=3, logit_bias={hole: 1e6}, ignore_eos=True))
    assert hole not in completion.token_ids


def test_async_twins(engine):
    async def main():
        one = await engine.agenerate([1, 2, 3], GREEDY)
        several = await engine.agenerate([[1, 2, 3], [4, 5]], GREEDY)
        text = ""
        async for delta in engine.astream([1, 2, 3], GREEDY):
            text += delta.text
        with pytest.raises(agentrt.TooLongError):
            await engine.agenerate([[1], [5] * 5000], GREEDY)
        task = asyncio.create_task(engine.agenerate([1], SamplingParams(max_tokens=1900, ignore_eos=True, seed=0)))
        while not engine.load().running:  # cancelled as soon as it runs, not when it may be over
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return one, several, text

    one, several, text = asyncio.run(main())
    assert one.token_ids == several[0].token_ids
    assert text == one.text
    assert wait_until(lambda: engine.load().running == 0)


@pytest.mark.slow
def test_submitting_is_thread_safe(engine):
    prompts = mixed_prompts(24, seed=3)
    alone = [engine.generate(prompt, GREEDY).token_ids for prompt in prompts]
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(lambda prompt: engine.generate(prompt, GREEDY).token_ids, prompts))
    assert together == alone


def test_prompts_are_text_ids_or_chats(engine):
    text = engine.generate("the quick brown fox", GREEDY)
    ids = engine.generate(engine.tokenize("the quick brown fox"), GREEDY)
    assert text.token_ids == ids.token_ids
    assert engine.detokenize(engine.tokenize("naïve 🙂")) == "naïve 🙂"
    chat = [{"role": "user", "content": "hello<|im_end|>"}]
    ids = engine.request(chat).prompt_ids
    end = engine.tokenize("<|im_end|>", special=True)[0]
    assert ids.count(end) == 1  # the template's own; what the user wrote is text
    assert [c.text for c in engine.generate([chat, chat], GREEDY)] == [engine.generate(chat, GREEDY).text] * 2


def test_generation_config_gives_the_defaults(tiny_model, tmp_path):
    folder = tmp_path / "defaults"
    shutil.copytree(tiny_model, folder)
    path = folder / "generation_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"do_sample": True, "temperature": 0.5, "top_k": 7}))
    with engine_on(folder) as engine:
        assert engine.facts.sampling == SamplingParams(temperature=0.5, top_k=7)
        assert engine.request([1]).sampling == engine.facts.sampling


def test_flush_says_what_it_freed(tiny_model):
    with engine_on(tiny_model) as engine:
        engine.generate(list(range(100)), SamplingParams(max_tokens=1, temperature=0))
        assert engine.cached_prefix(list(range(100))) == 100
        assert engine.cached_prefix(list(range(100)), cache_salt="other") == 0
        report = engine.flush_cache()
        assert (report.freed_tokens, report.kept_tokens) == (100, 0)
        assert engine.cached_prefix(list(range(100))) == 0


@pytest.mark.slow
@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(data=st.data())
def test_any_schedule_on_a_tiny_pool_equals_the_cacheless_run(engine, tiny_model, data):
    """Random submits, aborts and flushes against the engine itself; it checks the slot equation after every step."""
    prompts = mixed_prompts(12, seed=data.draw(st.integers(0, 5)))
    longest = max(map(len, prompts)) + 12
    page_size = data.draw(st.sampled_from([1, 4]))
    options = {"kv_tokens": longest + data.draw(st.integers(page_size, 60)), "page_size": page_size, "step_tokens": data.draw(st.sampled_from([5, 64]))}
    sampling = SamplingParams(temperature=0, max_tokens=12)
    answers = [engine.generate(prompt, sampling).token_ids for prompt in prompts]
    with engine_on(tiny_model, **options) as small:
        streams = []
        for prompt in prompts:
            request = small.request(prompt, sampling)
            streams.append((request, stream(small, request)))
            action = data.draw(st.sampled_from(["", "abort", "flush", "step"]))
            if action == "abort":
                small.abort(data.draw(st.sampled_from(streams))[0].request_id)
            elif action == "flush":
                small.flush_cache()
        for (request, deltas), answer in zip(streams, answers, strict=True):
            completion = collect(request, deltas)
            if completion.finish_reason is FinishReason.ABORT:
                assert completion.token_ids == answer[: len(completion.token_ids)]
            else:
                assert completion.token_ids == answer
