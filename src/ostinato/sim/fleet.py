"""Many workers behind one router, event by event: real router, real books, engine time from measured rates.

A worker computes prompts one after another and writes answers beside that. What a request finds is looked up
when its turn comes, is findable for others when its prompt is computed, and is held until its answer ends.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush, merge
from typing import Final

import numpy as np

from ostinato.kv.hashing import Namespace
from ostinato.kv.lease import Lease
from ostinato.kv.manager import KVManager
from ostinato.kv.policies import make_policy
from ostinato.routing import Ask, Router, RoutingRule, Ticket

from .faults import Chance
from .replay import ReplayClock, hints_of
from .traces import Trace, TraceRequest

_NAMESPACE: Final = Namespace("trace", "", "", "", "", "")
_SENTINEL: Final = np.array([-1], np.int32)
_COMMON_SHARE: Final = 0.05  # units in more requests than that are system prompts: the same in all copies


@dataclass(frozen=True, slots=True)
class Profile:
    """How fast one worker is, as measured. The defaults are the default model's on two cores.

    Attributes:
        prefill_tokens_per_s: prompts, one at a time.
        decode_token_s: between two tokens of an answer.
        load_bytes_per_s: from the cache that all share, over a worker's own network.
        token_bytes: KV of one token.
        max_running: requests a worker has in hand at most.
    """

    prefill_tokens_per_s: float = 400.0
    decode_token_s: float = 0.065
    load_bytes_per_s: float = float(1 << 30)
    token_bytes: int = 46_080
    max_running: int = 64

    def __post_init__(self) -> None:
        rates = (self.prefill_tokens_per_s, self.decode_token_s, self.load_bytes_per_s, self.token_bytes)
        assert min(rates) > 0, "a rate has to be above 0"
        assert self.max_running >= 1, "a worker that takes nothing"


@dataclass(frozen=True, slots=True)
class FleetPlan:
    """What is simulated.

    Attributes:
        num_workers: workers.
        capacity: units in the cache of each.
        global_capacity: units in a cache that all share (0: none).
        utilization: what computing every prompt in full would take of the workers' time: the trace's clock
            is stretched so that it is this.
        policy: which eviction policy a worker has.
        num_requests: how many are played of each copy of the trace (``None``: all).
    """

    num_workers: int
    capacity: int
    global_capacity: int = 0
    utilization: float = 0.7
    policy: str = "workload"
    num_requests: int | None = None


@dataclass(slots=True)
class FleetResult:
    """What happened. ``ttfts_s`` by request in order of arrival; bytes and tokens in all.

    ``most_over_mean``: the tokens that the busiest worker computed, over the mean. ``map_bytes``: what the
    router's books took in the end, for ``cached_tokens`` that the workers had then.
    """

    ttfts_s: list[float] = field(default_factory=list)
    hit_tokens: int = 0
    global_hit_tokens: int = 0
    input_tokens: int = 0
    loaded_bytes: int = 0
    stored_bytes: int = 0
    num_requests: int = 0
    duration_s: float = 0.0
    most_over_mean: float = 1.0
    map_bytes: int = 0
    cached_tokens: int = 0
    reasons: Counter[str] = field(default_factory=Counter)
    choice_times_s: list[float] = field(default_factory=list)


@dataclass(slots=True)
class _Worker:
    name: str
    manager: KVManager
    queue: deque[_Job] = field(default_factory=deque)
    is_computing: bool = False
    num_running: int = 0
    computed_tokens: int = 0


@dataclass(slots=True)
class _Job:
    request: TraceRequest
    arrival_s: float
    number: int
    ticket: Ticket
    lease: Lease | None = None
    is_kept: bool = False


def copies_of(
    trace: Trace, num_copies: int, chance: Chance, *, num_requests: int | None
) -> Iterator[TraceRequest]:
    """As many users more: the trace several times at once, each copy with prompts of its own.

    System prompts (units that many requests have) are the same in all copies. Copies begin within a minute.
    """
    requests = trace.requests[:num_requests]
    counts = Counter(unit for request in requests for unit in request.units.tolist())
    num_ids = max(counts) + 1
    is_own = np.ones(num_ids, np.int32)
    for unit, count in counts.items():
        is_own[unit] = count < max(2, _COMMON_SHARE * len(requests))

    def copy(number: int, shift_s: float) -> Iterator[TraceRequest]:
        for request in requests:
            units = (request.units + is_own[request.units] * (number * num_ids)).astype(np.int32)
            yield TraceRequest(
                request.time_s + shift_s, units, request.input_tokens, request.output_tokens,
                request.has_part_block, f"{number} {request.session}" if request.session else "",
            )  # fmt: skip

    assert num_ids * num_copies < 1 << 31, "more units than numbers"
    shifts = [0.0, *(60.0 * chance.random() for _ in range(num_copies - 1))]
    return merge(*(copy(i, shift) for i, shift in enumerate(shifts)), key=lambda request: request.time_s)


def simulate(
    trace: Trace,
    plan: FleetPlan,
    profile: Profile,
    rule: RoutingRule,
    chance: Chance,
    *,
    num_copies: int = 1,
    stopwatch: Callable[[], float] | None = None,
) -> FleetResult:
    """Plays ``num_copies`` of the trace on a fleet. ``stopwatch`` (seconds) times the router's choices."""
    played = trace.requests[: plan.num_requests]
    span_s = max(played[-1].time_s - played[0].time_s, 1.0)
    work_s = num_copies * sum(request.input_tokens for request in played) / profile.prefill_tokens_per_s
    stretch = work_s / (plan.num_workers * span_s * plan.utilization)
    fleet = _Fleet(trace.unit_tokens, plan, profile, rule, stopwatch)
    fleet.run(copies_of(trace, num_copies, chance, num_requests=plan.num_requests), stretch)
    return fleet.result


