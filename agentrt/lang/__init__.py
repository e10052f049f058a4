"""The language of agent programs: ``@function``, gen, select, roles, forks, tools.

    expressions ──> ir (nodes) ──> state (what a body holds) ──> interpreter (branches) ──> run ──> Backend
                                      program (what @function makes), batch, tracer

Read `ir`, then `interpreter`. No torch, no engine: anything that speaks `agentrt.backend.Backend` runs programs.
"""
