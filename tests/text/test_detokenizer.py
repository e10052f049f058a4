from __future__ import annotations

from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agentrt.text import Detokenizer

quick = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])


class OnlyBytes:
    """Another backend's tokenizer: it knows the bytes of its tokens, and nothing of our tables."""

    def token_bytes(self, token_id: int) -> bytes | None:
        return None if token_id == 256 else bytes([token_id])


@quick
@given(data=st.data())
def test_pieces_add_up_to_the_whole_whatever_the_ids(byte_level: Any, sentencepiece: Any, data: st.DataObject) -> None:
    for tokenizer in (byte_level(), sentencepiece()):
        ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=40))
        detokenizer = Detokenizer(tokenizer)
        assert "".join(map(detokenizer.push, ids)) + detokenizer.flush() == tokenizer.decode(ids)


@quick
@given(text=st.text(st.characters(exclude_categories=["Cs"]), max_size=30))
def test_a_character_is_given_with_its_last_byte_and_never_before(byte_level: Any, text: str) -> None:
    tokenizer = byte_level()
    detokenizer = Detokenizer(tokenizer)
    arrived = b""
    given_out = ""
    for token_id in tokenizer.encode(text):
        arrived += tokenizer.token_bytes(token_id)
        given_out += detokenizer.push(token_id)
        assert given_out == arrived.decode(errors="ignore")
    assert given_out + detokenizer.flush() == text


def test_a_cut_character_is_one_replacement_at_the_end(byte_level: Any) -> None:
    tokenizer = byte_level()
    *first, _ = tokenizer.encode("👩")
    detokenizer = Detokenizer(tokenizer)
    assert [detokenizer.push(i) for i in first] == ["", "", ""]
    assert detokenizer.push(tokenizer.token_id("<|im_end|>")) == ""  # a control token has no text, and breaks nothing
    assert detokenizer.flush() == "\ufffd"
    assert detokenizer.flush() == ""


def test_any_backends_tokenizer_will_do() -> None:
    detokenizer = Detokenizer(OnlyBytes())  # type: ignore[arg-type]
    assert "".join(map(detokenizer.push, [*"é!".encode(), 256, 0xE2])) + detokenizer.flush() == "é!\ufffd"
