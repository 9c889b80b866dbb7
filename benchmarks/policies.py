"""Which blocks to keep: eviction policies on recorded traffic, through the real books, against the optimum.

Physics: no model runs. Each request of a trace is looked up, inserted whole and let go in a pool of C blocks;
the share of blocks served is what a cache of that size would have saved of prefill. The optimum knows all
requests to come. "Second half" is measured warm: state and learning have run through the first half, on which
alone anything was tuned. Ratios are ours / LRU; the worst ratio is over whole runs, from cold.

    python benchmarks/policies.py [--data ../shared/data/traces] [--seeds 3]
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from common import finish
from ostinato.config import Settings
from ostinato.kv.policies import make_policy
from ostinato.kv.policy import HistoryPolicy, Outlook
from ostinato.models.store import ModelStore
from ostinato.ports import SystemClock
from ostinato.sim.compare import Rates, Row, compare
from ostinato.sim.replay import ReplayClock, never_continued, replay
from ostinato.sim.sessions import encode_bytes, prompt_encoder, read_session
from ostinato.sim.traces import Blocks, Trace, merge_sessions, read_mooncake
from ostinato.types import TokenArray

CAPACITIES = (1000, 3000, 5859, 10_000, 30_000)
POLICIES = ("lru", "lirs", "workload", "optimum")
AGENT_SHARES = (0.05, 0.15, 0.30, 0.60)  # of the distinct blocks
AGENT_BLOCK_TOKENS = 128
RATES = Rates(prefill_tokens_per_s=400.0)


def agent_traces(folder: Path, encode: Callable[[str], TokenArray], seeds: int) -> list[Trace]:
    """All sessions merged: starts within an hour, and within two minutes so that they contend."""
    blocks = Blocks(AGENT_BLOCK_TOKENS)
    sessions = [blocks.of(read_session(path, encode)) for path in sorted(folder.rglob("*.jsonl"))]
    merged: list[Trace] = []
    for name, span_s in (("agent-hour", 3600.0), ("agent-dense", 120.0)):
        for seed in range(1, seeds + 1):
            chance = random.Random(seed)
            starts_s = [chance.uniform(0, span_s) for _ in sessions]
            merged.append(merge_sessions(sessions, starts_s, f"{name}-{seed}"))
    return merged


def tokenizer() -> tuple[str, Callable[[str], TokenArray]]:
    """The default model's where it is in the store, else bytes in fours."""
    settings = Settings.from_environment(os.environ)
    assert settings.store is not None
    stored = ModelStore(settings.store).find(settings.model)
    if stored is None:
        return "bytes", encode_bytes
    return settings.model, prompt_encoder(stored.model.path, SystemClock())


def decision_ms(trace: Trace, capacity: int) -> dict[str, float]:
    """Processor time of a request with ours, without LRU's for the same; and metadata for each block."""
    took: list[float] = []
    size = 0.0
    for name in ("lru", "workload"):
        clock = ReplayClock()
        policy = make_policy(name, num_blocks=capacity, block_tokens=1, clock=clock)
        start = time.process_time()
        replay(trace.requests, capacity, policy, clock, unit_tokens=trace.unit_tokens)
        took.append((time.process_time() - start) * 1000 / len(trace.requests))
        size = policy.size_bytes / capacity if isinstance(policy, HistoryPolicy) else 0.0
    return {
        "lru_total_ms": round(took[0], 3),
        "decision_ms": round(took[1] - took[0], 3),
        "metadata_bytes_per_block": round(size),
    }


