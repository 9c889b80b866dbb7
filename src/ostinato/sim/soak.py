"""Hours of mixed traffic with faults, in laps, and what memory holds after each."""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from ostinato.kv.policies import make_policy
from ostinato.kv.policies.workload import Workload
from ostinato.kv.policy import EvictionPolicy, HistoryPolicy

from .faults import Chance, FaultyReplay
from .replay import ReplayClock
from .traces import TraceRequest
from .traffic import mixed_traffic


@dataclass(frozen=True, slots=True)
class Lap:
    """After some minutes of traffic, when nobody runs.

    ``python_bytes`` is what Python's allocators hold, as ``tracemalloc`` counts it: everything the replay
    keeps but LMDB's own pages, which lie in files. ``policy_bytes`` is what the policy says of its history.
    """

    time_s: float
    num_requests: int
    num_events: int
    hit_units: int
    tier_hit_units: int
    num_cached: int
    num_in_tier: int
    policy_bytes: int
    python_bytes: int


def soak(
    chance: Chance,
    tier_folder: Path,
    *,
    policy: str = "workload",
    capacity: int = 1500,
    tier_capacity: int = 4000,
    duration_s: float = 7200.0,
    lap_s: float = 600.0,
    begun_per_s: float = 0.5,
    check_every: int = 250,
    history_floor: int = 8192,
    on_lap: Callable[[Lap], None] = lambda lap: None,
) -> list[Lap]:
    """Plays traffic through arena and tier under all faults; ``tracemalloc`` has to run.

    ``history_floor``: blocks beyond eight times the cache that ``workload`` remembers. In the server it is so
    large that it takes hours to fill, and memory is flat only after that.

    Raises ``AssertionError`` for the first thing that is wrong.
    """
    assert tracemalloc.is_tracing(), "nobody counts memory: start tracemalloc first"
    clock = ReplayClock()
    rule: EvictionPolicy | HistoryPolicy
    if policy == "workload":
        rule = Workload(capacity, 1, clock, history_floor=history_floor)
    else:
        rule = make_policy(policy, num_blocks=capacity, block_tokens=1, clock=clock)
    replay = FaultyReplay(capacity, rule, clock, chance, tier_folder=tier_folder, tier_capacity=tier_capacity)
    laps: list[Lap] = []
    traffic = mixed_traffic(chance, duration_s=duration_s, begun_per_s=begun_per_s)
    try:
        for end_s, requests in _laps(traffic, lap_s):
            counted = _Counted(requests)
            counts = replay.run(counted, check_every=check_every)
            gc.collect()
            laps.append(
                Lap(
                    end_s,
                    counted.num_requests,
                    counts.num_events,
                    counts.hit_units,
                    counts.tier_hit_units,
                    replay.manager.num_cached_tokens,
                    replay.num_in_tier,
                    rule.size_bytes if isinstance(rule, HistoryPolicy) else 0,
                    tracemalloc.get_traced_memory()[0],
                )
            )
            on_lap(laps[-1])
    finally:
        replay.close()
    return laps


class _Counted:
    def __init__(self, requests: Iterable[TraceRequest]) -> None:
        self.num_requests = 0
        self._requests = requests

    def __iter__(self) -> Iterator[TraceRequest]:
        for request in self._requests:
            self.num_requests += 1
            yield request


def _laps(traffic: Iterator[TraceRequest], lap_s: float) -> Iterator[tuple[float, Iterator[TraceRequest]]]:
    """Traffic cut by its own time; each lap has to be played to its end before the next is asked for."""
    ahead = next(traffic, None)
    end_s = 0.0

    def lap() -> Iterator[TraceRequest]:
        nonlocal ahead
        while ahead is not None and ahead.time_s < end_s:
            yield ahead
            ahead = next(traffic, None)

    while ahead is not None:
        end_s += lap_s
        yield end_s, lap()
