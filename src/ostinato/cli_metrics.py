"""``ostinato metrics``: what is measured, and what draws and watches it."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import click

from .cli_model import json_option
from .errors import ParameterError

_OUT = click.option(
    "-o", "--output", type=click.Path(path_type=Path, dir_okay=False), help="File to write to."
)


@click.group()
def metrics() -> None:
    """What a server measures; a Grafana dashboard and Prometheus rules for it."""


@metrics.command("list")
@json_option
def list_series(as_json: bool) -> None:
    """List every series with its meaning."""
    from .series import ALL

    if as_json:
        click.echo(json.dumps([{"full_name": each.full_name, **asdict(each)} for each in ALL]))
        return
    for each in ALL:
        label = f"{{{', '.join(each.labels)}}}" if each.labels else ""
        click.echo(f"{each.full_name}{label} ({each.kind}): {each.text}")


@metrics.command("dashboard")
@_OUT
def grafana(output: Path | None) -> None:
    """Write a dashboard for Grafana to import."""
    from .monitoring import dashboard

    _write(dashboard(), output)


@metrics.command("rules")
@_OUT
def prometheus_rules(output: Path | None) -> None:
    """Write Prometheus rules: when to wake somebody, and why."""
    from .monitoring import rules

    _write(rules(), output)


def _write(text: str, output: Path | None) -> None:
    if output is None:
        click.echo(text, nl=False)
        return
    try:
        output.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ParameterError(f"cannot write {output}: {error.strerror}", param="output") from error
