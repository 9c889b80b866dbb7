"""Policies and capacities side by side, with the optimum beside them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

from ostinato.kv.policies import make_policy
from ostinato.kv.policy import HistoryPolicy

from .optimum import optimum_hits
from .replay import ReplayClock, replay
from .traces import Trace

OPTIMUM = "optimum"


@dataclass(frozen=True, slots=True)
class Row:
    """One policy at one capacity. Rates are shares of units asked for, ``half2`` of the second half only.

    ``ttft_s`` is the estimated mean prefill of what was not served, without queueing; ``metadata_bytes`` is
    the policy's own memory for each cached block. ``None``: not defined for this row.
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

    def as_dict(self) -> dict[str, object]:
        return asdict(self)


def compare(
    trace: Trace,
    policies: Sequence[str],
    capacities: Sequence[int],
    *,
    prefill_tokens_per_s: float,
    on_row: Callable[[Row], None] = lambda row: None,
) -> list[Row]:
    """A row for each policy at each capacity (in units of the trace); "optimum" is the clairvoyant bound."""
    rows: list[Row] = []
    for capacity in capacities:
        for policy in policies:
            make = _optimum if policy == OPTIMUM else _replayed
            rows.append(make(trace, policy, capacity, prefill_tokens_per_s))
            on_row(rows[-1])
    return rows


def _replayed(trace: Trace, name: str, capacity: int, tokens_per_s: float) -> Row:
    clock = ReplayClock()
    policy = make_policy(name, num_blocks=capacity, block_tokens=1, clock=clock)
    result = replay(trace.requests, capacity, policy, clock, unit_tokens=trace.unit_tokens)
    missed = result.input_tokens - result.hit_tokens
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
        missed / tokens_per_s / len(trace.requests),
        size,
    )


def _optimum(trace: Trace, name: str, capacity: int, tokens_per_s: float) -> Row:
    hits = optimum_hits(trace.requests, capacity)
    refs = [len(request.units) for request in trace.requests]
    half = len(refs) // 2
    pairs = zip(hits, trace.requests, strict=True)
    hit_tokens = sum(min(hit * trace.unit_tokens, request.input_tokens) for hit, request in pairs)
    input_tokens = sum(request.input_tokens for request in trace.requests)
    return Row(
        trace.name,
        name,
        capacity,
        sum(hits) / sum(refs),
        sum(hits[half:]) / sum(refs[half:]),
        hit_tokens,
        input_tokens,
        None,
        (input_tokens - hit_tokens) / tokens_per_s / len(refs),
        None,
    )
