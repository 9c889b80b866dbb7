"""The command line for warming: ``ostinato warm``, and what ``ostinato serve`` says of it."""

from __future__ import annotations

import json
import os
import secrets
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from .config import QUANTIZATIONS, Settings

if TYPE_CHECKING:
    from .prompt.template import Template
    from .prompt.tokens import HFTokenizer
    from .warming.background import Outcome
    from .warming.logs import Encode
    from .warming.run import Warmed

_PIECE_TOKENS = 512
_UNLIMITED_BLOCKS = 1 << 20
_ENDS = {"done": "all of it", "full": "until its share of the cache was full", "stopped": "until stopped"}


@click.command()
@click.argument("names", metavar="[LOG] [MODEL]", nargs=-1)
@click.option(
    "--documents",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    help="A folder of documents to compute instead of a log.",
)
@click.option(
    "--system",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="With --documents: the system text that they will stand behind.",
)
@click.option("--top", type=click.IntRange(1), default=16, show_default=True, help="Prefixes at most.")
@click.option("--url", help="A running server, e.g. http://127.0.0.1:8000.")
@click.option("--api-key", help="The server's. Better: OSTINATO_API_KEY.")
@click.option(
    "--tier",
    type=click.Path(path_type=Path, file_okay=False),
    help="A shared tier's folder; MODEL is loaded to compute what is not in it.",
)
@click.option("--tier-bytes", help="What that may take, as its servers have it, e.g. 8GiB.")
@click.option(
    "--share", type=click.FloatRange(0, 1), default=0.5, show_default=True, help="Of the cache, to fill."
)
@click.option("--half-life", type=float, help="Seconds after which a request counts half; half the log.")
@click.option(
    "--min-uses", type=float, default=1.0, show_default=True, help="Leave out what is expected less often."
)
@click.option("--capacity", type=int, help="Tokens of KV the cache has, where it cannot be asked.")
@click.option("--block-size", type=int, help="Tokens in a block of the cache.")
@click.option("--store", type=click.Path(path_type=Path, file_okay=False), help="Model store.")
@click.option("--template", help="auto, chatml, …, or a file with a Jinja template.")
@click.option("--dtype", type=click.Choice(["auto", "float32", "bfloat16", "float16"]))
@click.option("--quantization", type=click.Choice(QUANTIZATIONS))
@click.option("--offline", is_flag=True, default=None, help="Never ask the network for a model.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def warm(names: tuple[str, ...], url: str | None, tier: Path | None, **options: Any) -> None:
    """Warm a cache with the most valuable prompt beginnings of LOG (JSONL, or a folder of it).

    LOG has OpenAI request bodies, agent sessions, or a request log with content. Without --url and --tier
    it says what would be done, and what that would bring. With --documents there is no LOG: all of them are
    computed once, to be found wherever they stand in prompts that may use moved KV.
    """
    if url and tier:
        raise click.UsageError("give --url or --tier, not both")
    documents: Path | None = options["documents"]
    log, model = _names(names, documents is not None)
    if documents is not None and not (url or tier):
        raise click.UsageError("--documents needs --url or --tier")
    if options["system"] is not None and documents is None:
        raise click.UsageError("--system is for --documents")
    given = {
        name: options[name]
        for name in ("block_size", "store", "template", "dtype", "quantization", "offline")
    }
    if tier is not None:
        given |= {"shared_tier": tier, "shared_tier_bytes": options["tier_bytes"]}
    settings = Settings.from_environment(os.environ, model=model, **given)
    if documents is not None:
        warmed, num_documents = _warm_documents(documents, url, settings, options)
        said = {"documents": num_documents, **_counts(warmed)}
        click.echo(json.dumps(said) if options["as_json"] else documents_text(num_documents, warmed))
        return
    assert log is not None
    if url:
        outcome = _warm_url(log, url, settings, options)
    elif tier is not None:
        outcome = _warm_tier(log, settings, options)
    else:
        outcome = _plan(log, settings, options)
    click.echo(json.dumps(record(outcome)) if options["as_json"] else text(outcome))


def _names(names: tuple[str, ...], has_documents: bool) -> tuple[Path | None, str | None]:
    """LOG and MODEL; with documents there is no LOG."""
    if len(names) > (1 if has_documents else 2):
        raise click.UsageError(f"got an unexpected argument ({names[-1]})")
    if has_documents:
        return None, names[0] if names else None
    if not names:
        raise click.UsageError("missing argument 'LOG', or --documents")
    if not Path(names[0]).exists():
        raise click.UsageError(f"Path '{names[0]}' does not exist.")
    return Path(names[0]), names[1] if len(names) > 1 else None


def _warm_documents(
    folder: Path, url: str | None, settings: Settings, options: dict[str, Any]
) -> tuple[Warmed, int]:
    """Has all documents computed, or loaded, there; and how many there are."""
    from .building import build_runtime
    from .models.progress import RichProgress
    from .ports import SystemClock
    from .warming.background import encode_for
    from .warming.documents import read_documents
    from .warming.engine import EngineTarget
    from .warming.http import HttpTarget, served_model
    from .warming.run import warm as run

    system = "" if options["system"] is None else options["system"].read_text(encoding="utf-8").strip()
    with ExitStack() as stack:
        target: HttpTarget | EngineTarget
        if url is not None:
            key = options["api_key"] or os.environ.get("OSTINATO_API_KEY")
            name, length = served_model(url, key)
            most = (length or 1 << 30) - 1
            encode = _encoder(*_assembly(settings), most + 1)
            target = stack.enter_context(
                HttpTarget(
                    url,
                    name,
                    block_size=settings.block_size,
                    share=options["share"],
                    piece_tokens=_PIECE_TOKENS,
                    max_tokens=most,
                    api_key=key,
                )
            )
        else:
            runtime = build_runtime(settings, SystemClock(), None if options["as_json"] else RichProgress())
            stack.callback(runtime.close)
            encode = encode_for(runtime)
            target = EngineTarget(
                runtime, piece_tokens=settings.max_batch_tokens, share=options["share"], fill_tier=True
            )
        prefixes = read_documents(folder, encode, system=system)
        with _progress(prefixes, options["as_json"]) as advance, _interrupted(target.stop):
            warmed = run(prefixes, target, advance)
        if isinstance(target, EngineTarget):
            target.settle()
    return warmed, len(prefixes)


def _plan(log: Path, settings: Settings, options: dict[str, Any]) -> Outcome:
    from .warming.background import Outcome
    from .warming.logs import read_log
    from .warming.plan import choose
    from .warming.report import expect

    tokenizer, template = _assembly(settings)
    read = read_log(log, _encoder(tokenizer, template, 1 << 30))
    prefixes = choose(
        read.prompts, options["top"], half_life_s=options["half_life"], min_uses=options["min_uses"]
    )
    expected = expect(read.prompts, prefixes, _cache(settings, options, None))
    return Outcome(read, prefixes, expected, expected.warmed)


def _warm_url(log: Path, url: str, settings: Settings, options: dict[str, Any]) -> Outcome:
    from .warming.background import Outcome, usable
    from .warming.http import HttpTarget, served_model
    from .warming.logs import read_log
    from .warming.plan import choose
    from .warming.report import expect
    from .warming.run import warm as run

    key = options["api_key"] or os.environ.get("OSTINATO_API_KEY")
    name, length = served_model(url, key)
    tokenizer, template = _assembly(settings)
    max_tokens = (length or 1 << 30) - 1
    read = read_log(log, _encoder(tokenizer, template, max_tokens + 1))
    prefixes = choose(
        usable(read.prompts), options["top"], half_life_s=options["half_life"], min_uses=options["min_uses"]
    )
    with HttpTarget(
        url,
        name,
        block_size=settings.block_size,
        share=options["share"],
        piece_tokens=_PIECE_TOKENS,
        max_tokens=max_tokens,
        api_key=key,
    ) as target:
        with _progress(prefixes, options["as_json"]) as advance, _interrupted(target.stop):
            warmed = run(prefixes, target, advance)
        expected = expect(read.prompts, prefixes, _cache(settings, options, target.num_blocks))
    return Outcome(read, prefixes, expected, warmed)


def _warm_tier(log: Path, settings: Settings, options: dict[str, Any]) -> Outcome:
    from .building import build_runtime
    from .models.progress import RichProgress
    from .ports import SystemClock
    from .warming.background import Outcome, encode_for
    from .warming.engine import EngineTarget
    from .warming.logs import read_log
    from .warming.plan import choose
    from .warming.report import Cache, expect
    from .warming.run import warm as run

    with ExitStack() as stack:
        runtime = build_runtime(settings, SystemClock(), None if options["as_json"] else RichProgress())
        stack.callback(runtime.close)
        read = read_log(log, encode_for(runtime))
        prefixes = choose(
            read.prompts, options["top"], half_life_s=options["half_life"], min_uses=options["min_uses"]
        )
        share = options["share"]
        target = EngineTarget(runtime, piece_tokens=settings.max_batch_tokens, share=share, fill_tier=True)
        with _progress(prefixes, options["as_json"]) as advance, _interrupted(target.stop):
            warmed = run(prefixes, target, advance)
        target.settle()
        num_blocks = runtime.health().num_blocks
        cache = Cache(num_blocks, settings.block_size, settings.policy, share, target.num_tier_blocks)
        expected = expect(read.prompts, prefixes, cache)
    return Outcome(read, prefixes, expected, warmed)


def _cache(settings: Settings, options: dict[str, Any], num_blocks: int | None) -> Any:
    from .warming.report import Cache

    if num_blocks is None:
        capacity = options["capacity"]
        num_blocks = _UNLIMITED_BLOCKS if capacity is None else max(2, capacity // settings.block_size)
    return Cache(num_blocks, settings.block_size, settings.policy, options["share"])


def _assembly(settings: Settings) -> tuple[HFTokenizer, Template | None]:
    """The model's tokenizer and template, without the model."""
    from .models.fetch import fetch
    from .models.store import ModelStore
    from .ports import SystemClock
    from .prompt.template import template_for
    from .prompt.tokens import HFTokenizer

    assert settings.store is not None, "Settings.from_environment sets the store"
    store = ModelStore(settings.store)
    local = fetch(settings.model, store, progress=None, offline=settings.offline, token=settings.hf_token)
    nonce = str(secrets.randbelow(9 * 10**19) + 10**19)
    tokenizer = HFTokenizer.from_folder(local.path, nonce=nonce)
    return tokenizer, template_for(tokenizer, settings.template, clock=SystemClock(), nonce=nonce)


def _encoder(tokenizer: HFTokenizer, template: Template | None, max_model_len: int) -> Encode:
    from .warming.logs import encoder

    return encoder(tokenizer, template, max_model_len)


@contextmanager
def _progress(prefixes: Any, is_quiet: bool) -> Iterator[Callable[[int], None]]:
    """A bar of tokens on standard error."""
    if is_quiet:
        yield lambda num_tokens: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("warming"), BarColumn(), MofNCompleteColumn(), TextColumn("tokens"))
    with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True)) as bars:
        task = bars.add_task("", total=sum(prefix.new_tokens for prefix in prefixes))
        yield lambda num_tokens: bars.advance(task, num_tokens)


