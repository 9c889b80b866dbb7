"""The picture of ``benchmarks/reuse.py``: what repairing buys. Plain SVG."""

from __future__ import annotations

import math
from typing import Any

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 720, 400, 70, 190, 36, 52
COLORS = {"changed_date": "#0072b2", "changed_role": "#e69f00", "different_head": "#d55e00"}
MOST_PERCENT, LOW, HIGH = 35.0, -6, 1


def draw(table: dict[str, Any]) -> str:
    """Divergence of the next token over the share of moved tokens that was computed again."""
    right, bottom = WIDTH - RIGHT, HEIGHT - BOTTOM

    def x(percent: float) -> float:
        return round(LEFT + percent / MOST_PERCENT * (right - LEFT), 1)

    def y(kl: float) -> float:
        place = (math.log10(max(kl, 10.0**LOW)) - LOW) / (HIGH - LOW)
        return round(bottom - min(max(place, 0.0), 1.0) * (bottom - TOP), 1)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" '
        f'viewBox="0 0 {WIDTH} {HEIGHT}">',
        "<style>text{font:12px system-ui,sans-serif;fill:#222}</style>",
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<text x="{LEFT}" y="20">Divergence of the next token from the exact answer (nats, mean)</text>',
    ]
    for power in range(LOW, HIGH + 1):
        at = y(10.0**power)
        parts.append(f'<line x1="{LEFT}" x2="{right}" y1="{at}" y2="{at}" stroke="#e5e5e5"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{at + 4}" text-anchor="end">1e{power}</text>')
    for percent in range(0, 35, 5):
        parts.append(f'<text x="{x(percent)}" y="{bottom + 18}" text-anchor="middle">{percent} %</text>')
    caption = "moved tokens computed again; circles: adaptive; crosses: keys not turned"
    middle = (LEFT + right) // 2
    parts.append(f'<text x="{middle}" y="{bottom + 40}" text-anchor="middle">{caption}</text>')
    label_at = TOP + 10
    for family, color in COLORS.items():
        rows = table.get(family, {})
        fixed = [rows[m] for m in ("none", "5%", "10%", "15%", "20%", "30%") if m in rows]
        points = [(x(100 * row["repaired_share"]), y(row["kl"]["mean"])) for row in fixed]
        if not points:
            continue
        line = " ".join(f"{a},{b}" for a, b in points)
        parts.append(f'<polyline points="{line}" fill="none" stroke="{color}" stroke-width="2"/>')
        if (row := rows.get("adaptive")) is not None:
            a, b = x(100 * row["repaired_share"]), y(row["kl"]["mean"])
            parts.append(f'<circle cx="{a}" cy="{b}" r="6" fill="none" stroke="{color}" stroke-width="2.5"/>')
        if (row := rows.get("naive")) is not None:
            parts.append(f'<text x="{x(0)}" y="{y(row["kl"]["mean"]) + 4}" style="fill:{color}">×</text>')
        name = family.replace("_", " ")
        parts.append(f'<text x="{right + 16}" y="{label_at}" style="fill:{color}">{name}</text>')
        label_at += 20
    parts.append("</svg>\n")
    return "\n".join(parts)
