"""Requests that overlap, are cancelled and fail while the clock jumps; the books are checked at each event.

The same trace, seed and arguments replay the same events: what fails once fails again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from ostinato.kv.hashing import Namespace
from ostinato.kv.manager import KVManager, Lease
from ostinato.kv.policy import EvictionPolicy, HistoryPolicy
from ostinato.types import TokenArray

from .replay import ReplayClock, hints_of
from .traces import TraceRequest


class Chance(Protocol):
    """What the replay draws from; ``random.Random(seed)`` is one."""

    def random(self) -> float: ...

    def randrange(self, stop: int, /) -> int: ...


@dataclass(slots=True)
class FaultCounts:
    """What happened. ``num_checked`` counts the checks of all books."""

    num_events: int = 0
    num_finished: int = 0
    num_cancelled: int = 0
    num_failed: int = 0
    num_refused: int = 0
    num_jumps: int = 0
    num_cleared: int = 0
    num_checked: int = 0
    hit_units: int = 0


class WrongBlockError(AssertionError):
    """The books named a block for tokens that were never written to it."""


@dataclass(slots=True)
class _Running:
    lease: Lease
    units: TokenArray
    num_written: int


class FaultyReplay:
    """Up to ``max_running`` requests at once, each written piece by piece.

    An arena of plain integers stands beside the books: a unit is *written* to the slot that the lease names,
    and on a hit each slot must hold what the prompt says. A cancelled request leaves without a commit, a
    failed one after writing what it never commits.
    """

    def __init__(
        self,
        capacity: int,
        policy: EvictionPolicy | HistoryPolicy,
        clock: ReplayClock,
        chance: Chance,
        *,
        max_running: int = 8,
    ) -> None:
        self.counts = FaultCounts()
        self._manager = KVManager(capacity, 1, policy=policy)
        self._clock = clock
        self._chance = chance
        self._max_running = max_running
        self._arena: list[tuple[int, ...] | None] = [None] * capacity
        self._running: list[_Running] = []
        self._namespaces = [Namespace(f"model {i}", "", "", "", "", "") for i in range(2)]

    def run(self, requests: Sequence[TraceRequest], *, check_every: int = 1) -> FaultCounts:
        """Plays all requests; raises ``AssertionError`` at the first thing that is wrong."""
        for request in requests:
            self._clock.time_s = max(self._clock.time_s, request.time_s)
            while len(self._running) >= self._max_running:
                self._step()
                self._check(check_every)
            self._begin(request)
            self._check(check_every)
            if self._chance.random() < 0.5:
                self._step()
                self._check(check_every)
        while self._running:
            self._step()
            self._check(check_every)
        assert self._manager.num_held_blocks == 0, "blocks are held and nobody runs"
        return self.counts

    def _begin(self, request: TraceRequest) -> None:
        draw = self._chance.random()
        if draw < 0.02:
            self._clock.time_s += (self._chance.random() - 0.3) * 7200  # back as well: policies must bear it
            self.counts.num_jumps += 1
        elif draw < 0.021:
            self._manager.clear()
            self.counts.num_cleared += 1
        namespace = self._namespaces[0 if self._chance.random() < 0.9 else 1]
        lease = self._manager.acquire(namespace, request.units, hints=hints_of(request))
        self.counts.hit_units += lease.prefix_len
        running = _Running(lease, request.units, lease.prefix_len)
        self._verify(running)
        self._running.append(running)

    def _step(self) -> None:
        """One piece of one request: reserve, write, commit; or it ends, one way or another."""
        running = self._running[self._chance.randrange(len(self._running))]
        draw = self._chance.random()
        if draw < 0.03:
            self._end(running)
            self.counts.num_cancelled += 1
            return
        num_units = len(running.units)
        end = min(num_units, running.num_written + 1 + self._chance.randrange(16))
        if not running.lease.reserve(end):
            self._end(running)
            self.counts.num_refused += 1
            return
        running.lease.take_copies()
        self._verify(running)  # what it holds was not given away to make room
        self._write(running, end)
        if draw < 0.06:
            self._end(running)  # written and never committed
            self.counts.num_failed += 1
            return
        running.lease.commit(running.units[:end])
        if end == num_units:
            self._end(running)
            self.counts.num_finished += 1

    def _write(self, running: _Running, end: int) -> None:
        slots = running.lease.slots(running.num_written, end).tolist()
        for at, slot in zip(range(running.num_written, end), slots, strict=True):
            self._arena[slot] = self._name(running, at)
        running.num_written = end

    def _verify(self, running: _Running) -> None:
        slots = running.lease.slots(0, running.num_written).tolist()
        for at, slot in enumerate(slots):
            if self._arena[slot] != self._name(running, at):
                raise WrongBlockError(f"slot {slot} holds {self._arena[slot]}, wanted unit {at}")

    def _name(self, running: _Running, at: int) -> tuple[int, ...]:
        which = self._namespaces.index(running.lease.namespace)
        return (which, at, int(running.units[at]), int(running.units[at - 1]) if at else -1)

    def _end(self, running: _Running) -> None:
        running.lease.release()
        self._running.remove(running)

    def _check(self, every: int) -> None:
        self.counts.num_events += 1
        if self.counts.num_events % every == 0:
            self._manager.check_integrity()
            self.counts.num_checked += 1
