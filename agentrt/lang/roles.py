"""Chat roles one at a time: the pieces that the model's own chat template puts around each message.

A template renders a whole conversation; a program appends one message after another and must never change what was fed.
So each role's prefix and suffix are derived: the conversation so far is rendered with a sentinel for every content, with
and without the new message, and the pieces are what stands between the sentinels. Every derivation is checked: the
longer rendering must begin with the shorter one. Where a template rewrites its history (so that no piece-by-piece rendering
can equal it), what was fed stays fed and the new message gets the pieces of the longer rendering's last message, with
one warning; where a model has no template, messages are written as ``USER: ...`` lines, with one warning.

Pieces are control tokens (ids) and plain text; the text is tokenised with the message's own, as the template's
rendering would be. Nothing here is per program: pieces are remembered per tokenizer.
"""

from __future__ import annotations

import json
import warnings
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agentrt.backend import Tokenizer
from agentrt.errors import AgentrtError, PromptError
from agentrt.lang.transcript import Piece
from agentrt.text.chat_messages import describe_tools
from agentrt.text.tool_format import CallFormat, guess_format

Unit = str | int  #: one character, or the id of a control token

_PROBE = {"type": "function", "function": {"name": "probe", "parameters": {"type": "object", "properties": {}}}}
_IN_WORDS = describe_tools(()).partition("\n")[0]  #: how a model is told of tools whose template has no place for them

_REMEMBERED = 4096  #: conversations (by their roles) whose pieces are kept per tokenizer


@dataclass(frozen=True, slots=True)
class RolePieces:
    """What stands around one message.

    Attributes:
        prefix: Before its content.
        suffix: After its content.
        trims: The template strips white space around the content.
    """

    prefix: tuple[Piece, ...]
    suffix: tuple[Piece, ...]
    trims: bool = False


class ChatRoles:
    """The role pieces of one tokenizer's chat template."""

    def __init__(self, tokenizer: Tokenizer, tools: Sequence[Mapping[str, Any]] | None = None) -> None:
        self._tokenizer = weakref.ref(tokenizer)
        self.tools = tools
        self._offering: dict[str, ChatRoles] = {}
        self._format: CallFormat | None = None
        self._known: dict[tuple[str, ...], RolePieces] = {}
        self._without_template = False
        self._knows_tools: bool | None = None

    def pieces(self, history: Sequence[str], role: str) -> RolePieces:
        """Returns the pieces around a message of `role` after messages of the roles in `history`.

        Raises:
            PromptError: The template refuses such a conversation.
        """
        roles = (*history, role)
        found = self._known.get(roles)
        if found is None:
            if len(self._known) >= _REMEMBERED:
                self._known.clear()
            found = self._known[roles] = self._derive(roles)
        return found

    def with_tools(self, schemas: Sequence[Mapping[str, Any]]) -> ChatRoles:
        """The same template, telling the model of these tools (in OpenAI's form)."""
        key = json.dumps(schemas, ensure_ascii=False, sort_keys=True)
        if key not in self._offering:
            if len(self._offering) >= 64:
                self._offering.clear()
            tokenizer = self._tokenizer()
            assert tokenizer is not None, "asked through the tokenizer"
            self._offering[key] = ChatRoles(tokenizer, schemas)
        return self._offering[key]

    def knows_tools(self) -> bool:
        """Whether the template itself tells the model of tools; one that does not is given them in words."""
        if self._knows_tools is None:
            tokenizer = self._tokenizer()
            assert tokenizer is not None, "asked through the tokenizer"
            try:
                ids = tokenizer.encode_chat([{"role": "user", "content": "probe"}], tools=[_PROBE])
                self._knows_tools = _IN_WORDS not in tokenizer.decode(ids, skip_special=False)
            except (PromptError, LookupError, NotImplementedError):
                self._knows_tools = False
        return self._knows_tools

    def call_format(self) -> CallFormat:
        """The way of writing calls that the template shows for a turn that calls; Hermes' if it shows none."""
        if self._format is None:
            tokenizer = self._tokenizer()
            assert tokenizer is not None, "asked through the tokenizer"
            call = {"type": "function", "id": "call00000", "function": {"name": "probe", "arguments": {"key": "value"}}}
            turns: list[dict[str, Any]] = [
                {"role": "user", "content": "probe"},
                {"role": "assistant", "content": "", "tool_calls": [call]},
            ]
            try:
                shown = tokenizer.decode(tokenizer.encode_chat(turns, add_generation_prompt=False), skip_special=False)
            except (PromptError, LookupError, NotImplementedError):
                shown = ""
            self._format = guess_format(shown)
        return self._format

    def results(self, history: Sequence[str], count: int) -> list[tuple[Piece, ...]]:
        """The pieces around the results of `count` calls after messages of the roles in `history`: before, between, and after.

        Templates join neighbouring results in ways of their own, so they are derived together.

        Raises:
            PromptError: The template has no place for them.
        """
        roles = (*history, *("tool",) * count)
        rest = self._render(roles)
        begun = self._render(tuple(history))
        if rest[: len(begun)] != begun:
            raise PromptError("the chat template renders earlier messages differently when results follow")
        rest = rest[len(begun) :]
        pieces: list[tuple[Piece, ...]] = []
        for place in range(len(history), len(roles)):
            before, rest, _ = _around(rest, place, roles)
            pieces.append(_grouped(before))
        return [*pieces, _grouped(rest)]

    def _derive(self, roles: tuple[str, ...]) -> RolePieces:
        if self._without_template:
            return _plain(roles[-1])
        try:
            return self._from_template(roles)
        except (PromptError, LookupError, NotImplementedError) as error:
            if self._has_template():
                raise PromptError(
                    f"the model's chat template refuses a {roles[-1]!r} message after {list(roles[:-1])}: {error}"
                ) from error
        self._without_template = True
        warnings.warn("this model has no chat template; roles are written as 'USER: ...' lines", stacklevel=2)
        return _plain(roles[-1])

    def _has_template(self) -> bool:
        try:
            self._render(("user",))
        except (PromptError, LookupError, NotImplementedError):
            return False
        return True

    def _from_template(self, roles: tuple[str, ...]) -> RolePieces:
        history = roles[:-1]
        whole = self._render(roles)
        before, after, trims = _around(whole, len(history), roles)
        prefix = self._new_units(history, before)
        if roles[-1] == "assistant":  # what invites the model to speak, not what stands before a past answer
            prefix = self._invitation(history) or prefix
        return RolePieces(_grouped(prefix), _grouped(after), trims)

    def _new_units(self, history: tuple[str, ...], before: list[Unit]) -> list[Unit]:
        """What of `before` (everything before the new content) was not there when the history ended."""
        if not history:
            return before
        shorter = self._render(history)
        if before[: len(shorter)] == shorter:
            return before[len(shorter) :]
        warnings.warn(
            "this model's chat template renders earlier messages differently when new ones follow; what was fed stays as it was",
            stacklevel=2,
        )
        _, after, _ = _around(shorter, len(history) - 1, history)
        _, rest, _ = _around(before, len(history) - 1, history)
        common = next(
            (i for i, (a, b) in enumerate(zip(after, rest, strict=False)) if a != b), min(len(after), len(rest))
        )
        return rest[common:]

    def _invitation(self, history: tuple[str, ...]) -> list[Unit]:
        if not history:
            return []
        invited, silent = self._render(history, generate=True), self._render(history)
        return invited[len(silent) :] if invited[: len(silent)] == silent else []

    def _render(self, roles: tuple[str, ...], *, generate: bool = False) -> list[Unit]:
        tokenizer = self._tokenizer()
        assert tokenizer is not None, "asked through the tokenizer"
        messages = [{"role": role, "content": _sentinel(place, role)} for place, role in enumerate(roles)]
        return _units(tokenizer, tokenizer.encode_chat(messages, tools=self.tools, add_generation_prompt=generate))


