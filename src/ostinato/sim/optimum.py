"""The clairvoyant bound: what a cache could serve that knew all requests to come."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush

from .traces import TraceRequest


def optimum_hits(requests: Sequence[TraceRequest], capacity: int) -> list[int]:
    """Units served to each request by Belady's MIN, leaves first among equals.

    Exact for prefixes whose ids name a whole prefix: a parent is never needed later than its child, so the
    unit needed last is always a leaf and what is resident stays closed under prefixes. As in the replay, a
    request is inserted whole and its own units are not victims.
    """
    next_at: dict[int, int] = {}
    following: list[list[int]] = [[] for _ in requests]
    for at in range(len(requests) - 1, -1, -1):
        units = requests[at].units.tolist()
        following[at] = [next_at.get(unit, len(requests)) for unit in units]
        next_at.update((unit, at) for unit in units)
    resident: dict[int, int] = {}  # unit -> when it is needed next
    heap: list[tuple[int, int, int]] = []
    hits: list[int] = []
    for at, request in enumerate(requests):
        units = request.units.tolist()
        assert len(units) <= capacity, f"a request of {len(units)} units in a cache of {capacity}"
        hit = 0
        while hit < len(units) and units[hit] in resident:
            hit += 1
        hits.append(hit)
        for depth, unit in enumerate(units):
            resident[unit] = following[at][depth]
            heappush(heap, (-following[at][depth], -depth, unit))
        own, kept = set(units), []
        while len(resident) > capacity:
            entry = heappop(heap)
            unit = entry[2]
            if resident.get(unit) != -entry[0]:
                continue
            if unit in own:
                kept.append(entry)
                continue
            del resident[unit]
        for entry in kept:
            heappush(heap, entry)
    return hits
