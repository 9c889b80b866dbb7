"""The command line for vendors' prompt caches: ``ostinato plan`` and ``ostinato providers``."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from .providers.forecast import Decision, Planned
    from .providers.rules import RuleTable

_RULES = click.option(
    "--rules",
    "rule_files",
    multiple=True,
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="TOML file with rows of your own; they win. May be given more than once.",
)
_DAY = click.option("--on", "day", type=click.DateTime(["%Y-%m-%d"]), help="The day whose rules hold; today.")


@click.group()
def providers() -> None:
    """What vendors' prompt caches do and cost."""


@providers.command("rules")
@click.argument("vendor", required=False)
@click.option("--model", help="What holds for this model, instead of all rows.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON, one object a line.")
@_RULES
@_DAY
def provider_rules(
    vendor: str | None, model: str | None, as_json: bool, rule_files: tuple[Path, ...], day: datetime | None
) -> None:
    """Print the table of rules, or those of VENDOR, each with its source and the day it was read."""
    from .providers.rules import load_table, rows_of, vendor_of_model

    table = load_table(rule_files)
    if model is not None:
        _print_model(table, vendor or vendor_of_model(model), model, _day(day), as_json)
        return
    if vendor is not None and vendor not in table.vendors:
        raise click.UsageError(f"there is no vendor {vendor!r}; there are {', '.join(table.vendors)}")
    for row in rows_of(table, vendor):
        source = table.sources[row.source]
        shown = {
            "kind": row.kind,
            "vendor": row.vendor,
            "models": list(row.models),
            **{name: _plain(value) for name, value in row.values.items()},
            "from": None if row.since is None else row.since.isoformat(),
            "source": source.title,
            "read": source.read.isoformat(),
            "conflict": row.conflict,
            "origin": row.origin,
        }
        if as_json:
            click.echo(json.dumps(shown))
            continue
        head = f"{row.kind:11} {row.vendor:10} {' '.join(row.models)}"
        click.echo(head + (f"  from {row.since}" if row.since else ""))
        for name, value in row.values.items():
            click.echo(f"    {name} = {json.dumps(_plain(value))}")
        click.secho(f"    read {source.read} in: {source.title}", dim=True)
        if row.conflict:
            click.secho(f"    conflict: {row.conflict}", fg="yellow")


def _print_model(table: RuleTable, vendor: str, model: str, on: date, as_json: bool) -> None:
    from dataclasses import fields

    rules, price = table.rules(vendor, model, on), table.price(vendor, model, on)
    shown: dict[str, Any] = {
        item.name: _plain(getattr(rules, item.name)) for item in fields(rules) if item.name != "sources"
    }
    shown["price"] = None if price is None else _plain(price)
    shown["break_even_requests"] = {
        known.name: str(round(rules.break_even(known.name), 2)) for known in rules.ttl
    }
    if as_json:
        click.echo(json.dumps(shown))
        return
    for name, value in shown.items():
        named = rules.sources.get(name)
        where = "" if named is None else f"    ({table.sources[named].title}, {table.sources[named].read})"
        click.echo(f"{name} = {json.dumps(value)}{where}")


@click.command("plan")
@click.argument("files", nargs=-1, required=True, type=click.Path(path_type=Path, exists=True))
@click.option("--model", default="claude-sonnet-5-5", show_default=True, help="For requests that name none.")
@click.option("--vendor", help="Whose rules; by default by the model's name.")
@click.option("--bytes-per-token", type=click.FloatRange(0.5, 16), default=4.0, show_default=True)
@click.option("--first-token", type=click.FloatRange(0), default=2.0, show_default=True, help="Seconds.")
@click.option(
    "--repair",
    "repairs",
    multiple=True,
    type=click.Choice(["tool_order", "key_order", "volatile"]),
    help="What may be rewritten first. May be given more than once.",
)
@click.option("--each", is_flag=True, help="Print what to do with every request, too.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON, one object a line.")
@_RULES
@_DAY
def plan(files: tuple[Path, ...], day: datetime | None, **options: Any) -> None:
    """Print where breakpoints pay in FILES (requests, logs of them, sessions) and what they save.

    Of a folder all .json and .jsonl files in it are read.
    """
    from .providers.forecast import Planned
    from .providers.logs import read_requests
    from .providers.repair import RepairRules
    from .providers.rules import load_table
    from .providers.wire_anthropic import bytes_per_token

    on, count = _day(day), bytes_per_token(options["bytes_per_token"])
    rules = RepairRules(**dict.fromkeys(options["repairs"], True)) if options["repairs"] else None
    requests = [
        request
        for file in _files_in(files)
        for request in read_requests(
            file, count, model=options["model"], vendor=options["vendor"], repairs=rules
        )
    ]
    planned = Planned(load_table(options["rule_files"]), on, first_token_s=options["first_token"])
    is_each = options["each"] or len(requests) == 1
    for decision in planned.play(requests):
        if is_each:
            _print_decision(decision, options["as_json"])
    _print_forecasts(planned, options["as_json"])
    if not options["as_json"]:
        untimed = sum(not request.is_timed for request in requests)
        click.secho("Assumed:", bold=True)
        for line in (
            f"a token is {options['bytes_per_token']:g} bytes of JSON or text",
            f"responses begin after {options['first_token']:g} s; rules and prices are those of {on}",
            *([f"{untimed} requests carry no time: 30 s apart"] if untimed else []),
            "text of sessions is cut where earlier requests of the session ended",
            "money is for input only, at list price, in dollars",
        ):
            click.echo(f"  {line}")


