"""Attention over the paged store in plain torch operators, on any device: the fallback that is always there.

What is the same for all layers (which slots each run reads, and its mask) is worked out once a step and kept in
``batch.prepared``. Long runs, and runs whose slots are neighbours, are attended to one by one, the latter on views
of the store; short runs with scattered slots are gathered and padded into one call. Padding is masked, so that no run
ever sees another's tokens. It does not read shared prefixes once for all (``batch.shared``): native kernels do.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from agentrt.attention.base import AttentionBatch, AttentionSpec

SHORT_RUN = 8  #: Runs of up to so many tokens are gathered and padded together, if their slots are scattered.
PADDING = 1.25  #: How much longer than the shortest the longest sequence of a padded call may be.


@dataclass(frozen=True, slots=True)
class _Single:
    """One run on its own.

    Attributes:
        rows: Its rows of q.
        read: The slots it reads: a slice of the store, or int64 [seen].
        mask: Added to the scores, [new, seen]; None: none is needed, or `causal` says it all.
        causal: The run sees only itself, each token those up to itself.
    """

    rows: slice
    read: slice | Tensor
    mask: Tensor | None
    causal: bool

    def attend(self, q: Tensor, keys: Tensor, values: Tensor, spec: AttentionSpec, out: Tensor) -> None:
        """Fills `out` at this run's rows."""
        if isinstance(self.read, slice):
            k, v = keys[self.read], values[self.read]
        else:
            k, v = keys.index_select(0, self.read), values.index_select(0, self.read)
        q = q[self.rows].unsqueeze(0)
        out[self.rows] = _attend(q, k.unsqueeze(0), v.unsqueeze(0), self.mask, self.causal, spec)[0]


@dataclass(frozen=True, slots=True)
class _Padded:
    """Several runs of the same number of new tokens in one call.

    Attributes:
        rows: Their rows of q, int64 [runs * new].
        read: The slots they read, int64 [runs * longest]; padded with the run's first slot.
        mask: Added to the scores, [runs, 1, new, longest].
    """

    rows: Tensor
    read: Tensor
    mask: Tensor

    def attend(self, q: Tensor, keys: Tensor, values: Tensor, spec: AttentionSpec, out: Tensor) -> None:
        """Fills `out` at these runs' rows."""
        runs, _, new, seen = self.mask.shape
        k = keys.index_select(0, self.read).view(runs, seen, *keys.shape[1:])
        v = values.index_select(0, self.read).view(runs, seen, *values.shape[1:])
        rows = q.index_select(0, self.rows).view(runs, new, *q.shape[1:])
        out.index_copy_(0, self.rows, _attend(rows, k, v, self.mask, False, spec).reshape(-1, *q.shape[1:]))