class _Fleet:
    def __init__(
        self,
        unit_tokens: int,
        plan: FleetPlan,
        profile: Profile,
        rule: RoutingRule,
        stopwatch: Callable[[], float] | None,
    ) -> None:
        self._unit_tokens, self._profile, self._stopwatch = unit_tokens, profile, stopwatch
        self._clock = ReplayClock()
        self._router = Router(rule, block_tokens=unit_tokens, now_s=self._clock.monotonic)
        self._workers: dict[str, _Worker] = {}
        for number in range(plan.num_workers):
            name = f"worker-{number}"
            self._workers[name] = _Worker(name, self._manager(plan.policy, plan.capacity))
            self._router.add(name, num_blocks=plan.capacity)
        self._global = self._manager("lru", plan.global_capacity) if plan.global_capacity else None
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._num_events = 0
        self.result = FleetResult()

    def run(self, requests: Iterator[TraceRequest], stretch: float) -> None:
        result = self.result
        for request in requests:
            arrival_s = request.time_s * stretch
            self._play_until(arrival_s)
            self._clock.time_s = arrival_s
            self._arrive(request, arrival_s)
        self._play_until(float("inf"))
        result.duration_s = self._clock.time_s
        computed = [worker.computed_tokens for worker in self._workers.values()]
        result.most_over_mean = max(computed) * len(computed) / max(sum(computed), 1)
        result.map_bytes = self._router.prefixes.size_bytes
        result.cached_tokens = self._unit_tokens * sum(
            worker.manager.num_cached_tokens for worker in self._workers.values()
        )

    def _arrive(self, request: TraceRequest, arrival_s: float) -> None:
        result, router = self.result, self._router
        ask = Ask(request.units.tolist(), request.input_tokens, request.session)
        began_s = self._stopwatch() if self._stopwatch else 0.0
        choice = router.choose(ask)
        assert choice is not None, "no worker is open"
        ticket = router.begin(ask, choice)
        if self._stopwatch:
            result.choice_times_s.append(self._stopwatch() - began_s)
        result.reasons[choice.reason] += 1
        result.input_tokens += request.input_tokens
        result.ttfts_s.append(0.0)
        worker = self._workers[choice.worker]
        worker.queue.append(_Job(request, arrival_s, result.num_requests, ticket))
        result.num_requests += 1
        self._start(worker)

    def _start(self, worker: _Worker) -> None:
        if worker.is_computing or not worker.queue or worker.num_running >= self._profile.max_running:
            return
        job, result, profile = worker.queue.popleft(), self.result, self._profile
        units, input_tokens = job.request.units, job.request.input_tokens
        asked = np.concatenate((units, _SENTINEL))
        num_local = worker.manager.peek(_NAMESPACE, asked)
        job.lease = worker.manager.acquire(_NAMESPACE, units, hints=hints_of(job.request))
        job.is_kept = job.lease.reserve(len(units))
        local = min(num_local * self._unit_tokens, input_tokens)
        loaded = 0
        if self._global is not None:
            num_global = self._global.peek(_NAMESPACE, asked)
            more = min(num_global * self._unit_tokens, input_tokens) - local
            load_s = more * profile.token_bytes / profile.load_bytes_per_s
            if more > 0 and load_s < more / profile.prefill_tokens_per_s:
                loaded = more
            self._keep_globally(job.request, num_global)
        # The last token is computed even where all is there: its logits are wanted.
        left = max(input_tokens - local - loaded, 1)
        result.hit_tokens += local + loaded
        result.global_hit_tokens += loaded
        result.loaded_bytes += loaded * profile.token_bytes
        worker.computed_tokens += left
        worker.is_computing = True
        worker.num_running += 1
        service_s = (
            loaded * profile.token_bytes / profile.load_bytes_per_s + left / profile.prefill_tokens_per_s
        )
        self._at(self._clock.time_s + service_s, lambda: self._computed(worker, job))

    def _computed(self, worker: _Worker, job: _Job) -> None:
        self.result.ttfts_s[job.number] = self._clock.time_s - job.arrival_s
        if job.lease is not None and job.is_kept:
            job.lease.commit(job.request.units)
        job.ticket.first_token()
        worker.is_computing = False
        ends_s = self._clock.time_s + job.request.output_tokens * self._profile.decode_token_s
        self._at(ends_s, lambda: self._ended(worker, job))
        self._start(worker)

    def _ended(self, worker: _Worker, job: _Job) -> None:
        if job.lease is not None:
            job.lease.release()
        while worker.manager.tend():
            pass
        job.ticket.end()
        worker.num_running -= 1
        self._start(worker)

    def _keep_globally(self, request: TraceRequest, num_there: int) -> None:
        assert self._global is not None
        num_new = len(request.units) - num_there
        with self._global.acquire(_NAMESPACE, request.units, hints=hints_of(request)) as lease:
            if lease.reserve(len(request.units)):
                lease.commit(request.units)
                self.result.stored_bytes += num_new * self._unit_tokens * self._profile.token_bytes

    def _at(self, time_s: float, act: Callable[[], None]) -> None:
        self._num_events += 1
        heappush(self._events, (time_s, self._num_events, act))

    def _play_until(self, time_s: float) -> None:
        while self._events and self._events[0][0] <= time_s:
            self._clock.time_s, _, act = heappop(self._events)
            act()

    def _manager(self, policy: str, capacity: int) -> KVManager:
        rule = make_policy(policy, num_blocks=capacity, block_tokens=1, clock=self._clock)
        return KVManager(capacity, 1, policy=rule)


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least ``share`` of them do not exceed."""
    assert values, "of nothing"
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, max(0, int(np.ceil(share * len(ordered))) - 1))]
