"""The command line: ``ostinato serve``, ``ostinato chat``, ``ostinato model …``."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from . import (
    __version__,
    cli_cache,
    cli_diagnose,
    cli_duplicates,
    cli_gateway,
    cli_metrics,
    cli_prompt,
    cli_providers,
    cli_replay,
    cli_route,
    cli_warm,
)
from .config import QUANTIZATIONS, Settings, parse_size, tame_waiting_threads
from .errors import ClientError, OstinatoError
from .kv.codecs.spec import is_lossy
from .kv.policy_names import POLICY_NAMES
from .responses.control import ANSWERS_FOR, HISTORIES, SEMANTIC_FOR
from .retention.methods import METHOD_NAMES
from .types import REUSE_MODES

if TYPE_CHECKING:
    from .runtime import Runtime
    from .warming.background import BackgroundWarming

F = TypeVar("F", bound=Callable[..., Any])


class Size(click.ParamType[int]):
    """A size in bytes with an optional unit."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        try:
            return parse_size(value)
        except ValueError:
            self.fail(f"{value!r} is not a size; write for example 512M or 2GiB", param, ctx)


def engine_options(command: F) -> F:
    """Options of every command that loads a model; their defaults are those of Settings."""
    for option in reversed(
        [
            click.option("--store", type=click.Path(path_type=Path, file_okay=False), help="Model store."),
            click.option("--kv-cache", type=Size(), help="KV capacity, e.g. 2GiB."),
            click.option(
                "--shared-tier",
                type=click.Path(path_type=Path, file_okay=False),
                help="Folder in which processes share KV, also across restarts.",
            ),
            click.option("--shared-tier-bytes", type=Size(), help="What that may take, e.g. 8GiB."),
            click.option(
                "--tier-codec",
                metavar="SPEC",
                help="How KV is stored there: exact, int8, 0-14:int4,15-:int8, …",
            ),
            click.option("--policy", type=click.Choice(POLICY_NAMES), help="What goes when that is full."),
            click.option("--block-size", type=int, help="Tokens in a block."),
            click.option("--max-model-len", type=int, help="Longest sequence in tokens."),
            click.option("--max-batch-tokens", type=int, help="Rows of one engine step at most."),
            click.option("--max-sequences", type=int, help="Sequences that run at once."),
            click.option("--max-waiting", type=int, help="Sequences that wait; more are refused."),
            click.option(
                "--itl-target-ms", type=float, help="Longest pause between tokens while prompts are computed."
            ),
            click.option("--deadline", type=float, help="Seconds a request has where it does not say."),
            click.option(
                "--dtype",
                type=click.Choice(["auto", "float32", "bfloat16", "float16"]),
                help="Of weights and KV; auto: float32 on a processor, elsewhere the model's own.",
            ),
            click.option(
                "--quantization",
                type=click.Choice(QUANTIZATIONS),
                help="Linear layers in eight bits on a processor: faster, answers may differ.",
            ),
            click.option("--device", help="Where torch computes: cpu, cuda, …"),
            click.option("--template", help="auto, chatml, …, or a file with a Jinja template."),
            click.option(
                "--message-rules",
                type=click.Path(path_type=Path, dir_okay=False),
                help="TOML file with roles of your own and rules for what the template has no place for.",
            ),
            click.option(
                "--canonical",
                type=click.Path(path_type=Path, dir_okay=False),
                help="TOML file with rules of canonical form; it changes what the model reads.",
            ),
            click.option(
                "--trim",
                type=click.Choice(["off", "drop", "shorten", "sticky"]),
                help="What to do with conversations that are too long, where a request does not say.",
            ),
            click.option("--trim-budget", type=int, help="Most tokens of a prompt; more are trimmed."),
            click.option("--trim-low-water", type=float, help="Part of the budget to trim down to."),
            click.option(
                "--refuse-special-text",
                is_flag=True,
                default=None,
                help="Refuse messages that contain a special token's text.",
            ),
            click.option(
                "--keep-answers",
                is_flag=True,
                default=None,
                help="Answers come back as history in the tokens they were generated in.",
            ),
            click.option("--offline", is_flag=True, default=None, help="Never ask the network for a model."),
            click.option(
                "--trace",
                type=click.Path(path_type=Path, dir_okay=False),
                help="Log requests to this file, digests instead of text.",
            ),
            click.option(
                "--trace-content", is_flag=True, default=None, help="Put prompts into that log as well."
            ),
            click.option(
                "--otel", is_flag=True, default=None, help="Send spans to OTEL_EXPORTER_OTLP_ENDPOINT."
            ),
        ]
    ):
        command = option(command)
    return command


