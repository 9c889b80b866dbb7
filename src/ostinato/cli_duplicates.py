"""``ostinato duplicates``: what a log would have saved with answers kept."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import click

from .errors import TraceError


@click.command("duplicates")
@click.argument("logs", nargs=-1, required=True, type=click.Path(path_type=Path, exists=True))
@click.option(
    "--near",
    type=click.FloatRange(0, 1, min_open=True),
    default=0.8,
    show_default=True,
    help="Share of three-word phrases that near texts have in common.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def duplicates(logs: tuple[Path, ...], near: float, as_json: bool) -> None:
    """Tell how many requests in LOGS came more than once.

    LOGS are files of JSON lines, or folders of such: bodies of requests, bare or under "body" or "request",
    recorded sessions, or what ostinato serve writes with --trace (best with --trace-content). Says how many
    are identical, how many canonically so (what the exact cache would serve), and how many are near (what a
    semantic cache would have to judge).
    """
    from .responses.duplicates import find_duplicates

    found = find_duplicates(_lines(logs), near=near)
    if not found.requests:
        raise TraceError(f"there is no request in {', '.join(map(str, logs))}")
    if as_json:
        click.echo(json.dumps(asdict(found)))
        return
    share = f"{found.requests:,} requests"
    click.echo(share + (f", and {found.unusable:,} lines that are none" if found.unusable else ""))
    if found.digests_only:
        click.echo(
            f"{found.digests_only:,} of them are digests of prompts: what else was asked is not known "
            "(--trace-content)"
        )
    for name, count, note in (
        ("identical", found.identical, "as they were written"),
        ("canonical", found.canonical, "those and others that mean the very same: the exact cache"),
        ("near", found.near, f"further ones whose last text is {near:.0%} the same: to be judged"),
    ):
        click.echo(f"  {name:10} {count:8,}  {count / found.requests:6.1%}  {note}")
    if found.canonical:
        click.echo(f"Of the canonical ones {found.greedy:,} are at temperature 0, which is served unasked.")
    if found.repeated_tokens:
        click.echo(f"They repeat {found.repeated_tokens:,} of {found.output_tokens:,} generated tokens.")
    if found.median_gap_s is not None:
        click.echo(f"Half of them come within {found.median_gap_s:,.0f} s of the one before.")
    for group in found.groups:
        click.echo(f"  {group.count:6,} ×  the request in line {group.line}")


def _lines(logs: tuple[Path, ...]) -> Iterator[bytes]:
    for log in logs:
        for file in sorted(log.rglob("*.jsonl")) if log.is_dir() else [log]:
            try:
                with file.open("rb") as lines:
                    yield from lines
            except OSError as error:
                raise TraceError(f"cannot read the log {file}: {error.strerror}") from error
