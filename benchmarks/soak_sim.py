"""Two hours of mixed traffic in the simulator, with faults: nothing wrong is served, and memory is flat.

Physics: chats, agents, questions about documents and prompts asked once run through the real books, policy,
link and tier (tiny blocks). Requests are cancelled and fail, clocks jump, the tier is away, tears and is
opened again, tenants are purged, prefixes are pinned. Books are checked all along. After each lap of ten
minutes, with nothing running, what Python holds is counted by tracemalloc. Growth is the largest lap of the
last third against the largest of the third before it: the first fills arena, tier and bounded history.

    python benchmarks/soak_sim.py [--hours 2] [--seed 1] [--policy workload]
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
import tracemalloc
from dataclasses import asdict
from pathlib import Path

import psutil

from common import finish
from ostinato.sim.soak import Lap, soak
from ostinato.sim.tiered import memory_folder


def say(lap: Lap) -> None:
    rss = psutil.Process().memory_info().rss / 2**20
    print(
        f"  {lap.time_s / 60:4.0f} min  {lap.num_requests:6,} requests  {lap.num_events:8,} events  "
        f"{lap.num_cached:6,} units cached  {lap.num_in_tier:6,} in the tier  "
        f"{lap.policy_bytes / 2**20:6.2f} MiB history  {lap.python_bytes / 2**20:7.2f} MiB Python  "
        f"{rss:6.0f} MiB RSS",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hours", type=float, default=2.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--policy", default="workload")
    given = parser.parse_args()
    tracemalloc.start()
    started_s = time.monotonic()
    with tempfile.TemporaryDirectory(dir=memory_folder()) as folder:
        laps = soak(
            random.Random(given.seed),
            Path(folder) / "tier",
            policy=given.policy,
            duration_s=3600 * given.hours,
            on_lap=say,
        )
    third = len(laps) // 3
    before = max(lap.python_bytes for lap in laps[third : 2 * third])
    after = max(lap.python_bytes for lap in laps[2 * third :])
    headline = {
        "hours": given.hours,
        "requests": sum(lap.num_requests for lap in laps),
        "events": laps[-1].num_events,
        "growth_ratio": round(after / before, 4),
        "growth_bytes": after - before,
        "took_s": round(time.monotonic() - started_s),
    }
    finish(
        "soak_sim",
        headline,
        {"seed": given.seed, "policy": given.policy, "laps": [asdict(lap) for lap in laps]},
    )


if __name__ == "__main__":
    main()
