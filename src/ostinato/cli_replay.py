"""The command line for the simulator: ``ostinato replay``."""

from __future__ import annotations

import json
import os
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from .config import Settings, parse_size

if TYPE_CHECKING:
    from .sim.compare import Row
    from .sim.traces import Trace
    from .types import TokenArray


@click.command()
@click.argument("traces", nargs=-1, required=True, type=click.Path(path_type=Path, exists=True))
@click.option("--policy", default="all", show_default=True, help="Names with commas between, or all.")
@click.option("--capacity", help="Blocks, or shares of the distinct blocks: 5859,10000 or 5%,30%.")
@click.option("--plot", is_flag=True, help="Draw the shares served.")
@click.option("--svg", type=click.Path(path_type=Path, dir_okay=False), help="Draw them into this file, too.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON, one object a line.")
@click.option("--prefill-rate", type=float, default=400.0, show_default=True, help="Tokens/s, for TTFT.")
@click.option("--tier-capacity", help="Blocks of a tier below, or shares of the distinct blocks; 0: none.")
@click.option("--load-rate", default="1GiB", show_default=True, help="Bytes/s from the tier, for TTFT.")
@click.option("--token-bytes", type=int, default=46_080, show_default=True, help="KV of one token.")
@click.option(
    "--hints",
    type=click.Choice(["none", "recorded", "perfect", "wrong"]),
    default="none",
    show_default=True,
    help="What the cache is told: how recorded answers end, which sequences are over, or the opposite.",
)
@click.option("--fleet", help="Simulate so many workers behind one router: 4 or 1,10,100.")
@click.option("--routing", default="all", show_default=True, help="With --fleet: names, or all.")
@click.option(
    "--global-capacity",
    default="0",
    show_default=True,
    help="With --fleet: blocks of a cache that all workers share, for each worker. 0,5859: both.",
)
@click.option(
    "--utilization",
    type=click.FloatRange(0, min_open=True),
    default=0.7,
    show_default=True,
    help="With --fleet: the share of the workers' time that computing all prompts would take.",
)
@click.option(
    "--copies", type=click.IntRange(1), help="With --fleet: of the trace. [default: one for 4 workers]"
)
@click.option(
    "--profile",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="With --fleet: a worker's rates, TOML, instead of --prefill-rate, --load-rate and --token-bytes.",
)
@click.option("--faults", is_flag=True, help="Cancel, fail and jump in time; check the books at every event.")
@click.option(
    "--requests", type=click.IntRange(1), help="To play of each trace: with --faults (500) or --fleet (all)."
)
@click.option("--seed", type=int, default=0, show_default=True, help="For faults and session starts.")
@click.option("--block-tokens", type=int, default=128, show_default=True, help="For sessions of text.")
@click.option("--span", type=float, default=3600.0, show_default=True, help="Sessions start within: seconds.")
def replay(traces: tuple[Path, ...], **options: Any) -> None:
    """Replay TRACES (Mooncake JSONL, agent sessions) through the cache's books, without a model."""
    from .sim.command import capacities_for, play_faults, policy_names, read_traces, tier_capacities_for
    from .sim.compare import Rates, compare
    from .sim.show import print_rows
    from .sim.svg import svg

    seed = options["seed"]
    names = policy_names(options["policy"]) if options["fleet"] is None else []
    read = read_traces(
        traces,
        encode=_prompt_encoder,
        block_tokens=options["block_tokens"],
        chance=random.Random(seed),
        span_s=options["span"],
    )
    if options["fleet"] is not None:
        _replay_fleets(read, options)
        return
    rows: list[Row] = []
    is_shown = sys.stderr.isatty()
    for trace in read:
        sizes = capacities_for(trace, options["capacity"])
        below = tier_capacities_for(trace, options["tier_capacity"])
        if options["faults"]:
            try:
                made = play_faults(
                    trace,
                    names,
                    sizes[0],
                    lambda: random.Random(seed),
                    num_requests=options["requests"] or 500,
                    tier_capacity=below[0],
                )
            except AssertionError as error:
                where = "; ".join(getattr(error, "__notes__", []))
                raise click.ClickException(f"seed {seed} found a fault ({where}): {error}") from error
            for counts in made:
                click.echo(json.dumps(counts))
            continue
        rows += compare(
            trace,
            names,
            sizes,
            rates=Rates(options["prefill_rate"], _load_rate(options["load_rate"]), options["token_bytes"]),
            tier_capacities=below,
            hints=options["hints"],
            on_row=_say if is_shown else _skip,
        )
    if options["as_json"]:
        for row in rows:
            click.echo(json.dumps(row.as_dict()))
    elif rows:
        print_rows(rows, with_chart=options["plot"])
    if options["svg"] and rows:
        try:
            options["svg"].write_text(svg(rows), encoding="utf-8")
        except OSError as error:
            raise click.ClickException(f"cannot write {options['svg']}: {error.strerror}") from error


