"""Turns a pattern into a byte automaton's table with outlines-core; also a small program that does so when asked.

Determinising can take exponential time and memory and cannot be interrupted, so it runs in a process that can be
killed (`killable.py`). This file is that process's whole program: it imports nothing of agentrt.

Over the pipe: a pickle of ("ready",) out at the start; then pickles of (pattern, most states) in, of ("table", table, accepting,
start) or ("error", kind, message) out.
"""

from __future__ import annotations

import pickle
import sys
from typing import BinaryIO

import numpy as np
import outlines_core
from numpy.typing import NDArray

Table = tuple[NDArray[np.int32], NDArray[np.bool_], int]

#: A character that no pattern of ours matches, put before and behind every pattern. Without the one behind, `Index` drops
#: ways: it sees a match only one byte late, prefers one alternative to another ("(a|ab)" never reads "ab"), and forgets what
#: goes on after it. Without the one before, it takes exponential time: it also prepares for matches that begin anywhere, and
#: then "a[0-9]{0,18}" has 2**18 sets of places where one may be under way.
SENTINEL = "\U0010ffff"

_BYTES = outlines_core.Vocabulary(256, {bytes([i]): [i] for i in range(256)})


class TooManyStatesError(ValueError):
    """The automaton is larger than allowed."""


def byte_table(pattern: str, max_states: int) -> Table:
    """Compiles `pattern`: int32 [states, 256] of next states or -1, bool [states] of accepting ones, the first state.

    Raises:
        TooManyStatesError: There are more than `max_states`.
        ValueError: outlines-core refuses the pattern.
    """
    index = outlines_core.Index(f"{SENTINEL}(?:{pattern}){SENTINEL}", _BYTES)
    transitions = index.get_transitions()
    finals = set(index.get_final_states())
    states = {index.get_initial_state()} | finals | set(transitions)
    for row in transitions.values():
        states.update(row.values())
    if len(states) > max_states:
        raise TooManyStatesError(f"the pattern's automaton has {len(states):,} states; the limit is {max_states:,}")
    number = {state: i for i, state in enumerate(sorted(states))}
    table = np.full((len(states), 256), -1, dtype=np.int32)
    for state, row in transitions.items():
        for byte, target in row.items():
            if byte < 256:
                table[number[state], byte] = number[target]
    start = _behind_sentinel(table, number[index.get_initial_state()])
    accepting = _without_last_sentinel(table, np.array([number[state] for state in finals], dtype=np.int32))
    return table, accepting, start


def _behind_sentinel(table: NDArray[np.int32], state: int) -> int:
    """The state after the first sentinel, or -1; the way there is cut off."""
    for byte in SENTINEL.encode():
        if state < 0:
            break
        following = int(table[state, byte])
        table[state] = -1
        state = following
    return state


def _without_last_sentinel(table: NDArray[np.int32], finals: NDArray[np.int32]) -> NDArray[np.bool_]:
    """Cuts the last sentinel off; the states from which it led to the end are the accepting ones, bool [states]."""
    *head, last = SENTINEL.encode()
    ends = np.isin(table[:, last], finals)
    table[ends, last] = -1
    reached = np.arange(len(table), dtype=np.int32)
    for byte in head:
        reached = np.where(reached >= 0, table[reached, byte], -1)
    accepting: NDArray[np.bool_] = (reached >= 0) & ends[reached]
    return accepting


def _answer(request: tuple[str, int]) -> tuple[object, ...]:
    try:
        return ("table", *byte_table(*request))
    except TooManyStatesError as error:
        return ("error", "states", str(error))
    except (ValueError, MemoryError) as error:
        return ("error", "pattern", str(error) or type(error).__name__)


def _serve(source: BinaryIO, sink: BinaryIO) -> None:
    pickle.dump(("ready",), sink)
    sink.flush()
    while True:
        try:
            request = pickle.load(source)
        except EOFError:
            return
        pickle.dump(_answer(request), sink, protocol=5)
        sink.flush()


def _bound_memory(limit: int) -> None:
    try:
        import resource
    except ImportError:  # Windows: the time limit alone has to do
        return
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


if __name__ == "__main__":
    _bound_memory(int(sys.argv[1]))
    _serve(sys.stdin.buffer, sys.stdout.buffer)
