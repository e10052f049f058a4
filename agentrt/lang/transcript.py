"""What one branch has said so far, as token ids: the fed, the sampled and the forced, and text that waits to be tokenised.

Text waits until ids are needed (`settle`), and is then tokenised in one piece, so that two appends give the ids of one
string. Generated ids are appended as they are and never tokenised again. It knows no backend beyond a tokenizer and
makes no request. Invariant: ``len(kinds) == len(transcript)``, and an id that a request has been made with changes only by
being cut off the end (what a stop string hides), which leaves every cached prefix valid. The branches of a fork share the ids
before it, as one tuple: a thousand of them hold it once.

Where a stop string matched, the answer's text ends before its ids do::

    ids     ... | The | Ġend | . | </ | answer | >        text "The end."
                                 ^keep            overhang "</answer>"

If the program goes on by writing the overhang itself, as most do, the ids already hold it and all of them are kept;
otherwise what lies wholly beyond the text is cut, and an id that straddles the boundary stays, marked `CUT`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection
from dataclasses import dataclass

from agentrt.backend import Tokenizer
from agentrt.request import FinishReason, Sample

FED, SAMPLED, FORCED, CUT = 0, 1, 2, 4  #: kinds of an id; CUT is added to the others

_SAMPLED = bytes((SAMPLED,))

Piece = str | int  #: pending text, or the id of a control token


@dataclass(frozen=True, slots=True)
class Overhang:
    """Text that the ids hold beyond the answer's text, and how many ids to keep if it is not wanted."""

    text: str
    keep: int
    straddles: bool


