"""Requests that overlap, are cancelled and fail while clocks jump, tiers fail and writes tear.

Three namespaces ask, one of them a tenant with a quota, some of its requests for a short time only; prefixes
are pinned and let go, tenants are purged.

The books, and what they say of contents, are checked at each event. The same trace, seed and arguments replay
the same events, told by a digest of them all: what fails once fails again.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from blake3 import blake3

from ostinato.errors import PinRefusedError
from ostinato.kv.hashing import BlockKey, Namespace
from ostinato.kv.lease import Lease
from ostinato.kv.manager import KVManager
from ostinato.kv.policy import EvictionPolicy, HistoryPolicy, Outlook
from ostinato.kv.terms import (
    NO_TERMS,
    Allowance,
    Allowances,
    Selection,
    Terms,
    model_id,
    tenant_of,
)
from ostinato.kv.tiers.base import Found, Miss, Outcome, Status
from ostinato.kv.tiers.shared import SharedTier
from ostinato.kv.transfer import Chain, TierLink
from ostinato.types import TokenArray

from .replay import ReplayClock, hints_of
from .tiered import (
    MeteredTier,
    NamedArena,
    TierCosts,
    abandon_amid,
    open_link,
    open_store,
    promote,
    write_back,
)
from .traces import TraceRequest

_COSTS = TierCosts(unit_tokens=16, token_bytes=1024, load_bytes_per_s=1e9, prefill_tokens_per_s=1000.0)
_OUTLOOKS = tuple(Outlook)


class Chance(Protocol):
    """What the replay draws from; ``random.Random(seed)`` is one."""

    def random(self) -> float: ...

    def randrange(self, stop: int, /) -> int: ...


@dataclass(slots=True)
class FaultCounts:
    """What happened. ``num_checked`` counts the checks of all books, ``digest`` is of all events in order."""

    num_events: int = 0
    num_finished: int = 0
    num_cancelled: int = 0
    num_failed: int = 0
    num_refused: int = 0
    num_jumps: int = 0
    num_cleared: int = 0
    num_pinned: int = 0
    num_purged: int = 0
    num_checked: int = 0
    hit_units: int = 0
    tier_hit_units: int = 0
    num_tier_failures: int = 0
    num_torn: int = 0
    num_lost: int = 0
    num_restarts: int = 0
    num_corrupt: int = 0
    num_cancelled_loads: int = 0
    digest: str = ""


@dataclass(slots=True)
class _Running:
    lease: Lease
    units: TokenArray
    names: Sequence[bytes]
    num_written: int
    chain: Chain
    number: int = 0


class FaultyTier(MeteredTier):
    """A tier that is away for some time, and that fails to load now and then."""

    def __init__(self, tier: SharedTier, clock: ReplayClock, chance: Chance) -> None:
        super().__init__(tier, clock, _COSTS)
        self.away_for = 0  # so many more loads, look-ups and rounds of storing
        self.num_failures = 0
        self._chance = chance

    def lookup(self, keys: Sequence[BlockKey]) -> Found:
        return Found(0, Status.MISS) if self._is_away() else super().lookup(keys)

    def load(self, key: BlockKey, into: memoryview) -> bool:
        if self.interrupt is None and (self._is_away() or self._chance.random() < 0.02):
            into[:] = bytes(self._chance.randrange(256) for _ in range(len(into)))  # "holds anything"
            self.num_failures += 1
            return False
        return super().load(key, into)

    def lose(self) -> int:
        """What waits to be stored never is; returns how many blocks that are."""
        num_lost = len(self._waiting)
        self._waiting.clear()
        return num_lost

    def _store(self, blocks: Sequence[tuple[BlockKey, Sequence[memoryview]]]) -> list[Outcome]:
        if self._is_away():
            return [Outcome.FULL] * len(blocks)
        return super()._store(blocks)

    def _is_away(self) -> bool:
        if self.away_for == 0:
            return False
        self.away_for -= 1
        self.num_failures += 1
        return True


@dataclass(slots=True)
class _Below:
    """A store and what leads there; made anew at each restart."""

    folder: Path
    capacity: int
    store: SharedTier = field(init=False)
    tier: FaultyTier = field(init=False)
    link: TierLink = field(init=False)

    def open(self, arena: NamedArena, clock: ReplayClock, chance: Chance) -> None:
        self.store = open_store(self.folder, self.capacity, clock)
        self.tier = FaultyTier(self.store, clock, chance)
        self.link = open_link(self.tier, arena, clock)

    def tear(self, chance: Chance) -> None:
        """Part of a slot is not what was written, as after a crash or on a bad disk."""
        with (self.folder / "slab").open("r+b") as slab:
            slab.seek(chance.randrange(self.capacity * NamedArena.payload_bytes))
            slab.write(bytes([chance.randrange(256)]))


class FaultyReplay:
    """Up to ``max_running`` requests at once, each written piece by piece.

    An arena of names stands beside the books: a unit is *written* to the slot that the lease names, and on a
    hit each slot must hold what the prompt says, whether it was computed there or came from the tier. A
    cancelled request leaves without a commit, a failed one after writing what it never commits.
    """

    def __init__(
        self,
        capacity: int,
        policy: EvictionPolicy | HistoryPolicy,
        clock: ReplayClock,
        chance: Chance,
        *,
        max_running: int = 8,
        tier_folder: Path | None = None,
        tier_capacity: int = 0,
    ) -> None:
        """``tier_folder``: where a tier of ``tier_capacity`` units is made; ``close`` lets go of it."""
        self.counts = FaultCounts()
        self._namespaces = [
            Namespace("model 0", "", "", "", "", ""),
            Namespace("model 0", "", "", "", "", "", salt="tenant"),
            Namespace("model 1", "", "", "", "", ""),
        ]
        quota = Allowances(by_tenant={tenant_of("tenant"): Allowance(capacity // 4)})
        self.manager = KVManager(capacity, 1, policy=policy, clock=clock, allowances=quota)
        self._clock = clock
        self._chance = chance
        self._max_running = max_running
        self._arena = NamedArena(capacity)
        self._running: list[_Running] = []
        self._events = blake3()
        self._num_begun = 0
        self._below: _Below | None = None
        if tier_folder is not None:
            self._below = _Below(tier_folder, tier_capacity)
            self._below.open(self._arena, clock, chance)

    def run(self, requests: Iterable[TraceRequest], *, check_every: int = 1) -> FaultCounts:
        """Plays all requests; raises ``AssertionError`` at the first thing that is wrong."""
        try:
            for request in requests:
                self._play(request, check_every)
            while self._running:
                self._step()
                self._check(check_every)
            assert self.manager.num_leases == 0, "a lease is left and nobody runs"
            assert self.manager.num_held_blocks == self.manager.num_pinned_blocks, "blocks are held by nobody"
        except AssertionError as error:
            error.add_note(
                f"event {self.counts.num_events}, events so far {self._events.hexdigest(length=8)}"
            )
            raise
        self.counts.digest = self._events.hexdigest(length=16)
        return self.counts

    @property
    def num_in_tier(self) -> int:
        """Units in the tier; 0 where there is none."""
        return 0 if self._below is None else self._below.store.use().num_blocks

    def close(self) -> None:
        """Lets go of the tier."""
        if self._below is not None:
            self._below.link.close()

    def _play(self, request: TraceRequest, check_every: int) -> None:
        self._clock.time_s = max(self._clock.time_s, request.time_s)
        while len(self._running) >= self._max_running:
            self._step()
            self._check(check_every)
        self._happen()
        self._begin(request)
        self._check(check_every)
        if self._running and self._chance.random() < 0.5:
            self._step()
            self._check(check_every)

    # ------------------------------------------------------------ faults of the world

    def _happen(self) -> None:
        if self._chance.random() < 0.5:
            self._note("tend", self.manager.tend())
        draw = self._chance.random()
        if draw < 0.02:
            self._clock.time_s += (self._chance.random() - 0.3) * 7200  # back as well: policies must bear it
            self.counts.num_jumps += 1
            self._note("jump", round(self._clock.time_s * 1e6))
        elif draw < 0.021:
            self._note("clear", self.manager.clear())
            self.counts.num_cleared += 1
        elif draw < 0.023:
            self._purge()
        elif draw < 0.05:
            self._pin()
        elif self._below is not None:
            self._happen_below(self._below, self._chance.random())

    def _purge(self) -> None:
        """All of one tenant goes, also what its requests are writing just now."""
        meant = self._namespaces[self._chance.randrange(len(self._namespaces))]
        selection = Selection(tenant=meant.tenant, model=model_id(meant.weights))
        if self._below is not None:
            self._below.store.purge(selection)
        purged = self.manager.purge(selection)
        for running in self._running:
            if running.lease.namespace == meant:
                assert self.manager.peek(meant, running.units) == 0, "what was purged is found"
        self.counts.num_purged += 1
        self._note("purge", purged.num_tokens, purged.num_freed_blocks, purged.num_held_blocks)

    def _pin(self) -> None:
        """Pins what a request has so far, or lets go of the oldest pin."""
        pins = self.manager.pins()
        if pins and self._chance.random() < 0.5:
            self.manager.unpin(pins[0].id)
        elif self._running:
            running = self._running[self._chance.randrange(len(self._running))]
            with suppress(PinRefusedError):  # they may hold so much and no more
                self.manager.pin(running.lease.namespace, running.units, ttl_s=600.0)
                self.counts.num_pinned += 1
        self._note("pins", self.manager.num_pinned_blocks)

    def _happen_below(self, below: _Below, draw: float) -> None:
        if draw < 0.004:
            self._restart(below)
        elif draw < 0.02:
            below.tier.away_for = self._chance.randrange(200)
            self._note("away", below.tier.away_for)
        elif draw < 0.08:
            below.tear(self._chance)
            self.counts.num_torn += 1
            self._note("tear")
        elif draw < 0.11:
            num_lost = below.tier.lose()
            self.counts.num_lost += num_lost
            self._note("lose", num_lost)

    def _restart(self, below: _Below) -> None:
        """Everything in memory is gone; the store is opened again."""
        for running in list(self._running):
            self._end(running)
            self.counts.num_cancelled += 1
        self.counts.num_lost += below.tier.lose()
        self._count_below(below)
        for pin in self.manager.pins():
            self.manager.unpin(pin.id)
        self.manager.clear()
        self._arena.wipe()
        below.link.close()
        below.open(self._arena, self._clock, self._chance)
        self.counts.num_restarts += 1
        self._note("restart", below.store.use().num_blocks)

    def _count_below(self, below: _Below) -> None:
        self.counts.num_tier_failures += below.tier.num_failures
        below.tier.num_failures = 0
        misses = below.store.counters.misses
        self.counts.num_corrupt += misses[Miss.CORRUPT]
        misses[Miss.CORRUPT] = 0

    # ------------------------------------------------------------ requests

    def _begin(self, request: TraceRequest) -> None:
        draw = self._chance.random()
        namespace = self._namespaces[0 if draw < 0.8 else 1 if draw < 0.93 else 2]
        terms = Terms(ttl_s=900.0) if self._chance.random() < 0.1 else NO_TERMS
        lease = self.manager.acquire(namespace, request.units, hints=hints_of(request), terms=terms)
        names = self._arena.names(namespace, request.units)
        self._num_begun += 1
        running = _Running(lease, request.units, names, lease.prefix_len, Chain(), self._num_begun)
        self.counts.hit_units += lease.prefix_len
        self._arena.verify(lease, names, lease.prefix_len)
        if self._below is not None and lease.reserve(len(request.units)):
            if self._leaves_amid(self._below, running):
                return
            running.num_written = promote(self._below.link, lease, request.units, running.chain)
            self.counts.tier_hit_units += running.num_written - lease.prefix_len
            self._arena.verify(lease, names, running.num_written)
        self._note("begin", running.number, lease.prefix_len, running.num_written)
        self._running.append(running)

    def _leaves_amid(self, below: _Below, running: _Running) -> bool:
        """Whether this one is cancelled while its blocks are being loaded."""
        if self._chance.random() > 0.3:
            return False
        after = self._chance.randrange(3)
        if not abandon_amid(below.link, below.tier, running.lease, running.units, after):
            return False
        self.counts.num_cancelled += 1
        self.counts.num_cancelled_loads += 1
        self._note("leave", running.number, after)
        return True

    def _step(self) -> None:
        """One piece of one request: reserve, write, commit; or it ends, one way or another."""
        running = self._running[self._chance.randrange(len(self._running))]
        draw = self._chance.random()
        if draw < 0.03:
            self.counts.num_cancelled += 1
            self._end(running, "cancel")
            return
        num_units = len(running.units)
        end = min(num_units, running.num_written + 1 + self._chance.randrange(16))
        if not running.lease.reserve(end):
            self.counts.num_refused += 1
            self._end(running, "refuse")
            return
        running.lease.take_copies()
        self._arena.verify(running.lease, running.names, running.num_written)  # nothing was given away
        self._arena.write(running.lease, running.names, running.num_written, end)
        running.num_written = end
        if draw < 0.06:
            self.counts.num_failed += 1
            self._end(running, "fail")  # written and never committed
            return
        running.lease.commit(running.units[:end])
        self._note("commit", running.number, end)
        if end == num_units or self._chance.random() < 0.3:
            self._store(running, end)
        if end == num_units:
            self.counts.num_finished += 1
            self._end(running, "finish")
            outlook = _OUTLOOKS[self._chance.randrange(len(_OUTLOOKS))]
            self._note("hint", self.manager.hint(running.lease.namespace, running.units, outlook))

    def _store(self, running: _Running, end: int) -> None:
        """Sends what is computed down; it arrives now or later."""
        if self._below is None:
            return
        write_back(self._below.link, running.lease, running.units[:end], running.chain)
        if self._chance.random() < 0.5:
            self._below.tier.settle()

    def _end(self, running: _Running, how: str = "cancel") -> None:
        running.lease.release()
        self._running.remove(running)
        self._note(how, running.number)

    # ------------------------------------------------------------ checks

    def _note(self, what: str, *details: int) -> None:
        self._events.update(f"{self.counts.num_events} {what} {details}\n".encode())

    def _check(self, every: int) -> None:
        self.counts.num_events += 1
        if self.counts.num_events % every:
            return
        self.manager.check_integrity()
        if self._below is not None:
            self._count_below(self._below)
            found = self._below.store.check_integrity()
            assert found.num_bad_records == 0, f"{found.num_bad_records} records are damaged"
            assert found.num_writing == 0, "a block is being written, and nobody writes"
            assert found.num_bad_payloads <= self.counts.num_torn, (
                f"{found.num_bad_payloads} payloads are damaged, {self.counts.num_torn} were torn"
            )
            self._note("below", found.num_ready, found.num_bad_payloads)
        self.counts.num_checked += 1
