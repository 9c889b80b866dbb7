"""Policies and capacities side by side, with the optimum beside them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

from ostinato.kv.policies import make_policy
from ostinato.kv.policy import HistoryPolicy, Outlook
from ostinato.kv.tiers.base import Outcome

from .optimum import optimum_hits
from .replay import ReplayClock, outlooks_for, replay
from .tiered import Below, TierCosts, memory_folder, open_store
from .traces import Trace

OPTIMUM = "optimum"


@dataclass(frozen=True, slots=True)
class Row:
    """One policy at one capacity. Rates are shares of units asked for, ``half2`` of the second half only.

    ``ttft_s`` is the estimated mean of loading what the tier served and computing what nobody did, without
    queueing; ``metadata_bytes`` is the policy's own memory for each cached block. ``tier_hit_tokens`` are
    those of ``hit_tokens`` that came from the tier, whose capacity is in units too (0: there was none).
    ``evicted`` are the arena's blocks by reason.
    ``None``: not defined for this row.
    """

    trace: str
    policy: str
    capacity: int
    hit_rate: float
    half2_rate: float
    hit_tokens: int
    input_tokens: int
    num_evicted: int | None
    ttft_s: float
    metadata_bytes: float | None
    tier_capacity: int = 0
    tier_hit_tokens: int | None = 0
    loaded_bytes: int | None = 0
    stored_bytes: int | None = 0
    num_tier_evicted: int | None = 0
    evicted: dict[str, int] | None = None

    def as_dict(self) -> dict[str, object]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Rates:
    """What the estimates stand on: tokens computed and bytes loaded in a second, and bytes of one token."""

    prefill_tokens_per_s: float
    load_bytes_per_s: float = float(1 << 30)
    token_bytes: int = 46_080


def compare(
    trace: Trace,
    policies: Sequence[str],
    capacities: Sequence[int],
    *,
    rates: Rates,
    tier_capacities: Sequence[int] = (0,),
    hints: str = "none",
    on_row: Callable[[Row], None] = lambda row: None,
) -> list[Row]:
    """A row for each policy at each capacity (in units of the trace); "optimum" is the clairvoyant bound.

    Of two places that is what both together could serve as one. ``hints``: what is said of the requests
    (:func:`~ostinato.sim.replay.outlooks_for`).
    """
    rows: list[Row] = []
    outlooks = outlooks_for(trace, hints)
    for tier_capacity in tier_capacities:
        for capacity in capacities:
            for policy in policies:
                if policy == OPTIMUM:
                    row = _optimum(trace, capacity, tier_capacity, rates)
                elif tier_capacity == 0:
                    row = _replayed(trace, policy, capacity, rates, outlooks=outlooks)
                else:
                    row = _replayed_with_tier(trace, policy, capacity, tier_capacity, rates, outlooks)
                rows.append(row)
                on_row(row)
    return rows


def _replayed(
    trace: Trace,
    name: str,
    capacity: int,
    rates: Rates,
    below: Below | None = None,
    clock: ReplayClock | None = None,
    outlooks: Sequence[Outlook] | None = None,
) -> Row:
    clock = clock or ReplayClock()
    policy = make_policy(name, num_blocks=capacity, block_tokens=1, clock=clock)
    result = replay(
        trace.requests,
        capacity,
        policy,
        clock,
        unit_tokens=trace.unit_tokens,
        below=below,
        outlooks=outlooks,
    )
    missed = result.input_tokens - result.hit_tokens
    num_loaded = 0 if below is None else below.tier.num_loaded
    loaded_bytes = num_loaded * trace.unit_tokens * rates.token_bytes
    total_s = missed / rates.prefill_tokens_per_s + loaded_bytes / rates.load_bytes_per_s
    size = policy.size_bytes / capacity if isinstance(policy, HistoryPolicy) else 0.0
    return Row(
        trace.name,
        name,
        capacity,
        result.hit_rate(),
        result.hit_rate(len(trace.requests) // 2),
        result.hit_tokens,
        result.input_tokens,
        result.num_evicted,
        total_s / len(trace.requests),
        size,
        tier_hit_tokens=result.tier_hit_tokens,
        loaded_bytes=loaded_bytes,
        evicted=result.evicted,
    )


def _replayed_with_tier(
    trace: Trace,
    name: str,
    capacity: int,
    tier_capacity: int,
    rates: Rates,
    outlooks: Sequence[Outlook] | None,
) -> Row:
    clock = ReplayClock()
    costs = TierCosts(
        trace.unit_tokens, rates.token_bytes, rates.load_bytes_per_s, rates.prefill_tokens_per_s
    )
    with ExitStack() as stack:
        folder = stack.enter_context(TemporaryDirectory(prefix="ostinato-replay-", dir=memory_folder()))
        store = open_store(Path(folder) / "tier", tier_capacity, clock)
        below = Below(store, capacity, clock, costs)
        stack.callback(below.close)
        row = _replayed(trace, name, capacity, rates, below, clock, outlooks)
        stored_bytes = below.tier.outcomes[Outcome.STORED] * costs.unit_bytes
        num_evicted = store.counters.evicted
    return replace(row, tier_capacity=tier_capacity, stored_bytes=stored_bytes, num_tier_evicted=num_evicted)


def _optimum(trace: Trace, capacity: int, tier_capacity: int, rates: Rates) -> Row:
    hits = optimum_hits(trace.requests, capacity + tier_capacity)
    refs = [len(request.units) for request in trace.requests]
    half = len(refs) // 2
    pairs = zip(hits, trace.requests, strict=True)
    hit_tokens = sum(min(hit * trace.unit_tokens, request.input_tokens) for hit, request in pairs)
    input_tokens = sum(request.input_tokens for request in trace.requests)
    return Row(
        trace.name,
        OPTIMUM,
        capacity,
        sum(hits) / sum(refs),
        sum(hits[half:]) / sum(refs[half:]),
        hit_tokens,
        input_tokens,
        None,
        (input_tokens - hit_tokens) / rates.prefill_tokens_per_s / len(refs),
        None,
        tier_capacity,
        *(None, None, None, None) if tier_capacity else (0, 0, 0, 0),
    )
