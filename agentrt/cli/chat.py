"""``agentrt chat``: a conversation in the terminal."""

from __future__ import annotations

from typing import Any

from agentrt.backend import stream
from agentrt.cli.generate import Options
from agentrt.cli.start import console
from agentrt.errors import UserError
from agentrt.runtime import Engine

HELP = "Type and press Enter. /clear begins anew, /quit (or Ctrl-D) leaves; Ctrl-C stops an answer."


def run(options: Options) -> None:
    """Talks until the user leaves."""
    with options.engine() as engine:
        console.print(f"[bold]{engine.capabilities.model}[/]  [dim]{HELP}[/]")
        messages = _beginning(options)
        while (text := _ask()) is not None:
            if text == "/clear":
                messages = _beginning(options)
            elif text:
                messages.append({"role": "user", "content": text})
                _answer(engine, messages, options)


def _beginning(options: Options) -> list[dict[str, Any]]:
    return [{"role": "system", "content": options.system}] if options.system else []


def _ask() -> str | None:
    """What the user typed; None to leave."""
    try:
        text = input("> ").strip()
    except EOFError:
        return None
    return None if text in ("/quit", "/exit") else text


def _answer(engine: Engine, messages: list[dict[str, Any]], options: Options) -> None:
    """Streams one answer and appends it; a message that does not fit is taken back."""
    try:
        request = engine.request(messages, options.sampling(engine.facts.sampling))
        deltas = stream(engine, request)
    except UserError as error:
        console.print(f"[red]{error}[/]")
        messages.pop()
        return
    parts: list[str] = []
    usage = None
    try:
        for delta in deltas:
            print(delta.text, end="", flush=True)
            parts.append(delta.text)
            usage = delta.usage or usage
    except KeyboardInterrupt:
        console.print("[dim] (stopped)[/]", end="")
    print()
    messages.append({"role": "assistant", "content": "".join(parts)})
    if usage is not None:
        console.print(f"[dim]{usage.prompt_tokens} prompt tokens, {usage.cached_tokens} of them reused[/]")
