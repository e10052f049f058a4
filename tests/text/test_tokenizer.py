from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agentrt import backend
from agentrt.errors import ModelError, PromptError
from agentrt.hub import resolve_model
from agentrt.text import Tokenizer, load_tokenizer

ANY_TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=60)
SPELLED = st.lists(st.sampled_from(["<|im_end|>", "<|im_start|>", "</s>", "<|im_", "end|>", "<think>", "a  12", "é", "\n"]), max_size=6).map("".join)
quick = settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])


@quick
@given(text=ANY_TEXT | SPELLED)
def test_bytes_of_the_ids_are_the_bytes_of_the_text(byte_level: Any, sentencepiece: Any, text: str) -> None:
    for tokenizer, prefix in ((byte_level(), ""), (sentencepiece(add_space_prefix=False), ""), (sentencepiece(), " " if text else "")):
        ids = tokenizer.encode(text)
        assert b"".join(tokenizer.token_bytes(i) for i in ids) == (prefix + text).encode()
        assert tokenizer.decode(ids) == prefix + text
        assert tokenizer.encode_batch([text, "b"])[0] == ids
        assert not tokenizer.control_ids & set(ids)


@quick
@given(text=SPELLED)
def test_special_makes_control_tokens_of_what_spells_them(byte_level: Any, text: str) -> None:
    tokenizer = byte_level()
    ids = tokenizer.encode(text, special=True)
    assert tokenizer.decode(ids, skip_special=False) == text
    spelled = {name: text.count(name) for name in ("<|im_end|>", "<|im_start|>", "</s>")}
    assert {name: ids.count(tokenizer.token_id(name)) for name in spelled} == spelled
    without = tokenizer.decode(ids)
    for name in spelled:
        text = text.replace(name, "")
    assert without == text


def test_which_ids_have_a_token(byte_level: Any) -> None:
    tokenizer = byte_level()
    assert isinstance(tokenizer, backend.Tokenizer)
    unused, beyond = tokenizer.vocab_size - 4, tokenizer.vocab_size - 1
    end = tokenizer.token_id("<|im_end|>")
    assert tokenizer.eos_ids == (end,)
    assert tokenizer.token_exists(end)
    assert tokenizer.token_bytes(end) is None
    assert [tokenizer.token_exists(i) for i in (unused, beyond, -1, tokenizer.vocab_size)] == [False] * 4
    assert tokenizer.token_bytes(beyond) is None
    assert tokenizer.decode([beyond, *tokenizer.encode("x")]) == "x"
    for wrong in (-1, tokenizer.vocab_size):
        with pytest.raises(PromptError, match=str(wrong)):
            tokenizer.decode([wrong])


def test_bos_only_where_the_model_was_trained_so(byte_level: Any, sentencepiece: Any) -> None:
    plain, trained = byte_level(), byte_level(add_bos_token=True)
    assert plain.encode("a", bos=True) == plain.encode("a")
    assert trained.encode("a", bos=True) == [trained.bos_id, *trained.encode("a")]
    assert trained.encode("<|im_start|>a", bos=True, special=True) == [trained.bos_id, *trained.encode("a")]  # not twice
    assert trained.encode_batch(["a"], bos=True) == [[trained.bos_id, *trained.encode("a")]]
    assert sentencepiece().encode("", bos=True) == [1]


def test_a_tokenizer_that_rewrites_text_says_so(byte_level: Any, sentencepiece: Any) -> None:
    assert not byte_level().rewrites_text
    assert not sentencepiece(add_space_prefix=False).rewrites_text
    prefixed = sentencepiece()
    assert (prefixed.rewrites_text, prefixed.rewrites_why) == (True, "it puts a space before a text")


def test_a_normaliser_is_named_and_an_unknown_kind_refused(byte_level: Any, tmp_path: Path) -> None:
    import tokenizers

    byte_level()
    path = tmp_path / "tokenizer.json"
    changed = tokenizers.Tokenizer.from_file(str(path))
    changed.normalizer = tokenizers.normalizers.NFC()
    changed.save(str(path))
    assert "NFC" in Tokenizer(resolve_model(str(tmp_path))).rewrites_why
    changed.decoder = tokenizers.decoders.WordPiece()
    changed.save(str(path))
    with pytest.raises(ModelError, match="WordPiece"):
        Tokenizer(resolve_model(str(tmp_path)))
    path.write_text("{}")
    with pytest.raises(ModelError, match="not a tokenizer that can be read"):
        Tokenizer(resolve_model(str(tmp_path)))


