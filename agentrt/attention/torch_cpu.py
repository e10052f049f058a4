"""Attention over the paged store in plain torch operators, on any device: the fallback that is always there.

What is the same for all layers (which slots each run reads, and its mask) is worked out once a step and kept in
``batch.prepared``. Long runs, and runs with long contexts in neighbouring slots, are attended to one by one, the latter
on views of the store; other short runs are gathered and padded into one call. A prefix that several runs share is read
once for all of them and merged with what each reads alone. Padding is masked: no run ever sees another's tokens.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from agentrt.attention.base import AttentionBatch, AttentionSpec
from agentrt.attention.dense import attend, attend_with_lse
from agentrt.attention.int_store import dequantized, quantized

SHORT_RUN = 8  #: Runs of up to so many new tokens may be gathered and padded together.
VIEW_TOKENS = (
    128  #: Short runs that read fewer are padded together too: calls of their own would cost more than the copy.
)
PADDING = 1.25  #: How much longer than the shortest the longest sequence of a padded call may be.
SHARED_TOKENS = 64  #: A shared prefix shorter than this is not worth a merge.


class _Scratch:
    """Memory for gathered keys and values, kept: fresh memory of that size costs more in page faults than the gather."""

    def __init__(self) -> None:
        self._memory: dict[tuple[str, torch.dtype, torch.device], Tensor] = {}

    def gather(self, place: str, source: Tensor, slots: Tensor) -> Tensor:
        """source[slots], valid until the next gather to the same place."""
        key, size = (place, source.dtype, source.device), slots.shape[0] * source.shape[1] * source.shape[2]
        memory = self._memory.get(key)
        if memory is None or memory.shape[0] < size:
            with torch.inference_mode(False):  # An inference tensor could not be written to outside of that mode.
                memory = self._memory[key] = torch.empty(size * 5 // 4, dtype=source.dtype, device=source.device)
        out = memory[:size].view(slots.shape[0], *source.shape[1:])
        return torch.index_select(source, 0, slots, out=out)


@dataclass(frozen=True, slots=True)
class _Layer:
    """One call's tensors, handed to every part.

    Attributes:
        q: [tokens, heads, head_dim].
        keys, values: The store's, [slots, kv_heads, head_dim], or bytes.
        spec: Scale, window and soft cap.
        scratch: For gathers.
        out: Like q; the parts fill it.
        lse: float32 [tokens, heads], filled if a shared prefix will be merged; else None.
    """

    q: Tensor
    keys: Tensor
    values: Tensor
    spec: AttentionSpec
    scratch: _Scratch
    out: Tensor
    lse: Tensor | None

    def read(self, slots: slice | Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values at those slots, each [seen, kv_heads, head_dim]."""
        if isinstance(slots, slice):
            keys, values = self.keys[slots], self.values[slots]
        else:
            keys, values = self.scratch.gather("keys", self.keys, slots), self.scratch.gather("values", self.values, slots)
        return widened(keys, self.q), widened(values, self.q)


@dataclass(frozen=True, slots=True)
class _Single:
    """One run on its own.

    Attributes:
        rows: Its rows of q.
        slots: What it reads: a slice of the store, or int64 [seen].
        mask: Added to the scores, [new, seen]; None: none is needed, or `causal` says it all.
        causal: The run sees only itself, each token those up to itself.
    """

    rows: slice
    slots: slice | Tensor
    mask: Tensor | None
    causal: bool

    def attend(self, layer: _Layer) -> None:
        """Fills `out` (and `lse`) at this run's rows."""
        k, v = layer.read(self.slots)
        arguments = (layer.q[self.rows][None], k[None], v[None], self.mask, self.causal, layer.spec)
        if layer.lse is None:
            layer.out[self.rows] = attend(*arguments)[0]
        else:
            out, lse = attend_with_lse(*arguments)
            layer.out[self.rows], layer.lse[self.rows] = out[0], lse[0]


@dataclass(frozen=True, slots=True)
class _Padded:
    """Several runs of the same number of new tokens in one call.

    Attributes:
        rows: Their rows of q, int64 [runs * new].
        slots: What they read, int64 [runs * longest]; padded with the run's first slot.
        mask: Added to the scores, [runs, 1, new, longest].
    """

    rows: Tensor
    slots: Tensor
    mask: Tensor

    def attend(self, layer: _Layer) -> None:
        """Fills `out` (and `lse`) at these runs' rows."""
        runs, _, new, seen = self.mask.shape
        k, v = (tensor.view(runs, seen, *tensor.shape[1:]) for tensor in layer.read(self.slots))
        q = layer.q.index_select(0, self.rows).view(runs, new, *layer.q.shape[1:])
        if layer.lse is None:
            out = attend(q, k, v, self.mask, False, layer.spec)
        else:
            out, lse = attend_with_lse(q, k, v, self.mask, False, layer.spec)
            layer.lse.index_copy_(0, self.rows, lse.reshape(runs * new, -1))
        layer.out.index_copy_(0, self.rows, out.reshape(-1, *layer.q.shape[1:]))


