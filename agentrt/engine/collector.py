"""Python's garbage collector in the engine's own process: what is there for good is not looked at again, and passes are rarer.

By default a full pass walks all that was ever imported, torch included, together with every waiting request: about 0.15 s in the middle
of a step with 10,000 requests alive. Nearly everything here is freed by reference counts; what is left to the collector is
little, and grows slowly. Not for a process that belongs to somebody else: an engine in a thread leaves the collector alone.
"""

from __future__ import annotations

import gc

#: Objects made and not freed between two young passes (1 to 2 ms); young passes a middle one (about 10 ms); middle ones a full one.
THRESHOLDS = (5_000, 10, 50)


def settle() -> None:
    """To be called once, when the engine is built: what is alive now stays."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*THRESHOLDS)
