"""A tier below the replayed arena: the real link, write-back and store, with a few bytes for each block.

Beside the books stands an arena of names: a unit's name says of which namespace it is, where it stands and
what stands before it. Names are what the codec stores and loads, so whatever a lease or a tier says is there
can be compared with what was put there.
"""

from __future__ import annotations

import os
import struct
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

import numpy as np

from ostinato.kv.hashing import BlockKey, Namespace
from ostinato.kv.lease import Lease
from ostinato.kv.loading import Load
from ostinato.kv.tiers.base import Found, Outcome, Tier, TierUse
from ostinato.kv.tiers.shared import SharedTier
from ostinato.kv.transfer import Chain, TierLink
from ostinato.ports import Clock
from ostinato.types import TokenArray

_NAME: Final = struct.Struct("<QII")  # all that stands before it, namespace, place
_CHAIN_MASK: Final = (1 << 64) - 1
_MAX_BUFFERS: Final = 1024
_SENTINEL: Final = np.int32(-1)  # no trace has it: what a hit can end before
TIMEOUT_S: Final = 60.0


class WrongBlockError(AssertionError):
    """A block does not hold what the books say it holds."""


@dataclass(frozen=True, slots=True)
class TierCosts:
    """What a unit stands for: ``unit_tokens`` tokens of ``token_bytes``, and how fast they come.

    Loading runs at ``load_bytes_per_s``, computing at ``prefill_tokens_per_s``.
    """

    unit_tokens: int
    token_bytes: int
    load_bytes_per_s: float
    prefill_tokens_per_s: float

    @property
    def unit_bytes(self) -> int:
        return self.unit_tokens * self.token_bytes

    def load_s(self, num_units: int) -> float:
        return num_units * self.unit_bytes / self.load_bytes_per_s

    def compute_s(self, num_units: int) -> float:
        return num_units * self.unit_tokens / self.prefill_tokens_per_s


class MovableClock(Clock, Protocol):
    """Time that the replay moves."""

    time_s: float


class NamedArena:
    """``num_slots`` names of units in place of KV. Namespaces are told apart by the order they came in."""

    payload_bytes: Final = _NAME.size
    name: Final = "names"
    is_exact: Final = True
    window_tokens: Final = 0

    def __init__(self, num_slots: int) -> None:
        self._names: list[bytes | None] = [None] * num_slots
        self._namespaces: dict[str, int] = {}

    def names(self, namespace: Namespace, units: TokenArray) -> list[bytes]:
        """What the slots of a prompt have to hold."""
        which = self._namespaces.setdefault(namespace.digest, len(self._namespaces))
        names, chain = [], 0
        for at, unit in enumerate(units.tolist()):
            chain = hash((chain, unit)) & _CHAIN_MASK  # of integers: the same in every process
            names.append(_NAME.pack(chain, which, at))
        return names

    def write(self, lease: Lease, names: Sequence[bytes], start: int, end: int) -> None:
        """What an engine does with rows ``[start, end)`` of a prompt."""
        for slot, name in zip(lease.slots(start, end).tolist(), names[start:end], strict=True):
            self._names[slot] = name

    def verify(self, lease: Lease, names: Sequence[bytes], end: int) -> None:
        """Compares the first ``end`` units of a lease with what they have to be.

        Raises:
            WrongBlockError: some slot holds another unit, or none.
        """
        for at, slot in enumerate(lease.slots(0, end).tolist()):
            held = self._names[slot]
            if held != names[at]:
                shown = "nothing" if held is None else _NAME.unpack(held)
                raise WrongBlockError(
                    f"slot {slot} holds {shown}, wanted unit {at}: {_NAME.unpack(names[at])}"
                )

    def wipe(self) -> None:
        """As after a restart."""
        self._names = [None] * len(self._names)

    def encode(self, slot: int, into: memoryview) -> bool:
        """For the tier: the name at ``slot``."""
        held = self._names[slot]
        assert held is not None, f"slot {slot} was never written and is to be stored"
        into[:] = held
        return True

    def decode(self, payload: memoryview, slot: int) -> None:
        """From the tier: the name for ``slot``."""
        self._names[slot] = bytes(payload)


