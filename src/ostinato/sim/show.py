"""Rows of a comparison as a table and as a chart, in the terminal or as PNG."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.bar import Bar
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from .compare import OPTIMUM, Row


def table(rows: Sequence[Row]) -> Table:
    """One line a row of one trace, best rate of each capacity in bold (the optimum aside)."""
    shown = Table(box=None, header_style="dim", pad_edge=False, title_style="bold", title_justify="left")
    shown.title = rows[0].trace if rows else None
    shown.add_column("policy", no_wrap=True)
    for title in ("capacity", "served", "2nd half", "x LRU", "hit tokens", "evicted", "TTFT", "meta"):
        shown.add_column(title, justify="right", no_wrap=True)
    base = {(row.trace, row.capacity): row.hit_rate for row in rows if row.policy == "lru"}
    best: dict[tuple[str, int], float] = {}
    for row in rows:
        if row.policy != OPTIMUM:
            key = (row.trace, row.capacity)
            best[key] = max(best.get(key, 0.0), row.hit_rate)
    for row in rows:
        key = (row.trace, row.capacity)
        is_best = row.policy != OPTIMUM and row.hit_rate == best[key]
        style = "bold" if is_best else "dim" if row.policy == OPTIMUM else ""
        lru = base.get(key, 0.0)
        shown.add_row(
            row.policy,
            f"{row.capacity:,}",
            f"{100 * row.hit_rate:.2f} %",
            f"{100 * row.half2_rate:.2f} %",
            f"{row.hit_rate / lru:.3f}" if lru else "",
            f"{row.hit_tokens / 1e6:.2f} M",
            "" if row.num_evicted is None else f"{row.num_evicted:,}",
            f"{row.ttft_s:.2f} s",
            "" if row.metadata_bytes is None else f"{row.metadata_bytes:,.0f} B",
            style=style,
        )
    return shown


def chart(rows: Sequence[Row], *, width: int = 48) -> RenderableType:
    """A bar a row, by trace and capacity, on one scale."""
    top = max((row.hit_rate for row in rows), default=0.0) or 1.0
    parts: list[RenderableType] = []
    for trace, capacity in dict.fromkeys((row.trace, row.capacity) for row in rows):
        parts.append(Text(f"\n{trace}, {capacity:,} blocks: share served", style="bold"))
        bars = Table.grid(padding=(0, 1))
        for row in rows:
            if (row.trace, row.capacity) == (trace, capacity):
                color = "green" if row.policy == "workload" else "grey50" if row.policy == OPTIMUM else "cyan"
                bar = Bar(top, 0, row.hit_rate, width=width, color=color)
                bars.add_row(Text(row.policy), bar, Text(f"{100 * row.hit_rate:.1f} %"))
        parts.append(bars)
    return Group(*parts)


def write_png(rows: Sequence[Row], path: Path) -> bool:
    """Share served over capacity, a panel a trace; false where matplotlib is not installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    traces = list(dict.fromkeys(row.trace for row in rows))
    figure = Figure(figsize=(6 * len(traces), 4.5), layout="constrained")
    for place, trace in enumerate(traces, 1):
        axes = figure.add_subplot(1, len(traces), place)
        for policy in dict.fromkeys(row.policy for row in rows):
            line = sorted(
                (r.capacity, 100 * r.hit_rate) for r in rows if (r.trace, r.policy) == (trace, policy)
            )
            axes.plot(
                *zip(*line, strict=True),
                marker="o",
                label=policy,
                linestyle="--" if policy == OPTIMUM else "-",
            )
        axes.set(title=trace, xscale="log", xlabel="capacity (blocks)", ylabel="served (%)")
        axes.legend(fontsize=8)
    figure.savefig(path, dpi=150)
    return True


def print_rows(rows: Sequence[Row], *, with_chart: bool, console: Console | None = None) -> None:
    console = console or Console()
    for trace in dict.fromkeys(row.trace for row in rows):
        console.print(table([row for row in rows if row.trace == trace]))
    if with_chart:
        console.print(chart(rows))
