"""A finite automaton over bytes, and the cursor's view of it: masks and forced runs by look-up.

outlines-core turns the regular expression (already read and rewritten by `regex_syntax`) into an automaton: its
`Index` over the 256 single bytes is the byte automaton itself. A token's way through it is its bytes' way, so a state's
mask is one vectorised walk of the whole vocabulary, made when the state is first met (or for all states ahead of
time) and looked up afterwards. States that cannot reach the end are cut away, so that what is left is never a dead end.

The automaton is immutable and shared; the memo of masks only grows, within a bound.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from agentrt.errors import GrammarError
from agentrt.grammar.jump_forward import canonical_run
from agentrt.grammar.killable import PATTERNS, TooManyStatesError
from agentrt.grammar.regex_worker import byte_table
from agentrt.grammar.vocabulary import Vocabulary

#: States that an automaton may have: 1 kB each while it is made, a tenth of that afterwards.
MAX_STATES = 50_000
#: Bytes of masks kept per automaton and vocabulary; beyond it they are computed anew each time.
MASK_BYTES = 16_000_000

#: Characters up to which a pattern is compiled in this process.
SMALL = 10


class ByteAutomaton:
    """States, and the byte that leads from one to another. Bytes that every state treats alike share a column.

    Attributes:
        columns: uint8 [256]; the column of each byte.
        table: int32 [states, columns]; the next state, or -1.
        accepting: bool [states].
        start: The first state; -1 if nothing matches at all.
        forced_byte: int16 [states]; the byte that must come next, or -1.
    """

    def __init__(self, table: NDArray[np.int32], accepting: NDArray[np.bool_], start: int) -> None:
        """`table` is int32 [states, 256]."""
        full, self.accepting, self.start = _trimmed(table, accepting, start)
        self.table, self.columns = _shared_columns(full)
        ways = full >= 0
        only = np.where((ways.sum(axis=1) == 1) & ~self.accepting, ways.argmax(axis=1), -1)
        self.forced_byte: NDArray[np.int16] = only.astype(np.int16)
        self._chains: dict[int, tuple[bytes, int]] = {}

    def walk(self, state: int, text: bytes) -> int:
        """The state after `text`, or -1."""
        for byte in text:
            if state < 0:
                return -1
            state = int(self.table[state, self.columns[byte]])
        return state

    def chain(self, state: int) -> tuple[bytes, int]:
        """The longest text forced from `state`, and the state behind it; walked once, then looked up."""
        found = self._chains.get(state)
        if found is None:
            text, end = bytearray(), state
            while (byte := int(self.forced_byte[end])) >= 0:
                text.append(byte)
                end = int(self.table[end, self.columns[byte]])
            found = self._chains[state] = (bytes(text), end)
        return found

    def __len__(self) -> int:
        return len(self.accepting)


def _shared_columns(full: NDArray[np.int32]) -> tuple[NDArray[np.int32], NDArray[np.uint8]]:
    """The distinct columns of a table, and for each byte which of them is its own."""
    by_content: dict[bytes, int] = {}
    turned = np.ascontiguousarray(full.T)
    columns = np.array([by_content.setdefault(column.tobytes(), len(by_content)) for column in turned], dtype=np.uint8)
    first = [int(np.argmax(columns == i)) for i in range(len(by_content))]
    return np.ascontiguousarray(full[:, first]), columns


def _trimmed(
    table: NDArray[np.int32], accepting: NDArray[np.bool_], start: int
) -> tuple[NDArray[np.int32], NDArray[np.bool_], int]:
    """Cuts away the states from which no accepting state can be reached."""
    alive = _reaching(table, accepting)
    number = np.where(alive, np.cumsum(alive) - 1, -1).astype(np.int32)
    kept = np.where(table >= 0, number[table], -1)[alive].astype(np.int32)
    return kept, accepting[alive], int(number[start]) if len(number) else -1


def _reaching(table: NDArray[np.int32], accepting: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """The states with a way to an accepting state, bool [states]: a search backwards over the distinct moves."""
    sources, bytes_ = np.nonzero(table >= 0)
    moves = np.unique(table[sources, bytes_].astype(np.int64) * len(table) + sources)
    starts = np.searchsorted(moves // len(table), np.arange(len(table) + 1))
    alive = accepting.copy()
    stack = np.flatnonzero(alive).tolist()
    while stack:
        state = stack.pop()
        for source in (moves[starts[state] : starts[state + 1]] % len(table)).tolist():
            if not alive[source]:
                alive[source] = True
                stack.append(source)
    return alive


def byte_automaton(pattern: str, size: int, seconds: float) -> ByteAutomaton:
    """Compiles a pattern that `regex_syntax.write` made.

    Args:
        pattern: The pattern.
        size: Its `regex_syntax.size`; n characters give at most 2**n states, so a small one need not be killable.
        seconds: Most time that it may take.

    Raises:
        TooManyStatesError: The automaton would be larger than MAX_STATES.
        GrammarError: It takes too long or too much memory, or nothing can match.
    """
    table = byte_table(pattern, MAX_STATES) if size <= SMALL else PATTERNS.compile(pattern, MAX_STATES, seconds)
    automaton = ByteAutomaton(*table)
    if automaton.start < 0:
        raise GrammarError("nothing can match the pattern", pointer="0")
    return automaton


def automaton_of_choices(choices: Sequence[bytes]) -> ByteAutomaton:
    """The prefix tree of `choices`.

    Raises:
        TooManyStatesError: They hold too many bytes.
    """
    moves: list[dict[int, int]] = [{}]
    ends = set()
    for choice in choices:
        state = 0
        for byte in choice:
            following = moves[state].get(byte)
            if following is None:
                following = moves[state][byte] = len(moves)
                moves.append({})
            state = following
        ends.add(state)
        if len(moves) > MAX_STATES:
            raise TooManyStatesError(f"the choices' prefix tree has more than {MAX_STATES:,} states", keyword="choices")
    table = np.full((len(moves), 256), -1, dtype=np.int32)
    for state, row in enumerate(moves):
        for byte, following in row.items():
            table[state, byte] = following
    accepting = np.zeros(len(moves), dtype=bool)
    accepting[list(ends)] = True
    return ByteAutomaton(table, accepting, 0)


class TokenFsm:
    """A byte automaton seen through one vocabulary."""

    def __init__(self, automaton: ByteAutomaton, vocabulary: Vocabulary) -> None:
        self.automaton = automaton
        self.vocabulary = vocabulary
        self._masks: dict[int, NDArray[np.int32]] = {}
        self._runs: dict[tuple[int, int | None], tuple[int, ...]] = {}
        self._eos = vocabulary.mask_of(vocabulary.eos_ids)
        self._kept_masks = MASK_BYTES // (4 * vocabulary.words)
        self._lock = threading.Lock()
        vocabulary.prepare()

    def mask(self, state: int) -> NDArray[np.int32]:
        """int32 [words]: tokens whose bytes stay inside the automaton, and the end tokens if `state` accepts."""
        found = self._masks.get(state)
        if found is None:
            found = self._computed(state)
            with self._lock:
                if len(self._masks) < self._kept_masks:
                    self._masks[state] = found
        return found

    def _computed(self, state: int) -> NDArray[np.int32]:
        vocabulary, table, columns = self.vocabulary, self.automaton.table, self.automaton.columns
        ways = np.flatnonzero(table[state, columns] >= 0)
        ids = np.concatenate([vocabulary.by_first_byte[byte] for byte in ways]) if len(ways) else np.empty(0, np.int64)
        states, depth = np.full(len(ids), state, dtype=np.int32), 0
        bits = np.zeros(vocabulary.words * 32, dtype=np.uint8)
        while len(ids):
            states = table[states, columns[vocabulary.flat[vocabulary.starts[ids] + depth]]]
            depth += 1
            alive = states >= 0
            ids, states = ids[alive], states[alive]
            done = vocabulary.lengths[ids] == depth
            bits[ids[done]] = 1
            ids, states = ids[~done], states[~done]
        mask = np.packbits(bits, bitorder="little").view(np.int32)
        if self.automaton.accepting[state]:
            mask = mask | self._eos
        mask.flags.writeable = False
        return mask

    def run(self, state: int, last_token: int | None) -> tuple[int, ...]:
        """The canonical tokens forced from `state`, behind `last_token`."""
        text, end = self.automaton.chain(state)
        if not text:
            return ()
        key = state, last_token
        found = self._runs.get(key)
        if found is None:
            ways = np.flatnonzero(self.automaton.table[end, self.automaton.columns] >= 0).astype(np.uint8).tobytes()
            ids = canonical_run(self.vocabulary, last_token, text, lambda tail: self.automaton.walk(end, tail) >= 0, ways)
            found = tuple(ids)
            if len(self._runs) < 100_000:
                self._runs[key] = found
        return found

    @property
    def nbytes(self) -> int:
        """Memory that it takes at most, masks included."""
        automaton = self.automaton
        masks = min(len(automaton), self._kept_masks) * 4 * self.vocabulary.words
        return automaton.table.nbytes + 100 * len(automaton) + masks

    def warm(self) -> None:
        """Makes every state's mask now (ahead of time), as far as the bound allows."""
        for state in range(min(len(self.automaton), self._kept_masks)):
            self.mask(state)


