"""Which blocks to keep: eviction policies on recorded traffic, through the real books, against the optimum.

Physics: no model runs. Each request of a trace is looked up, inserted whole and let go in a pool of C blocks;
the share of blocks served is what a cache of that size would have saved of prefill. The optimum knows all
requests to come. "Second half" is measured warm: state and learning have run through the first half, on which
alone anything was tuned. Ratios are ours / LRU; the worst ratio is over whole runs, from cold.

    python benchmarks/policies.py [--data ../shared/data/traces] [--seeds 3]
"""

from __future__ import annotations

import argparse
import gc
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from common import finish
from ostinato.config import Settings
from ostinato.kv.hashing import Namespace
from ostinato.kv.manager import KVManager
from ostinato.kv.policies import make_policy
from ostinato.kv.policy import RequestHints
from ostinato.models.store import ModelStore
from ostinato.ports import SystemClock
from ostinato.sim.compare import Rates, Row, compare
from ostinato.sim.replay import ReplayClock, hints_of
from ostinato.sim.sessions import encode_bytes, prompt_encoder, read_session
from ostinato.sim.traces import Blocks, Trace, TraceRequest, merge_sessions, read_mooncake
from ostinato.types import TokenArray

CAPACITIES = (1000, 3000, 5859, 10_000, 30_000)
POLICIES = ("lru", "lirs", "workload", "optimum")
AGENT_SHARES = (0.05, 0.15, 0.30, 0.60)  # of the distinct blocks
AGENT_BLOCK_TOKENS = 128
CHAT_HINTS = ("perfect", "wrong")
AGENT_HINTS = ("none", "recorded", "perfect", "wrong")
ENGINE_BLOCKS = (1000, 3000)  # of 16 tokens: 5 and 15 % of what the sessions say
SPACE = Namespace("trace", "", "", "", "", "")
RATES = Rates(prefill_tokens_per_s=400.0)


def agent_traces(read: Sequence[Trace], seeds: int) -> list[Trace]:
    """All sessions merged: starts within an hour, and within two minutes so that they contend."""
    blocks = Blocks(AGENT_BLOCK_TOKENS)
    sessions = [blocks.of(session) for session in read]
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


class Watch:
    """Processor time of the calls of one thread, in milliseconds."""

    def __init__(self) -> None:
        self.took: dict[str, list[float]] = {"request": [], "evict": [], "slice": [], "put_off": []}

    def __call__(self, name: str, call: Callable[[], Any]) -> Any:
        start_s = time.thread_time()
        result = call()
        self.took[name].append((time.thread_time() - start_s) * 1000)
        return result

    def mean(self, name: str) -> float:
        return statistics.fmean(self.took[name]) if self.took[name] else 0.0

    def spread(self, name: str) -> dict[str, float]:
        took = sorted(self.took[name])
        at = {"p50": 0.5, "p99": 0.99, "max": 1.0}
        return {key: round(took[min(len(took) - 1, int(share * len(took)))], 3) for key, share in at.items()}


def costs(trace: Trace, capacity: int, name: str) -> Watch:
    """A request is look-up, room, commit and release; ``evict`` is the part of it that makes room.

    What the policy puts off is done in slices between requests (in the engine: by a thread of its own); a
    slice is the longest that the books' lock is held for it, ``put_off`` all slices of one request.
    """
    clock, watch = ReplayClock(), Watch()
    policy = make_policy(name, num_blocks=capacity, block_tokens=1, clock=clock)
    manager = KVManager(capacity, 1, policy=policy)

    def serve(request: TraceRequest) -> None:
        with manager.acquire(SPACE, request.units, hints=hints_of(request)) as lease:
            if watch("evict", lambda: lease.reserve(len(request.units))):
                lease.commit(request.units)

    def tend() -> None:
        while watch("slice", manager.tend):
            pass

    gc.disable()  # a collection that falls into a request is not the policy's
    try:
        for number, request in enumerate(trace.requests):
            clock.time_s = max(clock.time_s, request.time_s)
            watch("request", lambda: serve(request))  # noqa: B023 - called at once
            watch("put_off", tend)
            if number % 1000 == 0:
                gc.collect()
    finally:
        gc.enable()
    return watch


