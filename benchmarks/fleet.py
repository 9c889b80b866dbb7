"""A fleet: requests routed to where their prefix is, against taking turns.

Physics: a prompt costs what of it has to be computed. Four workers that take turns each see a quarter of a
conversation, so most of its history is computed again by each. A router that remembers where a prefix went
finds it there, and the saved prefill shortens all queues. The parts ``routed`` and ``scale`` are played
on recorded traffic: real router, real books and eviction, engine time from measured rates. No model runs, so
hit rates and TTFT are the same on every machine. All strategies are played on the same requests.

    python benchmarks/fleet.py [--parts routed,scale] [--data ../shared/data/traces]
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from common import finish
from ostinato.sim.fleet import FleetPlan, Profile
from ostinato.sim.fleets import FleetRow, compare_fleets
from ostinato.sim.traces import Trace, read_mooncake

WORKERS = 4
CAPACITY = 5859  # blocks of 512 tokens: three million tokens
LOADS = (0.3, 0.5, 0.7, 0.9)
SCALES = (1, 10, 100, 1000)  # workers
SCALE_REQUESTS = 1000  # of each copy of the trace; every four workers have one
PARTS: dict[str, Callable[[Path], tuple[dict[str, Any], dict[str, Any]]]] = {}


def traces(data: Path) -> list[Trace]:
    names = ("conversation_trace", "synthetic_trace")
    paths = [data / "mooncake" / f"{name}.jsonl" for name in names]
    if missing := [path for path in paths if not path.exists()]:
        sys.exit(f"skipped: the recorded traces are not here ({missing[0]}); see --data")
    return [read_mooncake(path) for path in paths]


def say(row: FleetRow) -> None:
    print(
        f"  {row.trace}, {row.num_workers:,} workers, shared {row.global_capacity:,}: {row.routing}: "
        f"{row.hit_rate:.1%} served, TTFT p50 {row.ttft_p50_s:.1f} s, p99 {row.ttft_p99_s:.1f} s, "
        f"network {row.network_bytes / 1e9:,.0f} GB",
        flush=True,
    )


def routed(data: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """All ways to route on four workers, at several loads; the headline is the conversations at 0.7."""
    found: list[dict[str, Any]] = []
    headline: dict[str, Any] = {}
    for trace in traces(data):
        for load in LOADS:
            plan = FleetPlan(WORKERS, CAPACITY, utilization=load, policy="lru")
            rows = compare_fleets(
                trace, [plan], ["round-robin", "least-loaded", "sticky", "prefix"], Profile(),
                lambda: random.Random(0), on_row=say,
            )  # fmt: skip
            turns, ours = rows[0], rows[-1]
            found += [{"utilization": load, **row.as_dict()} for row in rows]
            if trace.name == "conversation_trace" and load == 0.7:
                headline = {
                    "routed_hit_ratio": round(ours.hit_tokens / turns.hit_tokens, 3),
                    "routed_ttft_ratio": round(ours.ttft_p50_s / turns.ttft_p50_s, 3),
                }
    return headline, {"rows": found}


def scale(data: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """One to a thousand workers, each with as many users; with a cache for all, and without."""
    trace = traces(data)[0]
    rows: list[FleetRow] = []
    for num_workers in SCALES:
        plans = [
            FleetPlan(num_workers, CAPACITY, shared * num_workers, policy="lru", num_requests=SCALE_REQUESTS)
            for shared in (0, CAPACITY)
        ]
        rows += compare_fleets(
            trace, plans, ["round-robin", "least-loaded", "prefix"], Profile(),
            lambda: random.Random(0), stopwatch=time.perf_counter, on_row=say,
        )  # fmt: skip
    last = rows[-4]  # a thousand workers, no cache for all, by prefix
    headline = {
        "choice_us_at_1000": None if last.choice_us is None else round(last.choice_us, 1),
        "map_bytes_per_token": round(last.map_bytes_per_token, 3),
    }
    return headline, {"rows": [row.as_dict() for row in rows]}


PARTS |= {"routed": routed, "scale": scale}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    default = Path(__file__).resolve().parents[2] / "shared" / "data" / "traces"
    parser.add_argument("--data", type=Path, default=default)
    parser.add_argument("--parts", default=",".join(PARTS), help="with commas between: " + ", ".join(PARTS))
    options = parser.parse_args()
    headline: dict[str, Any] = {}
    details: dict[str, Any] = {}
    for name in options.parts.split(","):
        if name not in PARTS:
            parser.error(f"there is no part {name!r}")
        print(f"{name}:", flush=True)
        told, details[name] = PARTS[name](options.data)
        headline |= told
    finish("fleet", headline, details)


if __name__ == "__main__":
    main()
