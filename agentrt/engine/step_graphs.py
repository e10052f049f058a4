"""Small steps as captured graphs: one launch for a whole step, where the host would else give out hundreds.

A graph is a fixed sequence of kernels on fixed memory, so steps are padded to one of a few numbers of tokens, and what changes from
step to step (tokens, positions, slots, attention's tiles) is copied into the memory that the graph reads. Padding has no slot, no
tile and no reader. Which tokens are of one run is nowhere in the kernels but in the tiles, so a decode of each sequence, forced runs, drafts
and the chunk of a prompt are one graph if they are as many tokens. It is captured when its size is first wanted.

What is copied lies in pinned memory that the next step writes over: a step's tokens are waited for before the next is launched,
and copies are done before tokens are. A step that gives no token is not waited for, and so not run here.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable
from typing import Protocol

import torch
from torch import Tensor

from agentrt.attention.base import Attention, AttentionBatch
from agentrt.engine.batch import ForwardBatch
from agentrt.models.decoder import LayeredStore

#: Numbers of tokens that are captured; a step takes the next larger one.
SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256, 320, 384, 448, 512)

#: A page table takes four bytes a page, in each captured size.
MOST_TOKENS = 1 << 21

#: Runs a step once and gives a call that runs it again on the same memory.
Capture = Callable[[Callable[[], Tensor]], Callable[[], Tensor]]


class FixedAttention(Attention, Protocol):
    """Attention whose work on a step can be put into memory that stays; `agentrt.attention.triton_paged.TritonAttention` is one."""

    def reserve(self, batch: AttentionBatch, windows: Iterable[int | None], new: int, seen: int, *, pinned: bool) -> Callable[[AttentionBatch], None]:
        """Makes room in `batch.prepared` for any step of so many new tokens that see so many; the answer fills it for a step."""
        ...


class Step(Protocol):
    """What is captured: `agentrt.models.decoder.Decoder.forward`."""

    def __call__(
        self, token_ids: Tensor, positions: Tensor, batch: AttentionBatch, attention: Attention, store: LayeredStore
    ) -> Tensor:
        """Hidden states [tokens, width]."""
        ...


class StepGraphs:
    """Captured steps of one model."""

    def __init__(
        self,
        step: Step,
        store: LayeredStore,
        attention: FixedAttention,
        windows: Iterable[int | None],
        *,
        most_new: int,
        most_tokens: int = MOST_TOKENS,
        device: torch.device,
        capture: Capture | None = None,
    ) -> None:
        """Captures nothing yet.

        Args:
            step: Computes hidden states.
            store: Keys and values.
            attention: How to attend.
            windows: Of the model's layers.
            most_new: Most new tokens of a step to capture.
            most_tokens: Length of all sequences of a batch together; steps with more are not covered.
            device: Where it runs.
            capture: How to capture; None: a CUDA graph.
        """
        self._step = step
        self._store = store
        self._attention = attention
        self._windows = tuple(dict.fromkeys(windows))
        self._sizes = [size for size in SIZES if size <= most_new]
        self._most_tokens = most_tokens
        self._device = device
        self._capture = capture or CudaCapture()
        self._graphs: dict[int, _Graph] = {}

    def cover(self, batch: ForwardBatch) -> bool:
        """Whether a graph can run a step: it is small, and some token's logits are wanted."""
        new = len(batch.token_ids)
        if not len(batch.logits_rows) or not self._sizes or new > self._sizes[-1]:
            return False
        return sum(batch.attention.context_lengths) + new <= self._most_tokens

    def forward(self, batch: ForwardBatch) -> Tensor:
        """Runs a covered step; returns the hidden states of `logits_rows` [rows, width], which the next step may write over."""
        new = len(batch.token_ids)
        size = self._sizes[bisect_left(self._sizes, new)]
        graph = self._graphs.get(size)
        if graph is None:
            graph = self._graphs[size] = self._captured(size, batch)
        graph.fill(batch)
        hidden = graph.replay()
        if batch.every:
            return hidden[:new]
        rows = batch.logits_rows.pin_memory() if self._device.type == "cuda" else batch.logits_rows
        return hidden.index_select(0, rows.to(self._device, non_blocking=True))

    def _captured(self, size: int, batch: ForwardBatch) -> _Graph:
        graph = _Graph(self._attention, self._windows, size, self._most_tokens, self._device)
        graph.fill(batch)
        token_ids, positions, fixed = graph.numbers[0], graph.numbers[1], graph.batch
        graph.replay = self._capture(lambda: self._step(token_ids, positions, fixed, self._attention, self._store))
        return graph


class _Graph:
    """One captured size: its memory, and the call that runs it.

    Attributes:
        numbers: int64 [3, size] on the device: token ids, positions, new slots.
        batch: What the captured step was given; its tensors stay, what is in them changes.
        replay: Runs it.
    """

    def __init__(self, attention: FixedAttention, windows: tuple[int | None, ...], size: int, tokens: int, device: torch.device) -> None:
        pinned = device.type == "cuda"
        self._host = torch.zeros((3, size), dtype=torch.int64, pin_memory=pinned)
        self.numbers = torch.zeros((3, size), dtype=torch.int64, device=device)
        self.batch = AttentionBatch((1,) * size, (0,) * size, (), self.numbers[2])
        self._fill_attention = attention.reserve(self.batch, windows, size, tokens, pinned=pinned)
        self.replay: Callable[[], Tensor]

    def fill(self, batch: ForwardBatch) -> None:
        """Copies what changes from step to step."""
        new = len(batch.token_ids)
        for row, numbers in zip(self._host, (batch.token_ids, batch.positions, batch.attention.new_slots), strict=True):
            row[:new] = numbers
        self._host[:2, new:] = 0
        self._host[2, new:] = -1  # written nowhere
        self.numbers.copy_(self._host, non_blocking=True)
        self._fill_attention(batch.attention)


class CudaCapture:
    """Captures CUDA graphs, all in one pool of memory, since they never run at once."""

    def __init__(self) -> None:
        self._pool: object | None = None

    def __call__(self, step: Callable[[], Tensor]) -> Callable[[], Tensor]:
        """Runs the step once, so that kernels are compiled and libraries have what they need, then captures it."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            step()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            out = step()
        self._pool = graph.pool()

        def replay() -> Tensor:
            graph.replay()
            return out

        return replay
