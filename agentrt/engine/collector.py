"""Python's garbage collector around an engine: it rests while one starts, and passes are rarer in the engine's own process.

By default a full pass walks all that was ever imported, torch included, together with every waiting request: about 0.15 s in the middle
of a step with 10,000 requests alive, and a few of those in a start, which makes hundreds of thousands of objects and hardly one to be
collected. Nearly everything here is freed by reference counts; what is left to the collector is little, and grows slowly. A process that
belongs to somebody else keeps its own collector: an engine in a thread lets it rest for the second or two of its start, and no longer.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

#: Objects made and not freed between two young passes (1 to 2 ms); young passes a middle one (about 10 ms); middle ones a full one.
THRESHOLDS = (5_000, 10, 50)

_lock = threading.Lock()
_resting: list[bool] = []  # one for each start under way: whether the collector was on before it


@contextmanager
def resting() -> Iterator[None]:
    """No passes until the last of those who want none is done; what was made meanwhile counts as old, and waits for a full pass."""
    with _lock:
        _resting.append(gc.isenabled())
        gc.disable()
    try:
        yield
    finally:
        with _lock:
            was_on = _resting.pop()
            if not _resting and was_on:
                if not gc.get_freeze_count():  # both together make everything old, and take no time
                    gc.freeze()
                    gc.unfreeze()
                gc.enable()


def settle() -> None:
    """To be called once in a process of the engine's own, when the engine is built: what is alive now stays, and passes begin."""
    gc.freeze()
    gc.set_threshold(*THRESHOLDS)
    gc.enable()