def decision(trace: Trace, capacity: int) -> dict[str, Any]:
    """What ours costs: on the way of a request more than LRU, and beside it."""
    lru, ours = costs(trace, capacity, "lru"), costs(trace, capacity, "workload")
    on_path_ms = ours.mean("request") - lru.mean("request")
    return {
        "lru_total_ms": round(lru.mean("request"), 3),
        "on_path_ms": round(on_path_ms, 3),
        "put_off_ms": round(ours.mean("put_off"), 3),
        "decision_ms": round(on_path_ms + ours.mean("put_off"), 3),
        "request_ms": {"lru": lru.spread("request"), "ours": ours.spread("request")},
        "evict_ms": {"lru": lru.spread("evict"), "ours": ours.spread("evict")},
        "slice_ms": ours.spread("slice"),
    }


def hinted(trace: Trace, capacity: int, kinds: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Percent served when something is said of each request once it was answered."""
    found: dict[str, dict[str, Any]] = {}
    for kind in kinds:
        rows = compare(trace, ("lru", "workload"), (capacity,), rates=RATES, hints=kind)
        found[kind] = table(rows)[str(capacity)]
    return found


def engine_like(sessions: Sequence[Trace], seed: int, num_blocks: int) -> dict[str, float]:
    """Percent of tokens served as the engine asks for them: blocks of 16 tokens, prompts in chunks of 512."""
    chance = random.Random(seed)
    trace = merge_sessions(sessions, [chance.uniform(0, 120.0) for _ in sessions], "")
    served: dict[str, float] = {}
    for name in ("lru", "workload"):
        clock = ReplayClock()
        policy = make_policy(name, num_blocks=num_blocks, block_tokens=16, clock=clock)
        manager = KVManager(num_blocks, 16, policy=policy)
        num_hit = num_asked = 0
        for request in trace.requests:
            clock.time_s = max(clock.time_s, request.time_s)
            length = len(request.units)
            with manager.acquire(SPACE, request.units, hints=RequestHints(length)) as lease:
                num_hit, num_asked = num_hit + lease.prefix_len, num_asked + length
                for end in (*range(lease.prefix_len + 512, length, 512), length):
                    if not lease.reserve(end):
                        break
                    lease.take_copies()
                    lease.commit(request.units[:end])
            while manager.tend():
                pass
        served["ours" if name == "workload" else name] = round(100 * num_hit / num_asked, 2)
    served["ratio"] = round(served["ours"] / served["lru"], 4)
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
    sessions = [read_session(path, encode) for path in sorted((given.data / "agent").rglob("*.jsonl"))]
    agent_hints: dict[str, dict[str, Any]] = {}
    for trace in agent_traces(sessions, given.seeds):
        distinct = len({unit for request in trace.requests for unit in request.units.tolist()})
        capacities = [int(distinct * share) for share in AGENT_SHARES]
        rows = compare(trace, POLICIES, capacities, rates=RATES, on_row=say)
        tables[trace.name] = table(rows)
        if trace.name.startswith("agent-dense"):
            agent_hints[trace.name] = {str(size): hinted(trace, size, AGENT_HINTS) for size in capacities[:2]}
    engine = {
        f"{num_blocks} blocks, seed {seed}": engine_like(sessions, seed, num_blocks)
        for num_blocks in ENGINE_BLOCKS
        for seed in range(1, given.seeds + 1)
    }
    print(f"  as the engine asks: {engine}", flush=True)
    cost = decision(traces[0], 5859)
    told = {trace.name.removesuffix("_trace"): hinted(trace, 5859, CHAT_HINTS) for trace in traces}
    cells = [(name, size, cell) for name, sizes in tables.items() for size, cell in sizes.items()]
    worst = min(cells, key=lambda each: float(each[2]["ratio"]))
    conversation, synthetic = tables["conversation"], tables["synthetic"]
    headline = {
        "conversation_half2_5859_ratio": conversation["5859"]["half2_ratio"],
        "conversation_half2_10000_ratio": conversation["10000"]["half2_ratio"],
        "synthetic_5859_ratio": synthetic["5859"]["ratio"],
        "worst_ratio": worst[2]["ratio"],
        "worst_at": f"{worst[0]} at {worst[1]} blocks",
        "worst_engine_like_ratio": min(served["ratio"] for served in engine.values()),
        "worst_wrong_hint_ratio": min(
            round(served["wrong"]["ours"] / tables[name]["5859"]["lru"], 4) for name, served in told.items()
        ),
        "metadata_bytes_per_block": conversation["5859"]["metadata_bytes_per_block"],
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
    details = {
        "tables": tables,
        "hints_5859": told,
        "agent_hints": agent_hints,
        "engine_like": engine,
        "agent_tokenizer": used,
    }
    finish("policies", headline, details)


if __name__ == "__main__":
    main()
