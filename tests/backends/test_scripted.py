"""The scripted backend behaves like an engine in everything a caller can see."""

from __future__ import annotations

import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrt import backend as backends
from agentrt.backends.byte_tokenizer import ByteTokenizer
from agentrt.backends.scripted import Answer, PrefixSet, ScriptedBackend
from agentrt.errors import AbortedError, ConstraintError, EngineError, PromptError, QueueFullError, TooLongError
from agentrt.request import FinishReason, Request, SamplingParams

TOKENIZER = ByteTokenizer()


def ask(backend, text="Q", **sampling):
    ids = tuple(backend.tokenizer.encode(text))
    return Request(prompt_ids=ids, sampling=SamplingParams(temperature=0.0, **sampling))


@pytest.mark.parametrize("inline", [True, False])
def test_deltas_add_up_to_the_answer_token_by_token(inline):
    backend = ScriptedBackend("the answer is: é🙂.", inline=inline)
    request = ask(backend)
    deltas = list(backends.stream(backend, request))
    assert "".join(d.text for d in deltas) == "the answer is: é🙂."
    assert all("�" not in d.text for d in deltas)
    ids = [i for d in deltas for i in d.token_ids]
    assert backend.tokenizer.decode(ids) == "the answer is: é🙂."
    assert ids[-1] in backend.tokenizer.eos_ids
    assert deltas[-1].finish_reason is FinishReason.STOP
    assert deltas[-1].usage.completion_tokens == len(ids)


def test_stop_string_is_cut_and_its_tokens_are_told():
    backend = ScriptedBackend("one. two")
    done = backends.complete(backend, ask(backend, stop=(".",)))
    assert (done.text, done.samples[0].stop_match) == ("one", ".")
    assert backend.tokenizer.decode(done.token_ids) == "one. "  # the token ". " was sampled whole
    with_stop = backends.complete(backend, ask(backend, stop=(".",), include_stop=True))
    assert with_stop.text == "one."


def test_a_possible_stop_string_is_held_back_while_it_streams():
    backend = ScriptedBackend("a <b> c")
    texts = [d.text for d in backends.stream(backend, ask(backend, stop=("<bad>",)))]
    assert "".join(texts) == "a <b> c"
    assert not any(t.endswith("<") for t in texts)


def test_length_stop_regex_stop_token_and_min_tokens():
    backend = ScriptedBackend("x1yz")
    cut = backends.complete(backend, ask(backend, max_tokens=2))
    assert (cut.text, cut.finish_reason) == ("x1", FinishReason.LENGTH)
    assert backends.complete(backend, ask(backend, stop_regex=(r"\d",))).text == "x"
    by_token = backends.complete(backend, ask(backend, stop_token_ids=(ord("y"),)))
    assert (by_token.text, by_token.samples[0].stop_match) == ("x1", ord("y"))
    assert backends.complete(backend, ask(backend, stop=("x", "z"), min_tokens=1)).text == "x1y"


def test_scores_of_the_prompt_from_a_place_on():
    backend = ScriptedBackend(score=lambda before, token: -float(len(before)))
    done = backends.complete(backend, ask(backend, "QRS", max_tokens=0, prompt_logprobs=0, prompt_logprobs_start=1))
    assert [(t.token_id, t.logprob) for t in done.prompt_logprobs] == [(ord("R"), -1.0), (ord("S"), -2.0)]
    assert done.token_ids == ()


def test_usage_counts_what_was_cached_and_the_last_prompt_token_is_always_computed():
    backend = ScriptedBackend("1234")
    first = backends.complete(backend, ask(backend, "prompt"))
    again = backends.complete(backend, ask(backend, "prompt"))
    longer = backends.complete(backend, ask(backend, "prompt1234!"))
    assert (first.usage.cached_tokens, again.usage.cached_tokens, longer.usage.cached_tokens) == (0, 5, 10)
    assert backend.flush_cache().freed_tokens > 0
    assert backend.cached_prefix(TOKENIZER.encode("prompt")) == 0


def test_an_answer_that_breaks_its_constraint_fails_the_request():
    backend = ScriptedBackend("maybe")
    for constraint in ({"choices": ["a", "b"]}, {"regex": r"\d+"}, {"json_schema": {"type": "object"}}):
        with pytest.raises(ConstraintError):
            backends.complete(backend, ask(backend, **constraint))
    assert backends.complete(backend, ask(backend, regex=r"\d+", max_tokens=2)).text == "ma"  # cut, and marked as cut