def closed_hint(trace: Trace, capacity: int) -> dict[str, float]:
    """Percent served when the caller says truly, after each request, whether it is the last of its chain."""
    served: dict[str, float] = {}
    outlooks = [Outlook.OVER if last else Outlook.UNKNOWN for last in never_continued(trace.requests)]
    for name, label in (("lru", "lru"), ("workload", "ours")):
        clock = ReplayClock()
        policy = make_policy(name, num_blocks=capacity, block_tokens=1, clock=clock)
        units = trace.unit_tokens
        result = replay(trace.requests, capacity, policy, clock, unit_tokens=units, outlooks=outlooks)
        served[label] = round(100 * result.hit_rate(), 2)
        served[f"{label}_half2"] = round(100 * result.hit_rate(len(trace.requests) // 2), 2)
    return served


def table(rows: list[Row]) -> dict[str, dict[str, Any]]:
    """Rows by capacity: percent of blocks served, whole run and second half, and ours against LRU."""
    by_capacity: dict[str, dict[str, Any]] = {}
    for row in rows:
        cell = by_capacity.setdefault(str(row.capacity), {})
        name = "ours" if row.policy == "workload" else row.policy
        cell[name] = round(100 * row.hit_rate, 2)
        cell[f"{name}_half2"] = round(100 * row.half2_rate, 2)
        if row.policy == "workload":
            cell["metadata_bytes_per_block"] = round(row.metadata_bytes or 0)
    for cell in by_capacity.values():
        cell["ratio"] = round(cell["ours"] / cell["lru"], 4)
        cell["half2_ratio"] = round(cell["ours_half2"] / cell["lru_half2"], 4)
    return by_capacity


def say(row: Row) -> None:
    print(
        f"  {row.trace:20} {row.capacity:7,} {row.policy:9} {100 * row.hit_rate:6.2f} % "
        f"second half {100 * row.half2_rate:6.2f} %",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, default=Path("../shared/data/traces"))
    parser.add_argument("--seeds", type=int, default=3, help="merges of the agent sessions, of each kind")
    given = parser.parse_args()
    files = {name: given.data / "mooncake" / f"{name}_trace.jsonl" for name in ("conversation", "synthetic")}
    missing = [str(path) for path in files.values() if not path.is_file()]
    if missing:
        sys.exit(f"the traces are not here ({', '.join(missing)}); give their folder with --data")
    traces = [read_mooncake(path) for path in files.values()]
    tables: dict[str, dict[str, dict[str, Any]]] = {}
    for trace in traces:
        rows = compare(trace, POLICIES, CAPACITIES, rates=RATES, on_row=say)
        tables[trace.name.removesuffix("_trace")] = table(rows)
    used, encode = tokenizer()
    for trace in agent_traces(given.data / "agent", encode, given.seeds):
        distinct = len({unit for request in trace.requests for unit in request.units.tolist()})
        capacities = [int(distinct * share) for share in AGENT_SHARES]
        rows = compare(trace, POLICIES, capacities, rates=RATES, on_row=say)
        tables[trace.name] = table(rows)
    cost = decision_ms(traces[0], 5859)
    hinted = {trace.name.removesuffix("_trace"): closed_hint(trace, 5859) for trace in traces}
    cells = [(name, size, cell) for name, sizes in tables.items() for size, cell in sizes.items()]
    worst = min(cells, key=lambda each: float(each[2]["ratio"]))
    conversation, synthetic = tables["conversation"], tables["synthetic"]
    headline = {
        "conversation_half2_5859_ratio": conversation["5859"]["half2_ratio"],
        "conversation_half2_10000_ratio": conversation["10000"]["half2_ratio"],
        "synthetic_5859_ratio": synthetic["5859"]["ratio"],
        "worst_ratio": worst[2]["ratio"],
        "worst_at": f"{worst[0]} at {worst[1]} blocks",
        "metadata_bytes_per_block_max": max(cell["metadata_bytes_per_block"] for _, _, cell in cells),
        **cost,
        "traces": {
            name: {
                size: {key: cell[key] for key in ("lru", "lirs", "ours", "optimum")}
                for size, cell in sizes.items()
            }
            for name, sizes in tables.items()
        },
    }
    finish("policies", headline, {"tables": tables, "closed_hint_5859": hinted, "agent_tokenizer": used})


if __name__ == "__main__":
    main()