class Transcript:
    """Ids and pending text of one branch; see the module's text. One thread at a time."""

    __slots__ = ("_own", "_shared", "ended", "kinds", "logprobs", "overhang", "pending")

    def __init__(self, shared: tuple[int, ...] = ()) -> None:
        self._shared = shared
        self._own: list[int] = []
        self.kinds = bytearray()
        self.logprobs: dict[int, float] = {}  #: place in `ids` -> log-probability, where known
        self.pending: list[Piece] = []
        self.overhang: Overhang | None = None
        self.ended: int | None = None  #: end token that the model sampled last; it was never fed

    def __len__(self) -> int:
        return len(self._shared) + len(self._own)

    @property
    def ids(self) -> tuple[int, ...]:
        """All ids; where nothing came after a fork, the very tuple that its branches share."""
        if not self._own:
            return self._shared
        return (*self._shared, *self._own) if self._shared else tuple(self._own)

    @ids.setter
    def ids(self, ids: Collection[int]) -> None:
        self._shared, self._own = (), list(ids)

    def share(self) -> None:
        """Makes one tuple of all ids so far, which every copy from now on begins with."""
        self._shared, self._own = self.ids, []

    def copy(self) -> Transcript:
        """Returns an independent copy."""
        twin = Transcript(self._shared)
        twin._own, twin.kinds, twin.logprobs = self._own.copy(), self.kinds.copy(), self.logprobs.copy()
        twin.pending, twin.overhang, twin.ended = self.pending.copy(), self.overhang, self.ended
        return twin

    def write(self, piece: Piece) -> None:
        """Appends text, or a control token by its id; nothing is tokenised yet."""
        self.pending.append(piece)

    def settle(self, tokenizer: Tokenizer, *, heal: bool = False) -> bytes:
        """Tokenises what is pending.

        Args:
            tokenizer: The model's.
            heal: Leave out the last token of the text, so that the generation may complete it in another way.

        Returns:
            The bytes of the token that was left out; empty if none was.
        """
        if not self.pending:  # an answer directly after an answer
            if self.overhang is not None:
                self._trim()
            return b""
        pieces, self.pending = _merged(self.pending), []
        pieces = self._continue_answer(pieces)
        first_new = len(self)
        for piece in pieces:
            if isinstance(piece, int):
                self._extend([piece], FED)
            elif piece:
                self._extend(tokenizer.encode(piece, bos=not len(self)), FED)
        return self._cut_last(tokenizer, first_new) if heal and isinstance(pieces[-1], str) else b""

    def _continue_answer(self, pieces: list[Piece]) -> list[Piece]:
        first = pieces[0]
        if self.overhang is not None:
            if isinstance(first, str) and first.startswith(self.overhang.text):
                first = first[len(self.overhang.text) :]
                self.overhang = None
                return [first, *pieces[1:]]
            self._trim()
        if self.ended is not None and first == self.ended:
            self._extend([self.ended], SAMPLED)
            pieces = pieces[1:] or [""]
        self.ended = None
        return pieces

    def _trim(self) -> None:
        over, self.overhang = self.overhang, None
        if over is not None:
            del self._own[over.keep - len(self._shared) :], self.kinds[over.keep :]
            if over.straddles:
                self.kinds[-1] |= CUT

    def _cut_last(self, tokenizer: Tokenizer, first_new: int) -> bytes:
        if len(self) <= max(first_new, 1):
            return b""
        tail = tokenizer.token_bytes(self._own[-1])
        if not tail:
            return b""
        del self._own[-1], self.kinds[-1]
        return tail

    def _extend(self, ids: Collection[int], kind: int) -> None:
        self._own.extend(ids)
        self.kinds.extend(bytes((kind,)) * len(ids))

    def add_choice(self, ids: Collection[int], logprobs: Collection[float] = ()) -> None:
        """Appends the ids of a choice that was selected."""
        self._note_logprobs(logprobs)
        self._extend(ids, SAMPLED)

    def add_answer(self, sample: Sample, tokenizer: Tokenizer, ends: Collection[int], healed: bytes = b"") -> None:
        """Appends a generated answer's ids as they are, but for the end token, which was sampled and never fed.

        Args:
            sample: The answer.
            tokenizer: The model's.
            ends: Ids that end an answer.
            healed: Bytes that the ids begin with and the text does not (see `settle`).
        """
        ids, kinds = list(sample.token_ids), bytearray(_SAMPLED * len(sample.token_ids))
        if True in sample.forced:
            for place, forced in enumerate(sample.forced):
                if forced:
                    kinds[place] = FORCED
        if sample.logprobs:
            self._note_logprobs([t.logprob or 0.0 for t in sample.logprobs])
        self.ended = None
        stopped = bool(ids) and sample.finish_reason is FinishReason.STOP
        if stopped and (ids[-1] in ends or tokenizer.token_bytes(ids[-1]) is None):
            self.ended = ids.pop()
            kinds.pop()
        start = len(self)
        self._own += ids
        self.kinds += kinds
        if isinstance(sample.stop_match, str):
            self.overhang = _overhang(ids, start, healed.decode("utf-8", "replace") + sample.text, tokenizer)

    def _note_logprobs(self, logprobs: Collection[float]) -> None:
        start = len(self)
        for place, logprob in enumerate(logprobs):
            self.logprobs[start + place] = logprob


def _merged(pieces: list[Piece]) -> list[Piece]:
    if len(pieces) == 1:
        return pieces
    merged: list[Piece] = []
    run: list[str] = []
    for piece in pieces:
        if isinstance(piece, str):
            run.append(piece)
            continue
        if run:
            merged.append("".join(run))
            run = []
        merged.append(piece)
    if run:
        merged.append("".join(run))
    return merged


def _overhang(ids: list[int], start: int, text: str, tokenizer: Tokenizer) -> Overhang | None:
    """Finds where the text ends among the ids that began at `start`; None if it ends with them."""
    whole = tokenizer.decode(ids)
    if len(whole) <= len(text) or not whole.startswith(text):
        return None
    keep = bisect_left(range(len(ids)), True, key=lambda count: tokenizer.decode(ids[:count]).startswith(text))
    return Overhang(whole[len(text) :], start + keep, tokenizer.decode(ids[:keep]) != text)
