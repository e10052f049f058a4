"""200 programs at once in a pool four times too small, on a real (tiny) model: all end, and say what they say without a cache."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field

import pytest

from agentrt.config import CacheConfig, EngineConfig, SchedulerConfig
from agentrt.engine.assembly import build_engine
from agentrt.request import ProgramTag, Request, SamplingParams
from agentrt.text import load_tokenizer

PROGRAMS, CALLS, RUNNING = 200, 3, 24
SHARED = [random.Random(0).randrange(300) for _ in range(40)]
LONGEST = len(SHARED) + CALLS * (12 + 10)


@dataclass
class Program:
    """Three calls, each on all that was said before and a few words more, which a tool takes a while to give."""

    number: int
    said: list[int] = field(default_factory=lambda: list(SHARED))
    answers: list[tuple[int, ...]] = field(default_factory=list)
    waits: int = 0

    def next_call(self) -> Request:
        rng = random.Random(1000 * self.number + len(self.answers))
        self.said += [rng.randrange(300) for _ in range(rng.randrange(4, 12))]
        tag = ProgramTag(f"p{self.number}", expected_calls=CALLS - 1 - len(self.answers))
        sampling = SamplingParams(temperature=0, max_tokens=rng.randrange(2, 11))
        return Request(prompt_ids=tuple(self.said), sampling=sampling, program=tag, request_id=f"{self.number}.{len(self.answers)}")

    def take(self, answer: tuple[int, ...]) -> None:
        self.answers.append(answer)
        self.said += answer
        self.waits = self.number % 7


def run(core, programs):
    """Drives the programs to their end; returns how many steps it took."""
    answers: dict[str, list[int]] = {}
    away = deque(programs)
    steps = 0
    while away or not core.idle:
        for _ in range(len(away)):
            program = away.popleft()
            if program.waits:
                program.waits -= 1
                away.append(program)
            else:
                core.submit(program.next_call())
        for delta in core.step():
            assert delta.error is None
            answers.setdefault(delta.request_id, []).extend(delta.token_ids)
            if delta.finish_reason is not None:
                program = programs[int(delta.request_id.split(".")[0])]
                program.take(tuple(answers.pop(delta.request_id)))
                if len(program.answers) < CALLS:
                    away.append(program)
                else:
                    core.end_program(f"p{program.number}")
        steps += 1
        assert steps < 20_000, "a program hangs"
    return steps


def build(folder, **cache):
    config = EngineConfig(model=str(folder), dtype="float32", threads=1, cache=CacheConfig(**cache), scheduler=SchedulerConfig(max_running=RUNNING, max_wait=0.5))
    core, _ = build_engine(config, folder, load_tokenizer(str(folder)))
    return core


@pytest.fixture(scope="module")
def uncached(tiny_model):
    """What the programs say with room for all and nothing kept."""
    core = build(tiny_model, kv_tokens=RUNNING * LONGEST, prefix_cache=False)
    programs = [Program(number) for number in range(PROGRAMS)]
    run(core, programs)
    core.close()
    return [program.answers for program in programs]


OPTIONS = [
    pytest.param({}, id="default"),
    pytest.param({"eviction": "adaptive", "page_size": 16}, id="adaptive, pages of 16", marks=pytest.mark.slow),
]


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.slow
def test_200_programs_in_a_pool_four_times_too_small(tiny_model, uncached, options):
    core = build(tiny_model, kv_tokens=RUNNING * LONGEST // 4 // 16 * 16, check=True, **options)
    programs = [Program(number) for number in range(PROGRAMS)]
    run(core, programs)
    stats = core.stats()
    core.close()
    assert [program.answers for program in programs] == uncached
    assert len({answer for answers in uncached for answer in answers}) > PROGRAMS  # they differ, so a mix-up would show
    assert stats["evicted_tokens"] > 5 * RUNNING * LONGEST // 4
