"""What each node does when its turn comes: a function of the branch and the queue's item, or a generator of what it waits on.

The steps that ask the model have files of their own (`generate`, `scoring`, `agent`); the others are here. No queue and no thread is
known to a step. Invariant: a step settles its item's variables or raises, and what it raises is the branch's error.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from agentrt.errors import UserError
from agentrt.lang import ir
from agentrt.lang.agent import call_once, loop
from agentrt.lang.generate import generate
from agentrt.lang.items import ForkPoint, Item, JoinPoint, Look
from agentrt.lang.roles import spells_control_token
from agentrt.lang.scoring import select_best
from agentrt.lang.variables import Variable

if TYPE_CHECKING:
    from agentrt.lang.interpreter import Branch

Step = Generator[Future[Any], Any, None]

_CONTROL = re.compile(r"<\|?[\w/]+\|?>|\[/?[A-Z_]+\]")  #: what may spell a control token


def _text(branch: Branch, item: Item) -> None:
    text: str = item.node.text
    if _CONTROL.search(text):
        _warn_of_control(branch, text, item.where)
    if (
        branch.messages
        and branch.messages[-1].trims
        and branch.in_chat
        and len(branch.feed.pieces) == branch.messages[-1].begin
    ):
        text = text.lstrip()
    branch.write(text)


def _warn_of_control(branch: Branch, text: str, where: ir.Where) -> None:
    if "control" not in branch.run.warned and spells_control_token(branch.run.tokenizer, text):
        branch.run.warn_once(
            "control",
            f"{text.strip()[:60]!r} spells a control token; as text it stays text. Write special(...) for the token.",
            where,
        )


def _special(branch: Branch, item: Item) -> None:
    text: str = item.node.text
    tokenizer = branch.run.tokenizer
    ids = tokenizer.encode(text, special=True)
    if len(ids) != 1 or tokenizer.token_bytes(ids[0]) is not None:
        raise UserError(f"special({text!r}): this model has no control token of that spelling", param="special")
    branch.write(ids[0], text)


def _role_begin(branch: Branch, item: Item) -> None:
    branch.begin_message(item.node.role)


def _role_end(branch: Branch, item: Item) -> None:
    branch.end_message(item.node.role)


def _scope_begin(branch: Branch, item: Item) -> None:
    branch.scopes += ((item.variables[0], len(branch.feed.pieces)),)


def _scope_end(branch: Branch, item: Item) -> None:
    *outer, (variable, begin) = branch.scopes
    branch.scopes = tuple(outer)
    text = "".join(branch.feed.pieces[begin:])
    variable.push(text)
    variable.settle(text)


def _media(branch: Branch, item: Item) -> None:
    kind, backend = item.node.kind, branch.run.backend
    able = "takes them, but requests cannot carry them yet" if backend.capabilities.vision else "takes text only"
    raise UserError(f"{kind}(...) was appended, but model {backend.capabilities.model!r} {able}", param=kind)


def _look(branch: Branch, item: Item) -> None:
    item.node.future.set_result(item.node.read(branch))


def _fork(branch: Branch, item: Item) -> None:
    branch.transcript.settle(branch.run.tokenizer)
    branch.transcript.share()
    branch.known_ids = min(branch.known_ids, len(branch.transcript))
    text = branch.feed.text
    for child in item.node.children:
        child.begin_after(branch, text)


def _metas(sources: list[Variable]) -> list[Any]:
    return [source.meta for source in sources]


def _join(branch: Branch, item: Item) -> Step:
    point: JoinPoint = item.node
    failed: BaseException | None = None
    for child, mark in zip(point.children, point.marks, strict=True):
        try:
            yield mark
        except Exception as error:
            child.seen = True
            failed = failed or error
    if failed is not None and not point.keep_errors:
        raise failed
    for variable, sources in point.gathered:
        variable.settle([source.error or source.value for source in sources], sources, _metas)
    if point.append_text:
        for child in point.children:
            branch.write("".join(child.feed.pieces[child.fork_text :]))


STEPS: dict[type, Callable[[Branch, Item], Step | None]] = {
    ir.Text: _text,
    ir.Gen: generate,
    ir.Select: select_best,
    ir.Special: _special,
    ir.RoleBegin: _role_begin,
    ir.RoleEnd: _role_end,
    ir.ScopeBegin: _scope_begin,
    ir.ScopeEnd: _scope_end,
    ir.Media: _media,
    ir.ToolCall: call_once,
    ir.AgentLoop: loop,
    Look: _look,
    ForkPoint: _fork,
    JoinPoint: _join,
}
