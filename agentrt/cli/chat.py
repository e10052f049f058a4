"""``agentrt chat``: a conversation in the terminal. Only the engine's own end, or the user, ends it.

Invariant: the messages end with an answer whenever the user is asked, so that a turn that failed leaves nothing behind.
"""

from __future__ import annotations

from typing import Any

from agentrt.backend import DeltaStream, stream
from agentrt.cli.console import complain, say, show
from agentrt.cli.generate import Options
from agentrt.errors import AgentrtError, EngineError
from agentrt.request import SamplingParams, Usage
from agentrt.runtime import Engine

HELP = "Type and press Enter. /clear begins anew, /quit (or Ctrl-D) leaves; Ctrl-C stops an answer."


def run(options: Options) -> None:
    """Talks until the user leaves.

    Raises:
        EngineError: The engine is down.
    """
    changes = options.sampling_changes()
    with options.engine() as engine:
        sampling = engine.facts.sampling.replace(**changes)
        say(engine.capabilities.model, "bold")
        say(HELP, "dim")
        messages = _beginning(options)
        while (text := _ask()) is not None:
            if text == "/clear":
                messages = _beginning(options)
            elif text:
                messages += _turn(engine, [*messages, {"role": "user", "content": text}], sampling)


def _beginning(options: Options) -> list[dict[str, Any]]:
    return [{"role": "system", "content": options.system}] if options.system else []


def _ask() -> str | None:
    """What the user typed; None to leave. Ctrl-C takes back what was typed, and a Ctrl-C for an answer that just ended."""
    try:
        text = input("> ").strip()
    except EOFError:
        return None
    except KeyboardInterrupt:
        print()
        return ""
    return None if text in ("/quit", "/exit") else text


def _turn(engine: Engine, messages: list[dict[str, Any]], sampling: SamplingParams) -> list[dict[str, Any]]:
    """Streams the answer to the last message; returns what the turn adds to the conversation: both of them, or nothing."""
    parts: list[str] = []
    try:
        deltas = stream(engine, engine.request(messages, sampling))
        usage = _show(deltas, parts)
    except EngineError:
        raise
    except AgentrtError as error:
        if parts:
            print()
        complain(error)
        say("your message is taken back; the conversation goes on", "dim")
        return []
    except KeyboardInterrupt:  # the stream is lost, and with it the request
        say(" (stopped)", "dim")
        usage = None
    if usage is not None:
        say(f"{usage.prompt_tokens} prompt tokens, {usage.cached_tokens} of them reused", "dim")
    text = "".join(parts)
    return [messages[-1], {"role": "assistant", "content": text}] if text or usage else []


def _show(deltas: DeltaStream, parts: list[str]) -> Usage | None:
    """Prints the pieces of an answer as they come, and collects them."""
    usage = None
    try:
        for delta in deltas:
            show(delta.text)
            parts.append(delta.text)
            usage = delta.usage or usage
    finally:
        deltas.close()
    print()
    return usage
