"""Room is left for programs that are away only while that costs less than computing their contexts anew, and only for so long."""

from __future__ import annotations

from types import SimpleNamespace

from agentrt.scheduling.absence import LARGE_PREFILL, Absences


def test_what_is_left_follows_the_price_of_prefill_and_ends():
    absences, program = Absences(seconds=60.0, most_pages=50, pool_tokens=1000), SimpleNamespace(program="p")
    absences.leave(program, 30, now=5.0)
    for _ in range(100):  # decodes of many sequences: they say nothing of what a prefill costs
        absences.step(tokens=256, prefilled=0, seconds=256.0)
    assert absences.pages(now=6.0) == 0
    for _ in range(100):
        absences.step(tokens=LARGE_PREFILL, prefilled=LARGE_PREFILL, seconds=0.1 * LARGE_PREFILL)
    assert absences.pages(now=6.0) == 30
    absences.leave(SimpleNamespace(program="q"), 40, now=7.0)
    assert absences.pages(now=7.0) == 50  # not more than its share
    assert absences.changes_at() == 65.0
    assert absences.pages(now=65.5) == 40
    absences.back(SimpleNamespace(program="q"), now=66.0)
    assert absences.pages(now=66.0) == 0
    assert absences.changes_at() == float("inf")
