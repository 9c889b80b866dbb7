"""``ostinato cache …``: look after what is kept, through a running server or in a tier's folder."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

import click

if TYPE_CHECKING:
    from .kv.terms import Selection
    from .kv.tiers.shared import SharedTier
    from .responses.stores.base import Store

F = TypeVar("F", bound=Callable[..., Any])
_TIMEOUT_S = 600.0  # a pin may have to be computed
_SHOWN_ID_CHARS = 15


def server_options(command: F) -> F:
    """Which server, and how to get in."""
    key = click.option(
        "--admin-key", envvar="OSTINATO_ADMIN_KEY", help="The server's admin key. Better: OSTINATO_ADMIN_KEY."
    )
    url = click.option("--url", help="Address of a running server, e.g. http://127.0.0.1:8000.")
    return url(key(command))


def tier_option(command: F) -> F:
    folder = click.Path(path_type=Path, file_okay=False, exists=True)
    return click.option("--tier", type=folder, help="Folder of a shared tier, instead of a server.")(command)


def answers_option(command: F) -> F:
    return click.option(
        "--answers", metavar="WHERE", help="Store of answers (file or postgresql://…), instead of a server."
    )(command)


json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


@click.group()
def cache() -> None:
    """Look after what is kept: show it, purge it, pin it."""


@cache.command("ls")
@server_options
@tier_option
@answers_option
@json_option
def ls(url: str | None, admin_key: str | None, tier: Path | None, answers: str | None, as_json: bool) -> None:
    """Show what is kept, by tenant; of a server also what is pinned."""
    _refuse_several(url, tier, answers)
    if answers is not None:
        from .server.admin import answers_object

        with _answers(answers) as store:
            found: dict[str, Any] = {"shared_tier": None, "answers": answers_object(store.uses(), {})}
    elif tier is not None:
        entries = [
            {
                "tenant": content.tenant,
                "name": None,
                "model": content.model,
                "prompt": content.prompt,
                "blocks": content.num_blocks,
                "bytes": content.num_blocks * store.slot_bytes,
                "first_stored_ms": content.first_stored_ms,
                "last_stored_ms": content.last_stored_ms,
            }
            for store in _stores(tier)
            for content in store.contents()
        ]
        found = {"shared_tier": entries}
    else:
        found = _call(url, admin_key, "cache")
    if as_json:
        click.echo(json.dumps(found))
        return
    if "arena" in found:
        _show_arena(found)
    for entry in found["shared_tier"] or ():
        whose = entry["name"] or _short(entry["tenant"])
        click.echo(
            f"shared tier  {whose:16} {entry['blocks']:8} blocks {entry['bytes'] / 1e6:9.1f} MB"
            f"  model {_short(entry['model'])}  prompt {_short(entry['prompt'])}"
        )
    for entry in found.get("answers") or ():
        whose = entry["name"] or _short(entry["tenant"])
        click.echo(
            f"answers      {whose:16} {entry['entries']:8} {entry['kind']:9}{entry['bytes'] / 1e6:8.1f} MB"
            f"  model {_short(entry['model'])}"
        )


@cache.command("purge")
@server_options
@tier_option
@answers_option
@json_option
@click.option("--all", "everything", is_flag=True, help="Everything.")
@click.option("--tenant", help="Of this API key (by its name) or tenant (by its id, see `cache ls`).")
@click.option("--cache-salt", help="Of requests with this cache_salt and no API key.")
@click.option("--model", help="Of this model: the server's by its name, any by its id.")
@click.option("--prompt-name", help="Of requests that used this named prompt.")
@click.option("--older-than", type=click.FloatRange(0), help="Stored at least so many seconds ago.")
def purge(
    url: str | None,
    admin_key: str | None,
    tier: Path | None,
    answers: str | None,
    as_json: bool,
    everything: bool,
    older_than: float | None,
    **names: str | None,
) -> None:
    """Drop what meets all conditions given. Nobody finds any of it afterwards.

    Through a server: from its arena, its shared tier and its answers, the latter two for all processes. In a
    folder: from the tier, and from the arena of every process that uses it. In a store of answers: from that.
    """
    _refuse_several(url, tier, answers)
    body: dict[str, Any] = {name: value for name, value in names.items() if value is not None}
    if older_than is not None:
        body["older_than_s"] = older_than
    if everything == bool(body):
        raise click.UsageError("say what to purge, or --all")
    if answers is not None:
        report = _purge_answers(answers, body)
    elif tier is not None:
        report = _purge_folder(tier, body)
    else:
        report = _call(url, admin_key, "cache/purge", body or {"all": True})
    if as_json:
        click.echo(json.dumps(report))
        return
    arena = report.get("arena")
    if arena is not None:
        click.echo(
            f"arena: {arena['freed_blocks']} blocks freed, {arena['held_blocks']} more when they are no "
            f"longer in use, {arena['pins']} pins ended"
        )
    if report["shared_tier"] is not None:
        click.echo(f"shared tier: {report['shared_tier']['blocks']} blocks dropped and overwritten")
    if report.get("answers") is not None:
        click.echo(f"answers: {report['answers']['entries']} dropped")
    click.echo(f"{report['freed_bytes'] / 1e6:.1f} MB are free again")


@cache.command("pin")
@server_options
@json_option
@click.option("--system", help="System text to keep.")
@click.option("--messages", type=click.File(), help="JSON file with messages, - for standard input.")
@click.option("--tenant", help="Of this API key, by its name.")
@click.option("--cache-salt", help="Of requests with this cache_salt.")
@click.option("--ttl", type=click.FloatRange(1), help="Seconds until it ends by itself.")
def pin(
    url: str | None,
    admin_key: str | None,
    as_json: bool,
    system: str | None,
    messages: Any,
    ttl: float | None,
    **names: str | None,
) -> None:
    """Keep the beginning of all conversations that begin with these messages; computes what is missing."""
    if (system is None) == (messages is None):
        raise click.UsageError("give --system or --messages")
    if messages is not None:
        try:
            given = json.load(messages)
        except ValueError as error:
            raise click.UsageError(f"--messages is not JSON: {error}") from error
    else:
        given = [{"role": "system", "content": system}]
    body: dict[str, Any] = {"messages": given}
    body |= {name: value for name, value in names.items() if value is not None}
    if ttl is not None:
        body["ttl_s"] = ttl
    found = _call(url, admin_key, "cache/pin", body)
    click.echo(json.dumps(found) if as_json else f"{found['id']} keeps {found['tokens']} tokens")


@cache.command("unpin")
@server_options
@click.argument("pin_id")
def unpin(url: str | None, admin_key: str | None, pin_id: str) -> None:
    """Let go of PIN_ID."""
    _call(url, admin_key, "cache/unpin", {"id": pin_id})
    click.echo(f"{pin_id} is no longer pinned")


@cache.command("forget")
@server_options
@answers_option
@click.argument("answer_id")
def forget(url: str | None, admin_key: str | None, answers: str | None, answer_id: str) -> None:
    """Drop the kept answer ANSWER_ID (header x-ostinato-answer, or ostinato.cache.id in what came)."""
    _refuse_several(url, answers)
    if answers is None:
        _call(url, admin_key, "cache/forget", {"id": answer_id})
    else:
        from .responses.exact import key_of

        key = key_of(answer_id)
        with _answers(answers) as store:
            if key is None or not store.forget(key).num_entries:
                raise click.ClickException(f"there is no answer {answer_id[:80]!r} (any more)")
    click.echo(f"{answer_id} is forgotten")


# ---------------------------------------------------------------- a server


def _call(url: str | None, admin_key: str | None, path: str, body: dict[str, Any] | None = None) -> Any:
    if url is None:
        raise click.UsageError("give --url, the address of a running server")
    if urlsplit(url).scheme not in ("http", "https"):
        raise click.UsageError(f"--url is {url!r}; write for example http://127.0.0.1:8000")
    if not admin_key:
        raise click.UsageError("give the server's admin key in OSTINATO_ADMIN_KEY or --admin-key")
    data = None if body is None else json.dumps(body).encode()
    headers = {"authorization": f"Bearer {admin_key}", "content-type": "application/json"}
    request = Request(f"{url.rstrip('/')}/v1/ostinato/{path}", data, headers)
    try:
        with urlopen(request, timeout=_TIMEOUT_S) as reply:
            return json.loads(reply.read())
    except HTTPError as error:
        raise click.ClickException(_reason(error)) from error
    except (URLError, OSError) as error:
        raise click.ClickException(f"{url} cannot be reached: {getattr(error, 'reason', error)}") from error


def _reason(error: HTTPError) -> str:
    with error:
        if error.code == 404 and not error.headers.get("content-type", "").startswith("application/json"):
            return "there is no such door at that address"
        try:
            text = str(json.loads(error.read())["error"]["message"])
        except (ValueError, KeyError, TypeError):
            return f"the server said {error.code}"
    if error.code == 404 and "Not Found" in text:
        return "the server has no admin key set, so its cache cannot be looked after: set OSTINATO_ADMIN_KEY"
    return text


def _show_arena(found: dict[str, Any]) -> None:
    arena = found["arena"]
    click.echo(
        f"arena: {arena['blocks']} blocks of {found['block_bytes']} bytes: {arena['held']} held, "
        f"{arena['evictable']} evictable, {arena['free']} free; {arena['pinned']} pinned of "
        f"{arena['may_be_pinned']} that may be"
    )
    for use in found["tenants"]:
        whose = use["name"] or _short(use["tenant"])
        quota = "" if use["quota_bytes"] is None else f" of {use['quota_bytes'] / 1e6:.1f} MB"
        click.echo(f"arena        {whose:16} {use['blocks']:8} blocks {use['bytes'] / 1e6:9.1f} MB{quota}")
    for item in found["pins"]:
        ends = "" if item["expires_in_s"] is None else f", for {item['expires_in_s']:.0f} s more"
        click.echo(f"pinned       {item['id']}  {item['tokens']} tokens of {_short(item['tenant'])}{ends}")


def _short(name: str) -> str:
    return name[:_SHOWN_ID_CHARS] if name else "-"


# ---------------------------------------------------------------- a folder


def _refuse_several(*places: object) -> None:
    if sum(place is not None for place in places) > 1:
        raise click.UsageError("give one of --url, --tier and --answers")


def _stores(folder: Path) -> Iterator[SharedTier]:
    """Every store in a folder that ``--shared-tier`` was pointed to, or the one it is; open meanwhile."""
    from .kv.tiers.shared import SharedTier
    from .ports import SystemClock

    places = sorted(path.parent for path in folder.glob("*/tier.json"))
    if (folder / "tier.json").exists():
        places = [folder]
    if not places:
        raise click.ClickException(f"there is no shared tier in {os.fspath(folder)}")
    for place in places:
        with closing(SharedTier.open_found(place, clock=SystemClock())) as store:
            yield store


def _purge_folder(folder: Path, body: dict[str, Any]) -> dict[str, Any]:
    selection = _selection(body)
    num_blocks = num_bytes = 0
    for store in _stores(folder):
        num = store.purge(selection)
        num_blocks += num
        num_bytes += num * store.slot_bytes
    return {"shared_tier": {"blocks": num_blocks}, "freed_bytes": num_bytes}


@contextmanager
def _answers(place: str) -> Iterator[Store]:
    """A store of answers that is there already."""
    from .config import Settings
    from .ports import SystemClock
    from .response_caches import is_file, open_store

    if is_file(place) and not Path(place).expanduser().exists():
        raise click.ClickException(f"there is no store of answers in {place}")
    settings = Settings.from_environment(os.environ, answers=place)
    store = open_store(settings, int(SystemClock().now() * 1000))
    try:
        yield store
    finally:
        store.close()


def _purge_answers(place: str, body: dict[str, Any]) -> dict[str, Any]:
    from .ports import SystemClock

    selection = _selection(body)
    with _answers(place) as store:
        removed = store.purge(selection, int(SystemClock().now() * 1000))
    answers = {"entries": removed.num_entries, "bytes": removed.num_bytes}
    return {"shared_tier": None, "answers": answers, "freed_bytes": removed.num_bytes}


def _selection(body: dict[str, Any]) -> Selection:
    """What a purge means where no server knows the names of tenants and models."""
    from .kv.terms import Selection, is_id, prompt_id, tenant_of
    from .server.sampling import namespace_salt

    tenant, model, prompt = body.get("tenant"), body.get("model"), body.get("prompt_name")
    for name, value in (("--tenant", tenant), ("--model", model)):
        if value is not None and not is_id(value):
            raise click.UsageError(f"without a server {name} is an id: `ostinato cache ls --json` shows them")
    if (salt := body.get("cache_salt")) is not None:
        if tenant is not None:
            raise click.UsageError("give --tenant or --cache-salt, not both")
        tenant = tenant_of(namespace_salt("", salt))
    if prompt is not None and not is_id(prompt):
        prompt = prompt_id(prompt)
    return Selection(tenant, model, prompt, body.get("older_than_s", 0.0))
