"""A tokenizer without a model: bytes, a few longer tokens, and the control tokens of a plain chat template.

The scripted backend uses it, and the remote backend for servers that take text only: ids turn back into exactly the text
that they came from. It is no model's tokenizer and knows no merges beyond the list it is given. Invariant:
``b"".join(token_bytes(i) for i in encode(text)) == text.encode()``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from agentrt.backend import Message
from agentrt.errors import PromptError

#: Tokens of more than one byte, so that where a text is cut matters as it does for real tokenizers.
MERGES = (
    " the",
    " yes",
    " no",
    " and",
    " a",
    "the",
    "ing",
    "er",
    "\n\n",
    ": ",
    ":\n",
    "  ",
    ". ",
    ".\n",
    "</",
    "answer",
    "...",
    "ab",
    "abc",
)
BEGIN, END = "<|im_start|>", "<|im_end|>"
ROLES = ("system", "user", "assistant", "tool", "developer")


class ByteTokenizer:
    """See the module's text.

    Args:
        merges: Texts that are one token each; the longest that fits is taken.
        chat: Whether it has a chat template (ChatML's form).
    """

    def __init__(self, merges: Sequence[str] = MERGES, *, chat: bool = True) -> None:
        longer = sorted({merge.encode() for merge in merges}, key=len, reverse=True)
        self._bytes: list[bytes | None] = [*(bytes((value,)) for value in range(256)), *longer]
        self._ids = {part: token_id for token_id, part in enumerate(self._bytes) if part is not None}
        self._pattern = re.compile(b"|".join([*map(re.escape, longer), b"."]), re.DOTALL)
        self._begin, self._end = len(self._bytes), len(self._bytes) + 1
        self._bytes += [None, None]
        self._special = {BEGIN: self._begin, END: self._end}
        self._spelling = {token_id: text for text, token_id in self._special.items()}
        self._chat = chat

    @property
    def vocab_size(self) -> int:
        """Number of ids."""
        return len(self._bytes)

    @property
    def bos_id(self) -> int | None:
        """None: a text begins with its first byte."""
        return None

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """The end of a message."""
        return (self._end,)

    def encode(self, text: str, *, bos: bool = False, special: bool = False) -> list[int]:
        """Tokenises; see `agentrt.backend.Tokenizer`."""
        if special:
            parts = re.split(f"({re.escape(BEGIN)}|{re.escape(END)})", text)
            return [
                i for part in parts for i in ([self._special[part]] if part in self._special else self.encode(part))
            ]
        ids = self._ids
        return [ids[part] for part in self._pattern.findall(text.encode("utf-8", "surrogatepass"))]

    def decode(self, ids: Iterable[int], *, skip_special: bool = True) -> str:
        """Text of ids; see `agentrt.backend.Tokenizer`."""
        parts = []
        for token_id in ids:
            part = self._bytes[token_id]
            if part is not None:
                parts.append(part)
            elif not skip_special:
                parts.append(self._spelling[token_id].encode())
        return b"".join(parts).decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes | None:
        """Bytes of one id; None for a control token."""
        return self._bytes[token_id] if 0 <= token_id < len(self._bytes) else None

    def encode_chat(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **template_arguments: Any,
    ) -> list[int]:
        """Renders messages in ChatML's form.

        Raises:
            PromptError: There is no chat template, no message, or a role it does not know.
        """
        if not self._chat:
            raise PromptError("this tokenizer has no chat template")
        if not messages:
            raise PromptError("a chat needs at least one message", param="messages")
        ids: list[int] = []
        if tools:
            ids += self._message(
                "system", "Tools:\n" + "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
            )
        for message in messages:
            if message["role"] not in ROLES:
                raise PromptError(f"unknown role {message['role']!r}; roles are {', '.join(ROLES)}", param="messages")
            ids += self._message(message["role"], message.get("content") or "")
        return ids + ([self._begin, *self.encode("assistant\n")] if add_generation_prompt else [])

    def _message(self, role: str, content: str) -> list[int]:
        return [self._begin, *self.encode(f"{role}\n{content}"), self._end, *self.encode("\n")]

    def messages(self, ids: Sequence[int]) -> list[dict[str, str]] | None:
        """Reads ids back as messages; None if they are not a chat. An open assistant message at the end is left out if empty."""
        if not ids or ids[0] != self._begin:
            return None
        found: list[dict[str, str]] = []
        for part in self.decode(ids, skip_special=False).split(BEGIN)[1:]:
            role, _, content = part.partition("\n")
            closed = content.rsplit(END, 1)
            found.append({"role": role, "content": closed[0]})
        if found and found[-1]["role"] == "assistant" and not found[-1]["content"]:
            found.pop()
        return found
