"""The text of one sample: detokenised as it comes, watched for stop strings, held back while it may still change.

Ids are told as they are; text only when it is certain: never half a character, never what may become a stop string, and
nothing at all before its final check if the answer has one.
"""

from __future__ import annotations

from collections.abc import Callable

from agentrt.backend import Tokenizer
from agentrt.request import SamplingParams
from agentrt.scheduling.sequence import Cursor
from agentrt.text.detokenizer import Detokenizer
from agentrt.text.stop import StopMatcher


class SampleOutput:
    """Watches one sample; satisfies the scheduler's `Watch`."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        sampling: SamplingParams,
        *,
        skip: int = 0,
        new_cursor: Callable[[], Cursor | None] | None = None,
        verify: Callable[[str], list[str]] | None = None,
    ) -> None:
        """Makes an empty output.

        Args:
            tokenizer: Gives the bytes of tokens.
            sampling: Says what stops it.
            skip: Bytes at the beginning that complete the prompt's text, and are not the answer's.
            new_cursor: Gives a cursor at the beginning of the grammar, for another try.
            verify: The final check of the complete text; None if it needs none.
        """
        self._tokenizer = tokenizer
        self._sampling = sampling
        self._skip = skip
        self._new_cursor = new_cursor
        self._verify = verify
        self._begin()

    def _begin(self) -> None:
        sampling = self._sampling
        self._detokenizer = Detokenizer(self._tokenizer, self._skip)
        stops = sampling.stop or sampling.stop_regex
        self._matcher = StopMatcher(sampling.stop, sampling.stop_regex, sampling.include_stop) if stops else None
        self._length = 0
        self._text: list[str] = []  # certain, not taken yet
        self._stopped = False

    def push(self, token_id: int) -> str | None:
        """Takes a token; returns the stop string or pattern that its text completed, if any."""
        self._length += 1
        return self._add(self._detokenizer.push(token_id))

    def _add(self, text: str) -> str | None:
        if not text or self._stopped:
            return None
        if self._matcher is None or self._length < self._sampling.min_tokens:
            self._text.append(text)
            return None
        certain, match = self._matcher.push(text)
        self._text.append(certain)
        self._stopped = match is not None
        return match

    def take(self) -> str:
        """Text that became certain since the last call; "" while a final check is outstanding."""
        if self._verify is not None:
            return ""
        return self._drain()

    def finish(self) -> str:
        """The rest of the text, once nothing more will come."""
        self._close()
        return self._drain()

    def _close(self) -> None:
        if not self._stopped:
            self._add(self._detokenizer.flush())
        if not self._stopped and self._matcher is not None:
            self._text.append(self._matcher.flush())
        self._stopped = True

    def _drain(self) -> str:
        text = "".join(self._text)
        self._text.clear()
        return text

    def violations(self) -> tuple[str, ...]:
        """What the complete text fails of its final check."""
        if self._verify is None:
            return ()
        self._close()
        self._text = ["".join(self._text)]
        return tuple(self._verify(self._text[0]))

    def restart(self) -> Cursor | None:
        """Forgets the text; returns a cursor at the beginning of the grammar."""
        self._begin()
        return self._new_cursor() if self._new_cursor else None
