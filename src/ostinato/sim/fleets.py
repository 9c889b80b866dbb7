"""Fleets side by side: sizes, ways to route, with and without a cache that all share."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from ostinato.errors import ParameterError, TraceError
from ostinato.routing import STRATEGIES, RoutingRule

from .faults import Chance
from .fleet import FleetPlan, FleetResult, Profile, percentile, simulate
from .traces import Trace

WORKERS_OF_A_TRACE = 4
"""Workers for each copy of the trace, unless it is said how many copies there are."""


@dataclass(frozen=True, slots=True)
class FleetRow:
    """One fleet. Times in seconds; ``hit_rate`` is hit tokens of input tokens.

    ``network_bytes``: loaded from and stored in the shared cache. ``most_over_mean``: what the busiest worker
    computed, over the mean. ``map_bytes_per_token``: the router's books for each token that workers have.
    ``choice_us``: the router's median time for a choice, where it was measured.
    """

    trace: str
    num_workers: int
    num_copies: int
    routing: str
    capacity: int
    global_capacity: int
    num_requests: int
    hit_rate: float
    hit_tokens: int
    global_hit_tokens: int
    input_tokens: int
    ttft_p50_s: float
    ttft_p90_s: float
    ttft_p99_s: float
    loaded_bytes: int
    stored_bytes: int
    duration_s: float
    most_over_mean: float
    map_bytes: int
    map_bytes_per_token: float
    choice_us: float | None
    reasons: dict[str, int]

    @property
    def network_bytes(self) -> int:
        return self.loaded_bytes + self.stored_bytes

    def as_dict(self) -> dict[str, object]:
        return {**asdict(self), "network_bytes": self.network_bytes}


def read_profile(file: Path) -> Profile:
    """A TOML file with the fields of :class:`~ostinato.sim.fleet.Profile`. Raises ``ParameterError``."""
    try:
        given = tomllib.loads(file.read_text(encoding="utf-8"))
        if unknown := given.keys() - {item.name for item in fields(Profile)}:
            raise ValueError(f"there is no {min(unknown)!r}")
        return checked_profile(**given)
    except (OSError, ValueError, TypeError) as error:
        raise ParameterError(f"{file}: {error}", param="profile") from error


def checked_profile(**values: object) -> Profile:
    """Raises ``ParameterError`` for what is no number above 0."""
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            raise ParameterError(f"{name} has to be above 0", param=name)
    return Profile(**values)  # type: ignore[arg-type]


def routing_names(given: str) -> list[str]:
    """``all``, or names with commas between. Raises ``ParameterError``."""
    names = list(STRATEGIES) if given == "all" else [name.strip() for name in given.split(",")]
    if unknown := [name for name in names if name not in STRATEGIES]:
        known = ", ".join(STRATEGIES)
        raise ParameterError(f"no routing {unknown[0]!r}; there are: {known}, or all", param="routing")
    return names


def compare_fleets(
    trace: Trace,
    plans: Sequence[FleetPlan],
    routings: Sequence[str],
    profile: Profile,
    make_chance: Callable[[], Chance],
    *,
    num_copies: int | None = None,
    stopwatch: Callable[[], float] | None = None,
    on_row: Callable[[FleetRow], None] = lambda row: None,
) -> list[FleetRow]:
    """A row for each plan and way to route.

    Raises ``TraceError`` where a request of the trace does not fit into one worker's cache.
    """
    longest = max(len(request.units) for request in trace.requests)
    rows: list[FleetRow] = []
    for plan in plans:
        if plan.capacity < longest:
            raise TraceError(
                f"{trace.name} has a request of {longest} blocks; a worker holds {plan.capacity}"
            )
        copies = num_copies or max(1, round(plan.num_workers / WORKERS_OF_A_TRACE))
        for name in routings:
            result = simulate(
                trace,
                plan,
                profile,
                RoutingRule(name),
                make_chance(),
                num_copies=copies,
                stopwatch=stopwatch,
            )
            rows.append(_row(trace, plan, copies, name, result))
            on_row(rows[-1])
    return rows


def _row(trace: Trace, plan: FleetPlan, num_copies: int, name: str, result: FleetResult) -> FleetRow:
    times_s = result.choice_times_s
    return FleetRow(
        trace=trace.name,
        num_workers=plan.num_workers,
        num_copies=num_copies,
        routing=name,
        capacity=plan.capacity,
        global_capacity=plan.global_capacity,
        num_requests=result.num_requests,
        hit_rate=result.hit_tokens / result.input_tokens,
        hit_tokens=result.hit_tokens,
        global_hit_tokens=result.global_hit_tokens,
        input_tokens=result.input_tokens,
        ttft_p50_s=percentile(result.ttfts_s, 0.5),
        ttft_p90_s=percentile(result.ttfts_s, 0.9),
        ttft_p99_s=percentile(result.ttfts_s, 0.99),
        loaded_bytes=result.loaded_bytes,
        stored_bytes=result.stored_bytes,
        duration_s=result.duration_s,
        most_over_mean=result.most_over_mean,
        map_bytes=result.map_bytes,
        map_bytes_per_token=result.map_bytes / max(result.cached_tokens, 1),
        choice_us=percentile(times_s, 0.5) * 1e6 if times_s else None,
        reasons=dict(result.reasons),
    )
