"""What is simulated: the engine's settings, and the real scheduler, tree and pool made from them."""

from __future__ import annotations

from dataclasses import dataclass

from agentrt.cache.eviction import eviction_policy
from agentrt.cache.page_pool import PagePool
from agentrt.cache.prefix_cache import PrefixCache
from agentrt.errors import UserError
from agentrt.scheduling.policy import POLICIES
from agentrt.scheduling.scheduler import Budget, Scheduler
from agentrt.simulation.cost_model import PRESETS, CostModel
from agentrt.simulation.simulator import Clock, Simulator
from agentrt.simulation.trace import Trace


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """An engine to simulate.

    Attributes:
        policy: Order of admission.
        eviction: Which cached prefixes go first.
        pool_tokens: Token slots.
        page_size: Tokens a page.
        step_tokens: Most new tokens a step.
        prefill_tokens: Most of them in prefill chunks while others decode; None: half.
        max_running: Most sequences a step.
        max_wait: By how many seconds a request that overtakes may be younger.
        hold_share: Share of the pool that holds may keep.
        prefix_cache: Keep computed prefixes.
        cost: Seconds a step.
        skip: Take decode steps in which nothing changes at once.
        check: Verify the slot equation after every step.
    """

    policy: str = "lpm"
    eviction: str = "program"
    pool_tokens: int = 1 << 17
    page_size: int = 16
    step_tokens: int = 2048
    prefill_tokens: int | None = None
    max_running: int = 64
    max_wait: float = 5.0
    hold_share: float = 0.5
    prefix_cache: bool = True
    cost: CostModel = PRESETS["gpu-8b"]
    skip: bool = True
    check: bool = False

    def __post_init__(self) -> None:
        if self.policy not in POLICIES:
            raise UserError(f"policy is {self.policy!r}; it must be one of {', '.join(POLICIES)}", param="policy")
        if self.pool_tokens < self.page_size:
            raise UserError(f"the pool of {self.pool_tokens} tokens is smaller than one page of {self.page_size}", param="pool")

    def simulator(self, trace: Trace) -> Simulator:
        """The engine, with a trace before it."""
        clock = Clock()
        pages = self.pool_tokens // self.page_size
        policy = eviction_policy(self.eviction)
        cache = PrefixCache(PagePool(pages, self.page_size), policy, enabled=self.prefix_cache, hold_share=self.hold_share, clock=clock)
        budget = Budget(self.step_tokens, self.prefill_tokens or max(self.step_tokens // 2, 1), self.max_running)
        scheduler = Scheduler(cache, budget, POLICIES[self.policy], clock=clock, max_wait=self.max_wait)
        return Simulator(trace, scheduler, cache, self.cost, clock, skip=self.skip, check=self.check)