def test_a_prefix_for_the_first_piece_only_is_only_there(sentencepiece: Any, tmp_path: Path) -> None:
    import tokenizers

    sentencepiece()
    path = tmp_path / "tokenizer.json"
    changed = tokenizers.Tokenizer.from_file(str(path))
    changed.normalizer = None
    changed.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    changed.save(str(path))
    tokenizer = Tokenizer(resolve_model(str(tmp_path)))
    changed.encode_special_tokens = False
    for text in ("a<|im_end|>b", "<|im_end|>ab ab", "ab"):
        assert tokenizer.encode(text, special=True) == changed.encode(text, add_special_tokens=False).ids


def test_lone_surrogates_are_refused(byte_level: Any) -> None:
    for call in (lambda: byte_level().encode("a\ud800"), lambda: byte_level().encode_batch(["a\ud800"])):
        with pytest.raises(PromptError, match="lone surrogates"):
            call()


def test_threads_may_share_it(byte_level: Any) -> None:
    tokenizer = byte_level()
    texts = [f"thread {i} <|im_end|>" * 20 for i in range(32)]

    def round_trip(text: str) -> bool:
        chat = tokenizer.encode_chat([{"role": "user", "content": text}])
        return tokenizer.decode(tokenizer.encode(text)) == text and chat.count(tokenizer.token_id("<|im_end|>")) == 1

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(round_trip, texts * 4))


RECORDED = {
    "a  12": ([81, 256, 33, 34], [64, 220, 220, 16, 17]),
    "Hello, world!": ([19556, 28, 905, 17], [9707, 11, 1879, 0]),
    "3.14 is 2x\n\n\tdone": (
        [35, 30, 33, 36, 314, 216, 34, 104, 1116, 197, 22744],
        [18, 13, 16, 19, 374, 220, 17, 87, 271, 40495],
    ),
    "naïve café 你好 👩\u200d🚀": (
        [3546, 46494, 37366, 216, 18645, 250, 48392, 138, 15107, 235, 119, 321, 231, 10813, 244, 218],
        [3376, 37572, 586, 51950, 220, 108386, 61804, 102, 378, 235, 145836],
    ),
    "I'm they'll WE'LL": ([57, 5248, 502, 3060, 26587, 23, 16421], [40, 2776, 807, 3278, 19677, 6, 4086]),
    "<|im_end|>": ([44, 108, 306, 79, 486, 108, 46], [27, 91, 318, 6213, 91, 29]),
}


@pytest.mark.model
@pytest.mark.parametrize("text", RECORDED)
def test_recorded_ids_of_the_default_model(small_model: Tokenizer, text: str) -> None:
    assert small_model.encode(text) == RECORDED[text][0]


@pytest.mark.model
@pytest.mark.slow
@pytest.mark.parametrize("text", RECORDED)
def test_recorded_ids_of_the_model_that_calls_tools(tool_model: Tokenizer, text: str) -> None:
    assert tool_model.encode(text) == RECORDED[text][1]


@pytest.mark.model
def test_facts_of_the_default_model(small_model: Tokenizer) -> None:
    assert (small_model.vocab_size, small_model.eos_ids, small_model.adds_bos) == (49_152, (2, 0), False)
    assert not small_model.rewrites_text
    assert load_tokenizer() is small_model


@pytest.mark.model
@pytest.mark.slow
def test_ids_are_those_of_transformers(small_model: Tokenizer, tool_model: Tokenizer) -> None:
    """On ordinary text. transformers' own reading of the GGUF splits digits of the default model wrongly, so none here."""
    import transformers

    texts = ["The quick brown fox jumps over the lazy dog.", "def f(x):\n    return x + y\n\n", "naïve café, 你好; 👩\u200d🚀!", " leading", "trailing  "]
    for tokenizer, name in ((small_model, None), (tool_model, "qwen2.5-coder-0.5b")):
        path = resolve_model(name).gguf
        assert path is not None
        theirs = transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
        for text in texts:
            assert tokenizer.encode(text) == theirs(text, add_special_tokens=False)["input_ids"], (name, text)


@pytest.mark.model
def test_loading_imports_neither_torch_nor_transformers() -> None:
    program = "import sys, agentrt.text as t; t.load_tokenizer().encode_chat([{'role': 'user', 'content': 'x'}]); print([m for m in ('torch', 'transformers', 'gguf') if m in sys.modules])"
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert found.stdout.strip() == "[]"
