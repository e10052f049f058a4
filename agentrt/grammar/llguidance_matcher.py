"""The cursor's view of a grammar that llguidance compiled: JSON Schemas and lark grammars.

llguidance parses with Earley's algorithm over lexemes, releases the interpreter's lock while it computes a mask, and
makes forced spans canonical by itself, by the rule that `jump_forward` states. One template per grammar is compiled
and copied for each sequence.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import llguidance
import llguidance.numpy as llguidance_numpy
import numpy as np
from numpy.typing import NDArray

from agentrt.errors import ConstraintError, GrammarError
from agentrt.grammar.vocabulary import Vocabulary

#: Bounds on one grammar's work: lexer states of about 2 kB, steps of a few milliseconds.
LIMITS = llguidance.LLParserLimits(
    initial_lexer_fuel=3_000_000, step_lexer_fuel=500_000, max_lexer_states=100_000, verbose_errors=False
)

#: Characters of a grammar up to which it cannot nest so deep that a plain thread's stack is too small, and the stack for larger ones.
_SHALLOW = 4_000
_STACK = 512 * 2**20
_stack_lock = threading.Lock()


def compiled_template(grammar: str, vocabulary: Vocabulary) -> llguidance.LLMatcher:
    """Compiles llguidance's own text form of a grammar.

    Raises:
        GrammarError: It cannot be compiled; the message is llguidance's.
    """
    tokens = vocabulary.llguidance
    made = partial(llguidance.LLMatcher, tokens, grammar, log_level=0, limits=LIMITS)
    matcher: llguidance.LLMatcher = made() if len(grammar) < _SHALLOW else _on_a_deep_stack(made)
    if matcher.is_error():
        raise GrammarError(_first_lines(matcher.get_error()))
    return matcher


def _on_a_deep_stack(work: Callable[[], Any]) -> Any:
    """Does `work` in a thread of its own with room to recurse.

    llguidance follows references by recursion, and a stack that is too small for a chain of a thousand would end the process. Of
    so large a stack only what is used takes memory.
    """
    results: list[Any] = []
    with _stack_lock:
        before = threading.stack_size(_STACK)
        try:
            thread = threading.Thread(target=lambda: results.append(work()), name="agentrt-deep-grammar")
            thread.start()
        except (RuntimeError, ValueError) as error:
            raise GrammarError("the grammar is large, and there is no memory for a thread to compile it in") from error
        finally:
            threading.stack_size(before)
    thread.join()
    if not results:
        raise GrammarError("the grammar cannot be compiled")
    return results[0]


def _first_lines(message: str) -> str:
    lines = [line.strip() for line in message.strip().splitlines() if line.strip() and not line.startswith("<")]
    return "; ".join(lines[:3])[:400] or "the grammar cannot be compiled"


class LlguidanceMatcher:
    """One sequence's position in a grammar of llguidance's."""

    def __init__(self, template: llguidance.LLMatcher, plain: bool = False, forces: bool = True) -> None:
        """`plain`: the template was compiled without forcing, so masks are the grammar's own and forced runs only drafts; `forces`: there are such runs."""
        self.matcher = template.deep_copy()
        self._plain = plain
        self._forces = forces

    def fill(self, out: NDArray[np.int32]) -> None:
        """Writes the mask into `out`, int32 [words]; contiguous."""
        self.matcher.unsafe_compute_mask_ptr(out.ctypes.data, out.nbytes)
        self.check()

    def check(self) -> None:
        """Raises ConstraintError if llguidance gave up on this sequence."""
        if self.matcher.is_error():
            raise ConstraintError(f"the grammar cannot be followed any further: {_first_lines(self.matcher.get_error())}")

    def advance(self, token_id: int) -> bool:
        """Takes the token; False, and no change, if it is not allowed."""
        taken: int = self.matcher.try_consume_tokens([token_id])
        return taken == 1

    def forced(self) -> list[int]:
        """The canonical tokens that must come next."""
        if not self._forces:
            return []
        if self._plain:
            self.matcher.compute_ff_bytes()  # without it, a template without forcing finds nothing
        return list(self.matcher.compute_ff_tokens())

    def rollback(self, count: int) -> None:
        """Takes back the last `count` tokens."""
        if not self.matcher.rollback(count):
            raise ConstraintError(f"{count} tokens cannot be taken back: {_first_lines(self.matcher.get_error())}")

    @property
    def accepting(self) -> bool:
        """Whether the text may end here."""
        return bool(self.matcher.is_accepting())

    @property
    def finished(self) -> bool:
        """Whether nothing may follow."""
        return bool(self.matcher.is_stopped()) and not self.matcher.is_error()


_executor: llguidance.LLExecutor | None = None


def fill_in_parallel(matchers: Sequence[tuple[LlguidanceMatcher, int]], out: NDArray[np.int32]) -> None:
    """Writes each matcher's mask into its row of `out`, int32 [rows, words], on llguidance's own threads."""
    global _executor
    if _executor is None:
        _executor = llguidance.LLExecutor()
    llguidance_numpy.fill_next_token_bitmask_par(_executor, [(m.matcher, row) for m, row in matchers], out)
    for matcher, _ in matchers:
        matcher.check()
