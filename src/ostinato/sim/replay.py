"""Requests of a trace through the real manager, index and policies; there is no model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from ostinato.events import BlocksEvicted, Event
from ostinato.kv.hashing import Namespace
from ostinato.kv.manager import KVManager
from ostinato.kv.policy import EvictionPolicy, HistoryPolicy, Outlook, RequestHints
from ostinato.kv.sessions import Sessions
from ostinato.types import TokenArray

from .tiered import Below
from .traces import Trace, TraceRequest

_NAMESPACE = Namespace("trace", "", "", "", "", "")
_WALL_S = 1.7e9
_SENTINEL = np.array([-1], np.int32)  # no trace has it: what a hit can end before


class ReplayClock:
    """Time as the trace tells it; on the wall it is about 2023, and clocks may go back."""

    def __init__(self) -> None:
        self.time_s = 0.0

    def now(self) -> float:
        return _WALL_S + self.time_s

    def monotonic(self) -> float:
        return self.time_s


@dataclass(slots=True)
class Replayed:
    """What a replay served. ``hits`` and ``refs`` are units of each request.

    ``evicted`` are blocks by reason, ``tier_hit_tokens`` those of ``hit_tokens`` that came from the tier.
    """

    capacity: int
    hits: list[int] = field(default_factory=list)
    refs: list[int] = field(default_factory=list)
    hit_tokens: int = 0
    tier_hit_tokens: int = 0
    input_tokens: int = 0
    evicted: dict[str, int] = field(default_factory=dict)

    @property
    def num_evicted(self) -> int:
        return sum(self.evicted.values())

    def hit_rate(self, start: int = 0) -> float:
        """Units served of units asked for, from request ``start`` on."""
        return sum(self.hits[start:]) / sum(self.refs[start:])


def replay(
    requests: Sequence[TraceRequest],
    capacity: int,
    policy: EvictionPolicy | HistoryPolicy,
    clock: ReplayClock,
    *,
    unit_tokens: int,
    on_request: Callable[[KVManager], None] | None = None,
    outlooks: Sequence[Outlook] | None = None,
    below: Below | None = None,
) -> Replayed:
    """Each request in turn is looked up, inserted whole and let go, in a pool of ``capacity`` units.

    A request longer than the pool is computed and not kept. ``clock`` is the one the policy was made with.
    ``outlooks``: what is said of each sequence once it was answered. What the policy puts off it does between
    requests.
    """
    result = Replayed(capacity)

    def observe(event: Event) -> None:
        if isinstance(event, BlocksEvicted):
            result.evicted[event.reason] = result.evicted.get(event.reason, 0) + event.num_blocks

    manager = KVManager(capacity, 1, policy=policy, observer=observe)
    sessions = None if outlooks is None else Sessions(manager, clock)
    for number, request in enumerate(requests):
        clock.time_s = max(clock.time_s, request.time_s)
        if sessions is not None:
            sessions.began(_NAMESPACE, request.units)
        in_arena, in_tier = serve(manager, request.units, hints_of(request), below)
        hit = in_arena + in_tier
        result.hits.append(hit)
        result.refs.append(len(request.units))
        hit_tokens = min(hit * unit_tokens, request.input_tokens)
        result.hit_tokens += hit_tokens
        result.tier_hit_tokens += hit_tokens - min(in_arena * unit_tokens, request.input_tokens)
        result.input_tokens += request.input_tokens
        if sessions is not None and outlooks is not None:
            sessions.ended(_NAMESPACE, request.units, outlooks[number])
        while manager.tend():
            pass
        if on_request is not None:
            on_request(manager)
    return result


def never_continued(requests: Sequence[TraceRequest]) -> list[bool]:
    """The perfect hint: whether no later request goes on from the last full unit of this one."""
    later: set[int] = set()
    found: list[bool] = []
    for request in reversed(requests):
        units = request.units.tolist()
        at = len(units) - 2 if request.has_part_block and len(units) > 1 else len(units) - 1
        found.append(units[at] not in later)
        later.update(units)
    return found[::-1]


HINTS = ("none", "recorded", "perfect", "wrong")


def outlooks_for(trace: Trace, hints: str) -> list[Outlook] | None:
    """What is said of each request of a trace once it was answered; ``hints`` is one of ``HINTS``.

    ``recorded``: what the ends of its answers say. ``perfect``: which sequences are over. ``wrong``: that of
    all the others.
    """
    assert hints in HINTS, f"no hints {hints!r}"
    if hints == "none":
        return None
    if hints == "recorded":
        return [request.outlook for request in trace.requests]
    is_said_of = hints == "perfect"
    return [
        Outlook.OVER if is_last is is_said_of else Outlook.UNKNOWN
        for is_last in never_continued(trace.requests)
    ]


def hints_of(request: TraceRequest) -> RequestHints:
    return RequestHints(request.input_tokens, request.output_tokens, request.has_part_block)


def serve(
    manager: KVManager, units: TokenArray, hints: RequestHints, below: Below | None = None
) -> tuple[int, int]:
    """One request from look-up to release; returns how many units were in the arena, and below it."""
    # A trace's ids stand for blocks: a prompt that is wholly there is served to its last id, which a
    # look-up of tokens never reports because the model wants the last token's logits.
    hit = manager.peek(_NAMESPACE, np.concatenate((units, _SENTINEL)))
    from_tier = 0
    with manager.acquire(_NAMESPACE, units, hints=hints) as lease:
        if lease.reserve(len(units)):
            if below is not None:
                from_tier = below.serve(lease, units, hit)
            else:
                lease.commit(units)
    return hit, from_tier
