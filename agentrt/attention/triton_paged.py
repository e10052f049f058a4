"""Attention over the paged store in Triton kernels: what runs on a GPU.

A step's runs are cut into tiles on the host (`agentrt.kernels.attention_tiles`), once for all layers with the same window, and sent to
the device in one copy; a layer then takes at most four launches: write the new keys and values, attend to narrow tiles, attend
to wide ones, merge. It never asks the device for anything, so the host runs ahead. Slots are read as pages of the store's own
page size, which is what the pool hands out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from agentrt.attention.base import AttentionBatch, AttentionSpec
from agentrt.kernels.attention_tiles import TILE_FIELDS, TileLimits, TileLists, tile_lists
from agentrt.kernels.merge_parts import merge_parts
from agentrt.kernels.paged_attention import PagedKV, Scores, TileShape, attend_tiles, narrow_shape, wide_shape
from agentrt.kernels.rotary_kv import rotate_and_write, write_kv

#: Integers to which sections of the one copy are aligned: kernels are compiled for pointers at multiples of 16 bytes.
_ALIGNMENT = 16
#: Programs that fill the device, for each of its multiprocessors.
_PROGRAMS = 2


@dataclass(frozen=True, slots=True)
class TileCapacity:
    """Room for the lists of a step, in entries; for lists that are made anew in the same memory step after step.

    Attributes:
        tokens, rows, narrow, wide, merged, members, part_rows: Of `TileLists`.
        pages: Of all page tables together.
    """

    tokens: int
    rows: int
    narrow: int
    wide: int
    merged: int
    members: int
    part_rows: int
    pages: int


@dataclass(frozen=True, slots=True)
class DeviceTiles:
    """A step's lists on the device; sections of one int32 tensor.

    Attributes:
        rows, seen, narrow, wide, merge_tokens, merge_starts, merge_members: As in `TileLists`.
        pages: Page tables, one after another.
        part_rows: Room for partial rows.
    """

    rows: Tensor
    seen: Tensor
    narrow: Tensor
    wide: Tensor
    merge_tokens: Tensor
    merge_starts: Tensor
    merge_members: Tensor
    pages: Tensor
    part_rows: int


class TritonAttention:
    """Attention in Triton kernels; see `agentrt.attention.base.Attention` for shapes.

    Attributes:
        page_size: Slots a page of the store.
    """

    def __init__(self, heads: int, kv_heads: int, head_dim: int, page_size: int, device: torch.device) -> None:
        """Fits tiles to a model and a device.

        Args:
            heads, kv_heads, head_dim: Of the model.
            page_size: Slots a page, a power of two.
            device: Where it runs; on a CPU, in Triton's interpreter.
        """
        group = heads // kv_heads
        self.page_size = page_size
        self._narrow, self._wide = narrow_shape(head_dim, group), wide_shape(head_dim, group)
        block = 1 << (group - 1).bit_length()
        cores = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 8
        self._limits = TileLimits(self._narrow.rows // block, self._wide.rows // block, max(_PROGRAMS * cores // kv_heads, 1))
        self._device = device

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        store: tuple[Tensor, Tensor],
        batch: AttentionBatch,
        spec: AttentionSpec,
    ) -> Tensor:
        """Writes k and v to the store and attends."""
        write_kv(k, v, batch.new_slots, *store)
        return self._attend(q, store, batch, spec)

    def from_qkv(
        self, qkv: Tensor, angles: tuple[Tensor, Tensor], heads: int, store: tuple[Tensor, Tensor], batch: AttentionBatch, spec: AttentionSpec
    ) -> Tensor:
        """Rotates q and k, writes k and v to the store, and attends, with one launch less a layer than step by step.

        Args:
            qkv: [tokens, heads + 2 * kv_heads, head_dim]: heads of q, of k, of v.
            angles: Cosines and sines of the new tokens, as `agentrt.models.rotary.Rotary.angles` gives them.
            heads: Of q.
            store, batch, spec: As for a call.
        """
        return self._attend(rotate_and_write(qkv, *angles, batch.new_slots, *store, heads), store, batch, spec)

    def _attend(self, q: Tensor, store: tuple[Tensor, Tensor], batch: AttentionBatch, spec: AttentionSpec) -> Tensor:
        tiles = batch.prepared.get((TritonAttention, spec.window))
        if not isinstance(tiles, DeviceTiles):
            host, sections = self.pack(batch, spec.window)
            tiles = batch.prepared[TritonAttention, spec.window] = sections.on(self._sent(torch.from_numpy(host)))
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        parts = torch.empty((tiles.part_rows, *q.shape[1:]), dtype=torch.float32, device=q.device)
        part_lse = torch.empty((tiles.part_rows, q.shape[1]), dtype=torch.float32, device=q.device)
        paged = PagedKV(*store, tiles.pages, self.page_size)
        scores = Scores(spec.scale, spec.window, spec.softcap)

        def attend(work: Tensor, shape: TileShape) -> None:
            attend_tiles(q, paged, tiles.rows, tiles.seen, work, scores, shape, out, parts, part_lse)

        attend(tiles.narrow, self._narrow)
        attend(tiles.wide, self._wide)
        merge_parts(parts, part_lse, tiles.merge_tokens, tiles.merge_starts, tiles.merge_members, out)
        return out

    def _sent(self, host: Tensor) -> Tensor:
        """The lists on the device, without waiting for the copy."""
        return host.pin_memory().to(self._device, non_blocking=True) if self._device.type == "cuda" else host

    def reserve(
        self, batch: AttentionBatch, windows: Iterable[int | None], new: int, seen: int, *, pinned: bool
    ) -> Callable[[AttentionBatch], None]:
        """Makes room in `batch.prepared` for any step of so many tokens, for whoever runs the same launches step after step.

        Args:
            batch: What the launches are made with.
            windows: Of the model's layers.
            new: Most new tokens of a step, and so most runs.
            seen: Length of all sequences of a step together, at most.
            pinned: Whether to copy from pinned memory.

        Returns:
            Fills the room for a step.
        """
        room = self.capacity(new, seen // self.page_size + new)
        size = Sections.of(room).size
        places: list[tuple[int | None, Tensor, Tensor]] = []
        for window in windows:
            memory = torch.zeros(size, dtype=torch.int32, device=self._device)
            batch.prepared[TritonAttention, window] = Sections.of(room).on(memory)
            places.append((window, torch.empty(size, dtype=torch.int32, pin_memory=pinned), memory))

        def fill(step: AttentionBatch) -> None:
            for window, staging, memory in places:
                host, _ = self.pack(step, window, room)
                staging[: len(host)] = torch.from_numpy(host)
                memory[: len(host)].copy_(staging[: len(host)], non_blocking=True)

        return fill

    def capacity(self, new: int, pages: int) -> TileCapacity:
        """Room for any step of at most so many new tokens with at most so many pages, whatever runs they are, shared prefixes included."""
        most = new + self._limits.wanted  # a tile takes a token at least, and splitting makes at most as many pieces more as are wanted
        return TileCapacity(
            tokens=new,
            rows=2 * new,
            narrow=most,
            wide=most,
            merged=new,
            members=most + most * self._limits.wide_tokens,
            part_rows=most + most * self._limits.wide_tokens,
            pages=pages,
        )

    def pack(self, batch: AttentionBatch, window: int | None, capacity: TileCapacity | None = None) -> tuple[NDArray[np.int32], Sections]:
        """A step's lists as one array, and where each lies in it.

        Args:
            batch: The runs; their slots should be on the CPU, since fetching them would wait for the device.
            window: Of the layers that the lists are for.
            capacity: Room for each list; None: what this step needs.

        Returns:
            int32, no longer than needed (page tables come last, so that unused room for them need not be copied).
        """
        self.foresee(batch, window)
        lists, pages = batch.prepared[TileLists, window], batch.prepared[PageTables]
        assert isinstance(lists, TileLists)  # for the type checker
        assert isinstance(pages, PageTables)
        pages.complete(batch, self.page_size)
        sections = Sections.of(capacity or _needed(lists, len(pages.flat)))
        host = np.zeros(sections.pages + len(pages.flat), np.int32)
        sections.fill(host, lists, pages.flat)
        return host, sections

    def foresee(self, batch: AttentionBatch, window: int | None) -> None:
        """Makes a step's lists, which depend on lengths alone, and its page tables, unless they are there; `pack` completes them."""
        pages = batch.prepared.get(PageTables)
        if not isinstance(pages, PageTables):
            pages = batch.prepared[PageTables] = PageTables.of(batch, self.page_size)
        if (TileLists, window) not in batch.prepared:
            starts = [0, *pages.ends[:-1]]
            batch.prepared[TileLists, window] = tile_lists(batch.query_lengths, batch.context_lengths, starts, batch.shared, window, self._limits)


