"""Text to token ids and back, and chats to token ids; no torch, no transformers.

The `tokenizers` library does the splitting and merging. What stands here is what an engine needs beyond it: exact
bytes of every token, text that stays text even where it spells a control token, and knowledge of whether the tokenizer
gives a text back as it was. Invariant: a control token's id comes out of a text only where the caller (``special``)
or the chat template put it.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import tokenizers

from agentrt.errors import ModelError, PromptError
from agentrt.hub import ModelFiles, resolve_model
from agentrt.text.chat_messages import Message
from agentrt.text.chat_template import ChatTemplate, Piece
from agentrt.text.token_table import TokenTable, build_table, kinds_of, state_of

_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token")

#: Characters from which on a text is tokenised without keeping other threads of this process waiting.
LONG_TEXT = 8192

_loading = threading.Lock()

#: Encoded and decoded at load: spaces of every kind, digits, composed and not, emoji that are several characters.
_SELF_TEST = "Round trip: a  12\t34\n\n  caf\u00e9 cafe\u0301 \ufb01 \u4f60\u597d \U0001f469\u200d\U0001f680 </s><|x|> \u00a0 end "


class Tokenizer:
    """A model's tokenizer; immutable and thread-safe.

    Attributes:
        path: The ``tokenizer.json`` it was read from.
        adds_bos: The model was trained with BOS before every text.
        rewrites_text: A text does not come back from its ids as it was.
        rewrites_why: What is changed, or "".
    """

    def __init__(self, files: ModelFiles) -> None:
        """Reads the tokenizer of a model.

        Raises:
            ModelError: The file cannot be read, or is of a kind whose bytes are not certain.
        """
        self.path = files.tokenizer_json
        self._text = _load(files.tokenizer_json)
        self._text.encode_special_tokens = True  # control tokens in a text are text; `_split` finds the others
        self._later = _without_first_prefix(self._text)
        self._vocab_size = _logits_width(files.config) or self._text.get_vocab_size(with_added_tokens=True)
        self._config = files.tokenizer_config
        special = {i: token for i, token in self._text.get_added_tokens_decoder().items() if token.special}
        self._added = {token.content: token for token in special.values()}
        self._control_ids = {token.content: i for i, token in special.items()}
        self._control = re.compile("|".join(map(self._pattern, sorted(self._added, key=len, reverse=True))) or r"(?!)")
        self._bos_id = self._named_id("bos_token", files)
        self._eos_ids = self._end_ids(files)
        self.adds_bos = self._bos_id is not None and self._begins_with_bos()
        self._template_source = files.chat_template
        self.rewrites_why = self._self_test()
        self.rewrites_text = bool(self.rewrites_why)

    @property
    def vocab_size(self) -> int:
        """Width of the logits: ids are below this; some of them may have no token."""
        return self._vocab_size

    @property
    def bos_id(self) -> int | None:
        """Id that begins a text, if the model has one."""
        return self._bos_id

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """Every id that ends an answer."""
        return self._eos_ids

    @property
    def control_ids(self) -> frozenset[int]:
        """Ids of control tokens."""
        return frozenset(self.table.control)

    @cached_property
    def table(self) -> TokenTable:
        """What each id stands for."""
        return build_table(self._text, self._vocab_size)

    @cached_property
    def chat_template(self) -> ChatTemplate:
        """The model's chat template, or the plain one for a model without.

        Raises:
            ModelError: The template cannot be compiled.
        """
        named = {name: text for name in _NAMED_TOKENS if (text := _token_text(self._config.get(name))) is not None}
        if self._template_source is None and not self.adds_bos:
            named.pop("bos_token", None)
        return ChatTemplate(self._template_source, named, self._added)

    def encode(self, text: str, *, bos: bool = False, special: bool = False) -> list[int]:
        """Tokenises `text` in one piece.

        Args:
            text: Any string; text that spells a control token is text unless `special`.
            bos: Put `bos_id` before it, if the model was trained so.
            special: Text that spells a control token becomes that token.

        Raises:
            PromptError: The text has lone surrogates, which are no characters.
        """
        ids = self._encode_pieces(self._split(text)) if special else self._encode_text(text, self._text)
        return self._with_bos(ids) if bos else ids

    def encode_batch(self, texts: Sequence[str], *, bos: bool = False) -> list[list[int]]:
        """Tokenises many texts at once, on all cores; control tokens in them are text.

        Raises:
            PromptError: A text has lone surrogates.
        """
        try:
            encodings = self._text.encode_batch_fast(list(texts), add_special_tokens=False)
        except (UnicodeError, TypeError) as error:
            raise _not_text(error) from error
        return [self._with_bos(encoding.ids) if bos else encoding.ids for encoding in encodings]

    def decode(self, ids: Iterable[int], *, skip_special: bool = True) -> str:
        """Text of `ids`; bytes that are not UTF-8 become U+FFFD.

        Raises:
            PromptError: An id is outside the vocabulary.
        """
        table = self.table
        parts: list[bytes] = []
        for token_id in ids:
            self._check_id(token_id)
            content = table.bytes_of[token_id]
            if content is not None:
                parts.append(content)
            elif not skip_special and token_id in table.control:
                parts.append(table.control[token_id].encode())
        return b"".join(parts).decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes | None:
        """The bytes that the token stands for; None for a control token or an id without a token.

        Raises:
            PromptError: The id is outside the vocabulary.
        """
        self._check_id(token_id)
        return self.table.bytes_of[token_id]

    def token_exists(self, token_id: int) -> bool:
        """Whether the id has a token. The logits may be wider than the vocabulary; such ids are never to be chosen."""
        if not 0 <= token_id < self._vocab_size:
            return False
        return self.table.bytes_of[token_id] is not None or token_id in self.table.control

    def token_id(self, text: str) -> int | None:
        """Id of the control token with that text, or None."""
        return self._control_ids.get(text)

    def render_chat(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **template_arguments: Any,
    ) -> str:
        """The chat as the template writes it, to be read by people: which tokens were the template's is lost.

        Raises:
            PromptError: As `encode_chat`.
        """
        pieces = self.chat_template.render(
            messages, tools=tools, add_generation_prompt=add_generation_prompt, **template_arguments
        )
        return "".join(piece.text for piece in pieces)

    def encode_chat(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **template_arguments: Any,
    ) -> list[int]:
        """Renders messages through the model's chat template and tokenises them; control tokens in the messages' own text stay text.

        Args:
            messages: The chat; contents are text, lists of text parts, or None.
            tools: Tools that the model may call. A template that knows none is given them in words.
            add_generation_prompt: End with the beginning of the assistant's answer.
            template_arguments: Further variables of the template.

        Raises:
            PromptError: The messages are malformed, or the template refuses them; names its complaint.
        """
        pieces = self.chat_template.render(
            messages, tools=tools, add_generation_prompt=add_generation_prompt, **template_arguments
        )
        return self._encode_pieces(pieces)

    def _encode_pieces(self, pieces: Iterable[Piece]) -> list[int]:
        ids: list[int] = []
        for index, piece in enumerate(pieces):
            if piece.control:
                ids.append(self._control_ids[piece.text])
            else:
                ids += self._encode_text(piece.text, self._later if index else self._text)
        return ids

    def _encode_text(self, text: str, tokenizer: tokenizers.Tokenizer) -> list[int]:
        try:
            if len(text) > LONG_TEXT:  # as a batch, since the library lets other threads run only then
                return list(tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids)
            return list(tokenizer.encode(text, add_special_tokens=False).ids)
        except (UnicodeError, TypeError) as error:
            raise _not_text(error) from error

    def _split(self, text: str) -> list[Piece]:
        """Cuts a text at the control tokens it spells."""
        pieces: list[Piece] = []
        end = 0
        for match in self._control.finditer(text):
            if match.start() > end:
                pieces.append(Piece(text[end : match.start()], control=False))
            pieces.append(Piece(next(group for group in match.groups() if group), control=True))
            end = match.end()
        if end < len(text):
            pieces.append(Piece(text[end:], control=False))
        return pieces

    def _pattern(self, text: str) -> str:
        """How a control token is found in a text; some swallow the white space beside them."""
        token = self._added[text]
        return (r"\s*" if token.lstrip else "") + f"({re.escape(text)})" + (r"\s*" if token.rstrip else "")

    def _with_bos(self, ids: list[int]) -> list[int]:
        if not self.adds_bos or self._bos_id is None or ids[:1] == [self._bos_id]:
            return ids
        return [self._bos_id, *ids]

    def _check_id(self, token_id: int) -> None:
        if not 0 <= token_id < self._vocab_size:
            raise PromptError(f"token id {token_id} is outside the vocabulary of {self._vocab_size} ids", param="ids")

    def _named_id(self, name: str, files: ModelFiles) -> int | None:
        text = _token_text(self._config.get(name))
        if text is not None:
            return self._text.token_to_id(text)
        found = files.generation_config.get(f"{name}_id", files.config.get(f"{name}_id"))
        return found if isinstance(found, int) else None

    def _end_ids(self, files: ModelFiles) -> tuple[int, ...]:
        named = files.generation_config.get("eos_token_id")
        if named is None:
            named = files.config.get("eos_token_id")
        ids = list(named) if isinstance(named, list) else [named]
        ids.append(self._named_id("eos_token", files))
        return tuple(dict.fromkeys(i for i in ids if isinstance(i, int) and 0 <= i < self._vocab_size))

    def _begins_with_bos(self) -> bool:
        told = self._config.get("add_bos_token")
        if isinstance(told, bool):
            return told
        return self._text.encode("a", add_special_tokens=True).ids[:1] == [self._bos_id]

    def _self_test(self) -> str:
        """What becomes of a text on the way to ids and back; "" if nothing."""
        back = self.decode(self.encode(_SELF_TEST))
        if back == _SELF_TEST:
            return ""
        if back == " " + _SELF_TEST:
            return "it puts a space before a text"
        kinds = kinds_of(self._text.normalizer) | kinds_of(self._text.pre_tokenizer)
        return f"its steps {', '.join(sorted(kinds)) or '(none named)'} change the text"


def _load(path: Path) -> tokenizers.Tokenizer:
    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise ModelError(f"{path} is not a tokenizer that can be read: {error}", param="model") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _without_first_prefix(tokenizer: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    """For the pieces after the first: some tokenizers put a space before the first piece of a text only."""
    state = state_of(tokenizer.pre_tokenizer)
    if not isinstance(state, dict) or '"prepend_scheme": "first"' not in json.dumps(state):
        return tokenizer
    whole = json.loads(tokenizer.to_str())
    whole["pre_tokenizer"] = json.loads(json.dumps(state).replace('"prepend_scheme": "first"', '"prepend_scheme": "never"'))
    later = tokenizers.Tokenizer.from_str(json.dumps(whole))
    later.encode_special_tokens = True
    return later


def _logits_width(config: Mapping[str, Any]) -> int:
    width = config.get("vocab_size") or (config.get("text_config") or {}).get("vocab_size")
    return width if isinstance(width, int) else 0


def _token_text(value: Any) -> str | None:
    """A named token is a text, or an object with its content."""
    if isinstance(value, Mapping):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _not_text(error: Exception) -> PromptError:
    return PromptError(f"the text cannot be tokenised: {error}; lone surrogates are no characters", param="text")


def load_tokenizer(model: str | None = None) -> Tokenizer:
    """Loads the tokenizer of a model, fetching the model first where that is needed; the last few are kept.

    Args:
        model: As for `agentrt.hub.resolve`; None is the default model.

    Raises:
        ModelError: The model cannot be had or read.
    """
    files = resolve_model(model)
    with _loading:  # an engine in a thread and who starts it want the same one at the same time
        return _loaded(files.folder, files.tokenizer_json.stat().st_mtime_ns, model)


@lru_cache(maxsize=4)
def _loaded(folder: Path, changed_ns: int, model: str | None) -> Tokenizer:
    return Tokenizer(resolve_model(model))
