"""The real scheduler, tree and pool without a model: traces, virtual time, bounds and reports."""