@dataclass(frozen=True, slots=True)
class PageTables:
    """The pages of a step's runs.

    Attributes:
        flat: int32: the table of each run, one after another.
        ends: Where each ends.
    """

    flat: NDArray[np.int32]
    ends: list[int]

    @classmethod
    def of(cls, batch: AttentionBatch, page_size: int) -> PageTables:
        """From slots, of which those of a single new token may not be known yet."""
        first = [slots.cpu().numpy()[::page_size] for slots in batch.slots]
        flat = np.concatenate(first) // page_size if first else np.zeros(0)
        return cls(flat.astype(np.int32), np.cumsum([len(own) for own in first]).tolist())

    def complete(self, batch: AttentionBatch, page_size: int) -> None:
        """Puts in the pages that a single new token begins, which were perhaps not known before."""
        for new, context, end, slots in zip(batch.query_lengths, batch.context_lengths, self.ends, batch.slots, strict=True):
            if new == 1 and context % page_size == 0:
                self.flat[end - 1] = int(slots[-1]) // page_size


@dataclass(frozen=True, slots=True)
class Sections:
    """Where the lists lie in one int32 array."""

    capacity: TileCapacity
    rows: int
    seen: int
    narrow: int
    wide: int
    merge_tokens: int
    merge_starts: int
    merge_members: int
    pages: int
    size: int

    @classmethod
    def of(cls, capacity: TileCapacity) -> Sections:
        """One after another, each aligned."""
        sizes = (
            capacity.rows, capacity.tokens, TILE_FIELDS * capacity.narrow, TILE_FIELDS * capacity.wide, capacity.merged, capacity.merged + 1,
            capacity.members, capacity.pages,
        )  # fmt: skip
        offsets = np.cumsum([0, *(-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes)]).tolist()
        return cls(capacity, *offsets)

    def fill(self, host: NDArray[np.int32], lists: TileLists, pages: NDArray[np.int32]) -> None:
        """Puts lists into an array of zeros; unused tiles have no rows, unused merges no parts."""
        for offset, part in (
            (self.rows, lists.rows), (self.seen, lists.seen), (self.narrow, lists.narrow.ravel()), (self.wide, lists.wide.ravel()),
            (self.merge_tokens, lists.merge_tokens), (self.merge_members, lists.merge_members),
        ):  # fmt: skip
            host[offset : offset + len(part)] = part
        starts = host[self.merge_starts : self.merge_starts + self.capacity.merged + 1]
        starts[: len(lists.merge_starts)] = lists.merge_starts
        starts[len(lists.merge_starts) :] = lists.merge_starts[-1]
        host[self.pages :] = pages

    def on(self, device: Tensor) -> DeviceTiles:
        """The lists in a copy of the array that `fill` filled."""
        room = self.capacity

        def section(offset: int, size: int) -> Tensor:
            return device[offset : offset + size]

        return DeviceTiles(
            rows=section(self.rows, room.rows),
            seen=section(self.seen, room.tokens),
            narrow=section(self.narrow, TILE_FIELDS * room.narrow).view(-1, TILE_FIELDS),
            wide=section(self.wide, TILE_FIELDS * room.wide).view(-1, TILE_FIELDS),
            merge_tokens=section(self.merge_tokens, room.merged),
            merge_starts=section(self.merge_starts, room.merged + 1),
            merge_members=section(self.merge_members, room.members),
            pages=device[self.pages :],
            part_rows=room.part_rows,
        )


def _needed(lists: TileLists, pages: int) -> TileCapacity:
    return TileCapacity(
        tokens=len(lists.seen),
        rows=len(lists.rows),
        narrow=len(lists.narrow),
        wide=len(lists.wide),
        merged=len(lists.merge_tokens),
        members=len(lists.merge_members),
        part_rows=lists.part_rows,
        pages=pages,
    )
