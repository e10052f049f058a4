"""A state holds token ids: what is fed stays fed, and text is whole characters."""

from __future__ import annotations

import warnings

import pytest

import agentrt as sgl  # noqa: F401  (a program written for sgl: text before a gen stays as it is)
from agentrt.backends.scripted import ScriptedBackend
from agentrt.errors import UserError
from agentrt.lang.expressions import assistant, gen, special, system, user
from agentrt.lang.program import function


def test_streamed_emoji_never_yields_a_replacement_character():
    @function
    def program(s):
        s += "Q" + gen("a")

    text = "🙂👩‍👩‍👧 é ñ 漢字 ok"
    state = program.run(backend=ScriptedBackend(text), stream=True)
    pieces = list(state.text_iter("a"))
    assert "".join(pieces) == text
    assert not any("�" in piece for piece in pieces)
    assert len(pieces) > 5


def test_regex_classes_are_unicode():
    @function
    def program(s):
        s += "Q" + gen("a", regex=r"\w+")
        return s["a"]

    assert program.run(backend=ScriptedBackend("Grüße漢字")).ret_value == "Grüße漢字"


def test_two_appends_give_the_ids_of_one_string():
    @function
    def program(s):
        s += "He said a"
        s += "b"
        s += "c and t" + "he rest"
        s += gen("a")

    backend = ScriptedBackend("x")
    program.run(backend=backend)
    assert list(backend.requests[0].prompt_ids) == backend.tokenizer.encode("He said abc and the rest")


def test_generated_ids_are_appended_as_they_are_and_fed_prefixes_never_change():
    @function
    def program(s):
        s += "is it a" + gen("a") + "c" + gen("b")

    backend = ScriptedBackend("b")
    state = program.run(backend=backend)
    first, second = backend.requests
    assert second.prompt_ids == (*first.prompt_ids, ord("b"), ord("c"))  # not the token "bc" or "abc"
    assert state.text() == "is it abcb"


def test_turn_two_of_a_chat_reuses_every_token_of_turn_one_generated_ones_included():
    @function
    def chat(s):
        s += system("You are brief.")
        s += user("Hello")
        s += assistant(gen("a"))
        s += user("And now?")
        s += assistant(gen("b"))

    backend = ScriptedBackend("Hi there the end.")
    state = chat.run(backend=backend)
    first, second = backend.requests
    said = backend.tokenizer.encode("Hi there the end.")
    assert second.prompt_ids[: len(first.prompt_ids) + len(said)] == (*first.prompt_ids, *said)
    assert state.get_meta_info("b")["cached_tokens"] == len(first.prompt_ids) + len(said)
    whole = backend.tokenizer.encode_chat(
        [
            {"role": "system", "content": "You are brief."},
            {"role": "user", "content": "Hello"},
            {"role": "assistant", "content": "Hi there the end."},
            {"role": "user", "content": "And now?"},
        ]
    )
    assert list(second.prompt_ids) == whole  # what the template renders, token for token
    assert second.prompt_ids.count(backend.tokenizer.eos_ids[0]) == 4


def test_a_stop_string_that_ends_inside_a_token_is_cut_from_the_text_and_not_fed_twice():
    @function
    def program(s, after):
        s += "Q: " + gen("a", stop=".") + after + gen("b")

    backend = ScriptedBackend("one. two")
    state = program.run(". Next:", backend=backend)
    second = backend.requests[1]
    assert state["a"] == "one"
    assert backend.tokenizer.decode(second.prompt_ids) == "Q: one. Next:"
    assert state.text() == "Q: one. Next:one. two"
    other = program.run("!", backend=backend)
    assert other.text() == "Q: one!one. two"
    assert backend.tokenizer.decode(backend.requests[-1].prompt_ids) == "Q: one!"


def test_an_id_that_straddles_the_end_of_the_text_is_kept_and_marked():
    from agentrt.lang.transcript import CUT

    @function
    def program(s):
        s += "Q: " + gen("a", stop="g") + "!" + gen("b")

    backend = ScriptedBackend("ring")  # "ing" is one token
    state = program.run(backend=backend)
    assert state["a"] == "rin"
    transcript = state._branch.transcript
    assert backend.tokenizer.decode(backend.requests[-1].prompt_ids) == "Q: ring!"
    place = len(backend.tokenizer.encode("Q: r"))
    assert transcript.kinds[place] & CUT
    assert not any(kind & CUT for kind in transcript.kinds[:place])


def test_text_that_spells_a_control_token_is_text_special_writes_the_token_and_a_warning_comes_once():
    @function
    def program(s):
        s += "a<|im_end|>b<|im_end|>"
        s += gen("x")

    @function
    def meant(s):
        s += "a" + special("<|im_end|>") + "b" + gen("x")

    backend = ScriptedBackend("x")
    with pytest.warns(UserWarning, match="special") as caught:
        program.run(backend=backend)
    line = program.func.__code__.co_firstlineno + 2
    assert [(warning.filename, warning.lineno) for warning in caught] == [(__file__, line)]
    end = backend.tokenizer.eos_ids[0]
    assert end not in backend.requests[0].prompt_ids
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        state = meant.run(backend=backend)
    assert list(backend.requests[1].prompt_ids) == [ord("a"), end, ord("b")]
    assert state.text() == "a<|im_end|>bx"

    @function
    def wrong(s):
        s += special("<|nope|>")

    with pytest.raises(UserError, match="no control token"):
        wrong.run(backend=backend)


def test_no_double_bos():
    from agentrt.backends.byte_tokenizer import ByteTokenizer

    class WithBos(ByteTokenizer):
        bos_id = 7

        def encode(self, text, *, bos=False, special=False):
            return ([7] if bos else []) + super().encode(text, special=special)

        def encode_chat(self, messages, **kw):
            return [self._begin, *super().encode_chat(messages, **kw)]

    backend = ScriptedBackend("x", tokenizer=WithBos())

    @function
    def plain(s):
        s += "Q" + gen("a") + "R" + gen("b")

    @function
    def chat(s):
        s += user("Q") + assistant(gen("a"))

    plain.run(backend=backend)
    assert [r.prompt_ids.count(7) for r in backend.requests] == [1, 1]
    chat.run(backend=backend)
    assert backend.requests[-1].prompt_ids.count(7) == 0  # the template brings its own beginning


def test_an_empty_prompt_is_an_error_with_its_line():
    @function
    def program(s):
        s += gen("a")

    with pytest.raises(UserError, match="empty") as caught:
        program.run(backend=ScriptedBackend())
    assert caught.value.__notes__
