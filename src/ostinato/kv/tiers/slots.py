"""Which slot of the shared tier a new block gets, and what has to go for it.

In this order: a slot whose block's time is up, a free one, that of the block used least recently. A tenant at
its quota gives up one of its own.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from enum import Enum
from itertools import islice

import lmdb
import numpy as np

from ..hashing import NO_PARENT, BlockKey
from ..terms import Allowances, id_to_bytes
from .base import Outcome, TierCounters
from .books import Books
from .ranks import BUSY, Ranks
from .records import READY, WRITING, Record

_NUM_CANDIDATES = 256
_NUM_EXPIRED = 256


class _Reason(Enum):
    """Why a slot is taken from a block."""

    CAPACITY = 1
    QUOTA = 2
    EXPIRED = 3


class Slots:
    """Everything happens inside writing transactions, so one thread of all processes at a time is in here."""

    def __init__(
        self,
        books: Books,
        ranks: Ranks,
        num_slots: int,
        *,
        version: int,
        allowances: Allowances,
        counters: TierCounters,
        is_abandoned: Callable[[Record], bool],
    ) -> None:
        """``is_abandoned``: nobody will go on writing this record's block."""
        self._books = books
        self._ranks = ranks
        self._num_slots = num_slots
        self._version = version
        self._allowances = allowances
        self._counters = counters
        self._is_abandoned = is_abandoned
        # Slots and the ranks they had, those used least recently first: of all, and of one tenant.
        self._candidates: deque[tuple[int, int]] = deque()
        self._own_candidates: tuple[bytes, deque[tuple[int, int]]] = b"", deque()
        self._line: tuple[bytes, set[int]] = NO_PARENT, set()  # a block and the slots of all before it

    def take(self, txn: lmdb.Transaction, key: BlockKey, now_ms: int) -> int | Outcome:
        """A slot that this block's tenant may have; whatever was in it is dropped."""
        quota = self._allowances.of(key.origin.tenant).max_blocks
        tenant = id_to_bytes(key.origin.tenant)
        ledger = self._books.ledger
        if quota is not None and ledger.num_slots(txn, tenant) >= quota:
            slot = self._take_own(txn, key, tenant) if quota else None
            return Outcome.REFUSED if slot is None else slot
        for slot in islice(ledger.expired(txn, now_ms), _NUM_EXPIRED):
            if self._vacate(txn, slot, _Reason.EXPIRED):
                return slot
        slot = self._take_any(txn)
        return Outcome.FULL if slot is None else slot

    def note_filed(self, key: BlockKey, slot: int) -> None:
        """``key`` got this slot."""
        if self._line[0] == key.parent:
            self._line = key.hash, self._line[1]
            self._line[1].add(slot)

    def note_freed(self) -> None:
        """A slot became free, which is better than any that is not."""
        self._candidates.clear()

    def _take_own(self, txn: lmdb.Transaction, key: BlockKey, tenant: bytes) -> int | None:
        """The slot of the tenant's block used least recently, but none before ``key``.

        A block whose parent is not here gets none: it would push out what can be found for what cannot.
        """
        line = self._line_of(txn, key)
        if line is None:
            return None
        ledger = self._books.ledger
        for _ in range(2):
            owner, candidates = self._own_candidates
            while owner == tenant and candidates:
                slot, rank = candidates.popleft()
                if slot in line or self._ranks.get(slot) != rank or not ledger.has(txn, tenant, slot):
                    continue  # ranks are read without a lock: the slot may be another's by now
                if self._vacate(txn, slot, _Reason.QUOTA):
                    return slot
            slots = np.array(ledger.slots(txn, tenant), np.intp)
            ranks = self._ranks.read()[1][slots]
            order = np.argsort(ranks, kind="stable")[:_NUM_CANDIDATES]
            self._own_candidates = tenant, deque((int(slots[i]), int(ranks[i])) for i in order)
        return None

    def _line_of(self, txn: lmdb.Transaction, key: BlockKey) -> set[int] | None:
        """The slots of all blocks before ``key``; ``None`` if one of them is not here."""
        if self._line[0] != key.parent or key.parent == NO_PARENT:
            slots: set[int] = set()
            name = key.parent
            while name != NO_PARENT:
                record = self._books.record(txn, name)
                if record is None or record.version != self._version:
                    return None
                slots.add(record.slot)
                name = record.parent
            self._line = key.parent, slots
        elif self._books.record(txn, key.parent) is None:
            return None
        return self._line[1]

    def _take_any(self, txn: lmdb.Transaction) -> int | None:
        for _ in range(2):
            while self._candidates:
                slot, rank = self._candidates.popleft()
                if self._ranks.get(slot) == rank and self._vacate(txn, slot, _Reason.CAPACITY):
                    return slot
            self._find_candidates(txn)
        return None

    def _vacate(self, txn: lmdb.Transaction, slot: int, reason: _Reason) -> bool:
        """Whether the slot can be had; its block is dropped then."""
        name = self._books.name_in(txn, slot)
        if name is None:
            return True
        record = self._books.record(txn, name)
        if record is not None and record.slot == slot:
            if record.state == WRITING:
                if not self._is_abandoned(record):
                    return False
                self._counters.reclaimed += 1
            elif reason is _Reason.EXPIRED:
                self._counters.expired += 1
            elif reason is _Reason.QUOTA:
                self._counters.given_up += 1
            else:
                self._counters.evicted += 1
        self._books.vacate(txn, slot, name, record)
        return True

    def _find_candidates(self, txn: lmdb.Transaction) -> None:
        now, ranks = self._ranks.read()
        order = ranks.copy()
        order[ranks > now] = 0  # no such time has been: damaged
        busy = np.flatnonzero(ranks == BUSY)
        order[[slot for slot in busy.tolist() if not self._is_free_after_all(txn, slot)]] = BUSY
        count = min(_NUM_CANDIDATES, self._num_slots)
        first = np.argpartition(order, count - 1)[:count] if count < self._num_slots else np.arange(count)
        first = np.sort(first)
        first = first[np.argsort(order[first], kind="stable")]
        self._candidates.extend((int(slot), int(ranks[slot])) for slot in first if order[slot] != BUSY)

    def _is_free_after_all(self, txn: lmdb.Transaction, slot: int) -> bool:
        """Of a slot ranked as being written: whether its writer is gone, or was done and did not say so."""
        name = self._books.name_in(txn, slot)
        record = None if name is None else self._books.record(txn, name)
        return record is None or record.slot != slot or record.state == READY or self._is_abandoned(record)