class Group(click.Group):
    """Shows our own errors as one line that says what to do, and exits with 1."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except OstinatoError as error:
            click.secho(f"Error: {error}", fg="red", err=True)
            ctx.exit(2 if isinstance(error, ClientError) else 1)


@click.group(cls=Group, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="ostinato")
@click.option("-v", "--verbose", is_flag=True, help="Say more of what is going on.")
def main(verbose: bool) -> None:
    """Makes the repeated part of LLM prompts cheap and fast, and never wrong.

    Every option can also be set in the environment, as OSTINATO_<OPTION>.
    """
    tame_waiting_threads(os.environ)
    logging.basicConfig(
        level=logging.INFO if verbose else logging.WARNING, format="%(levelname)s %(name)s: %(message)s"
    )


def _settings(model: str | None, **options: Any) -> Settings:
    return Settings.from_environment(os.environ, model=model, **options)


@main.command()
@click.argument("model", required=False)
@engine_options
@click.option("--host", help="Address to listen on.")
@click.option("--port", type=int, help="Port to listen on; 0 takes a free one.")
@click.option("--api-keys", help="Comma-separated keys; each keeps its KV apart. Better: OSTINATO_API_KEYS.")
@click.option(
    "--prompts",
    type=click.Path(path_type=Path, dir_okay=False),
    help="TOML file with named prompts for requests to use.",
)
@click.option(
    "--warm",
    type=click.Path(path_type=Path, exists=True),
    help="Request log to warm the cache from, in the background.",
)
@click.option("--warm-top", type=click.IntRange(1), help="Prefixes to warm at most.")
@click.option(
    "--tenants",
    type=click.Path(path_type=Path, dir_okay=False),
    help="TOML file with API keys by name, and what each may keep.",
)
@click.option("--tenant-kv-cache", type=Size(), help="What each API key or salt may keep of --kv-cache.")
@click.option("--tenant-shared-tier", type=Size(), help="And of --shared-tier-bytes.")
@click.option(
    "--answers",
    metavar="WHERE",
    help="Keep whole answers for equal requests: in a file, memory, or postgresql://…",
)
@click.option("--answers-for", type=click.Choice(ANSWERS_FOR), help="Whose answers to keep and give.")
@click.option("--answers-bytes", type=Size(), help="What they may take.")
@click.option("--answers-ttl", type=float, help="Seconds for which an answer is kept.")
@click.option(
    "--semantic",
    type=click.Choice(SEMANTIC_FOR),
    help="Whom to give kept answers of questions that mean the same; they may be wrong.",
)
@click.option("--semantic-budget", type=float, help="Share of near misses that may be answered wrongly.")
@click.option(
    "--semantic-history",
    type=click.Choice(HISTORIES),
    help="Earlier turns of a conversation: the same, or meaning the same.",
)
@click.option("--semantic-checks", type=float, help="Share of such answers to ask the model for as well.")
@click.option("--embedder", help="What finds near questions: a name, a folder, or MODEL@URL.")
@click.option("--tenant-answers", type=Size(), help="What each API key or salt may keep of --answers-bytes.")
@click.option(
    "--kv-budget", help="KV of each request: 2048 (tokens), 50% (of the prompt), 64MiB; may change answers."
)
@click.option("--kv-recall", type=Size(), help="Memory for what budgets drop, for later turns to have back.")
@click.option("--kv-recall-every", type=int, help="Generated tokens after which a long answer has it back.")
@click.option("--retention", type=click.Choice(METHOD_NAMES), help="What is kept within --kv-budget.")
@click.option(
    "--reuse",
    type=click.Choice(REUSE_MODES),
    help="KV of text that stands elsewhere now: exact (not used), moved (may change answers), verify.",
)
@click.option("--reuse-repair", help="What of moved KV is computed again: adaptive, none, 15%, first:16.")
@click.option("--reuse-max-deviation", type=float, help="Compute exactly what is estimated to deviate more.")
@click.option("--reuse-sample", type=float, help="Part of answers with moved KV to verify, 0 to 1.")
@click.option("--reuse-max-kl", type=float, help="Stop moving KV where these differ by more on average.")
@click.option("--cache-ttl", type=float, help="Seconds after its last use for which KV is kept.")
@click.option("--pinned-share", type=float, help="Part of --kv-cache that may be pinned, 0 to 1.")
@click.option("--admin-key", help="Key for `ostinato cache`. Better: OSTINATO_ADMIN_KEY.")
@click.option("--dollars-per-hour", type=float, help="What the machine costs: prices time saved.")
@click.option("--drain-timeout", type=float, help="Seconds for running requests at shutdown.")
@click.option("--anthropic-rules", help="Count caching on /v1/messages by the rules of this Anthropic model.")
@click.option(
    "--pin-breakpoints", is_flag=True, default=None, help="Keep KV up to cache_control for its time."
)
@cli_gateway.upstream_options
def serve(model: str | None, **options: Any) -> None:
    """Serve MODEL with the APIs of OpenAI and Anthropic (alias, Hugging Face id, folder or .gguf)."""
    urls, file = options.pop("upstream_urls"), options.pop("upstream_file")
    mode, rule_files = options.pop("plan_mode"), options.pop("provider_rules")
    diagnose = options.pop("diagnose")
    if urls or file is not None:
        if model is not None:
            raise click.UsageError("give MODEL or upstreams, not both")
        cli_gateway.run_gateway(_settings(None, **options), urls, file, mode, diagnose, rule_files)
        return
    from .building import build_runtime
    from .models.progress import RichProgress
    from .ports import SystemClock
    from .response_caches import with_answers
    from .server import create_app, server_settings
    from .server import serve as run_server

    settings = _settings(model, **options)
    click.echo(f"Loading {settings.model} …")
    clock = SystemClock()
    runtime, front = with_answers(settings, clock, lambda: build_runtime(settings, clock, RichProgress()))
    for text in _caveats(settings, runtime):
        click.secho(text, fg="yellow")
    warming = _warming(runtime, settings)

    def ready(url: str) -> None:
        click.echo(_welcome(url, runtime, settings))
        if warming is not None:
            warming.start()

    wire = server_settings(
        host=settings.host,
        port=settings.port,
        tenants=settings.all_tenants(),
        admin_key=settings.admin_key,
        drain_timeout_s=settings.drain_timeout,
        anthropic_rules=settings.anthropic_rules or "",
        pin_breakpoints=settings.pin_breakpoints,
        dollars_per_hour=settings.dollars_per_hour,
    )
    try:
        answers = None if front is None else front.exact
        rated = None if front is None else front.rated
        run_server(create_app(front or runtime, wire, runtime, answers, rated), wire, ready)
    except OSError as error:
        raise click.ClickException(
            f"cannot listen on {settings.host}:{settings.port}: {error.strerror}; choose another --port"
        ) from error
    finally:
        if warming is not None:
            warming.stop()
        runtime.close()


def _caveats(settings: Settings, runtime: Runtime) -> Iterator[str]:
    """What the operator asked for that may change answers, and what this model cannot do."""
    if runtime.info.reuse_reason:
        yield f"No KV reuse: {runtime.info.reuse_reason}."
    if settings.quantization is not None:
        yield f"Linear layers are computed in {settings.quantization}: answers may differ from float32's."
    if is_lossy(settings.tier_codec):
        yield f"KV is stored as {settings.tier_codec}: answers that read it may differ (approximate_tokens)."
    if settings.kv_budget is not None:
        within = f"{settings.kv_budget} by {settings.retention}"
        yield f"The KV of each request is kept within {within}: answers may differ."
    if settings.reuse == "moved":
        yield f"Moved KV may be used (repair: {settings.reuse_repair}): answers may differ."
        if (reason := runtime.info.movement_reason) is not None:
            yield f"This model's KV is right at its own position only: {reason}."
    if settings.semantic != "off":
        share = f"{settings.semantic_budget:.1%}"
        yield f"Questions may get the answer of others that mean the same; budget for near misses: {share}."


def _warming(runtime: Runtime, settings: Settings) -> BackgroundWarming | None:
    """What was asked to be warmed, to be started when the server answers."""
    if settings.warm is None:
        return None
    from .warming.background import BackgroundWarming

    return BackgroundWarming(
        runtime,
        settings.warm,
        top=settings.warm_top,
        piece_tokens=settings.max_batch_tokens,
        policy=settings.policy,
        on_end=lambda outcome: click.echo(cli_warm.text(outcome), err=True),
    )


def _welcome(url: str, runtime: Runtime, settings: Settings) -> str:
    model = runtime.model_name
    return f"""
