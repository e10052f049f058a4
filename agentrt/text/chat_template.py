"""Renders messages through a model's chat template, keeping apart what the template wrote and what people wrote.

A control token in the rendered text counts only where the template wrote it. To know, each place in the messages
where a control token's text begins, or could begin together with what follows, gets a *guard* after its first
character: one private-use character that occurs nowhere in the input, drawn anew for each rendering. The template may
then cut, trim, join or dump the text as it likes; a guarded spelling is never the token's. Afterwards the text is cut
at the control tokens that are whole, and the guards are taken out of the rest. Invariant: no text in a message, a tool
or an argument becomes a control token.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agentrt.errors import PromptError
from agentrt.text.chat_messages import Message, plain_messages, plain_tools, system_into_user, tools_in_words

#: For a model without a template: what a base model continues best, a transcript.
FALLBACK_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{% if message.role == 'system' %}{{ message.content }}\n\n"
    "{% else %}{{ message.role | capitalize }}: {{ message.content }}\n{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}Assistant:{% endif %}"
)

_PRIVATE_USE = range(0xE000, 0xF900)


@dataclass(frozen=True, slots=True)
class Piece:
    """A stretch of the rendered chat.

    Attributes:
        text: Its text, guards taken out.
        control: Whether it is a control token that the template wrote.
    """

    text: str
    control: bool


class ChatTemplate:
    """A model's chat template; immutable and thread-safe."""

    def __init__(self, source: str | None, named_tokens: Mapping[str, str], control_tokens: Iterable[str]) -> None:
        """Compiles.

        Args:
            source: The template; None for a model that has none, which gets `FALLBACK_TEMPLATE`.
            named_tokens: What the template may name, such as ``bos_token``.
            control_tokens: Texts of the tokens that are special.

        Raises:
            ModelError: The source is not a template.
        """
        from agentrt.text.template_sandbox import SandboxedTemplate  # and jinja2, which a start does not need

        self.is_fallback = source is None
        self._template = SandboxedTemplate(FALLBACK_TEMPLATE if source is None else source)
        self._named_tokens = dict(named_tokens)
        if self.is_fallback:
            self._named_tokens.setdefault("bos_token", "")
        tokens = sorted(set(control_tokens), key=len, reverse=True)
        self._control = re.compile("|".join(map(re.escape, tokens)) or r"(?!)")
        self._tokens = tokens
        self._first = re.compile("[" + "".join(map(re.escape, sorted({token[0] for token in tokens}))) + "]" if tokens else r"(?!)")

    @property
    def knows_tools(self) -> bool:
        """Whether the template itself tells the model of tools."""
        return "tools" in self._template.variables

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **template_arguments: Any,
    ) -> list[Piece]:
        """Renders.

        Args:
            messages: The chat.
            tools: Tools that the model may call.
            add_generation_prompt: End with the beginning of the assistant's answer.
            template_arguments: Further variables of the template, such as ``enable_thinking``.

        Returns:
            The rendered chat in pieces; empty ones left out.

        Raises:
            PromptError: The messages are malformed, or the template refuses them; names its complaint.
        """
        chat = self._known_roles(plain_messages(messages))
        offered = plain_tools(tools) if tools else None
        if not self.knows_tools:
            chat, offered = tools_in_words(chat, offered), None
        guard = _unused_character(chat, offered, template_arguments)
        given: dict[str, Any] = self._named_tokens | self._guarded(template_arguments, guard)
        given |= {"tools": self._guarded(offered, guard), "documents": given.get("documents")}
        given["add_generation_prompt"] = add_generation_prompt
        rendered = self._render_with_or_without_system(chat, given, guard)
        return self._pieces(rendered, guard)

    def _known_roles(self, chat: list[dict[str, Any]]) -> list[dict[str, Any]]:
        if "developer" in self._template.source:
            return chat
        return [message | {"role": "system"} if message["role"] == "developer" else message for message in chat]

    def _render_with_or_without_system(self, chat: list[dict[str, Any]], given: dict[str, Any], guard: str) -> str:
        try:
            return self._template.render(given | {"messages": self._guarded(chat, guard)})
        except PromptError:
            if not any(message["role"] == "system" for message in chat):
                raise
            merged = system_into_user(chat)
            try:
                return self._template.render(given | {"messages": self._guarded(merged, guard)})
            except PromptError:
                pass
            raise  # what it said of the messages as they were given

    def _guarded(self, value: Any, guard: str) -> Any:
        """A copy of `value` with guards in its strings; a role is left alone, since templates spell tokens with it."""
        if isinstance(value, str):
            return self._guarded_text(value, guard)
        if isinstance(value, Mapping):
            return {
                self._guarded(key, guard): item if key == "role" else self._guarded(item, guard)
                for key, item in value.items()
            }
        if isinstance(value, list | tuple):
            return [self._guarded(item, guard) for item in value]
        return value

    def _guarded_text(self, text: str, guard: str) -> str:
        return self._first.sub(lambda match: match[0] + guard if self._may_begin(text, match.start()) else match[0], text)

    def _may_begin(self, text: str, start: int) -> bool:
        """Whether a control token is spelled here, if white space is cut or what follows the text is joined to it."""
        rest = ""
        for token in self._tokens:
            if token[0] != text[start]:
                continue
            rest = rest or _squeezed(text, start, len(self._tokens[0]))
            squeezed = "".join(token.split())
            if rest.startswith(squeezed) or squeezed.startswith(rest):
                return True
        return False

    def _pieces(self, rendered: str, guard: str) -> list[Piece]:
        escaped = f"\\u{ord(guard):04x}"  # as a JSON dump in ASCII has it
        pieces: list[Piece] = []

        def add_text(text: str) -> None:
            if text := text.replace(guard, "").replace(escaped, ""):
                pieces.append(Piece(text, control=False))

        end = 0
        for match in self._control.finditer(rendered):
            add_text(rendered[end : match.start()])
            pieces.append(Piece(match[0], control=True))
            end = match.end()
        add_text(rendered[end:])
        return pieces


def _squeezed(text: str, start: int, length: int) -> str:
    """The next `length` characters of `text` that are not white space; fewer only at its end."""
    window = length
    while True:
        found = "".join(text[start : start + window].split())
        if len(found) >= length or start + window >= len(text):
            return found[:length]
        window *= 2


def _unused_character(*values: Any) -> str:
    """A private-use character, drawn at random, that occurs in none of the values."""
    seen = repr(values)
    for _ in range(64):
        code = secrets.choice(_PRIVATE_USE)
        if chr(code) not in seen and f"\\u{code:04x}" not in seen:
            return chr(code)
    raise PromptError("the messages hold too many different private-use characters", param="messages")
