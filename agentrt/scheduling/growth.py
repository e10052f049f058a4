"""How many tokens a running sequence is likely to generate still, so that admission leaves room for it.

Requests bound their output loosely, if at all, so reserving `max_tokens` for each would leave the pool half empty, and
reserving nothing would preempt all the time. The guess is learnt: the mean output of the sequences that ended lately, as
far as the request allows it. A wrong guess costs a preemption or an idle page, nothing else.
"""

from __future__ import annotations

from agentrt.scheduling.sequence import Sequence

MEMORY = 32
"""Sequences over which the mean output is taken, roughly."""

FIRST_GUESS = 64.0
"""Mean output before any sequence has ended."""

LEAST = 8
"""Tokens that a sequence is expected to go on for, however long it has been."""


class Growth:
    """The guess, and what it is learnt from."""

    def __init__(self) -> None:
        self._typical = FIRST_GUESS

    def ended(self, sequence: Sequence) -> None:
        """Learns from a sequence that ended well."""
        self._typical += (sequence.output_length - self._typical) / MEMORY

    def length(self, sequence: Sequence) -> int:
        """Tokens that the sequence is thought to have at its end."""
        length = len(sequence.token_ids)
        more = max(self._typical - (length - sequence.prompt_length), LEAST)
        return max(length, min(sequence.max_length, length + round(more)))