class TorchAttention:
    """Attention in torch operators; see `agentrt.attention.base.Attention` for shapes."""

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
        keys.index_copy_(0, batch.new_slots, k)
        values.index_copy_(0, batch.new_slots, v)
        key = (TorchAttention, spec.window)
        parts = batch.prepared.get(key)
        if parts is None:
            parts = batch.prepared[key] = tuple(_plan(batch, spec.window, q.dtype))
        out = torch.empty_like(q)
        for part in parts:  # type: ignore[attr-defined]
            part.attend(q, keys, values, spec, out)
        return out


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, spec: AttentionSpec) -> Tensor:
    """Shapes: q [runs, new, heads, head_dim], k and v [runs, seen, kv_heads, head_dim] -> like q."""
    runs, new, heads, head_dim = q.shape
    kv_heads = k.shape[2]
    k, v = k.transpose(1, 2), v.transpose(1, 2)
    # With one token, the heads that share a KV head become rows of one query matrix: no key is read twice.
    q = q.view(runs, kv_heads, heads // kv_heads, head_dim) if new == 1 else q.transpose(1, 2)
    if spec.softcap is None:
        gqa = q.shape[1] != kv_heads
        out = scaled_dot_product_attention(q, k, v, mask, is_causal=causal, scale=spec.scale, enable_gqa=gqa)
    else:
        out = _softcapped(q, k, v, mask, causal, spec)
    return out.reshape(runs, 1, heads, head_dim) if new == 1 else out.transpose(1, 2)


def _softcapped(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, spec: AttentionSpec) -> Tensor:
    """The same by hand, in float32, since torch's fused attention cannot cap scores; heads lead."""
    assert spec.softcap is not None  # for the type checker
    runs, heads, new, head_dim = q.shape
    kv_heads, seen = k.shape[1:3]
    q = q.reshape(runs, kv_heads, -1, head_dim).float()
    scores = q.matmul(k.float().transpose(2, 3)).mul_(spec.scale / spec.softcap).tanh_().mul_(spec.softcap)
    scores = scores.view(runs, heads, new, seen)
    if causal:
        scores.masked_fill_(torch.ones(new, seen, dtype=torch.bool, device=q.device).triu_(1), float("-inf"))
    elif mask is not None:
        scores += mask
    weights = scores.softmax(-1).view(runs, kv_heads, -1, seen)
    return weights.matmul(v.float()).view(runs, heads, new, head_dim).to(v.dtype)


def _plan(batch: AttentionBatch, window: int | None, dtype: torch.dtype) -> Iterator[_Single | _Padded]:
    """Splits the batch into calls."""
    short: dict[int, list[tuple[int, Tensor]]] = defaultdict(list)
    row = 0
    for new, context, slots in zip(batch.query_lengths, batch.context_lengths, batch.slots, strict=True):
        if window is not None:  # The earliest token of the run sees window - 1 tokens before it, the others fewer.
            context = min(context, window - 1)
            slots = slots[-(context + new) :]
        read = _neighbours(slots)
        if new > SHORT_RUN or read is not None:
            yield _single(slice(row, row + new), slots if read is None else read, context, window, dtype, slots.device)
        else:
            short[new].append((row, slots))
        row += new
    for new, runs in short.items():
        for group in _alike(runs):
            yield _padded(group, new, window, dtype)


def _neighbours(slots: Tensor) -> slice | None:
    """The slots as a slice of the store, if they are neighbours in order."""
    if slots.is_cuda:  # Looking would wait for the device.
        return None
    first, count = int(slots[0]), slots.shape[0]
    if int(slots[-1]) - first != count - 1 or not bool((slots.diff() == 1).all()):
        return None
    return slice(first, first + count)


def _single(
    rows: slice, read: slice | Tensor, context: int, window: int | None, dtype: torch.dtype, device: torch.device
) -> _Single:
    new = rows.stop - rows.start
    whole_window = window is None or context + new <= window
    if whole_window and (new == 1 or context == 0):
        return _Single(rows, read, mask=None, causal=new > 1)
    return _Single(rows, read, mask=_mask(new, context, window, dtype, device), causal=False)


def _mask(new: int, context: int, window: int | None, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zero where a run's token may look and minus infinity elsewhere, [new, context + new]."""
    mask = torch.full((new, context + new), float("-inf"), dtype=dtype, device=device)
    # What is left of -inf: above the diagonal (the future) and, with a window, what lies before it.
    mask.triu_(context + 1)
    if window is not None:
        past = torch.ones(new, context + new, dtype=torch.bool, device=device).tril_(context - window)
        mask.masked_fill_(past, float("-inf"))
    return mask


def _alike(runs: list[tuple[int, Tensor]]) -> Iterator[list[tuple[int, Tensor]]]:
    """Groups (row, slots) so that little is wasted on padding."""
    group: list[tuple[int, Tensor]] = []
    for run in sorted(runs, key=lambda run: run[1].shape[0]):
        if group and run[1].shape[0] > PADDING * group[0][1].shape[0] + 32:
            yield group
            group = []
        group.append(run)
    yield group


def _padded(group: list[tuple[int, Tensor]], new: int, window: int | None, dtype: torch.dtype) -> _Padded:
    longest = group[-1][1].shape[0]
    device = group[0][1].device
    read = torch.empty(len(group), longest, dtype=torch.int64, device=device)
    mask = torch.full((len(group), 1, new, longest), float("-inf"), dtype=dtype, device=device)
    for place, (_, slots) in enumerate(group):
        seen = slots.shape[0]
        read[place, :seen] = slots
        read[place, seen:] = slots[0]
        mask[place, 0, :, :seen] = 0.0 if new == 1 else _mask(new, seen - new, window, dtype, device)
    starts = torch.tensor([row for row, _ in group], device=device)
    rows = (starts[:, None] + torch.arange(new, device=device)).view(-1)
    return _Padded(rows, read.view(-1), mask)
