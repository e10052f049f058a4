"""Where the command line talks: to the person on standard error, so that the answer on standard output can be piped.

What comes from outside (an error, a path, a model's name) is shown as it is and never read as rich's markup or emoji codes.
"""

from __future__ import annotations

import sys

from rich.console import Console
from rich.text import Text

console = Console(stderr=True)


def say(message: str, style: str = "", screen: Console = console) -> None:
    """Prints a message as it is, and never folds it: what is in it is there to be copied."""
    screen.print(Text(message, style=style), soft_wrap=True)


def complain(error: BaseException) -> None:
    """Prints an error as it is."""
    console.print(Text.assemble(("error:", "bold red"), " ", str(error)), soft_wrap=True)


def show(piece: str) -> None:
    """Prints a piece of an answer on standard output; what its encoding cannot hold becomes a question mark."""
    encoding = sys.stdout.encoding or "utf-8"
    print(piece.encode(encoding, "replace").decode(encoding), end="", flush=True)
