"""The attention interface: runs of new tokens over cached context, for many sequences at once.

A batch is a list of runs. Run ``r`` brings ``query_lengths[r]`` new tokens (rows of q, k and v, run after run) on top of
``context_lengths[r]`` tokens whose KV is in the store. A backend first writes the new k and v to their slots, then lets
every new token attend to its sequence's context and to the run's tokens up to itself. A prefill chunk, a decode, a
forced run and a draft differ only in the length of the run, so backends that are faster drop in without a change above.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Protocol, runtime_checkable

import numpy as np
from torch import Tensor


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """What a layer asks of attention.

    Attributes:
        scale: Factor on q.k.
        window: A token sees itself and the `window - 1` tokens before it; None: all.
        softcap: Scores become ``softcap * tanh(scores / softcap)``; None: off.
    """

    scale: float
    window: int | None = None
    softcap: float | None = None


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """Which tokens see which slots; made once a step, shared by all layers.

    Attributes:
        query_lengths: New tokens of each run, at least 1.
        context_lengths: Cached tokens before each run.
        slots: For each run, int64 [context + new]: the slots of its whole sequence, in order; the last `new` of them
            are where the run's own k and v are written.
        new_slots: int64 [tokens]: those last parts, run after run.
        shared: Groups of runs (indices) and the number of leading slots that they have in common, so that a backend
            may read a shared prefix once; every run is in at most one group. A hint: ignoring it is right too.
        attending: How many tokens of each run attend, the last ones; None: all. What is answered for the others is left open, so a
            backend may attend with all of them; every token's k and v are written all the same.
        prepared: What a backend worked out for this batch and wants to keep for the next layer; `only` shares it, so what depends
            on `attending` is kept under it.
    """

    query_lengths: tuple[int, ...]
    context_lengths: tuple[int, ...]
    slots: tuple[Tensor, ...]
    new_slots: Tensor
    shared: tuple[tuple[tuple[int, ...], int], ...] = ()
    attending: tuple[int, ...] | None = None
    prepared: dict[object, object] = field(default_factory=dict, compare=False, repr=False)

    def only(self, wanted: Tensor) -> AttentionBatch:
        """The same runs, in which no token before a run's first wanted one has to attend.

        Args:
            wanted: int64 [rows], on the CPU: tokens, counted through all runs, in any order.
        """
        rows, lengths = np.sort(wanted.numpy()), np.array(self.query_lengths, dtype=np.int64)
        ends = lengths.cumsum()
        first = np.append(rows, ends[-1:])[rows.searchsorted(ends - lengths)]  # beyond the run's end if none of it is wanted
        return replace(self, attending=tuple(np.maximum(ends - first, 0).tolist()))


class Attention(Protocol):
    """A way to compute attention over the paged store."""

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        store: tuple[Tensor, Tensor],
        batch: AttentionBatch,
        spec: AttentionSpec,
    ) -> Tensor:
        """Writes k and v to the store and attends.

        Args:
            q: [tokens, heads, head_dim], rotary already applied.
            k: [tokens, kv_heads, head_dim], rotary already applied.
            v: [tokens, kv_heads, head_dim].
            store: The layer's keys and values, each [slots, kv_heads, head_dim]; written in place.
            batch: The runs.
            spec: The layer's scale, window and softcap.

        Returns:
            [tokens, heads, head_dim], in q's dtype.
        """
        ...


@runtime_checkable
class FusedAttention(Attention, Protocol):
    """Attention that can also rotate: it takes a layer's q, k and v as the matrix product leaves them."""

    def from_qkv(
        self,
        qkv: Tensor,
        angles: tuple[Tensor, Tensor],
        heads: int,
        store: tuple[Tensor, Tensor],
        batch: AttentionBatch,
        spec: AttentionSpec,
    ) -> Tensor:
        """Rotates q and k, writes k and v to the store, and attends.

        Args:
            qkv: [tokens, heads + 2 * kv_heads, head_dim]: heads of q, of k, of v.
            angles: Cosines and sines of the new tokens, each [tokens, 1, head_dim], the first half of the sines negated.
            heads: Of q.
            store, batch, spec: As for a call.

        Returns:
            [tokens, heads, head_dim], in qkv's dtype.
        """
        ...


@runtime_checkable
class HostPlanned(Protocol):
    """Attention that works a step out on the host, and so wants its slots there; `AttentionBatch.slots` are on the CPU for it."""

    def foresee(self, batch: AttentionBatch, window: int | None, /) -> None:
        """Works out what does not depend on the slots of the new tokens, and keeps it in `batch.prepared`."""
        ...

    def pack(self, batch: AttentionBatch, window: int | None, /) -> object:
        """Works a step out."""
        ...
