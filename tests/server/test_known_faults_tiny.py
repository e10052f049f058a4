"""Faults of short memory, asked over HTTP of an engine whose pool is tiny and whose pages are large; it checks every page after every step."""

from __future__ import annotations

import shutil
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

import agentrt

pytestmark = pytest.mark.slow

PAGE, POOL = 16, 512


@pytest.fixture(scope="module")
def tiny(tiny_model, live):
    """A tiny random model behind HTTP with a pool of 32 pages, and the same with a pool that is never short."""
    with (
        agentrt.Engine(str(tiny_model), page_size=PAGE, kv_tokens=POOL, threads=1, dtype="float32", process=False, check=True) as short,
        agentrt.Engine(str(tiny_model), page_size=PAGE, kv_tokens=8192, prefix_cache=False, threads=1, dtype="float32", process=False) as ample,
        live(short) as small,
        live(ample) as large,
    ):
        yield small, large


@pytest.fixture
def ask(tiny):
    """Asks (the small pool, the large pool) for greedy texts; afterwards the small one is idle and has lost no slot.

    Some prompts come together in one call, so that they are there at the same time however fast the engine is. Gives each answer's ids, and
    how many tokens were cached in each call.
    """
    small, large = tiny

    def texts(server, prompts, together, max_tokens=24):
        said, cached = [], []
        with server.client() as http:
            for first in range(0, len(prompts), together):
                some = prompts[first : first + together]
                body = {"prompt": some, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
                answer = http.post("/v1/completions", json=body)
                assert answer.status_code == 200, answer.text
                said += [choice["token_ids"] for choice in answer.json()["choices"]]
                cached.append(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])
        return said, cached

    yield lambda prompts, together=1, **options: (texts(small, prompts, together, **options), texts(large, prompts, 1, **options))
    before = small.backend.stats()
    assert (before["running"], before["waiting"], before["locked_tokens_now"]) == (0, 0, 0)
    small.backend.flush_cache()
    assert small.backend.stats()["cached_tokens_now"] == 0


def ids(seed, length):
    return [3 + (seed * 7919 + place * 31) % 200 for place in range(length)]


def test_a_tiny_pool_under_constant_eviction_equals_the_reference_and_starves_nobody(tiny, ask):
    prompts = [ids(number % 5, 90) + ids(number, 40) for number in range(24)]  # 24 times 154 tokens want a pool of 512
    (short, cached), (ample, _) = ask(prompts, together=12)
    assert short == ample
    assert tiny[0].backend.stats()["evicted_tokens"] > 0
    assert any(cached)


def test_one_running_request_that_exhausts_the_pool_is_preempted_and_the_others_go_on(tiny, ask):
    engine = tiny[0].backend
    engine.generate([[n] for n in range(150)], agentrt.SamplingParams(max_tokens=1))  # so that admission hopes for short answers
    before = engine.stats()["preemptions"]
    prompts = [ids(number, 60) for number in range(4)]  # each grows to 260 tokens: two fit, four do not
    (short, _), (ample, _) = ask(prompts, together=4, max_tokens=200)
    assert short == ample
    assert engine.stats()["preemptions"] > before


@pytest.mark.parametrize("stream", [False, True])
def test_what_fits_the_context_but_not_the_pool_is_a_400_with_both_numbers(tiny, stream):
    with tiny[0].client() as http:
        answer = http.post("/v1/completions", json={"prompt": ids(1, 600), "max_tokens": 8, "stream": stream})
        assert http.post("/v1/completions", json={"prompt": ids(1, 10), "max_tokens": 2}).status_code == 200
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["code"] == "context_length_exceeded"
    assert "512" in error["message"]
    assert "60" in error["message"]  # 600 and what it may generate


def test_prefixes_that_part_inside_a_page_reuse_whole_pages_and_answer_right(ask):
    shared = ids(9, 3 * PAGE + 5)
    (short, cached), (ample, _) = ask([shared + ids(1, 20), shared + ids(2, 20), shared[: PAGE + 3] + ids(3, 20)])
    assert short == ample
    assert cached == [0, 3 * PAGE, PAGE]