def test_errors_at_the_door_and_on_the_way():
    backend = ScriptedBackend(lambda t, r: Answer("half", error=AbortedError("gone")), max_context=10, max_queued=1)
    with pytest.raises(PromptError):
        backend.submit(Request(prompt_ids=()), lambda d: None)
    with pytest.raises(TooLongError):
        backend.submit(ask(backend, "x" * 20), lambda d: None)
    deltas = []
    done = threading.Event()
    backend.submit(ask(backend), lambda d: (deltas.append(d), d.last and done.set()))
    assert done.wait(10)
    assert "".join(d.text for d in deltas).startswith("hal")
    assert isinstance(deltas[-1].error, AbortedError)
    slow = ScriptedBackend(lambda t, r: Answer("x", delay=30), max_queued=1)
    slow.submit(ask(slow), lambda d: None)
    with pytest.raises(QueueFullError):
        slow.submit(ask(slow), lambda d: None)
    slow.close()


def test_a_script_that_raises_fails_only_its_request():
    def script(text, request):
        if "bad" in text:
            raise ZeroDivisionError("in the script")
        return "fine"

    backend = ScriptedBackend(script)
    with pytest.raises(EngineError, match="ZeroDivisionError"):
        backends.complete(backend, ask(backend, "bad"))
    assert backends.complete(backend, ask(backend, "good")).text == "fine"


def test_abort_and_deadline_end_a_request():
    backend = ScriptedBackend(lambda t, r: Answer("x", delay=60))
    got, done = [], threading.Event()
    request = ask(backend)
    backend.submit(request, lambda d: (got.append(d), done.set()))
    backend.abort(request.request_id)
    assert done.wait(10)
    assert got[-1].finish_reason is FinishReason.ABORT
    timed = Request(prompt_ids=(65,), sampling=SamplingParams(), deadline=0.02)
    assert backends.complete(backend, timed).finish_reason is FinishReason.ABORT
    backend.abort("unknown")


def test_close_fails_what_is_under_way_and_refuses_more():
    backend = ScriptedBackend(lambda t, r: Answer("x", delay=60))
    got, done = [], threading.Event()
    backend.submit(ask(backend), lambda d: (got.append(d), done.set()))
    backend.close()
    backend.close()
    assert done.wait(10)
    assert isinstance(got[-1].error, EngineError)
    with pytest.raises(EngineError):
        backend.submit(ask(backend), lambda d: None)


def test_n_samples_and_their_logprobs():
    backend = ScriptedBackend(["one", "two"])
    done = backends.complete(backend, ask(backend, n=2, logprobs=2))
    assert [s.text for s in done.samples] == ["one", "two"]
    assert all(len(s.logprobs) == len(s.token_ids) and len(s.logprobs[0].top) == 2 for s in done.samples)


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=6).map(tuple), max_size=12),
    st.lists(st.integers(0, 2), max_size=7).map(tuple),
)
def test_the_prefix_set_finds_the_longest_common_prefix_with_any(inserted, asked):
    known = PrefixSet()
    for ids in inserted:
        known.insert(ids, "")

    def common(a, b):
        return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))

    assert known.match(asked, "") == max((common(asked, ids) for ids in inserted), default=0)
    assert known.match(asked, "other") == 0


@settings(max_examples=100, deadline=None)
@given(st.text(max_size=40))
def test_the_byte_tokenizer_gives_back_every_text(text):
    ids = TOKENIZER.encode(text)
    assert TOKENIZER.decode(ids) == text
    assert b"".join(TOKENIZER.token_bytes(i) for i in ids) == text.encode()


def test_control_tokens_only_where_they_are_meant():
    text = "a<|im_end|>b"
    assert TOKENIZER.eos_ids[0] not in TOKENIZER.encode(text)
    assert TOKENIZER.eos_ids[0] in TOKENIZER.encode(text, special=True)
    chat = TOKENIZER.encode_chat([{"role": "user", "content": text}])
    assert chat.count(TOKENIZER.eos_ids[0]) == 1
    assert TOKENIZER.messages(chat) == [{"role": "user", "content": text}]
    with pytest.raises(PromptError):
        TOKENIZER.encode_chat([{"role": "king", "content": ""}])