def _sentinel(place: int, role: str) -> str:
    # A tool's result may be parsed by the template, so it is JSON too; the spaces show whether content is trimmed.
    return f' "zq{place}qz" ' if role == "tool" else f" zq{place}qz "


def _around(units: list[Unit], place: int, roles: tuple[str, ...]) -> tuple[list[Unit], list[Unit], bool]:
    """Splits at one sentinel: (before, after, whether its spaces were trimmed)."""
    full = _sentinel(place, roles[place])
    for needle in (full, full.strip()):
        start = _find(units, list(needle))
        if start >= 0:
            return units[:start], units[start + len(needle) :], needle != full
    raise PromptError(f"the chat template drops or rewrites the content of {roles[place]!r} messages")


def _find(units: list[Unit], needle: list[str]) -> int:
    size = len(needle)
    return next((i for i in range(len(units) - size, -1, -1) if units[i : i + size] == needle), -1)


def _units(tokenizer: Tokenizer, ids: list[int]) -> list[Unit]:
    units: list[Unit] = []
    text = b""
    for token_id in ids:
        part = tokenizer.token_bytes(token_id)
        if part is None:
            units.extend(text.decode("utf-8", "replace"))
            units.append(token_id)
            text = b""
        else:
            text += part
    units.extend(text.decode("utf-8", "replace"))
    return units


def _grouped(units: list[Unit]) -> tuple[Piece, ...]:
    pieces: list[Piece] = []
    for unit in units:
        if isinstance(unit, str) and pieces and isinstance(pieces[-1], str):
            pieces[-1] += unit
        else:
            pieces.append(unit)
    return tuple(pieces)


def _plain(role: str) -> RolePieces:
    return RolePieces((f"{role.upper()}: ",), ("\n",))


_by_tokenizer: weakref.WeakKeyDictionary[Any, ChatRoles] = weakref.WeakKeyDictionary()


def chat_roles(tokenizer: Tokenizer) -> ChatRoles:
    """Returns the roles of this tokenizer's template, derived once."""
    found = _by_tokenizer.get(tokenizer)
    if found is None:
        found = _by_tokenizer[tokenizer] = ChatRoles(tokenizer)
    return found


def spells_control_token(tokenizer: Tokenizer, text: str) -> bool:
    """Whether `text` would be tokenised to control tokens if its spelling were taken for them."""
    try:
        return tokenizer.encode(text, special=True) != tokenizer.encode(text)
    except AgentrtError:
        return False
