"""The page pool: which pages of the KV store are free, and which ones to hand out next.

A page is a fixed group of token slots: page ``p`` stands for slots ``p * page_size`` to ``(p + 1) * page_size - 1``.
The pool knows nothing of tokens, sequences or tensors; it gives out page numbers and takes them back. It prefers long
runs of neighbouring pages, since attention reads a run as a view and scattered pages as a gather.

Free pages lie in *extents* (maximal runs of free pages, joined with their neighbours as they come back) or in
*reservations*: the pages just after a sequence's last one, kept aside so that sequences that grow side by side do not
interleave. A reservation is a preference and no more: its pages count as free, and go to whoever needs them when no
extent is left.

Invariant: every page is used, or in one extent, or in one reservation; never two of these, and
``free_count`` is the number of pages that are not used.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from agentrt.errors import UserError

RESERVE_TOKENS = 64
"""Slots kept aside after a sequence's last page: a few dozen decode steps without another's page in between."""

Pages = Sequence[int] | NDArray[np.int32]


class PagePool:
    """Hands out pages and takes them back, in time that depends on how many they are and not on the pool's size.

    Args:
        pages: Pages in all, at least 1.
        page_size: Token slots a page, at least 1; only used to size reservations.

    Raises:
        UserError: Either is less than 1.
    """

    def __init__(self, pages: int, page_size: int) -> None:
        for name, value in (("pages", pages), ("page_size", page_size)):
            if value < 1:
                raise UserError(f"{name} is {value!r}; the page pool needs at least 1", param=name)
        self.total = pages
        self.page_size = page_size
        self.reserve = max(1, RESERVE_TOKENS // page_size) if pages >= 64 else 0
        self._used = bytearray(pages)
        self._free_count = 0
        self._extents: dict[int, int] = {}  # first page -> length
        self._extent_ends: dict[int, int] = {}  # page after the last -> first page
        # Extents by size: bin b holds the first pages of extents of 2**(b-1) to 2**b - 1 pages.
        self._bins: list[dict[int, None]] = [{} for _ in range(pages.bit_length() + 1)]
        self._reservations: OrderedDict[int, int] = OrderedDict()  # first page -> length, least recently used first
        self._free_count = pages
        self._add_extent(0, pages)

    @property
    def free_count(self) -> int:
        """Pages that nobody owns."""
        return self._free_count

    def allocate(self, count: int, after: int | None = None, *, expect: int = 0) -> list[int] | None:
        """Hands out `count` pages.

        Args:
            count: How many.
            after: The page that the sequence owns last; the new ones follow it where they can.
            expect: How many more the sequence is likely to want next; as many are kept aside if there are.

        Returns:
            The pages, in the order in which the sequence should use them; None if not that many are free (nothing
            changes then).
        """
        if count > self._free_count:
            return None
        if count == 1 and after is not None and self._reservations.get(after + 1, 0) > max(self.reserve // 2, 1):
            return [self._next_of_reservation(after + 1)]
        pages: list[int] = []
        if after is not None:
            self._follow(after + 1, count, pages)
        # Who took a long run (a prefill chunk) is likely to want another: bounded, so that eight such takers leave half the pool.
        wish = max(self.reserve, expect, min(count, self.total // 16))
        while len(pages) < count:
            self._start_elsewhere(count - len(pages), wish, pages)
        if pages:
            self._free_count -= count
            self._keep_aside(pages[-1] + 1, wish if self.reserve else 0)
        return pages

    def free(self, pages: Pages) -> None:
        """Takes pages back, in any order.

        Raises:
            RuntimeError: A page is not the pool's, or is free already (twice in the list counts too). Nothing is taken.
        """
        runs = _runs(pages)
        for start, stop in runs:
            self._check_used(start, stop)
        previous = -1
        for start, stop in runs:
            if start < previous:
                raise RuntimeError(f"page {start} is freed twice in one call")
            previous = stop
        for start, stop in runs:
            self._used[start:stop] = bytes(stop - start)
            self._free_count += stop - start
            # What was kept aside after the run's last page has lost its owner.
            stop += self._reservations.pop(stop, 0)
            self._add_extent(start, stop - start)

    def settle(self, page: int) -> None:
        """Says that the sequence whose last page is `page` will grow no more: what is kept aside after it is anyone's."""
        length = self._reservations.pop(page + 1, 0)
        if length:
            self._add_extent(page + 1, length)

    def check(self) -> None:
        """Verifies the pool's invariant, at a cost that grows with the pool.

        Raises:
            RuntimeError: It does not hold.
        """
        claimed = bytearray(self._used)
        for start, length in [*self._extents.items(), *self._reservations.items()]:
            if length < 1 or any(claimed[start : start + length]):
                raise RuntimeError(f"free pages {start} to {start + length - 1} are owned twice")
            claimed[start : start + length] = b"\x01" * length
        if 0 in claimed:
            raise RuntimeError(f"page {claimed.index(0)} is neither used nor free")
        if self._used.count(0) != self._free_count:
            raise RuntimeError(f"{self._used.count(0)} pages are free, but {self._free_count} are counted")
        if any(start in self._extent_ends for start in self._extents):
            raise RuntimeError("two neighbouring extents were not joined")

    # -- where pages change hands ------------------------------------------------------------------------------------
    #
    #        used            used by the caller     reservation             extent
    #   ... [after] | first ................ last | next ..... next+wish | ............ |
    #                 taken from the front of      kept aside for this    stays free for all
    #                 a reservation or an extent   caller's next pages

    def _next_of_reservation(self, page: int) -> int:
        """Takes the first page of a reservation of several: what a sequence that grows by a token needs, most of the time."""
        length = self._reservations.pop(page)
        self._reservations[page + 1] = length - 1  # now the most recently used
        self._used[page] = 1
        self._free_count -= 1
        return page

    def _follow(self, page: int, count: int, pages: list[int]) -> None:
        """Takes up to `count` pages from `page` on, as long as they are free: reservation first, then the extent behind it."""
        while len(pages) < count:
            length = self._reservations.pop(page, 0) or self._remove_extent(page)
            if not length:
                return
            page = self._take_front(page, length, count - len(pages), pages)

    def _start_elsewhere(self, count: int, wish: int, pages: list[int]) -> None:
        """Takes up to `count` pages from the extent that fits best, breaking reservations if there is no extent."""
        start = self._best_extent(count + wish, count)
        if start is None:
            start, length = self._reservations.popitem(last=False)
        else:
            length = self._remove_extent(start)
        self._take_front(start, length, count, pages)

    def _take_front(self, start: int, length: int, count: int, pages: list[int]) -> int:
        """Takes up to `count` pages off a run of free ones that is in no list now; the rest becomes an extent. Returns the next page."""
        taken = min(count, length)
        self._used[start : start + taken] = b"\x01" * taken
        pages.extend(range(start, start + taken))
        if taken < length:
            self._add_extent(start + taken, length - taken)
        return start + taken

    def _keep_aside(self, page: int, wish: int) -> None:
        """Turns up to `wish` pages from `page` on into a reservation, if they begin an extent."""
        length = self._remove_extent(page)
        kept = min(wish, length)
        if kept:
            self._reservations[page] = kept
        if kept < length:
            self._insert_extent(page + kept, length - kept)

    def _best_extent(self, wanted: int, least: int) -> int | None:
        """First page of an extent of `wanted` pages, or of `least`, or else of one of the longest; None if there is none."""
        for size in (wanted, least):
            # Every extent in a bin above size's own is long enough; the smallest such bin leaves the longest runs whole.
            for extents in self._bins[size.bit_length() + 1 :]:
                if extents:
                    return _last(extents)
            own = self._bins[size.bit_length()] if size.bit_length() < len(self._bins) else {}
            start = _last(own)
            if start is not None and self._extents[start] >= size:
                return start
        return next((_last(extents) for extents in reversed(self._bins) if extents), None)

    def _add_extent(self, start: int, length: int) -> None:
        """Makes a run of pages an extent, joined with the extents on both sides."""
        left = self._extent_ends.get(start)
        if left is not None:
            length += self._remove_extent(left)
            start = left
        length += self._remove_extent(start + length)
        self._insert_extent(start, length)

    def _insert_extent(self, start: int, length: int) -> None:
        self._extents[start] = length
        self._extent_ends[start + length] = start
        self._bins[length.bit_length()][start] = None

    def _remove_extent(self, start: int) -> int:
        """Forgets the extent that begins at `start`; returns its length, 0 if there is none."""
        length = self._extents.pop(start, 0)
        if length:
            del self._extent_ends[start + length]
            del self._bins[length.bit_length()][start]
        return length

    def _check_used(self, start: int, stop: int) -> None:
        if start < 0 or stop > self.total:
            page = start if start < 0 else max(start, self.total)
            raise RuntimeError(f"page {page} is not of this pool, whose pages are 0 to {self.total - 1}")
        free = self._used.find(0, start, stop)
        if free >= 0:
            raise RuntimeError(f"page {free} is freed, but it is free already")


def _last(extents: dict[int, None]) -> int | None:
    """The key that was added last. ``popitem`` trims the dict's dead tail, which iterating backwards would walk each time."""
    if not extents:
        return None
    start, _ = extents.popitem()
    extents[start] = None
    return start


def _runs(pages: Pages) -> list[tuple[int, int]]:
    """The runs of neighbouring pages, as (first, page after the last), ascending."""
    if len(pages) == 1:
        return [(int(pages[0]), int(pages[0]) + 1)]
    ordered = np.sort(np.asarray(pages, dtype=np.int64))
    if not len(ordered):
        return []
    cuts = np.flatnonzero(np.diff(ordered) != 1) + 1
    firsts = ordered[np.concatenate(([0], cuts))].tolist()
    lasts = ordered[np.concatenate((cuts - 1, [len(ordered) - 1]))].tolist()
    return [(first, last + 1) for first, last in zip(firsts, lasts, strict=True)]