@contextmanager
def _interrupted(stop: threading.Event) -> Iterator[None]:
    """Ctrl-C ends the warming after the piece at hand, and what was done is told."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, lambda number, frame: stop.set())
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def documents_text(num_documents: int, warmed: Warmed) -> str:
    """What became of documents, for people."""
    return (
        f"{len(warmed.tokens):,} of {num_documents:,} documents {_ENDS[warmed.end]}: "
        f"{warmed.computed_tokens:,} tokens computed, {warmed.loaded_tokens:,} loaded, "
        f"{warmed.found_tokens:,} there already"
    )


def _counts(warmed: Warmed) -> dict[str, object]:
    return {
        "end": warmed.end,
        "found_tokens": warmed.found_tokens,
        "loaded_tokens": warmed.loaded_tokens,
        "computed_tokens": warmed.computed_tokens,
    }


def record(outcome: Outcome) -> dict[str, object]:
    """What came of it, as JSON; no text of a prompt is in it."""
    warmed, expected = outcome.warmed, outcome.expected
    return {
        "requests": len(outcome.log.prompts),
        "unusable": outcome.log.num_unusable,
        "prefixes": [
            {
                "tokens": len(prefix.tokens),
                "new_tokens": prefix.new_tokens,
                "requests": prefix.num_requests,
                "expected_uses": round(prefix.expected_uses, 3),
                "value_tokens": round(prefix.value, 1),
                "warmed_tokens": warmed.tokens[place] if place < len(warmed.tokens) else 0,
            }
            for place, prefix in enumerate(outcome.prefixes)
        ],
        **_counts(warmed),
        "expected": {
            "prompt_tokens": expected.prompt_tokens,
            "hit_rate_before": round(expected.cold_rate, 6),
            "hit_rate_after": round(expected.warm_rate, 6),
            "saved_tokens": expected.warm_hits - expected.cold_hits,
            "first_request_hit_tokens": expected.first_hits,
        },
    }


def text(outcome: Outcome) -> str:
    """The same for people."""
    warmed, expected, log = outcome.warmed, outcome.expected, outcome.log
    lines = [f"{len(log.prompts):,} requests, {len(outcome.prefixes)} prefixes worth warming"]
    if log.num_unusable:
        lines.append(f"{log.num_unusable:,} lines could not be used; the first: {log.reason}")
    if outcome.prefixes:
        lines.append(f"\n{'tokens':>8} {'new':>8} {'in log':>8} {'expected':>9} {'value':>12}  warmed")
    for place, prefix in enumerate(outcome.prefixes):
        reached = warmed.tokens[place] if place < len(warmed.tokens) else 0
        lines.append(
            f"{len(prefix.tokens):8,} {prefix.new_tokens:8,} {prefix.num_requests:8,} "
            f"{prefix.expected_uses:9.1f} {prefix.value:12,.0f}  {reached:,}"
        )
    lines += [
        f"\nwarmed {_ENDS[warmed.end]}: {warmed.computed_tokens:,} tokens computed, "
        f"{warmed.loaded_tokens:,} loaded, {warmed.found_tokens:,} there already",
        f"expected hit rate, if the log came again: {100 * expected.cold_rate:.1f} % cold, "
        f"{100 * expected.warm_rate:.1f} % warmed; the first request finds {expected.first_hits:,} tokens",
    ]
    return "\n".join(lines)
