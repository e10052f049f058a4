"""Tokenizers and corpora for the grammar room's tests."""

import json
import os
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from agentrt.grammar.check import ByteTokenizer, byte_tokenizer


@pytest.fixture(scope="session")
def byte_tokens() -> ByteTokenizer:
    """One token a byte."""
    return byte_tokenizer()


class TrainedTokenizer:
    """A byte-level BPE trained here on JSON-like text, so that tokens span the seams that jump-forward has to mind."""

    bos_id = None

    def __init__(self) -> None:
        self._tokenizer = Tokenizer(models.BPE())
        self._tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        self._tokenizer.decoder = decoders.ByteLevel()
        words = ["name", "arguments", "get_weather", "city", "unit", "celsius", "temperature", "description", "items", "value"]
        text = [f'{{"{a}": "{b}", "{b}": [{len(a)}, true, null], "x": {{"{a}": 12.5}}}}' for a in words for b in words]
        text += ["<tool_call>\n" + line + "\n</tool_call>" for line in text] + ["é ü 漢字 🙂 the quick brown fox, 2024-12-31"] * 20
        trainer = trainers.BpeTrainer(
            vocab_size=1200, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), special_tokens=["<eos>", "<end>"], show_progress=False
        )
        self._tokenizer.train_from_iterator(text, trainer)
        self.vocab_size = self._tokenizer.get_vocab_size()
        self.eos_ids = (0, 1)
        alphabet = {char: byte for byte, char in _byte_alphabet().items()}
        self._bytes = [
            None if i < 2 else bytes(alphabet[c] for c in self._tokenizer.id_to_token(i)) for i in range(self.vocab_size)
        ]

    def encode(self, text: str, *, bos: bool = False, special: bool = False) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, ids, *, skip_special: bool = True) -> str:
        return b"".join(self._bytes[i] or b"" for i in ids).decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes | None:
        return self._bytes[token_id]


def _byte_alphabet() -> dict[int, str]:
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in plain]
    return {b: chr(b) for b in plain} | {b: chr(256 + i) for i, b in enumerate(others)}


@pytest.fixture(scope="session")
def trained_tokens() -> TrainedTokenizer:
    """A small byte-level BPE."""
    return TrainedTokenizer()


@pytest.fixture(scope="session")
def corpora() -> Path:
    """The folder of corpora."""
    folder = Path(os.environ.get("AGENTRT_CORPORA", Path(__file__).parents[3] / "shared" / "data"))
    if not (folder / "structured").is_dir():
        pytest.skip(f"no corpora in {folder} (set AGENTRT_CORPORA)")
    return folder


@pytest.fixture(scope="session")
def read_corpus(corpora):
    """Reads one corpus of schemas by its file's name."""


    def read(name):
        with (corpora / "structured" / name).open(encoding="utf-8") as lines:
            return [json.loads(line) for line in lines]

    return read
