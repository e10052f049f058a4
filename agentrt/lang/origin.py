"""Where in the author's program something was written: the file and line that errors name.

Invariant: frames of the language's own code are never named.
"""

from __future__ import annotations

import os
import sys

from agentrt.lang.ir import Where

_HOME = os.path.dirname(os.path.abspath(__file__))


def caller() -> Where:
    """File and line of the nearest frame outside the language's own code."""
    frame = sys._getframe(1)
    while frame.f_code.co_filename.startswith(_HOME) and frame.f_back is not None:
        frame = frame.f_back
    return frame.f_code.co_filename, frame.f_lineno
