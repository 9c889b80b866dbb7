"""Rows of a comparison as a table and as a chart, in the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.bar import Bar
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from .compare import OPTIMUM, Row
from .fleets import FleetRow


def table(rows: Sequence[Row]) -> Table:
    """One line a row of one trace, best rate of each capacity in bold (the optimum aside)."""
    shown = Table(
        box=None, header_style="dim", padding=(0, 1, 0, 0), title_style="bold", title_justify="left"
    )
    shown.title = rows[0].trace if rows else None
    shown.add_column("policy", no_wrap=True)
    with_tier = any(row.tier_capacity for row in rows)
    titles = ["capacity", "served", "2nd half", "x LRU", "hit tokens", "evicted", "TTFT", "meta"]
    if with_tier:
        titles = [
            "arena",
            "tier",
            "served",
            "x LRU",
            "hits",
            "of tier",
            "loaded",
            "stored",
            "evicted",
            "TTFT",
        ]
    for title in titles:
        shown.add_column(title, justify="right", no_wrap=True)
    base = {_place(row): row.hit_rate for row in rows if row.policy == "lru"}
    best: dict[tuple[str, int, int], float] = {}
    for row in rows:
        if row.policy != OPTIMUM:
            key = _place(row)
            best[key] = max(best.get(key, 0.0), row.hit_rate)
    for row in rows:
        key = _place(row)
        is_best = row.policy != OPTIMUM and row.hit_rate == best[key]
        style = "bold" if is_best else "dim" if row.policy == OPTIMUM else ""
        lru = base.get(key, 0.0)
        shown.add_row(row.policy, *(_tier_cells if with_tier else _cells)(row, lru), style=style)
    return shown


def _place(row: Row) -> tuple[str, int, int]:
    return row.trace, row.capacity, row.tier_capacity


def _cells(row: Row, lru: float) -> tuple[str, ...]:
    return (
        f"{row.capacity:,}",
        f"{100 * row.hit_rate:.2f} %",
        f"{100 * row.half2_rate:.2f} %",
        f"{row.hit_rate / lru:.3f}" if lru else "",
        f"{row.hit_tokens / 1e6:.2f} M",
        "" if row.num_evicted is None else f"{row.num_evicted:,}",
        f"{row.ttft_s:.2f} s",
        "" if row.metadata_bytes is None else f"{row.metadata_bytes:,.0f} B",
    )


def _tier_cells(row: Row, lru: float) -> tuple[str, ...]:
    evicted = (
        "" if row.num_evicted is None else f"{_short(row.num_evicted)}+{_short(row.num_tier_evicted or 0)}"
    )
    return (
        _short(row.capacity),
        _short(row.tier_capacity),
        f"{100 * row.hit_rate:.1f}%",
        f"{row.hit_rate / lru:.2f}" if lru else "",
        _short(row.hit_tokens),
        "" if row.tier_hit_tokens is None else _short(row.tier_hit_tokens),
        "" if row.loaded_bytes is None else f"{_short(row.loaded_bytes)}B",
        "" if row.stored_bytes is None else f"{_short(row.stored_bytes)}B",
        evicted,
        f"{row.ttft_s:.2f}s",
    )


def _short(number: float) -> str:
    """A number in at most five characters: 950, 1.2k, 20k, 3.4M …"""
    for unit in ("", "k", "M", "G"):
        if number < 9.95 and unit:
            return f"{number:.1f}{unit}"
        if number < 1000:
            return f"{number:.0f}{unit}"
        number /= 1000
    return f"{number:,.1f}T" if number < 9.95 else f"{number:,.0f}T"


def chart(rows: Sequence[Row], *, width: int = 48) -> RenderableType:
    """A bar a row, by trace and capacity, on one scale."""
    top = max((row.hit_rate for row in rows), default=0.0) or 1.0
    parts: list[RenderableType] = []
    for place in dict.fromkeys(_place(row) for row in rows):
        trace, capacity, tier_capacity = place
        below = f" over {tier_capacity:,}" if tier_capacity else ""
        parts.append(Text(f"\n{trace}, {capacity:,} blocks{below}: share served", style="bold"))
        bars = Table.grid(padding=(0, 1))
        for row in rows:
            if _place(row) == place:
                color = "green" if row.policy == "workload" else "grey50" if row.policy == OPTIMUM else "cyan"
                bar = Bar(top, 0, row.hit_rate, width=width, color=color)
                bars.add_row(Text(row.policy), bar, Text(f"{100 * row.hit_rate:.1f} %"))
        parts.append(bars)
    return Group(*parts)


def print_rows(rows: Sequence[Row], *, with_chart: bool, console: Console | None = None) -> None:
    console = console or Console()
    for trace in dict.fromkeys(row.trace for row in rows):
        console.print(table([row for row in rows if row.trace == trace]))
    if with_chart:
        console.print(chart(rows))


def fleet_table(rows: Sequence[FleetRow]) -> Table:
    """One line a row of one trace."""
    shown = Table(box=None, header_style="dim", padding=(0, 1, 0, 0), title_justify="left")
    shown.title = rows[0].trace if rows else None
    shown.add_column("routing", no_wrap=True)
    for title in ("workers", "shared", "hits", "TTFT p50", "p90", "p99", "network", "most", "map"):
        shown.add_column(title, justify="right", no_wrap=True)
    for row in rows:
        shown.add_row(
            row.routing,
            f"{row.num_workers:,}",
            _short(row.global_capacity),
            f"{100 * row.hit_rate:.1f}%",
            f"{row.ttft_p50_s:.2f}s",
            f"{row.ttft_p90_s:.1f}s",
            f"{row.ttft_p99_s:.1f}s",
            f"{_short(row.network_bytes)}B",
            f"{row.most_over_mean:.2f}",
            f"{row.map_bytes_per_token:.2f}B",
        )
    return shown
