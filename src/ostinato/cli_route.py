"""The command line for fleets: ``ostinato route`` and ``ostinato workers``."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

import click

from .config import Settings
from .routing import STRATEGIES, RoutingRule

_TIMEOUT_S = 30.0


@click.command()
@click.argument("workers", nargs=-1, required=True)
@click.option("--name", default="fleet", show_default=True, help="Of the fleet: kept answers are by it.")
@click.option("--routing", type=click.Choice(STRATEGIES), default="prefix", show_default=True)
@click.option(
    "--cache-tokens",
    type=click.IntRange(1),
    default=1 << 20,
    show_default=True,
    help="KV of each worker, roughly.",
)
@click.option(
    "--block-bytes",
    type=click.IntRange(16),
    default=512,
    show_default=True,
    help="Of a prompt's JSON, that are told apart.",
)
@click.option(
    "--check-every",
    type=click.FloatRange(0.05),
    default=2.0,
    show_default=True,
    help="Seconds between checks.",
)
@click.option(
    "--max-tries", type=click.IntRange(1), default=3, show_default=True, help="Workers for a request."
)
@click.option("--worker-key", envvar="OSTINATO_WORKER_KEY", help="The workers' API key.")
@click.option("--host", help="Address to listen on.")
@click.option("--port", type=int, help="Port to listen on; 0 takes a free one.")
@click.option("--api-keys", help="Comma-separated keys. Better: OSTINATO_API_KEYS.")
@click.option(
    "--tenants", type=click.Path(path_type=Path, dir_okay=False), help="TOML file with API keys by name."
)
@click.option("--admin-key", help="Key for `ostinato workers`. Better: OSTINATO_ADMIN_KEY.")
@click.option("--answers", metavar="WHERE", help="Keep whole answers: a file, memory, or postgresql://…")
@click.option("--answers-for", type=click.Choice(["asked", "greedy", "all"]), help="Whose.")
@click.option("--answers-ttl", type=float, help="Seconds for which an answer is kept.")
@click.option("--drain-timeout", type=float, help="Seconds for running requests at shutdown.")
def route(workers: tuple[str, ...], **options: Any) -> None:
    """Stand before WORKERS (addresses of servers with one model) and send each request to one."""
    from .gateway import Fleet, FleetOptions, Upstream, create_gateway
    from .ports import SystemClock
    from .providers.rules import load_table
    from .response_caches import kept_answers
    from .server import serve, server_settings

    own = {name: options.pop(name) for name in ("name", "routing", "cache_tokens", "block_bytes")}
    checks = FleetOptions(
        RoutingRule(own["routing"]),
        cache_tokens=own["cache_tokens"],
        block_bytes=own["block_bytes"],
        check_every_s=options.pop("check_every"),
        max_tries=options.pop("max_tries"),
    )
    key = options.pop("worker_key") or ""
    settings = Settings.from_environment(os.environ, **options)
    wire = server_settings(
        host=settings.host,
        port=settings.port,
        tenants=settings.all_tenants(),
        admin_key=settings.admin_key,
        drain_timeout_s=settings.drain_timeout,
        max_body_bytes=64 << 20,
    )
    fleet = Fleet(
        [Upstream(_name(url), url.rstrip("/").removesuffix("/v1"), key=key) for url in workers],
        checks,
        name=own["name"],
    )

    def ready(url: str) -> None:
        click.secho(f"Routing at {url}", bold=True)
        for row in fleet.relay.workers():
            click.echo(f"  {row['name']}")

    answers = kept_answers(settings, SystemClock())
    try:
        serve(create_gateway((), wire, load_table(()), answers=answers, fleet=fleet), wire, ready)
    except OSError as error:
        raise click.ClickException(
            f"cannot listen on {settings.host}:{settings.port}: {error.strerror}; choose another --port"
        ) from error
    finally:
        if answers is not None:
            answers.close()


def _name(url: str) -> str:
    return urlsplit(url).netloc or url


@click.command()
@click.option("--url", default="http://127.0.0.1:8000", show_default=True, help="Address of a router.")
@click.option("--admin-key", envvar="OSTINATO_ADMIN_KEY", help="Its admin key. Better: OSTINATO_ADMIN_KEY.")
@click.option("--drain", metavar="WORKER", help="Give it no more requests.")
@click.option("--resume", metavar="WORKER", help="Give it requests again.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON, one object a line.")
def workers(url: str, admin_key: str | None, drain: str | None, resume: str | None, as_json: bool) -> None:
    """Print the workers behind a router; take one out for maintenance, or back in."""
    from rich.console import Console
    from rich.table import Table

    rows = _asked(url, "", None, admin_key)
    for name, is_drained in ((drain, True), (resume, False)):
        if name is not None:
            rows = _asked(url, "/drain", {"worker": name, "drain": is_drained}, admin_key)
    if as_json:
        for row in rows:
            click.echo(json.dumps(row))
        return
    shown = Table("worker", "state", "running", "load, tokens", box=None)
    for row in rows:
        shown.add_row(row["name"], row["state"], f"{row['num_running']:,}", f"{row['load_tokens']:,}")
    Console().print(shown)


def _asked(url: str, path: str, body: dict[str, Any] | None, admin_key: str | None) -> list[dict[str, Any]]:
    headers = {"Authorization": f"Bearer {admin_key}"} if admin_key else {}
    data = None if body is None else json.dumps(body).encode()
    request = Request(f"{url.rstrip('/')}/v1/ostinato/workers{path}", data=data, headers=headers)
    try:
        with urlopen(request, timeout=_TIMEOUT_S) as response:
            rows: list[dict[str, Any]] = json.load(response)["rows"]
    except HTTPError as error:
        with error:
            told = error.read().decode("utf-8", "replace")[:200]
        raise click.ClickException(f"{url} refuses: {error.code} {told}") from error
    except (URLError, ValueError, KeyError, TypeError) as error:
        raise click.ClickException(f"{url} does not answer as a router does: {error}") from error
    return rows