class MeteredTier:
    """A tier whose moves are counted, and whose loads take the time they would: the clock is moved on.

    What the write-back's thread brings waits here until ``settle``: threads have no say in the order of
    things, and the same replay does the same every time. A crash loses what waits.
    """

    def __init__(self, tier: Tier, clock: MovableClock, costs: TierCosts) -> None:
        self.counters = tier.counters
        self.num_loaded = 0
        self.outcomes = dict.fromkeys(Outcome, 0)
        self._tier = tier
        self._clock = clock
        self._costs = costs
        self.interrupt: tuple[int, Callable[[], None]] | None = None
        """To be called amid a load, when so many have gone before it."""
        self._waiting: list[tuple[BlockKey, bytes]] = []
        self._in_use: Sequence[BlockKey] = ()

    def use(self) -> TierUse:
        return self._tier.use()

    def lookup(self, keys: Sequence[BlockKey]) -> Found:
        return self._tier.lookup(keys)

    def expect(self, keys: Sequence[BlockKey]) -> None:
        self._tier.expect(keys)

    def load(self, key: BlockKey, into: memoryview) -> bool:
        if self.interrupt is not None:
            left, call = self.interrupt
            self.interrupt = (left - 1, call) if left else None
            if not left:
                call()
        is_here = self._tier.load(key, into)
        if is_here:
            self.num_loaded += 1
            self._clock.time_s += self._costs.load_s(1)
        return is_here

    def store(self, key: BlockKey, parts: Sequence[memoryview]) -> Outcome:
        return self.store_all([(key, parts)])[0]

    def store_all(self, blocks: Sequence[tuple[BlockKey, Sequence[memoryview]]]) -> list[Outcome]:
        self._waiting += [(key, b"".join(parts)) for key, parts in blocks]
        return [Outcome.PENDING] * len(blocks)

    def touch(self, keys: Sequence[BlockKey]) -> None:
        self._in_use = keys  # the whole chain in the end, however many pieces it came in

    def settle(self) -> None:
        """Lets all that waits happen, in order."""
        waiting, self._waiting = self._waiting, []
        if waiting:
            for outcome in self._store([(key, [memoryview(data)]) for key, data in waiting]):
                self.outcomes[outcome] += 1
            self._tier.touch(self._in_use)

    def _store(self, blocks: Sequence[tuple[BlockKey, Sequence[memoryview]]]) -> list[Outcome]:
        return self._tier.store_all(blocks)

    def drop_stale(self, limit: int) -> int:
        return self._tier.drop_stale(limit)

    def drop_expired(self, limit: int) -> int:
        return self._tier.drop_expired(limit)

    @property
    def epoch(self) -> int:
        return self._tier.epoch

    def close(self) -> None:
        self._tier.close()


def open_store(folder: Path, num_units: int, clock: Clock) -> SharedTier:
    """The real shared tier, for ``num_units`` names."""
    size = NamedArena.payload_bytes
    return SharedTier.open(folder, slot_bytes=size, capacity_bytes=num_units * size, clock=clock)


def memory_folder() -> str | None:
    """Where temporary files are memory, if there is such a place: a replay's tier need not outlive it."""
    shm = Path("/dev/shm")
    return str(shm) if shm.is_dir() and os.access(shm, os.W_OK) else None


def open_link(tier: Tier, arena: NamedArena, clock: Clock) -> TierLink:
    """The real link. Its own clock is the replay's, so that what it measures is what things cost there."""
    return TierLink(tier, arena, 1, clock, max_buffered_bytes=arena.payload_bytes * _MAX_BUFFERS)


def promote(link: TierLink, lease: Lease, units: TokenArray, chain: Chain) -> int:
    """Loads what the tier has of all units but the last; returns how many leading ones are in place.

    Raises ``TimeoutError`` where the tier never ends.
    """
    done = threading.Event()
    load = link.begin(lease, units, chain, done.set)
    if load is None:
        return lease.prefix_len
    _wait(done.wait(TIMEOUT_S))
    return link.finish(load, lease, units, chain)


def abandon_amid(link: TierLink, tier: MeteredTier, lease: Lease, units: TokenArray, after: int) -> bool:
    """The same, but whoever asked is gone when ``after`` units are in place; releases the lease.

    False: so many were not to be had, and nothing was released.
    """
    began, done = threading.Event(), threading.Event()
    load: Load | None = None

    def leave() -> None:  # in the loader's thread, amid a block: when exactly is not left to chance
        assert began.wait(TIMEOUT_S)
        assert load is not None, "loaded without a load"
        load.abandon(lease.release)

    tier.interrupt = (after, leave)
    load = link.begin(lease, units, Chain(), done.set)
    began.set()
    if load is not None:
        _wait(done.wait(TIMEOUT_S))
    is_gone = tier.interrupt is None
    tier.interrupt = None
    return is_gone


def write_back(link: TierLink, lease: Lease, units: TokenArray, chain: Chain) -> None:
    """Sends units down and waits until the tier has taken them all: a replay runs in no time.

    Raises ``TimeoutError`` where the tier never ends.
    """
    before = -1
    while (chain.num_below or 0) > before:  # or the tier takes no more of it, for instance of what was purged
        before = chain.num_below or 0
        link.offer(lease, units, chain)
        _wait(link.write_back.flush(TIMEOUT_S))


def _wait(is_done: bool) -> None:
    if not is_done:
        raise TimeoutError(f"the tier did not end within {TIMEOUT_S:g} s")


class Below:
    """What stands below a replayed arena. Every unit that is served is compared with what was computed."""

    def __init__(self, tier: Tier, capacity: int, clock: MovableClock, costs: TierCosts) -> None:
        """``capacity``: of the arena, in units."""
        self.tier = MeteredTier(tier, clock, costs)
        self._costs = costs
        self._arena = NamedArena(capacity)
        self._link = open_link(self.tier, self._arena, clock)

    def serve(self, lease: Lease, units: TokenArray, num_hits: int) -> int:
        """Fills a lease that has room for ``units``, of which the arena has ``num_hits``, and commits it.

        Returns how many more the tier had.
        """
        names = self._arena.names(lease.namespace, units)
        chain = Chain()
        in_place = lease.prefix_len
        if num_hits < len(units):
            # As in the arena, a prompt that is wholly there is served to its last id: hence one more.
            in_place = promote(self._link, lease, np.append(units, _SENTINEL), chain)
        self._arena.verify(lease, names, in_place)
        self._arena.write(lease, names, in_place, len(units))
        num_found = max(num_hits, in_place)
        if num_found < len(units):
            num_computed = len(units) - num_found
            self._link.rates.note_compute(num_computed, self._costs.compute_s(num_computed))
        lease.commit(units)
        write_back(self._link, lease, units, chain)
        self.tier.settle()
        return num_found - num_hits

    def close(self) -> None:
        self._link.close()
