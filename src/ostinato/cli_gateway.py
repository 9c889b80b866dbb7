"""The command line for the gateway: ``serve --upstream``, ``costs`` and ``misses``."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

import click

if TYPE_CHECKING:
    from .config import Settings
    from .gateway.upstreams import Diagnose
    from .providers.planner import Mode

F = TypeVar("F", bound=Callable[..., Any])
_TIMEOUT_S = 30.0
_FILE = click.Path(path_type=Path, exists=True, dir_okay=False)


def upstream_options(command: F) -> F:
    """Where to pass requests on to, instead of running a model."""
    url = click.option(
        "--upstream",
        "upstream_urls",
        multiple=True,
        help="Pass requests on to this server, instead of running MODEL: URL or anthropic+URL. Repeatable.",
    )
    file = click.option("--upstreams", "upstream_file", type=_FILE, help="TOML file with upstreams.")
    mode = click.option(
        "--plan",
        "plan_mode",
        type=click.Choice(["off", "observe", "plan"]),
        default="observe",
        show_default=True,
        help="Vendors' prompt caches: nothing, count, or set breakpoints. For --upstream.",
    )
    diagnose = click.option(
        "--diagnose",
        type=click.Choice(["off", "redacted", "text"]),
        default="off",
        show_default=True,
        help="Find out why vendors' caches were not read; with or without texts. For --upstream.",
    )
    rules = click.option(
        "--provider-rules", type=_FILE, multiple=True, help="Rows of your own, for upstreams."
    )
    return url(file(mode(diagnose(rules(command)))))


def run_gateway(
    settings: Settings,
    urls: tuple[str, ...],
    file: Path | None,
    mode: str,
    diagnose: str,
    rule_files: tuple[Path, ...],
) -> None:
    """Serve until stopped."""
    from .gateway import create_gateway, parse_upstream, read_upstreams
    from .ports import SystemClock
    from .providers.rules import load_table
    from .response_caches import kept_answers
    from .server import serve, server_settings

    upstreams = [
        parse_upstream(url, os.environ, plan=cast("Mode", mode), diagnose=cast("Diagnose", diagnose))
        for url in urls
    ]
    if file is not None:
        upstreams += read_upstreams(file, os.environ)
    wire = server_settings(
        host=settings.host,
        port=settings.port,
        tenants=settings.all_tenants(),
        admin_key=settings.admin_key,
        drain_timeout_s=settings.drain_timeout,
        max_body_bytes=64 << 20,  # images are in it
    )

    def ready(url: str) -> None:
        click.secho(f"Passing on at {url}", bold=True)
        for upstream in upstreams:
            names = ", ".join(upstream.models)
            key = "its own key" if upstream.key else "the caller's key"
            click.echo(f"  {names} → {upstream.url} ({upstream.protocol}, {key}, {upstream.plan})")

    answers = kept_answers(settings, SystemClock())
    try:
        rated = None if answers is None or answers.second is None else answers.second.semantic
        app = create_gateway(upstreams, wire, load_table(rule_files), answers=answers, rated=rated)
        serve(app, wire, ready)
    except OSError as error:
        raise click.ClickException(
            f"cannot listen on {settings.host}:{settings.port}: {error.strerror}; choose another --port"
        ) from error
    finally:
        if answers is not None:
            answers.close()


def _gateway_options(command: F) -> F:
    url = click.option(
        "--url", default="http://127.0.0.1:8000", show_default=True, help="Address of a gateway."
    )
    key = click.option(
        "--admin-key", envvar="OSTINATO_ADMIN_KEY", help="Its admin key. Better: OSTINATO_ADMIN_KEY."
    )
    as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON, one object a line.")
    return url(key(as_json(command)))


def _asked(url: str, route: str, admin_key: str | None) -> dict[str, Any]:
    headers = {"Authorization": f"Bearer {admin_key}"} if admin_key else {}
    request = Request(url.rstrip("/") + route, headers=headers)
    try:
        with urlopen(request, timeout=_TIMEOUT_S) as response:
            found: dict[str, Any] = json.load(response)
        if "rows" not in found:
            raise KeyError("rows")
    except HTTPError as error:
        error.close()
        raise click.ClickException(f"{url} refuses: {error.code} {error.reason}") from error
    except (URLError, ValueError, KeyError) as error:
        raise click.ClickException(f"{url} does not answer as a gateway does: {error}") from error
    return found


@click.command()
@_gateway_options
def costs(url: str, admin_key: str | None, as_json: bool) -> None:
    """Print what requests through a gateway have used and cost since it started."""
    from decimal import Decimal

    from rich.console import Console
    from rich.table import Column, Table

    found = _asked(url, "/v1/ostinato/costs", admin_key)
    rows = found["rows"]
    if as_json:
        for row in rows:
            click.echo(json.dumps(row))
        return
    names = ("vendor", "model", "tenant", "prompt", "requests", "uncached", "written", "read", "output")
    shown = Table(*(Column(name, overflow="fold") for name in (*names, "dollars", "saved")))
    for row in rows:
        cost, without = Decimal(row["dollars"]), Decimal(row["dollars_without_cache"])
        priced = row["unpriced_requests"] < row["requests"]
        shown.add_row(
            row["vendor"],
            row["model"],
            row["tenant"],
            row["prompt"],
            f"{row['requests']:,}",
            f"{row['uncached_tokens']:,}",
            f"{sum(row['written_tokens'].values()):,}",
            f"{row['read_tokens']:,}",
            f"{row['output_tokens']:,}",
            f"{cost:,.4f}" if priced else "?",
            f"{without - cost:,.4f}" if priced else "?",
        )
    Console().print(shown)
    if missing := found["unread_usages"] + found["untold_usages"]:
        click.secho(
            f"Without the usage of {missing} answers, which told none (streams, mostly).", fg="yellow"
        )


@click.command()
@_gateway_options
def misses(url: str, admin_key: str | None, as_json: bool) -> None:
    """Print why the latest requests through a gateway read less of vendors' caches than they could."""
    from rich.console import Console
    from rich.table import Column, Table

    rows = _asked(url, "/v1/ostinato/misses", admin_key)["rows"]
    if as_json:
        for row in rows:
            click.echo(json.dumps(row))
        return
    names = ("model", "verdict", "ours", "lost tokens", "where", "offset", "before", "after", "vendor's")
    shown = Table(*(Column(name, overflow="fold") for name in names))
    for row in rows:
        ours = row["ours"] or {}
        shown.add_row(
            row["model"],
            row["verdict"],
            ours.get("reason", ""),
            f"{ours['lost_tokens']:,}" if ours else "",
            ours.get("where", ""),
            str(ours.get("offset", "")),
            repr(ours["before"]) if ours.get("before") else "",
            repr(ours["after"]) if ours.get("after") else "",
            json.dumps(row["vendors"]) if row["vendors"] else "",
        )
    Console().print(shown)
