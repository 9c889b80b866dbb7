"""What a running server says: its counters, of how its cache is run, and for the holder of its admin key the
requests it remembers, of what is in the prompts."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Final

from .findings import Finding, Report
from .material import Asked

_SAMPLE = re.compile(r"^(?:ostinato_)(\w+?)(?:\{([^}]*)\})? (\S+)$", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
_MIN_TOKENS: Final = 1_000
_EVICTED: Final = {"capacity": "capacity", "quota": "quota", "expired": "ttl_gap", "purged": "purged"}
_NOT_WRITTEN: Final = 0.05
_ONLY_COUNTED: Final = frozenset({"write_back", "tier_failures", "preemption"})

Samples = Mapping[tuple[str, str], float]


def read_exposition(text: str) -> dict[tuple[str, str], float]:
    """Samples of our own series by name, without prefix, and the value of their last label."""
    found: dict[tuple[str, str], float] = {}
    for name, labels, value in _SAMPLE.findall(text):
        values = [label for _, label in _LABEL.findall(labels)]
        found[name, values[-1] if values else ""] = float(value)
    return found


def examine_server(samples: Samples) -> Report:
    """Findings out of a server's counters since its start, by tokens lost.

    What was evicted is not what came back: where there are misses, as much of it may have been lost.
    """

    def of(name: str, label: str = "") -> float:
        return samples.get((name, label), 0.0)

    looked_up, hits = of("prefix_cache_queries_total"), of("prefix_cache_hits_total")
    missed = looked_up - hits
    found: list[Finding] = []

    def add(kind: str, num_tokens: float, example: str) -> None:
        if num_tokens >= max(_MIN_TOKENS, 0.01 * looked_up):
            found.append(
                Finding(kind, "", int(of("requests_finished_total")), int(num_tokens), (), (example,))
            )

    for reason, kind in _EVICTED.items():
        evicted = of("prefix_cache_evicted_tokens_total", reason)
        again = of("prompt_tokens_recomputed_total") or missed
        add(kind, min(evicted, again), f"{evicted:,.0f} tokens were given up, {again:,.0f} computed again")
    stored = of("prefix_cache_stored_tokens_total")
    if looked_up >= _MIN_TOKENS and hits == 0 and stored == 0:
        add("cache_off", looked_up, "nothing was stored")
    offered = sum(value for (name, _), value in samples.items() if name == "kv_tier_write_back_blocks_total")
    dropped = of("kv_tier_write_back_blocks_total", "dropped")
    if offered and dropped > _NOT_WRITTEN * offered:
        add("write_back", missed * dropped / offered, f"{dropped:,.0f} of {offered:,.0f} blocks were dropped")
    failed = of("kv_tier_failed_blocks_total")
    if failed:
        found.append(Finding("tier_failures", "", 0, 0, (), (f"{failed:,.0f} blocks could not be read",)))
    preempted = of("preempted_tokens_total")
    add("preemption", preempted, f"{of('num_preemptions_total'):,.0f} sequences were thrown out")
    found.sort(key=lambda item: -item.lost_tokens)
    num_requests = int(sum(value for (name, _), value in _named(samples, "requests_finished_total")))
    possible = min(looked_up, hits + sum(item.lost_tokens for item in found))
    return Report(num_requests, int(looked_up), int(hits), int(possible), True, tuple(found))


def with_evictions(requests: Sequence[Asked], samples: Samples) -> list[Asked]:
    """A server's requests with what its cache gave up since its start, by reason: the counters say so."""
    evicted = {
        reason: int(samples.get(("prefix_cache_evicted_tokens_total", reason), 0)) for reason in _EVICTED
    }
    evicted = {reason: count for reason, count in evicted.items() if count}
    if not requests or not evicted:
        return list(requests)
    first = replace(requests[0], line={**requests[0].line, "evicted": evicted})
    return [first, *requests[1:]]


def together(of_requests: Report, of_counters: Report) -> Report:
    """A report on a server's requests, with what only its counters know of how it is run."""
    more = tuple(item for item in of_counters.findings if item.kind in _ONLY_COUNTED)
    found = sorted((*of_requests.findings, *more), key=lambda item: -item.lost_tokens)
    return replace(of_requests, findings=tuple(found))


def _named(samples: Samples, name: str) -> Iterator[tuple[tuple[str, str], float]]:
    return (item for item in samples.items() if item[0][0] == name)
