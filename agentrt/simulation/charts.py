"""Line charts as SVG text: axes with round numbers, a few lines, a legend. No library, no script; the page brings the colours."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 560, 230
LEFT, RIGHT, TOP, BOTTOM = 58, 12, 26, 34


@dataclass(frozen=True, slots=True)
class Line:
    """One line: its name in the legend, and its points, by ascending x."""

    name: str
    xs: Sequence[float]
    ys: Sequence[float]


def ticks(top: float, count: int = 4) -> list[float]:
    """Round numbers from 0 up to at least `top`, about `count` steps apart."""
    if not top > 0:
        return [0.0, 1.0]
    rough = top / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= rough * 0.999)
    return [step * index for index in range(math.ceil(top / step - 1e-9) + 1)]


def short(value: float) -> str:
    """A number in a few characters: 12.5k, 3M."""
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(value) >= size:
            return f"{value / size:.3g}{unit}"
    return f"{value:.3g}"


def line_chart(title: str, lines: Sequence[Line], *, x: str = "seconds", y: str = "") -> str:
    """Draws the lines over one another; returns an <svg> element."""
    right = max((max(line.xs, default=0.0) for line in lines), default=0.0) or 1.0  # the axis ends with the lines
    x_ticks = [tick for tick in ticks(right) if tick <= right]
    y_ticks = ticks(max((max(line.ys, default=0.0) for line in lines), default=0.0))
    parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}">']
    parts.append(f'<text class="title" x="{LEFT}" y="15">{escape(title)}{f" ({escape(y)})" if y else ""}</text>')
    parts += [_grid_y(value, y_ticks[-1]) for value in y_ticks]
    parts += [_grid_x(value, right) for value in x_ticks]
    parts.append(f'<text class="tick" x="{WIDTH - RIGHT}" y="{HEIGHT - 4}" text-anchor="end">{escape(x)}</text>')
    for number, line in enumerate(lines):
        points = " ".join(f"{_px(a, right):.1f},{_py(b, y_ticks[-1]):.1f}" for a, b in zip(line.xs, line.ys, strict=True))
        parts.append(f'<polyline class="line c{number}" points="{points}"/>')
    if len(lines) > 1:
        parts.append(_legend([line.name for line in lines]))
    return "\n".join([*parts, "</svg>"])


def _px(value: float, top: float) -> float:
    return LEFT + value / top * (WIDTH - LEFT - RIGHT)


def _py(value: float, top: float) -> float:
    return HEIGHT - BOTTOM - value / top * (HEIGHT - TOP - BOTTOM)


def _grid_y(value: float, top: float) -> str:
    at = _py(value, top)
    line = f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at:.1f}" y2="{at:.1f}"/>'
    return line + f'<text class="tick" x="{LEFT - 6}" y="{at + 3.5:.1f}" text-anchor="end">{short(value)}</text>'


def _grid_x(value: float, top: float) -> str:
    return f'<text class="tick" x="{_px(value, top):.1f}" y="{HEIGHT - BOTTOM + 14}" text-anchor="middle">{short(value)}</text>'


def _legend(names: Sequence[str]) -> str:
    """Right of the title, from right to left; about 6 units a character."""
    parts, at = [], float(WIDTH - RIGHT)
    for number in range(len(names) - 1, -1, -1):
        at -= 6.2 * len(names[number]) + 4
        parts.append(f'<text class="tick" x="{at:.1f}" y="15">{escape(names[number])}</text>')
        parts.append(f'<line class="line c{number}" x1="{at - 18:.1f}" x2="{at - 4:.1f}" y1="11.5" y2="11.5"/>')
        at -= 30
    return "".join(parts)
