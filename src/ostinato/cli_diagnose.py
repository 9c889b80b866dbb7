"""``ostinato diff`` and ``ostinato doctor``: why a cache did not hit."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from datetime import UTC, date, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import click

from .cli_model import json_option, model_option, offline_option, store_option, template_of, tokenizer_of
from .errors import ParameterError, UpstreamError

if TYPE_CHECKING:
    from .diagnose.live import Samples
    from .diagnose.material import Asked
    from .diagnose.writing import Writer

_TEMPLATE = click.option(
    "--template",
    default="plain",
    show_default=True,
    help="How conversations are written: plain (all there is), auto (the model's template), a name, a file.",
)


@click.command("diff")
@click.argument("a")
@click.argument("b")
@click.option(
    "--block-size", type=click.IntRange(1), default=16, show_default=True, help="Tokens in a block."
)
@_TEMPLATE
@model_option
@store_option
@offline_option
@json_option
def diff(
    a: str,
    b: str,
    block_size: int,
    template: str,
    model: str | None,
    store: Path | None,
    offline: bool | None,
    as_json: bool,
) -> None:
    """Show where two prompts part, and why.

    A and B are requests: a file with one (JSON, or any text), FILE:LINE, or FILE#ID of a log, such as
    ostinato serve writes with --trace and --trace-content. Says what each cache could have had of B after A.
    Of a trace without content it says which parts are the same.
    """
    from rich.console import Console

    from .diagnose.diff import compare
    from .diagnose.digests import compare_segments
    from .diagnose.material import read_one
    from .diagnose.show import print_diff, print_segments

    first, second = read_one(a), read_one(b)
    if not (first.has_content and second.has_content):
        segments = compare_segments(first, second)
        if as_json:
            click.echo(json.dumps(segments.as_dict()))
        else:
            print_segments(segments, Console(highlight=False, soft_wrap=True))
        return
    writer = _writer(model, store, offline, template)
    found = compare(writer.write(first), writer.write(second), block_tokens=block_size, on=_today())
    if as_json:
        click.echo(json.dumps(found.as_dict(), ensure_ascii=False))
        return
    print_diff(found, Console(highlight=False, soft_wrap=True))


@click.command("doctor")
@click.argument("source")
@click.option(
    "--fail-under", type=click.FloatRange(0, 1), help="Exit with 1 if less than this part is found."
)
@click.option("--price", type=click.FloatRange(0), help="Dollars for a million prompt tokens.")
@click.option("--no-replay", is_flag=True, help="Do not replay the repaired log.")
@_TEMPLATE
@model_option
@store_option
@offline_option
@json_option
@click.pass_context
def doctor(
    ctx: click.Context,
    source: str,
    fail_under: float | None,
    price: float | None,
    no_replay: bool,
    template: str,
    model: str | None,
    store: Path | None,
    offline: bool | None,
    as_json: bool,
) -> None:
    """Find what breaks the reuse of prompts, what it costs, and what mends it.

    SOURCE is a log of requests (JSON lines: bodies of OpenAI's or Anthropic's, recorded sessions, ShareGPT,
    or what ostinato serve writes with --trace; best with --trace-content), a folder of such, or the address
    of a running server (http://…): with its admin key in OSTINATO_ADMIN_KEY the requests it remembers are
    looked into, without it only its counters.
    """
    from rich.console import Console

    from .diagnose.doctor import examine
    from .diagnose.findings import Report
    from .diagnose.live import examine_server, together, with_evictions
    from .diagnose.material import read_requests
    from .diagnose.show import print_report

    def looked_into(requests: Sequence[Asked]) -> Report:
        has_content = any(asked.has_content for asked in requests)
        writer = _writer(model, store, offline, template) if has_content else None
        return examine(requests, writer, on=_today(), price=price, try_fixes=not no_replay)

    if source.startswith(("http://", "https://")):
        samples, requests = _of_server(source.rstrip("/"))
        report = examine_server(samples)
        if requests:
            report = together(looked_into(with_evictions(requests, samples)), report)
    else:
        if not Path(source).exists():
            raise ParameterError(f"there is no file or folder {source}", param="source")
        report = looked_into(read_requests(Path(source)))
    if as_json:
        click.echo(json.dumps(report.as_dict(), ensure_ascii=False))
    else:
        print_report(report, Console(highlight=False, soft_wrap=True))
    if fail_under is not None and report.hit_rate < fail_under:
        click.secho(f"{report.hit_rate:.1%} is less than {fail_under:.1%}", fg="red", err=True)
        ctx.exit(1)


def _writer(model: str | None, store: Path | None, offline: bool | None, template: str) -> Writer:
    from .diagnose.writing import Writer

    tokenizer, nonce = tokenizer_of(model, store, offline)
    return Writer(tokenizer, None if template == "plain" else template_of(tokenizer, nonce, template))


def _of_server(url: str) -> tuple[Samples, list[Asked]]:
    """Its counters, and the requests it remembers where its admin key is known."""
    from .diagnose.live import read_exposition
    from .diagnose.material import read_lines

    samples = read_exposition(_got(f"{url}/metrics", os.environ.get("OSTINATO_API_KEY", "")).decode())
    admin_key = os.environ.get("OSTINATO_ADMIN_KEY", "")
    if not admin_key:
        text = "Only its counters are read: with its admin key in OSTINATO_ADMIN_KEY its requests are, too."
        click.secho(text, fg="yellow", err=True)
        return samples, []
    return samples, read_lines(_got(f"{url}/v1/ostinato/requests", admin_key), url)


def _got(url: str, key: str) -> bytes:
    import httpx2

    headers = {"authorization": f"Bearer {key}"} if key else {}
    try:
        reply = httpx2.get(url, headers=headers, timeout=60.0)
    except httpx2.HTTPError as error:
        raise UpstreamError(f"{url} does not answer: {error}") from error
    if reply.status_code != 200:
        raise UpstreamError(
            f"{url} answers {reply.status_code}: is it an Ostinato server, and the key right?"
        )
    return reply.content


def _today() -> date:
    return datetime.now(UTC).date()
