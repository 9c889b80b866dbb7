"""Numbers as people read them. ``None`` is shown as a dash: it is not known."""

from __future__ import annotations

from datetime import UTC, datetime
from decimal import Decimal
from math import isinf
from typing import Final

UNKNOWN: Final = "–"


def number(value: float | None) -> str:
    """Exactly, with commas."""
    return UNKNOWN if value is None else f"{value:,.0f}"


def count(value: float | None) -> str:
    """Three digits that matter: 999, 12.3k, 4.56M."""
    if value is None:
        return UNKNOWN
    size = float(value)
    for unit in ("", "k", "M", "G"):
        if abs(size) < 999.5 or unit == "G":
            break
        size /= 1000
    if not unit:
        return f"{size:,.0f}"
    return f"{size:.0f}{unit}" if abs(size) >= 99.95 else f"{size:.1f}{unit}"


def percent(share: float | None) -> str:
    if share is None:
        return UNKNOWN
    value = 100 * share
    if 0 < value < 1 or 99 < value < 100:
        return f"{value:.1f} %"
    return f"{value:.0f} %"


def seconds(value: float | None) -> str:
    """43 µs, 85 ms, 1.24 s, 3 min 5 s, 2 h 10 min, 3 d 4 h."""
    if value is None:
        return UNKNOWN
    if isinf(value):
        return "for good"
    if 0 < value < 0.000995:
        return f"{1e6 * value:.0f} µs"
    if value < 0.0095:
        return f"{1000 * value:.1f} ms"
    if value < 0.9995:
        return f"{1000 * value:.0f} ms"
    if value < 99.5:
        return f"{value:.2f} s" if value < 9.995 else f"{value:.0f} s"
    for large, small, names in ((60, 1, ("min", "s")), (3600, 60, ("h", "min")), (86400, 3600, ("d", "h"))):
        if value < large * (60 if large == 60 else 24 if large == 3600 else 10**9):
            whole, rest = int(value // large), int(value % large // small)
            return f"{whole} {names[0]} {rest} {names[1]}" if rest else f"{whole} {names[0]}"
    raise AssertionError("days have no end")


def size(num_bytes: float | None) -> str:
    if num_bytes is None:
        return UNKNOWN
    value = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if value < 1023.5 or unit == "TiB":
            break
        value /= 1024
    return f"{value:.0f} {unit}" if value >= 99.5 or unit == "B" else f"{value:.1f} {unit}"


def dollars(value: Decimal | None) -> str:
    """Cents, or more digits where it is less than a dollar."""
    if value is None:
        return UNKNOWN
    if 0 < value < Decimal("0.0001"):
        return "< $0.0001"
    return f"${value:,.2f}" if abs(value) >= 1 or not value else f"${value:.4f}"


def ago(passed_s: float) -> str:
    if passed_s < 1:
        return "just now"
    return f"{int(passed_s)} s ago" if passed_s < 100 else f"{seconds(float(int(passed_s)))} ago"


def utc(moment_s: float) -> str:
    """Seconds since the Unix epoch as a machine reads it."""
    return datetime.fromtimestamp(moment_s, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