@dataclass(frozen=True, slots=True)
class _Prefix:
    """A prefix that several runs share; every one of their tokens sees all of it.

    Attributes:
        rows: Their rows of q, int64 [rows].
        slots: A slice of the store, or int64 [seen].
    """

    rows: Tensor
    slots: slice | Tensor

    def merge(self, layer: _Layer) -> None:
        """Merges attention to the prefix into `out`, which holds attention to all the rest."""
        if layer.lse is None:
            raise ValueError("merging needs the log-sum-exps of the rest")
        k, v = layer.read(self.slots)
        q = layer.q.index_select(0, self.rows)
        rows, heads, head_dim = q.shape
        kv_heads = k.shape[1]
        # The heads that share a KV head become rows: one large product reads the prefix once.
        q = q.view(rows, kv_heads, -1, head_dim).transpose(1, 2).reshape(1, -1, kv_heads, head_dim)
        out, lse = attend_with_lse(q, k[None], v[None], None, False, layer.spec)
        out = out.view(rows, -1, kv_heads, head_dim).transpose(1, 2).reshape(rows, heads, head_dim)
        lse = lse.reshape(rows, -1, kv_heads).transpose(1, 2).reshape(rows, heads)
        share = torch.sigmoid(lse - layer.lse.index_select(0, self.rows)).unsqueeze(-1).to(out.dtype)
        layer.out.index_copy_(0, self.rows, torch.lerp(layer.out.index_select(0, self.rows), out, share))


@dataclass(frozen=True, slots=True)
class _Run:
    """One run of the batch: its rows that attend, and the slots that it reads by itself."""

    row: int
    new: int
    context: int
    slots: Tensor

    @property
    def rows(self) -> slice:
        """Its rows of q."""
        return slice(self.row, self.row + self.new)


@dataclass(frozen=True, slots=True)
class _Plan:
    """The calls that make up one layer's attention."""

    parts: tuple[_Single | _Padded, ...]
    prefixes: tuple[_Prefix, ...]


class TorchAttention:
    """Attention in torch operators; see `agentrt.attention.base.Attention` for shapes. One instance a thread."""

    def __init__(self) -> None:
        self._scratch = _Scratch()

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
        keys, values = store
        keys.index_copy_(0, batch.new_slots, narrowed(k, keys))
        values.index_copy_(0, batch.new_slots, narrowed(v, values))
        key = (TorchAttention, spec.window, batch.attending)
        plan = batch.prepared.get(key)
        if not isinstance(plan, _Plan):
            plan = batch.prepared[key] = plan_batch(batch, spec.window, q.dtype)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device) if plan.prefixes else None
        layer = _Layer(q, keys, values, spec, self._scratch, out, lse)
        for part in plan.parts:
            part.attend(layer)
        for prefix in plan.prefixes:
            prefix.merge(layer)
        return out


def narrowed(heads: Tensor, store: Tensor) -> Tensor:
    """As the store holds them; what is beyond float16's range becomes its largest value, so that nothing finite becomes infinite."""
    if store.dtype == torch.int8:
        return quantized(heads, store)
    if store.dtype == torch.float16 and heads.dtype != store.dtype:
        most = torch.finfo(store.dtype).max
        heads = heads.float().clamp(-most, most)
    return heads.to(store.dtype)


def widened(stored: Tensor, q: Tensor) -> Tensor:
    """What a store holds, as heads like those of q."""
    return dequantized(stored, q.shape[-1], q.dtype) if stored.dtype == torch.int8 else stored.to(q.dtype)