class FsmMatcher:
    """One sequence's position in a `TokenFsm`."""

    def __init__(self, fsm: TokenFsm, plain: bool = False) -> None:
        """`plain`: masks are the automaton's own, and forced runs only drafts."""
        self._fsm = fsm
        self._plain = plain
        self._states = [fsm.automaton.start]
        self._tokens: list[int] = []

    @property
    def _state(self) -> int:
        return self._states[-1]

    def fill(self, out: NDArray[np.int32]) -> None:
        """Writes the mask into `out`, int32 [words]: one bit if a token is forced."""
        run = () if self._plain else self.forced()
        if run:
            out[:] = 0
            out.view(np.uint32)[run[0] // 32] = np.uint32(1 << run[0] % 32)
        else:
            out[:] = self._fsm.mask(self._state)

    def advance(self, token_id: int) -> bool:
        """Takes the token; False, and no change, if the automaton has no such way."""
        text = self._fsm.vocabulary.token_bytes(token_id)
        state = self._fsm.automaton.walk(self._state, text) if text else -1
        if state < 0:
            return False
        self._states.append(state)
        self._tokens.append(token_id)
        return True

    def forced(self) -> list[int]:
        """The canonical tokens that must come next."""
        return list(self._fsm.run(self._state, self._tokens[-1] if self._tokens else None))

    def rollback(self, count: int) -> None:
        """Takes back the last `count` tokens."""
        del self._states[len(self._states) - count :]
        del self._tokens[len(self._tokens) - count :]

    @property
    def accepting(self) -> bool:
        """Whether the text may end here."""
        return bool(self._fsm.automaton.accepting[self._state])

    @property
    def finished(self) -> bool:
        """Whether nothing may follow."""
        return self.accepting and not (self._fsm.automaton.table[self._state] >= 0).any()