def _replay_fleets(traces: list[Trace], options: dict[str, Any]) -> None:
    from rich.console import Console

    from .kv.policy_names import POLICY_NAMES
    from .ports import SystemClock
    from .sim.fleet import FleetPlan
    from .sim.fleets import checked_profile, compare_fleets, read_profile, routing_names
    from .sim.show import fleet_table

    if options["profile"] is not None:
        profile = read_profile(options["profile"])
    else:
        profile = checked_profile(
            prefill_tokens_per_s=options["prefill_rate"],
            load_bytes_per_s=_load_rate(options["load_rate"]),
            token_bytes=options["token_bytes"],
        )
    policy = "workload" if options["policy"] == "all" else options["policy"]
    if policy not in POLICY_NAMES:
        raise click.BadParameter(
            f"with --fleet it is one of {', '.join(POLICY_NAMES)}", param_hint="--policy"
        )
    plans = [
        FleetPlan(workers, capacity, shared * workers, options["utilization"], policy, options["requests"])
        for workers in _numbers(options["fleet"], "--fleet", at_least=1)
        for capacity in _numbers(options["capacity"] or "5859", "--capacity", at_least=1)
        for shared in _numbers(options["global_capacity"], "--global-capacity", at_least=0)
    ]
    for trace in traces:
        rows = compare_fleets(
            trace,
            plans,
            routing_names(options["routing"]),
            profile,
            lambda: random.Random(options["seed"]),
            num_copies=options["copies"],
            stopwatch=SystemClock().monotonic,
        )
        if options["as_json"]:
            for row in rows:
                click.echo(json.dumps(row.as_dict()))
        else:
            Console().print(fleet_table(rows))


def _numbers(text: str, option: str, *, at_least: int) -> list[int]:
    try:
        numbers = [int(item) for item in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or min(numbers) < at_least:
        raise click.BadParameter(f"{text!r}: write 4 or 1,10,100", param_hint=option)
    return numbers


def _load_rate(text: str) -> float:
    try:
        return float(max(1, parse_size(text)))
    except ValueError:
        raise click.BadParameter(f"{text!r} is not a size; write for example 500M or 2GiB") from None


def _say(row: Row) -> None:
    click.secho(f"{row.trace}, {row.capacity:,} blocks, {row.policy}: {row.hit_rate:.1%}", dim=True, err=True)


def _skip(row: Row) -> None:
    return


def _prompt_encoder() -> Callable[[str], TokenArray]:
    """The default model's assembly and tokenizer, for recorded text; the model itself is not loaded."""
    from .models.store import ModelStore
    from .ports import SystemClock
    from .sim.sessions import prompt_encoder

    settings = Settings.from_environment(os.environ)
    assert settings.store is not None
    stored = ModelStore(settings.store).find(settings.model)
    if stored is None:
        raise click.ClickException(
            f"sessions of text need a tokenizer: fetch one with: ostinato model fetch {settings.model}"
        )
    return prompt_encoder(stored.model.path, SystemClock())
