"""A comparison as a picture: share served over capacity, a panel for each trace. Plain SVG, no library."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from xml.sax.saxutils import escape

from .compare import OPTIMUM, Row

_WIDTH, _HEIGHT = 560, 380  # of a panel, in px
_LEFT, _RIGHT, _TOP, _BOTTOM = 56, 132, 40, 48
_COLORS = (
    "#0072b2", "#e69f00", "#cc79a7", "#56b4e9", "#d55e00",
    "#8a8a00", "#7f5fb0", "#a0522d", "#5f9ea0", "#999999",
)  # fmt: skip
_OURS, _OPTIMUM = "#009e73", "#555555"
_STYLE = "text{font:12px system-ui,sans-serif;fill:#222}.title{font-weight:600;font-size:14px}"


def svg(rows: Sequence[Row]) -> str:
    """The picture as text; capacities on a logarithmic axis."""
    assert rows, "nothing to draw"
    traces = list(dict.fromkeys(row.trace for row in rows))
    lines = list(dict.fromkeys((row.policy, row.tier_capacity) for row in rows))
    width = _WIDTH * len(traces)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{_HEIGHT}" '
        f'viewBox="0 0 {width} {_HEIGHT}">',
        f"<style>{_STYLE}</style>",
        f'<rect width="{width}" height="{_HEIGHT}" fill="white"/>',
    ]
    for place, trace in enumerate(traces):
        parts.append(f'<g transform="translate({_WIDTH * place},0)">')
        parts += _panel([row for row in rows if row.trace == trace], lines)
        parts.append("</g>")
    parts.append("</svg>\n")
    return "\n".join(parts)


def _panel(rows: Sequence[Row], lines: Sequence[tuple[str, int]]) -> Iterator[str]:
    sizes = sorted({row.capacity for row in rows})
    low, high = math.log(sizes[0]), math.log(sizes[-1])
    top = _round_up(max(100 * row.hit_rate for row in rows))
    right, bottom = _WIDTH - _RIGHT, _HEIGHT - _BOTTOM

    def x(capacity: int) -> float:
        share = (math.log(capacity) - low) / (high - low) if high > low else 0.5
        return round(_LEFT + share * (right - _LEFT), 1)

    def y(percent: float) -> float:
        return round(bottom - percent / top * (bottom - _TOP), 1)

    yield f'<text class="title" x="{_LEFT}" y="24">{escape(rows[0].trace)}</text>'
    for step in range(6):
        percent = top * step / 5
        yield f'<line x1="{_LEFT}" x2="{right}" y1="{y(percent)}" y2="{y(percent)}" stroke="#e5e5e5"/>'
        yield f'<text x="{_LEFT - 8}" y="{y(percent) + 4}" text-anchor="end">{percent:g} %</text>'
    for size in sizes:
        yield f'<line x1="{x(size)}" x2="{x(size)}" y1="{_TOP}" y2="{bottom}" stroke="#f0f0f0"/>'
        yield f'<text x="{x(size)}" y="{bottom + 18}" text-anchor="middle">{size:,}</text>'
    middle = (_LEFT + right) // 2
    yield f'<text x="{middle}" y="{bottom + 38}" text-anchor="middle">blocks; share served</text>'
    ends: list[tuple[float, str, str]] = []
    for number, (policy, below) in enumerate(lines):
        same = sorted(
            (row.capacity, 100 * row.hit_rate)
            for row in rows
            if (row.policy, row.tier_capacity) == (policy, below)
        )
        if not same:
            continue
        color = (
            _OURS
            if policy == "workload"
            else _OPTIMUM
            if policy == OPTIMUM
            else _COLORS[number % len(_COLORS)]
        )
        dash = ' stroke-dasharray="5 4"' if policy == OPTIMUM else ""
        wide = 3 if policy == "workload" else 1.5
        points = " ".join(f"{x(size)},{y(percent)}" for size, percent in same)
        yield f'<polyline points="{points}" fill="none" stroke="{color}" stroke-width="{wide}"{dash}/>'
        yield from (
            f'<circle cx="{x(size)}" cy="{y(percent)}" r="{wide}" fill="{color}"/>' for size, percent in same
        )
        label = f"{policy} over {below:,}" if below else policy
        ends.append((y(same[-1][1]), label, color))
    for at, (height, label, color) in _apart(ends):
        yield f'<line x1="{right + 3}" x2="{right + 12}" y1="{height}" y2="{at}" stroke="{color}"/>'
        yield f'<text x="{right + 16}" y="{round(at + 4, 1)}" style="fill:{color}">{escape(label)}</text>'


def _apart(ends: Sequence[tuple[float, str, str]]) -> Iterator[tuple[float, tuple[float, str, str]]]:
    """Where to write the names of lines, top to bottom, so that none lies on another."""
    step = min(14.0, (_HEIGHT - _TOP - _BOTTOM) / max(1, len(ends)))
    ordered = sorted(ends)
    places: list[float] = []
    for height, _, _ in ordered:
        places.append(max(height, places[-1] + step) if places else height)
    over = max(0.0, places[-1] - (_HEIGHT - _BOTTOM)) if places else 0.0
    for number in range(len(places) - 1, -1, -1):  # what ran over the bottom pushes those above it up
        limit = _HEIGHT - _BOTTOM - step * (len(places) - 1 - number)
        places[number] = round(min(places[number], limit) if over else places[number], 1)
    return zip(places, ordered, strict=True)


def _round_up(percent: float) -> float:
    """To a number whose fifths are easy to read."""
    for top in (1, 2, 5, 10, 20, 25, 50, 75, 100):
        if percent <= top:
            return float(top)
    raise AssertionError(f"{percent} percent served")