EXTREME = [
    {"temperature": 1e-320},
    {"temperature": 1e-45},
    {"temperature": 100},
    {"temperature": 1, "top_p": 1e-300},
    {"temperature": 1, "min_p": 1},
    {"temperature": 1, "top_k": 9_223_372_036_854_775_807},
    {"repetition_penalty": 1e300},
    {"repetition_penalty": 1e-300},
    {"logit_bias": {"5": 1e308}},
    {"logit_bias": {"5": -1e308}},
    {"temperature": 1e-45, "logit_bias": {"5": 3e38, "6": 3e38}},
    {"seed": 18_446_744_073_709_551_615},
    {"seed": -9_223_372_036_854_775_808},
    {"max_tokens": 9_223_372_036_854_775_807},
    {"stop": "\u0000"},
    {"stop_token_ids": [9_223_372_036_854_775_807]},
    {"stop_regex": "(a+)+$"},
    {"stop_regex": "(" * 500 + ")" * 500},
    {"json_schema": '{"not":' * 3000 + "{}" + "}" * 3000},
    {"json_schema": "[" * 100_000},
    {"json_schema": {"type": "string", "pattern": "(" * 2000 + ")" * 2000}},
    {"json_schema": {"enum": ["\u0000", "\U0010ffff", "\u2028"]}},
    {"regex": "(" * 5000 + "a" + ")" * 5000},
    {"regex": "\\p{Han}{3}\u0000?"},
    {"ebnf": "start: " + "(" * 3000 + '"a"' + ")" * 3000},
    {"choices": ["", "a"]},
    {"choices": [f"choice {n}" for n in range(30_000)]},
]


@pytest.mark.parametrize("fields", EXTREME, ids=lambda fields: str(fields)[:50])
def test_extremes_are_answered_or_refused_and_the_engine_goes_on(tiny, fields):
    with tiny[0].client() as http:
        answer = http.post("/v1/completions", json={"prompt": ids(1, 10), "max_tokens": 8} | fields)
        assert answer.status_code in (200, 400, 422), answer.text[:2000]
        assert http.post("/v1/completions", json={"prompt": ids(1, 10), "max_tokens": 2}).status_code == 200


def test_a_chain_of_better_matches_starves_nobody(tiny_model, live):
    """One request at a time, the longest match first, and always another long match that waits."""
    over, hot_ones = threading.Event(), []
    with (
        agentrt.Engine(str(tiny_model), policy="lpm", max_running=1, kv_tokens=4096, threads=1, process=False) as engine,
        live(engine) as server,
        ThreadPoolExecutor(5) as pool,
        server.client() as http,
    ):

        def ask(prompt):
            answer = http.post("/v1/completions", json={"prompt": prompt, "max_tokens": 4, "temperature": 0, "ignore_eos": True})
            assert answer.status_code == 200, answer.text

        def keep_asking(number):
            while not over.is_set():
                ask(ids(1, 200) + ids(number + len(hot_ones), 5))
                hot_ones.append(number)

        ask(ids(1, 200))
        crowd = [pool.submit(keep_asking, number) for number in range(4)]
        lonely = pool.submit(ask, ids(7, 60))
        try:
            lonely.result(60)
        finally:
            over.set()
        for each in crowd:
            each.result(60)
    assert hot_ones


TEMPLATE = (
    "{% if messages[-1].content == 'loop' %}{% for a in range(9999) %}{% for b in range(9999) %}{{ a * b }}{% endfor %}{% endfor %}"
    "{% elif messages[-1].content == 'reach' %}{{ messages.__class__.__base__.__subclasses__() }}"
    "{% else %}{% for message in messages %}{{ message.content }}{% endfor %}{% endif %}"
)


def test_a_hostile_chat_template_is_a_400_and_the_next_request_succeeds(tiny_model, tmp_path, live):
    folder = shutil.copytree(tiny_model, tmp_path / "hostile")
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    with agentrt.Engine(str(folder), kv_tokens=512, threads=1, process=False) as engine, live(engine) as server, server.client() as http:
        for content, code in (("loop", 400), ("a b", 200), ("reach", 400), ("a b", 200)):
            answer = http.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": content}], "max_tokens": 2})
            assert answer.status_code == code, answer.text