def plan_batch(batch: AttentionBatch, window: int | None, dtype: torch.dtype) -> _Plan:
    """Splits a batch into calls.

    Args:
        batch: The runs.
        window: Of the layers that the plan is for.
        dtype: Of q, and so of masks.
    """
    runs, row = [], 0
    attending = batch.query_lengths if batch.attending is None else batch.attending
    for length, new, context, slots in zip(batch.query_lengths, attending, batch.context_lengths, batch.slots, strict=True):
        row += length
        context += length - new
        if window is not None:  # The earliest token of the run sees window - 1 tokens before it, the others fewer.
            context = min(context, window - 1)
            slots = slots[slots.shape[0] - context - new :]
        runs.append(_Run(row - new, new, context, slots))
    prefixes = tuple(_take_prefixes(runs, batch)) if window is None else ()
    return _Plan(tuple(_parts([run for run in runs if run.new], window, dtype)), prefixes)


def _take_prefixes(runs: list[_Run], batch: AttentionBatch) -> Iterator[_Prefix]:
    """Takes shared prefixes out of what each run reads by itself, in place."""
    for sharing, length in batch.shared:
        members = [member for member in sharing if runs[member].new]
        if len(members) < 2:
            continue
        length = min(length, *(runs[member].context for member in members))
        if length < SHARED_TOKENS:
            continue
        slots = runs[members[0]].slots[:length]
        for member in members:
            run = runs[member]
            runs[member] = replace(run, context=run.context - length, slots=run.slots[length:])
        rows = [row for member in members for row in range(runs[member].row, runs[member].row + runs[member].new)]
        neighbours = _neighbours(slots)
        yield _Prefix(torch.tensor(rows, device=slots.device), slots if neighbours is None else neighbours)


def _parts(runs: list[_Run], window: int | None, dtype: torch.dtype) -> Iterator[_Single | _Padded]:
    short: dict[int, list[_Run]] = defaultdict(list)
    for run in runs:
        if run.new > SHORT_RUN or (run.slots.shape[0] >= VIEW_TOKENS and _neighbours(run.slots) is not None):
            yield _single(run, window, dtype)
        else:
            short[run.new].append(run)
    for alike in short.values():
        for group in _alike(alike):
            yield _padded(group, window, dtype) if len(group) > 1 else _single(group[0], window, dtype)


def _neighbours(slots: Tensor) -> slice | None:
    """The slots as a slice of the store, if they are neighbours in order."""
    if slots.is_cuda:  # Looking would wait for the device.
        return None
    first, count = int(slots[0]), slots.shape[0]
    if int(slots[-1]) - first != count - 1 or not bool((slots.diff() == 1).all()):
        return None
    return slice(first, first + count)


def _single(run: _Run, window: int | None, dtype: torch.dtype) -> _Single:
    neighbours = _neighbours(run.slots)
    slots = run.slots if neighbours is None else neighbours
    whole_window = window is None or run.context + run.new <= window
    if whole_window and (run.new == 1 or run.context == 0):
        return _Single(run.rows, slots, mask=None, causal=run.new > 1)
    return _Single(run.rows, slots, _mask(run.new, run.context, window, dtype, run.slots.device), causal=False)


def _mask(new: int, context: int, window: int | None, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zero where a run's token may look and minus infinity elsewhere, [new, context + new]."""
    mask = torch.full((new, context + new), float("-inf"), dtype=dtype, device=device)
    mask.triu_(context + 1)  # What is left of it lies above the diagonal: the future.
    if window is not None:
        past = torch.ones(new, context + new, dtype=torch.bool, device=device).tril_(context - window)
        mask.masked_fill_(past, float("-inf"))
    return mask


def _alike(runs: list[_Run]) -> Iterator[list[_Run]]:
    """Groups runs so that little is wasted on padding."""
    group: list[_Run] = []
    for run in sorted(runs, key=lambda run: run.context):
        if group and run.slots.shape[0] > PADDING * group[0].slots.shape[0] + 32:
            yield group
            group = []
        group.append(run)
    yield group


def _padded(group: list[_Run], window: int | None, dtype: torch.dtype) -> _Padded:
    new, longest, device = group[0].new, group[-1].slots.shape[0], group[0].slots.device
    read = torch.empty(len(group), longest, dtype=torch.int64, device=device)
    mask = torch.full((len(group), 1, new, longest), float("-inf"), dtype=dtype, device=device)
    for place, run in enumerate(group):
        seen = run.slots.shape[0]
        read[place, :seen] = run.slots
        read[place, seen:] = run.slots[0]
        mask[place, 0, :, :seen] = 0.0 if new == 1 else _mask(new, run.context, window, dtype, device)
    starts = torch.tensor([run.row for run in group], device=device)
    rows = (starts[:, None] + torch.arange(new, device=device)).view(-1)
    return _Padded(rows, read.view(-1), mask)
