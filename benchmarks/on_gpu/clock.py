"""The device's clock, and the two speeds that floors are made of: of a large copy and of a large product."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

from .sizes import Sizes


class Gpu:
    """The device: its clock, and the two speeds that floors are made of."""

    def __init__(self, sizes: Sizes) -> None:
        self.sizes = sizes
        self.cuda = sizes.device.type == "cuda"
        self._sweep = torch.empty(256 << 20 if self.cuda else 1, dtype=torch.uint8, device=sizes.device)
        big = (1 << 30) if self.cuda else 1 << 16
        source, target = (torch.empty(big, dtype=torch.uint8, device=sizes.device) for _ in range(2))
        self.bytes_per_second = 2 * big / self.seconds(lambda: target.copy_(source))
        side = 8192 if self.cuda else 64
        a, b = (torch.randn(side, side, device=sizes.device).to(sizes.dtype) for _ in range(2))
        self.flops = 2 * side**3 / self.seconds(lambda: a @ b)

    def wait(self) -> None:
        """Until all that was launched is done."""
        if self.cuda:
            torch.cuda.synchronize()

    def seconds(self, call: Callable[[], object], *, cold: bool = True) -> float:
        """Median time of a call on the device, with its inputs out of the cache if `cold`."""
        for _ in range(3 if self.cuda else 1):
            call()
        times = []
        for _ in range(self.sizes.repeats):
            if cold:
                self._sweep.zero_()
            times.append(self._once(call))
        return statistics.median(times)

    def _once(self, call: Callable[[], object]) -> float:
        if not self.cuda:
            begun = time.perf_counter()
            call()
            return time.perf_counter() - begun
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        call()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1000

    def floor(self, *, read: float = 0.0, operations: float = 0.0) -> float:
        """Seconds that so many bytes or operations take, whichever is more."""
        return max(read / self.bytes_per_second, operations / self.flops)
