"""What one branch has said: its ids, the text that readers see, and its chat messages, which grow together.

A `Conversation` writes text, control tokens, messages and tool results, in the model's own chat form; it asks nothing and runs
nothing. Invariant: what it writes goes to the transcript and to the feed alike, and what has been fed is never changed, but by
`compact`, which begins the ids anew.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from agentrt.errors import PromptError, UserError
from agentrt.lang import ir
from agentrt.lang.run import Run
from agentrt.lang.transcript import Piece, Transcript
from agentrt.lang.variables import Feed

Groups = list[list[dict[str, Any]]]  #: chat messages, those that belong together side by side


@dataclass(slots=True)
class Message:
    """One chat message of a branch: its role, and where its content stands in the branch's text (pieces of the feed).

    Attributes:
        role: Its role.
        begin: First piece of its content.
        end: First piece after it, or None while it is open.
        before: Content that stands in the parent branch's text.
        trims: The template strips white space around the content.
        suffix: What ends it.
    """

    role: str
    begin: int
    end: int | None = None
    before: str = ""
    trims: bool = False
    suffix: tuple[Piece, ...] = ()

    def content(self, pieces: list[str]) -> str:
        """Its content, given the pieces of its branch's text."""
        return self.before + "".join(pieces[self.begin : self.end])

    def inherited(self, pieces: list[str], begin: int) -> Message:
        """The same message as a fork sees it, whose own text begins at piece `begin`."""
        end = None if self.end is None else begin
        return Message(self.role, begin, end, self.content(pieces), self.trims, self.suffix)


class Conversation:
    """The written side of a branch; see the module's text.

    Attributes:
        run: What it shares with its siblings.
        transcript: Its ids.
        feed: Its text.
        messages: Its chat messages.
        roles: The chat template's roles, with the tools that it was told of.
        known_ids: Leading ids that an earlier request of this program has computed.
        shared_ids: Leading ids taken over from the parent.
    """

    __slots__ = ("feed", "known_ids", "messages", "roles", "run", "shared_ids", "transcript")

    def __init__(self, run: Run) -> None:
        self.run = run
        self.transcript = Transcript()
        self.feed = Feed()
        self.messages: list[Message] = []
        self.roles = run.roles
        self.known_ids = self.shared_ids = 0

    @property
    def in_chat(self) -> bool:
        """Whether a message is open."""
        return bool(self.messages) and self.messages[-1].end is None

    def write(self, piece: Piece, shown: str | None = None) -> None:
        """Appends text or a control token to the transcript, and to the text that readers see."""
        self.transcript.write(piece)
        if shown is None:
            shown = piece if isinstance(piece, str) else self.run.tokenizer.decode([piece], skip_special=False)
        self.feed.push(shown)

    def begin_message(self, role: str) -> None:
        """Opens a chat message.

        Raises:
            UserError: Another is open.
            PromptError: The model's chat template has no place for it.
        """
        if self.in_chat:
            opened = self.messages[-1].role
            raise UserError(
                f"a message of {role!r} begins while one of {opened!r} is open; end that one first: {opened}_end()"
            )
        pieces = self.roles.pieces([message.role for message in self.messages], role)
        for piece in pieces.prefix:
            self.write(piece)
        self.messages.append(Message(role, len(self.feed.pieces), trims=pieces.trims, suffix=pieces.suffix))

    def end_message(self, role: str) -> None:
        """Closes the open chat message.

        Raises:
            UserError: None of this role is open.
        """
        if not self.in_chat or self.messages[-1].role != role:
            opened = f"a {self.messages[-1].role!r} message is open" if self.in_chat else "no message is open"
            raise UserError(f"a {role!r} message ends, but {opened}")
        message = self.messages[-1]
        message.end = len(self.feed.pieces)
        pending = self.transcript.pending
        if message.trims and message.end > message.begin and pending and isinstance(pending[-1], str):
            pending[-1] = pending[-1].rstrip()
        for piece in message.suffix:
            self.write(piece)

    def rewrite_messages(self) -> None:
        """Writes the messages anew, as `roles` has them; only while nothing has been fed."""
        self.transcript.pending.clear()
        history: list[str] = []
        for message in self.messages:
            pieces = self.roles.pieces(history, message.role)
            history.append(message.role)
            message.suffix, message.trims = pieces.suffix, pieces.trims
            content = message.content(self.feed.pieces)
            ending = pieces.suffix if message.end is not None else ()
            for piece in (*pieces.prefix, content.strip() if pieces.trims else content, *ending):
                self.transcript.write(piece)

    def compact(self, keep: Callable[[Groups], Groups]) -> None:
        """Writes the chat anew from the messages that `keep` returns; the ids begin again, the variables and the text stay.

        Raises:
            UserError: There are no messages, or what `keep` returned is none.
        """
        opened = self.messages[-1].role if self.in_chat else None
        done = [message for message in self.messages if message.end is not None]
        if not done:
            raise UserError("compaction needs chat messages; this state has none yet", param="compact")
        kept = keep(_groups([{"role": m.role, "content": m.content(self.feed.pieces)} for m in done]))
        here = len(self.feed.pieces)
        try:
            self.messages = [Message(m["role"], here, here, m["content"]) for group in kept for m in group]
        except (TypeError, KeyError) as error:
            raise UserError(
                "a compaction hook returns groups of messages: [[{'role': ..., 'content': ...}, ...], ...]"
            ) from error
        self.transcript, self.known_ids, self.shared_ids = Transcript(), 0, 0
        self.rewrite_messages()
        if opened is not None:
            self.begin_message(opened)

    def write_results(self, texts: list[str], where: ir.Where) -> None:
        """Appends the results of tool calls, in the chat template's own form, or in words if it has none."""
        history = [message.role for message in self.messages]
        try:
            around = self.roles.results(history, len(texts))
        except PromptError:
            self.run.warn_once(
                "results", "this model's chat template has no place for tool results; they come as a user's message", where
            )
            self.begin_message("user")
            self.write("\n".join(f"<tool_response>\n{text}\n</tool_response>" for text in texts))
            self.end_message("user")
            return
        for before, text in zip(around, texts, strict=False):
            for piece in before:
                self.write(piece)
            begin = len(self.feed.pieces)
            self.write(text)
            self.messages.append(Message("tool", begin, len(self.feed.pieces)))
        for piece in around[-1]:
            self.write(piece)


def _groups(messages: list[dict[str, Any]]) -> Groups:
    """Messages that belong together: the results of tool calls stay with the turn that made the calls."""
    groups: Groups = []
    for message in messages:
        if message["role"] == "tool" and groups:
            groups[-1].append(message)
        else:
            groups.append([message])
    return groups
