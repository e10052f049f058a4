"""`simulate` gives a report that adds up, as JSON and as a page that stands alone."""

from __future__ import annotations

import json
import re
from xml.etree import ElementTree

import pytest

from agentrt.errors import UserError
from agentrt.simulation.charts import ticks
from agentrt.simulation.report import Spread
from agentrt.simulation.simulate import simulate


def test_report_and_page(tmp_path, capsys):
    out, html = tmp_path / "r.json", tmp_path / "r.html"
    found = simulate("chat", pool=16_384, programs=12, rate=2.0, eviction="lru", out=out, html=html, progress=True)
    assert "96/96" in capsys.readouterr().out
    assert found.calls == 96
    assert found.failed == 0
    assert found.programs == 12
    assert 0 < found.hit_rate <= found.belady_hit_rate + 0.02 <= found.unlimited_hit_rate + 0.02
    assert found.wait.worst <= found.first_token.worst <= found.whole.worst <= found.program_time.worst
    assert json.loads(out.read_text())["hit_rate"] == found.hit_rate
    page = html.read_text()
    assert "<script" not in page
    assert not re.search(r"""(src|href)=|https?://|url\(""", page)
    charts = re.findall(r"<svg.*?</svg>", page, re.S)
    assert len(charts) == 9
    for what in ("To the first token", "To the last token", "Hit rate", "Occupancy", "evicted", "Preemptions"):
        assert any(what in chart for chart in charts)
    for chart in charts:
        lines = ElementTree.fromstring(chart).findall("polyline")
        assert lines
        assert all(len(line.attrib["points"].split()) > 5 for line in lines)


def test_a_pool_too_small_for_one_call_and_unknown_names_are_refused():
    with pytest.raises(UserError, match="alone needs"):
        simulate("chat", pool=512, programs=1)
    with pytest.raises(UserError, match="few-shot"):
        simulate("no-such-trace")
    with pytest.raises(UserError, match="policy"):
        simulate("chat", policy="random", programs=1)


@pytest.mark.parametrize(("top", "last"), [(0, 1.0), (3, 3.0), (97, 100.0), (0.013, 0.015), (1e6, 1e6)])
def test_ticks_are_round_and_reach_the_top(top, last):
    found = ticks(top)
    assert found[-1] == pytest.approx(last)
    assert len(found) <= 6


def test_spread_counts_weights():
    spread = Spread.of([1.0, 2.0, 10.0], [90, 9, 1])
    assert (spread.p50, spread.p90, spread.worst) == (1.0, 1.0, 10.0)
    assert spread.mean == pytest.approx((90 + 18 + 10) / 100)
