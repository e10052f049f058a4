"""The engine's own process: ``python -m agentrt.engine READ_FD WRITE_FD``. Passes of the garbage collector begin when the engine is built."""

from __future__ import annotations

import gc

if __name__ == "__main__":
    gc.disable()  # before torch comes, a sixth of whose import they are; `collector.settle` ends this
    from agentrt.engine.worker import main

    main()
