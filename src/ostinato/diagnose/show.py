"""A comparison of two prompts, and the findings in a log, on a terminal."""

from __future__ import annotations

from typing import Final

from rich.console import Console
from rich.table import Table
from rich.text import Text

from .diff import Diff
from .digests import SegmentDiff
from .findings import Report

_EDGE_CHARS: Final = 60
_MAX_RUN_CHARS: Final = 160
_MAX_GROUPS: Final = 8


def print_diff(diff: Diff, console: Console) -> None:
    """Runs that are the same dim, what was red, what is now green; moved text blue."""
    a, b = diff.a, diff.b
    cause = diff.cause
    console.print(f"A {a.asked.where}: {len(a.tokens):,} tokens", highlight=False)
    console.print(f"B {b.asked.where}: {len(b.tokens):,} tokens", highlight=False)
    for written in (a, b):
        if written.remark:
            console.print(Text(written.remark, style="yellow"))
    if not diff.differences:
        console.print("They are the same.")
    else:
        verdict = f"The first {diff.num_common:,} tokens are the same, then: {cause.kind.replace('_', ' ')}"
        where = f" in {cause.where}" if cause.where else ""
        console.print(Text(verdict + where, style="bold" if not cause.is_harmless else ""))
        if cause.fix:
            console.print(Text(f"→ {cause.fix}", style="cyan"))
        if diff.num_lost:
            text = f"{diff.num_lost:,} tokens after that are the same again, and cannot be found as a prefix."
            console.print(Text(text, style="yellow"))
    console.print()
    console.print(_body(diff))
    console.print()
    table = Table(box=None, pad_edge=False)
    for name in ("layer", "tokens", ""):
        table.add_column(name, justify="right" if name == "tokens" else "left")
    for item in diff.potentials:
        table.add_row(item.layer, f"{item.num_tokens:,}", item.note)
    console.print(table)


_STYLES: Final = {"same": "dim", "moved": "blue", "new": "green"}


def print_segments(diff: SegmentDiff, console: Console) -> None:
    """Part by part, as no text is known."""
    console.print(f"The first {diff.num_common:,} tokens are the same, in whole parts.")
    if diff.num_lost:
        console.print(Text(f"{diff.num_lost:,} tokens after that are the same again.", style="yellow"))
    for number, (num_tokens, kind) in enumerate(diff.segments):
        console.print(Text(f"segment {number}: {num_tokens:,} tokens, {kind}", style=_STYLES[kind]))
    console.print(Text("What is in them says a trace written with --trace-content.", style="dim"))


def _body(diff: Diff) -> Text:
    a, b, text = diff.a, diff.b, Text()
    by_end = {run.b: run for run in diff.runs}
    place = 0
    for item in diff.differences:
        gap = item.gap
        run = by_end.get(place)
        if run is not None and run.length:
            _same(text, b.text(run.b, run.b_end), run.length)
        segment = b.label(gap.b)
        kinds = ", ".join(cause.kind.replace("_", " ") for cause in item.causes)
        text.append(f"\n── token {gap.b:,}, {segment}: {kinds}\n", style="bold magenta")
        if gap.a_end > gap.a:
            text.append(_cut(a.text(gap.a, gap.a_end)), style="red")
        if gap.b_end > gap.b:
            is_moved = any(run.b < gap.b_end and gap.b < run.b_end for run in diff.moved)
            text.append(_cut(b.text(gap.b, gap.b_end)), style="blue" if is_moved else "green")
        text.append("\n")
        place = gap.b_end
    run = by_end.get(place)
    if run is not None and run.length:
        _same(text, b.text(run.b, run.b_end), run.length)
    return text


def _same(text: Text, words: str, num_tokens: int) -> None:
    if len(words) > 2 * _EDGE_CHARS:
        words = f"{words[:_EDGE_CHARS]} ⋯ {num_tokens:,} tokens the same ⋯ {words[-_EDGE_CHARS:]}"
    text.append(words, style="dim")


def _cut(words: str) -> str:
    half = _MAX_RUN_CHARS // 2
    return words if len(words) <= _MAX_RUN_CHARS else f"{words[:half]} ⋯ {words[-half:]}"


def print_report(report: Report, console: Console) -> None:
    """Findings, the costliest first, with the fix of each and what it is worth."""
    how = "measured" if report.is_measured else "with room for all of it"
    console.print(
        f"{report.num_requests:,} requests, {report.prompt_tokens:,} prompt tokens; "
        f"{report.hit_rate:.1%} found ({how})",
        highlight=False,
    )
    if report.possible_tokens > report.hit_tokens:
        console.print(Text(f"{report.possible_rate:.1%} with everything below mended", style="green"))
    for finding in report.findings:
        share = finding.lost_tokens / report.prompt_tokens if report.prompt_tokens else 0.0
        title = finding.kind.replace("_", " ") + (f" in {finding.where}" if finding.where else "")
        money = "" if finding.lost_dollars is None else f", ${finding.lost_dollars:,.2f}"
        console.print()
        console.print(
            Text(f"{title}: {finding.lost_tokens:,} tokens ({share:.1%}{money}) "
                 f"in {finding.num_requests:,} requests", style="bold red")
        )  # fmt: skip
        for example in finding.examples:
            console.print(Text(f"  {example}", style="dim"))
        for where in finding.requests[:2]:
            console.print(Text(f"  {where}", style="dim"))
        console.print(Text(f"  → {finding.fix}", style="cyan"))
        if finding.gain_tokens is not None:
            console.print(
                Text(f"  replayed with this mended: {finding.gain_tokens:,} tokens more", style="green")
            )
    if not report.findings:
        console.print("Nothing breaks reuse.")
    for note in report.notes:
        console.print(
            Text(f"Note: {note.kind.replace('_', ' ')} in {note.num_requests:,} requests.", style="dim")
        )
    if len(report.groups) > 1:
        console.print()
        table = Table(box=None, pad_edge=False)
        for name in ("requests", "tokens", "found", "that begin like"):
            table.add_column(name, justify="left" if name.startswith("that") else "right")
        for group in report.groups[:_MAX_GROUPS]:
            rate = group.hit_tokens / group.prompt_tokens if group.prompt_tokens else 0.0
            table.add_row(
                f"{group.num_requests:,}", f"{group.prompt_tokens:,}", f"{rate:.0%}", Text(group.name)
            )
        console.print(table)