Serving {model} at {url}
{runtime.ledger}

    from openai import OpenAI

    client = OpenAI(base_url="{url}/v1", api_key="{"…" if settings.api_keys else "none"}")
    reply = client.chat.completions.create(
        model="{model}",
        messages=[{{"role": "user", "content": "What is an ostinato?"}}],
    )
    print(reply.choices[0].message.content, reply.usage)

Ctrl-C stops it."""


@main.command()
@click.argument("model", required=False)
@engine_options
@click.option("--system", help="System text to begin with.")
@click.option("--temperature", type=float, default=0.7, show_default=True)
@click.option("--max-tokens", type=int, help="Longest answer in tokens.")
@click.option("--seed", type=int, help="Makes the answers repeatable.")
def chat(
    model: str | None,
    system: str | None,
    temperature: float,
    max_tokens: int | None,
    seed: int | None,
    **options: Any,
) -> None:
    """Talk to MODEL in the terminal; each turn shows what was reused."""
    from .building import build_runtime
    from .library import Engine
    from .models.progress import RichProgress
    from .ports import SystemClock
    from .terminal import converse

    settings = _settings(model, **options)
    click.secho(f"Loading {settings.model} …", dim=True)
    with Engine(build_runtime(settings, SystemClock(), RichProgress())) as engine:
        converse(
            engine,
            system=system,
            params={"temperature": temperature, "max_tokens": max_tokens, "seed": seed},
        )


@main.group()
def model() -> None:
    """Fetch models and look after the store."""


@model.command("fetch")
@click.argument("name", required=False)
@click.option("--store", type=click.Path(path_type=Path, file_okay=False), help="Model store.")
@click.option("--offline", is_flag=True, default=None, help="Never ask the network.")
@click.option("--revision", help="Branch, tag or commit on the hub.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def model_fetch(name: str | None, revision: str | None, as_json: bool, **options: Any) -> None:
    """Bring NAME (alias, Hugging Face id, folder or .gguf) here, ready to load."""
    from .models.fetch import fetch
    from .models.progress import RichProgress
    from .models.store import ModelStore

    settings = _settings(name, **options)
    assert settings.store is not None
    local = fetch(
        settings.model,
        ModelStore(settings.store),
        progress=None if as_json else RichProgress(),
        offline=settings.offline,
        token=settings.hf_token,
        revision=revision,
    )
    if as_json:
        record = {"name": local.name, "path": str(local.path), "digest": local.weights_digest}
        click.echo(json.dumps(record | {"source": local.source}))
    else:
        click.echo(f"{local.name} is ready in {local.path} ({local.source})")


@model.command("list")
@click.option("--store", type=click.Path(path_type=Path, file_okay=False), help="Model store.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def model_list(as_json: bool, **options: Any) -> None:
    """Show the models in the store."""
    from .models.store import ModelStore

    settings = _settings(None, **options)
    assert settings.store is not None
    stored = ModelStore(settings.store).list_models()
    if as_json:
        click.echo(
            json.dumps(
                [
                    {
                        "name": item.model.name,
                        "path": str(item.model.path),
                        "digest": item.model.weights_digest,
                        "source": item.model.source,
                        "size_bytes": item.size_bytes,
                    }
                    for item in stored
                ]
            )
        )
        return
    for item in stored:
        click.echo(f"{item.model.name:24} {item.size_bytes / 1e6:8.0f} MB  {item.model.source}")
    if not stored:
        click.echo(f"no models in {settings.store}; fetch one with: ostinato model fetch")


@model.command("verify")
@click.argument("name")
@click.option("--store", type=click.Path(path_type=Path, file_okay=False), help="Model store.")
def model_verify(name: str, **options: Any) -> None:
    """Read every file of NAME again and compare its digest."""
    from .models.progress import RichProgress
    from .models.store import ModelStore

    settings = _settings(None, **options)
    assert settings.store is not None
    with RichProgress() as progress:
        local = ModelStore(settings.store).verify(name, progress=progress)
    click.echo(f"{local.name} is whole ({local.weights_digest})")


@model.command("remove")
@click.argument("name")
@click.option("--store", type=click.Path(path_type=Path, file_okay=False), help="Model store.")
def model_remove(name: str, **options: Any) -> None:
    """Remove NAME from the store."""
    from .models.store import ModelStore

    settings = _settings(None, **options)
    assert settings.store is not None
    freed = ModelStore(settings.store).remove(name)
    click.echo(f"removed {name}; {freed / 1e6:.0f} MB are free again")


main.add_command(cli_prompt.template)
main.add_command(cli_prompt.prompt)
main.add_command(cli_cache.cache)
main.add_command(cli_diagnose.diff)
main.add_command(cli_diagnose.doctor)
main.add_command(cli_duplicates.duplicates)
main.add_command(cli_metrics.metrics)
main.add_command(cli_replay.replay)
main.add_command(cli_warm.warm)
main.add_command(cli_gateway.costs)
main.add_command(cli_gateway.misses)
main.add_command(cli_route.route)
main.add_command(cli_route.workers)
main.add_command(cli_providers.plan)
main.add_command(cli_providers.providers)