def _files_in(paths: Iterable[Path]) -> Iterator[Path]:
    for path in paths:
        if path.is_dir():
            yield from sorted(file for file in path.rglob("*") if file.suffix in (".json", ".jsonl"))
        else:
            yield path


def _print_decision(decision: Decision, as_json: bool) -> None:
    prompt, made = decision.request.planned, decision.plan
    markers = {".".join(map(str, path)): ttl for path, ttl in made.paths(prompt).items()}
    if as_json:
        about: dict[str, Any] = {
            "request": decision.request.where,
            "breakpoints": markers,
            "reasons": list(made.reasons),
            "repairs": list(decision.request.repairs),
        }
        about |= {"cache_key": made.cache_key, "explicit": made.is_explicit, "fault": decision.fault}
        click.echo(json.dumps(about | {"expected": _plain(made.expected)}))
        return
    click.secho(decision.request.where, bold=True)
    if decision.fault:
        click.secho(f"  the vendor would refuse it: {decision.fault}", fg="red")
    for done in decision.request.repairs:
        click.echo(f"  repaired: {done}")
    for place, ttl in markers.items():
        click.echo(f"  breakpoint on {place}, for {ttl}")
    if made.is_explicit:
        click.echo("  no breakpoints by the vendor itself (mode explicit)")
    if made.cache_key:
        click.echo(f"  prompt_cache_key {made.cache_key}")
    for reason in made.reasons:
        click.secho(f"  {reason}", dim=True)


def _print_forecasts(planned: Planned, as_json: bool) -> None:
    from rich.console import Console
    from rich.table import Table

    rows = sorted(planned.forecasts.values(), key=lambda row: -row.planned.input)
    sent, made = planned.as_sent.total, planned.planned.total
    if as_json:
        for row in rows:
            click.echo(json.dumps(_plain(row)))
        total = {"without_cache": str(sent.without_cache), "as_sent": str(sent.total)}
        click.echo(json.dumps({"dollars": total | {"planned": str(made.total)}}))
        return
    shown = Table("model", "prefix", "requests", "input", "read as sent", "read planned", "written planned")
    for row in rows[:20]:
        refused = f" ({row.num_refused} refused)" if row.num_refused else ""
        shown.add_row(
            row.model,
            f"{row.prefix} {row.prefix_tokens:,}",
            f"{row.num_requests:,}{refused}",
            f"{row.planned.input:,}",
            f"{row.as_sent.read:,}",
            f"{row.planned.read:,}",
            f"{row.planned.num_written:,}",
        )
    Console().print(shown)
    if len(rows) > 20:
        click.echo(f"and {len(rows) - 20} more prefixes")
    if any(entry.num_unpriced for _, entry in planned.planned):
        click.echo("No price is known for some models: add it with --rules.")
    click.echo(
        f"Without a cache {_dollars(sent.without_cache)}, as sent {_dollars(sent.total)}, "
        f"as planned {_dollars(made.total)}."
    )


def _dollars(amount: Decimal) -> str:
    return f"${amount:,.4f}"


def _day(given: datetime | None) -> date:
    return (datetime.now(UTC) if given is None else given).date()


def _plain(value: Any) -> Any:
    """As JSON knows it."""
    from dataclasses import fields, is_dataclass

    if is_dataclass(value) and not isinstance(value, type):
        return {item.name: _plain(getattr(value, item.name)) for item in fields(value)}
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, Iterable) and not isinstance(value, str | bytes):
        items = [_plain(item) for item in value]
        return sorted(items) if isinstance(value, frozenset) else items
    if isinstance(value, Decimal):
        return str(value)
    return value.isoformat() if isinstance(value, date) else value
