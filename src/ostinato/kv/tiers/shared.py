"""The shared tier: blocks of this machine's processes in one file of fixed-size slots.

A block is stored in two phases. *Prepare*, in one transaction of the index: a slot is taken (from whoever
was used least recently) and filed as being written. Then the payload goes into the slot, outside of any
lock. *Publish*, in a second transaction: the record gets the payload's checksum and can be found.

Readers take no lock at all. They read a record, check that it is of the very block they mean, copy the slot,
and check the checksum of what they copied and that the record is still the same: a slot that was given to
somebody else in between is a miss, as is everything else that is not exactly right.

Lock order: ``opening`` (only to open and close) → the index' writer lock, which LMDB gives back when its
owner dies. Nothing waits while it holds the latter, except for the disk; whether another process lives is
asked without waiting.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from itertools import islice
from math import inf
from pathlib import Path
from typing import Self

import lmdb
import numpy as np
import numpy.typing as npt

from ostinato.errors import TierError
from ostinato.ports import Clock

from ..hashing import NO_PARENT, BlockKey
from ..terms import (
    FREE_FOR_ALL,
    Allowances,
    Origin,
    Selection,
    id_from_bytes,
    id_to_bytes,
)
from .base import Found, Miss, Outcome, Status, TierCounters
from .folder import FORMAT, RANK_BYTES, Folder, Geometry, read_geometry
from .ledger import Ledger, Purge, purge_of
from .records import CHECKSUM_BYTES, NEVER_MS, READY, WRITING, Record, decode, encode
from .slab import Slab, is_in_memory

_BUSY = (1 << 64) - 1  # the rank of a slot that is being written
_NUM_CANDIDATES = 256
_BATCH = 256  # records looked at in one transaction by what works in the background
_GENERATION = b"generation"
_REVOKED = 0  # the version of a record whose writer must not publish it
_WIPE_BATCH = 8  # slots overwritten in one transaction: nobody else can take a slot meanwhile
_NO_CHECKSUM = bytes(CHECKSUM_BYTES)


class _Reason(Enum):
    """Why a slot is taken from a block."""

    CAPACITY = 1
    QUOTA = 2
    EXPIRED = 3


@dataclass(frozen=True, slots=True)
class TierUse:
    """What is in a store. Slots that nobody uses are ``num_slots - num_blocks``."""

    num_slots: int
    slot_bytes: int
    num_blocks: int
    index_bytes: int


@dataclass(frozen=True, slots=True)
class Content:
    """What one tenant has of one model under one prompt's name (all ids): ``num_blocks`` blocks.

    The first and the last of them were stored at these milliseconds since the Unix epoch.
    """

    tenant: str
    model: str
    prompt: str
    num_blocks: int
    first_stored_ms: int
    last_stored_ms: int


@dataclass(frozen=True, slots=True)
class Integrity:
    """What a look at everything found."""

    num_ready: int
    num_writing: int
    num_bad_payloads: int
    num_bad_records: int


class SharedTier:
    """See the module's text. Any number of threads and processes; not to be used on across ``fork``."""

    def __init__(self, folder: Folder, version: int, clock: Clock | None, allowances: Allowances) -> None:
        self.counters = TierCounters()
        self._clock = clock
        self._allowances = allowances
        self._settled = 0  # purges up to here are carried out
        self._own_candidates: tuple[bytes, deque[tuple[int, int]]] = b"", deque()  # as the other ones
        self._line: tuple[bytes, set[int]] = NO_PARENT, set()  # a block and the slots of all before it
        self.slot_bytes = folder.geometry.slot_bytes
        self.num_slots = folder.geometry.num_slots
        self.rebuilt = folder.rebuilt
        self._folder = folder
        self._version = version
        self._env = folder.environment
        self._slab = Slab(folder.slab, self.num_slots * self.slot_bytes, in_memory=is_in_memory(folder.path))
        self._pid = os.getpid()
        self._rank = 0
        self._generation = 0  # used under the writer lock only
        self._writing: dict[int, bytes] = {}  # generations of own open writes, and how they are filed
        self._candidates: deque[tuple[int, int]] = deque()  # used under the writer lock only
        try:
            self._blocks = self._env.open_db(b"blocks")
            self._slots = self._env.open_db(b"slots")
            self._meta = self._env.open_db(b"meta")
            self._ledger = Ledger(self._env)
            self._env.reader_check()
            self._reclaim_abandoned()
            if folder.is_alone:
                self._rebuild_books()
            self.finish_purges()
            with self._reading() as txn:
                self._heard = self._ledger.last_purge(txn)
        except lmdb.Error as error:
            folder.close()
            raise TierError(
                f"the index of the KV tier in {folder.path} cannot be used: {error}; make room or remove it"
            ) from error

    @classmethod
    def open(
        cls,
        path: Path,
        *,
        slot_bytes: int,
        capacity_bytes: int,
        version: int = 1,
        clock: Clock | None = None,
        allowances: Allowances = FREE_FOR_ALL,
    ) -> Self:
        """Opens the store in folder ``path``, or makes it; one that was made for other sizes is made anew.

        Args:
            slot_bytes: longest payload of a block.
            capacity_bytes: what all slots together may take; the index comes on top (under 1 KiB a slot).
            version: of whoever makes the KV. Other versions' blocks are not hits, and lower ones are dropped
                by ``drop_stale``.
            clock: without one nothing is found that has a deadline.
            allowances: what each tenant may keep here, in slots.

        Raises:
            TierError: not our folder, no permission, no room, in use with other sizes, or open already.
        """
        assert slot_bytes >= 1, f"slots of {slot_bytes} bytes"
        assert version > _REVOKED, f"version {version}"
        num_slots = capacity_bytes // slot_bytes
        assert num_slots >= 1, f"{capacity_bytes} bytes hold no slot of {slot_bytes}"
        return cls(Folder(path, Geometry(FORMAT, slot_bytes, num_slots)), version, clock, allowances)

    @classmethod
    def open_found(cls, path: Path, *, clock: Clock) -> Self:
        """Opens a store that is there, whatever it was made for: for operators.

        Raises:
            TierError: there is none, or it is of another format, besides what ``open`` raises.
        """
        try:
            geometry = read_geometry(path)
        except OSError as error:
            raise TierError(f"the KV tier in {path} cannot be read: {error.strerror}") from error
        if geometry is None or geometry.format != FORMAT:
            raise TierError(f"{path} is not a KV tier of this version of Ostinato")
        return cls(Folder(path, geometry), 1, clock, FREE_FOR_ALL)

    def close(self) -> None:
        """Lets go of the store; what is in it stays."""
        self._folder.close()

    # ------------------------------------------------------------ reading

    def lookup(self, keys: Sequence[BlockKey]) -> Found:
        """How many of ``keys``, a chain from its root, are here; they count as used."""
        hits: list[int] = []
        status = Status.MISS
        with suppress(lmdb.Error), self._reading() as txn:
            purges, now_ms = self._open_purges(txn), self._now_ms()
            for key in keys:
                record = self._record(txn, key.hash)
                if record is None or record.version != self._version or not record.is_of(key):
                    break
                if _is_over(record, purges, now_ms):
                    break
                if record.state == WRITING:
                    status = Status.MISS if self._is_abandoned(record) else Status.PENDING
                    break
                hits.append(record.slot)
        self._use(hits)
        return Found(len(hits), Status.HIT if len(hits) == len(keys) else status)

    def touch(self, keys: Sequence[BlockKey]) -> None:
        with suppress(lmdb.Error), self._reading() as txn:
            records = [self._record(txn, key.hash) for key in keys]
            self._use([r.slot for r in records if r is not None and r.state == READY])

    def expect(self, keys: Sequence[BlockKey]) -> None:
        """Lets a disk begin to read the slots of ``keys``."""
        with suppress(OSError, lmdb.Error), self._reading() as txn:
            records = [self._record(txn, key.hash) for key in keys]
            for record in records:
                if record is not None and record.state == READY:
                    self._slab.expect(record.slot * self.slot_bytes, record.payload_bytes)

    def load(self, key: BlockKey, into: memoryview) -> bool:
        """Copies the payload of ``key`` into ``into``, a writable buffer of bytes of exactly its length.

        ``False``: counted in ``counters.misses`` by reason, and ``into`` holds anything.
        """
        try:
            miss = self._load(key, into)
        except (OSError, lmdb.Error):
            miss = Miss.IO_ERROR
        if miss is None:
            self.counters.hits += 1
            return True
        self.counters.misses[miss] += 1
        return False

    def _load(self, key: BlockKey, into: memoryview) -> Miss | None:
        with self._reading() as txn:
            data = _get(txn, key.hash, self._blocks)
            purges = self._open_purges(txn)
        if data is None:
            return Miss.ABSENT
        record = decode(key.hash, data, self.num_slots)
        if record is None:
            self._forget(key.hash, data)
            return Miss.CORRUPT
        if record.state == WRITING:
            return Miss.PENDING
        if _is_over(record, purges, self._now_ms()):
            return Miss.ABSENT
        if record.version != self._version or not record.is_of(key) or record.payload_bytes != len(into):
            return Miss.MISMATCH
        checksum = self._read_slot(record.slot, into)
        if self._data(key.hash) != data:
            return Miss.OVERTAKEN
        if checksum != record.checksum:
            self._forget(key.hash, data)
            return Miss.CORRUPT
        return None

    def _read_slot(self, slot: int, into: memoryview) -> bytes:
        return self._slab.read(slot * self.slot_bytes, into)

    def _reading(self) -> lmdb.Transaction:
        assert os.getpid() == self._pid, "a shared tier was used across a fork"
        return self._env.begin()

    def _data(self, name: bytes) -> bytes | None:
        with self._reading() as txn:
            return _get(txn, name, self._blocks)

    def _record(self, txn: lmdb.Transaction, name: bytes) -> Record | None:
        data = _get(txn, name, self._blocks)
        return None if data is None else decode(name, data, self.num_slots)

    # ------------------------------------------------------------ writing

    def store(self, key: BlockKey, parts: Sequence[memoryview]) -> Outcome:
        """Stores a payload given as contiguous pieces of bytes. ``FULL`` also where the disk is."""
        return self.store_all([(key, parts)])[0]

    def store_all(self, blocks: Sequence[tuple[BlockKey, Sequence[memoryview]]]) -> list[Outcome]:
        """Stores several, each by itself found or not; the index is asked twice for all of them."""
        outcomes = [Outcome.FULL] * len(blocks)
        prepared = self._prepare_all(blocks)
        try:
            written = [
                self._write(record, parts) if isinstance(record, Record) else record
                for record, (_, parts) in zip(prepared, blocks, strict=True)
            ]
            outcomes = self._publish_all([key for key, _ in blocks], written)
        finally:
            for record, outcome, (key, _) in zip(prepared, outcomes, blocks, strict=True):
                if isinstance(record, Record):
                    self._writing.pop(record.generation, None)
                    if outcome is not Outcome.STORED:
                        self._give_up(key, record)
        for outcome in outcomes:
            self.counters.outcomes[outcome] += 1
        return outcomes

    def _prepare_all(self, blocks: Sequence[tuple[BlockKey, Sequence[memoryview]]]) -> list[Record | Outcome]:
        prepared: list[Record | Outcome] = []
        try:
            with self._env.begin(write=True) as txn:
                self._generation = int.from_bytes(_get(txn, _GENERATION, self._meta) or b"", "little")
                for key, parts in blocks:
                    size = sum(len(part) for part in parts)
                    assert 0 < size <= self.slot_bytes, f"{size} bytes for a slot of {self.slot_bytes}"
                    prepared.append(self._prepare(txn, key, size))
                txn.put(_GENERATION, self._generation.to_bytes(8, "little"), db=self._meta)
        except (OSError, lmdb.Error) as error:
            if isinstance(error, lmdb.MapFullError):
                self._env.reader_check()  # so that the next one has room, if somebody died reading
            for record in prepared:
                if isinstance(record, Record):
                    self._writing.pop(record.generation, None)
            return [Outcome.FULL] * len(blocks)
        for record in prepared:
            if isinstance(record, Record):
                self._set_rank(record.slot, _BUSY)
        return prepared

    def _prepare(self, txn: lmdb.Transaction, key: BlockKey, num_bytes: int) -> Record | Outcome:
        """Inside a transaction: takes a slot and files the block as being written."""
        data = _get(txn, key.hash, self._blocks)
        known = None if data is None else decode(key.hash, data, self.num_slots)
        now_ms = self._now_ms()
        if known is not None and _is_over(known, self._open_purges(txn), now_ms) and known.state == READY:
            known = None
        if known is not None and known.state == READY and known.version >= self._version:
            return Outcome.KNOWN
        if known is not None and known.state == WRITING and not self._is_abandoned(known):
            return Outcome.PENDING
        if data is not None:
            self._drop(txn, key.hash, data)
        new = self._new_record(key, num_bytes, now_ms)
        if self._is_recalled(txn, key.origin, new):
            return Outcome.REFUSED
        slot = self._take_slot_for(txn, key, now_ms)
        if isinstance(slot, Outcome):
            return slot
        generation = self._generation = self._generation + 1
        record = new._replace(slot=slot, generation=generation)
        pending = encode(key.hash, record)
        txn.put(key.hash, pending, db=self._blocks)
        txn.put(_slot_key(slot), key.hash, db=self._slots)
        self._ledger.enter(txn, record)
        if self._line[0] == key.parent:
            self._line = key.hash, self._line[1]
            self._line[1].add(slot)
        self._writing[generation] = pending  # before anybody can see the record
        return record

    def _new_record(self, key: BlockKey, num_bytes: int, now_ms: int) -> Record:
        """All but its slot and its generation."""
        return Record(
            state=WRITING,
            owner=self._folder.number,
            version=self._version,
            slot=0,
            generation=0,
            payload_bytes=num_bytes,
            checksum=_NO_CHECKSUM,
            namespace=key.namespace,
            parent=key.parent,
            stored_ms=0 if self._clock is None else now_ms,
            expires_ms=self._deadline_ms(key.origin, now_ms),
            tenant=id_to_bytes(key.origin.tenant),
            model=id_to_bytes(key.origin.model),
            prompt=id_to_bytes(key.origin.prompt),
            tokens=key.tokens,
        )

    def _write(self, record: Record, parts: Sequence[memoryview]) -> Record | Outcome:
        try:
            checksum = self._slab.write(record.slot * self.slot_bytes, parts)
        except OSError:
            return Outcome.FULL
        return record._replace(state=READY, checksum=checksum)

    def _publish_all(self, keys: Sequence[BlockKey], written: Sequence[Record | Outcome]) -> list[Outcome]:
        outcomes: list[Outcome] = []
        slots: list[int] = []
        try:
            with self._env.begin(write=True) as txn:
                for key, record in zip(keys, written, strict=True):
                    if isinstance(record, Outcome):
                        outcomes.append(record)
                        continue
                    if _get(txn, key.hash, self._blocks) != self._writing[record.generation]:
                        outcomes.append(Outcome.REFUSED)  # purged meanwhile
                        continue
                    if self._is_recalled(txn, key.origin, record):
                        pending = record._replace(state=WRITING, checksum=_NO_CHECKSUM)
                        self._revoke(txn, key.hash, pending)
                        outcomes.append(Outcome.REFUSED)
                        continue
                    txn.put(key.hash, encode(key.hash, record), db=self._blocks)
                    outcomes.append(Outcome.STORED)
                    slots.append(record.slot)
        except lmdb.Error:
            return [item if isinstance(item, Outcome) else Outcome.FULL for item in written]
        self._use(slots)
        return outcomes

    def _give_up(self, key: BlockKey, record: Record) -> None:
        """Forgets a block that is still filed as being written: nobody will go on with it."""
        with suppress(lmdb.Error):
            left = self._data(key.hash)
            found = None if left is None else decode(key.hash, left, self.num_slots)
            if left and found and found.state == WRITING and found.generation == record.generation:
                self._forget(key.hash, left)

    # ------------------------------------------------------------ dropping

    def drop_stale(self, limit: int = _BATCH) -> int:
        """Forgets up to ``limit`` blocks of lower versions; for the background. Returns how many."""
        dropped = self._drop_where(lambda record: record.version < self._version, limit=limit)
        self.counters.dropped_stale += dropped
        return dropped

    def _reclaim_abandoned(self) -> None:
        """Frees what dead processes were writing, and what an earlier bearer of our number was."""
        self.counters.reclaimed += self._drop_where(
            lambda record: record.state == WRITING and self._is_abandoned(record), limit=self.num_slots
        )

    def _rebuild_books(self) -> None:
        """Makes anew what follows from the records, which alone know when they are damaged."""
        with self._env.begin(write=True) as txn:
            records: dict[int, tuple[bytes, Record]] = {}
            for name, data in list(_items(txn.cursor(self._blocks))):
                record = decode(name, data, self.num_slots)
                known = None if record is None else records.get(record.slot)
                if record is None or (known is not None and known[1].generation > record.generation):
                    txn.delete(name, db=self._blocks)
                    continue
                if known is not None:
                    txn.delete(known[0], db=self._blocks)
                records[record.slot] = name, record
            txn.drop(self._slots, delete=False)
            self._ledger.clear(txn)
            for name, record in records.values():
                txn.put(_slot_key(record.slot), name, db=self._slots)
                self._ledger.enter(txn, record)
            generations = (record.generation for _, record in records.values())
            last = int.from_bytes(_get(txn, _GENERATION, self._meta) or b"", "little")
            last = max(last, *generations) if records else last
            txn.put(_GENERATION, last.to_bytes(8, "little"), db=self._meta)

    def _is_abandoned(self, record: Record) -> bool:
        if record.owner == self._folder.number:
            return record.generation not in self._writing
        return not self._folder.is_alive(record.owner)

    def _drop_where(self, is_meant: Callable[[Record], bool], *, limit: int, wipe: bool = False) -> int:
        """Drops what is meant and what is damaged, in short transactions so that no writer waits long.

        ``wipe``: payloads are overwritten as well.
        """
        batch = _WIPE_BATCH if wipe else _BATCH
        meant: list[tuple[bytes, bytes]] = []
        with self._env.begin(db=self._blocks) as txn:
            for name, data in _items(txn.cursor()):
                record = decode(name, data, self.num_slots)
                if record is None or is_meant(record):
                    meant.append((name, data))
                    if len(meant) == limit:
                        break
        num_dropped = 0
        with suppress(lmdb.Error):  # no room even to forget: the next round, or eviction, will
            for start in range(0, len(meant), batch):
                with self._env.begin(write=True) as txn:
                    for name, data in meant[start : start + batch]:
                        if _get(txn, name, self._blocks) == data:
                            self._drop_or_revoke(txn, name, data, wipe=wipe)
                            num_dropped += 1
        return num_dropped

    def _drop_or_revoke(self, txn: lmdb.Transaction, name: bytes, data: bytes, *, wipe: bool) -> None:
        """Inside a transaction: what is being written keeps its slot until then, but is not published."""
        record = decode(name, data, self.num_slots)
        if record is not None and record.state == WRITING and not self._is_abandoned(record):
            self._revoke(txn, name, record)
        else:
            self._drop(txn, name, data, wipe=wipe)

    def _revoke(self, txn: lmdb.Transaction, name: bytes, record: Record) -> None:
        txn.put(name, encode(name, record._replace(version=_REVOKED)), db=self._blocks)

    def _forget(self, name: bytes, data: bytes) -> None:
        """Drops a record if it still is ``data``."""
        with suppress(lmdb.Error), self._env.begin(write=True) as txn:
            if _get(txn, name, self._blocks) == data:
                self._drop(txn, name, data)

    def _drop(self, txn: lmdb.Transaction, name: bytes, data: bytes, *, wipe: bool = False) -> None:
        """Inside a transaction: the record goes, and its slot is free if it still is that record's.

        ``wipe``: nobody can read what was in the slot any more. So it is with what was revoked.
        """
        txn.delete(name, db=self._blocks)
        record = decode(name, data, self.num_slots)
        if record is not None and _get(txn, _slot_key(record.slot), self._slots) == name:
            if wipe or record.version == _REVOKED:
                self._wipe(record)
            txn.delete(_slot_key(record.slot), db=self._slots)
            self._ledger.leave(txn, record.slot)
            self._set_rank(record.slot, 0)
            self._candidates.clear()

    def _wipe(self, record: Record) -> None:
        with suppress(OSError):  # no memory left for a slot is nothing left in it
            zeros = memoryview(bytes(record.payload_bytes))
            self._slab.write(record.slot * self.slot_bytes, [zeros])

    # ------------------------------------------------------------ purges and terms

    def purge(self, selection: Selection) -> int:
        """Drops what is selected and overwrites its payload; returns how many blocks.

        From the moment it is announced nobody finds any of it, in no process.

        Raises:
            TierError: it could not be written down.
        """
        self.announce(selection)
        return self.finish_purges()

    def announce(self, selection: Selection) -> None:
        """Makes a purge hold, for everyone and at once. ``finish_purges`` has to follow.

        Raises:
            TierError: it could not be written down.
        """
        assert selection.min_age_s <= 0 or self._clock is not None, "an age needs a clock"
        try:
            try:
                self._announce(selection)
            except lmdb.MapFullError:
                self._env.reader_check()  # who died reading keeps pages from being used again
                self._announce(selection)
        except lmdb.Error as error:
            raise TierError(f"the KV tier in {self._folder.path} cannot be purged: {error}") from error

    def _announce(self, selection: Selection) -> None:
        with self._env.begin(write=True) as txn:
            generation = int.from_bytes(_get(txn, _GENERATION, self._meta) or b"", "little")
            purge = purge_of(selection, generation=generation, now_ms=self._now_ms())
            self._ledger.announce(txn, purge)

    def finish_purges(self) -> int:
        """Drops whatever the announced purges mean; returns how many blocks. Reads the whole index.

        Where there is no room even to forget, it is left to the next call; nobody finds it all the same.
        """
        pending: list[tuple[int, Purge]] = []
        with suppress(lmdb.Error), self._reading() as txn:
            pending = [(number, purge) for number, purge in self._ledger.purges(txn) if not purge.is_done]
        if not pending:
            return 0

        def is_meant(record: Record) -> bool:
            return record.version != _REVOKED and any(purge.takes(record) for _, purge in pending)

        num_purged = self._drop_where(is_meant, limit=self.num_slots, wipe=True)
        self.counters.purged += num_purged
        with suppress(lmdb.Error), self._env.begin(write=True) as txn:
            records = (decode(name, data, self.num_slots) for name, data in _items(txn.cursor(self._blocks)))
            if not any(record is not None and is_meant(record) for record in records):
                for number, _ in pending:
                    self._ledger.carried_out(txn, number)
        return num_purged

    @property
    def epoch(self) -> int:
        """The number of the last purge that was heard of here: what ``Origin.epoch`` means."""
        return self._heard

    def news(self) -> Iterator[Selection]:
        """Purges not heard of before, by any process. One counts as heard when the next is asked for."""
        with suppress(lmdb.Error):
            with self._reading() as txn:
                last = self._ledger.last_purge(txn)
                if last == self._heard:
                    return
                purges = self._ledger.purges(txn, after=self._heard)
            if purges and purges[0][0] > self._heard + 1:
                yield Selection()  # too many to remember: everything
            for number, purge in purges:
                yield purge.selection(self._now_ms())
                self._heard = number

    def _open_purges(self, txn: lmdb.Transaction) -> list[Purge]:
        """Inside a transaction: purges that hold and are not carried out yet; nearly always none."""
        last = self._ledger.last_purge(txn)
        if last == self._settled:
            return []
        pending = [purge for _, purge in self._ledger.purges(txn, after=self._settled) if not purge.is_done]
        if not pending:
            self._settled = last
        return pending

    def _is_recalled(self, txn: lmdb.Transaction, origin: Origin, record: Record) -> bool:
        """Whether a purge that a block's sender had not heard of means it."""
        if origin.epoch is None or self._ledger.last_purge(txn) == origin.epoch:
            return False
        later = self._ledger.purges(txn, after=origin.epoch)
        if later and later[0][0] > origin.epoch + 1:
            return True
        # It was on its way before, whatever its generation is.
        sent = record._replace(generation=0)
        return any(purge.takes(sent) for _, purge in later)

    def _now_ms(self) -> int:
        """Without a clock, the end of time: what has a deadline is over."""
        return NEVER_MS - 1 if self._clock is None else int(self._clock.now() * 1000)

    def _deadline_ms(self, origin: Origin, now_ms: int) -> int:
        ttl_s = min(origin.ttl_s, self._allowances.of(origin.tenant).ttl_s)
        if ttl_s == inf:
            return NEVER_MS
        assert self._clock is not None, "a TTL needs a clock"
        return min(NEVER_MS - 1, now_ms + int(ttl_s * 1000))

    def drop_expired(self, limit: int = _BATCH) -> int:
        """Forgets up to ``limit`` blocks whose time is up; for the background. Returns how many."""
        num_dropped = 0
        with suppress(lmdb.Error), self._env.begin(write=True) as txn:
            for slot in list(islice(self._ledger.expired(txn, self._now_ms()), limit)):
                name = _get(txn, _slot_key(slot), self._slots)
                data = None if name is None else _get(txn, name, self._blocks)
                if name is not None and data is not None:
                    self._drop_or_revoke(txn, name, data, wipe=False)
                    num_dropped += 1
        self.counters.expired += num_dropped
        return num_dropped

    # ------------------------------------------------------------ what goes first

    def _take_slot_for(self, txn: lmdb.Transaction, key: BlockKey, now_ms: int) -> int | Outcome:
        """Inside a transaction: a slot that this block's tenant may have: its own if it is at its quota.

        Else one whose time is up, a free one, or that of the block used least recently.
        """
        quota = self._allowances.of(key.origin.tenant).max_blocks
        tenant = id_to_bytes(key.origin.tenant)
        if quota is not None and self._ledger.num_slots(txn, tenant) >= quota:
            slot = self._take_own_slot(txn, key, tenant) if quota else None
            return Outcome.REFUSED if slot is None else slot
        for slot in islice(self._ledger.expired(txn, now_ms), _BATCH):
            if self._vacate(txn, slot, _Reason.EXPIRED):
                return slot
        slot = self._take_slot(txn)
        return Outcome.FULL if slot is None else slot

    def _take_own_slot(self, txn: lmdb.Transaction, key: BlockKey, tenant: bytes) -> int | None:
        """Inside a transaction: the slot of the tenant's block used least recently, but none before ``key``.

        A block whose parent is not here gets none: it would push out what can be found for what cannot.
        """
        line = self._line_of(txn, key)
        if line is None:
            return None
        for _ in range(2):
            owner, candidates = self._own_candidates
            while owner == tenant and candidates:
                slot, rank = candidates.popleft()
                if slot in line or self._get_rank(slot) != rank or not self._ledger.has(txn, tenant, slot):
                    continue  # ranks are read without a lock: the slot may be another's by now
                if self._vacate(txn, slot, _Reason.QUOTA):
                    return slot
            slots = np.array(self._ledger.slots(txn, tenant), np.intp)
            ranks = self._read_ranks()[1:][slots]
            order = np.argsort(ranks, kind="stable")[:_NUM_CANDIDATES]
            self._own_candidates = tenant, deque((int(slots[i]), int(ranks[i])) for i in order)
        return None

    def _line_of(self, txn: lmdb.Transaction, key: BlockKey) -> set[int] | None:
        """The slots of all blocks before ``key``; ``None`` if one of them is not here."""
        if self._line[0] != key.parent or key.parent == NO_PARENT:
            slots: set[int] = set()
            name = key.parent
            while name != NO_PARENT:
                record = self._record(txn, name)
                if record is None or record.version != self._version:
                    return None
                slots.add(record.slot)
                name = record.parent
            self._line = key.parent, slots
        elif self._record(txn, key.parent) is None:
            return None
        return self._line[1]

    def _take_slot(self, txn: lmdb.Transaction) -> int | None:
        """Inside a transaction: a free slot, or that of the block used least recently, which goes."""
        for _ in range(2):
            while self._candidates:
                slot, rank = self._candidates.popleft()
                if self._get_rank(slot) == rank and self._vacate(txn, slot):
                    return slot
            self._find_candidates(txn)
        return None

    def _vacate(self, txn: lmdb.Transaction, slot: int, reason: _Reason = _Reason.CAPACITY) -> bool:
        """Whether the slot can be had; its block is dropped then."""
        name = _get(txn, _slot_key(slot), self._slots)
        if name is None:
            return True
        data = _get(txn, name, self._blocks)
        record = None if data is None else decode(name, data, self.num_slots)
        if record is not None and record.slot == slot:
            if record.state == WRITING:
                if not self._is_abandoned(record):
                    return False
                self.counters.reclaimed += 1
            elif reason is _Reason.EXPIRED:
                self.counters.expired += 1
            elif reason is _Reason.QUOTA:
                self.counters.given_up += 1
            else:
                self.counters.evicted += 1
        if data is not None and (record is None or record.slot == slot):
            txn.delete(name, db=self._blocks)
        txn.delete(_slot_key(slot), db=self._slots)
        self._ledger.leave(txn, slot)
        return True

    def _find_candidates(self, txn: lmdb.Transaction) -> None:
        ranks = self._read_ranks()
        now, ranks = int(ranks[0]), ranks[1:]
        busy = np.flatnonzero(ranks == _BUSY)
        order = ranks.copy()
        order[ranks > now] = 0  # no such time has been: damaged
        live = [slot for slot in busy.tolist() if not self._is_free_after_all(txn, slot)]
        order[live] = _BUSY
        count = min(_NUM_CANDIDATES, self.num_slots)
        first = np.argpartition(order, count - 1)[:count] if count < self.num_slots else np.arange(count)
        first = np.sort(first)
        first = first[np.argsort(order[first], kind="stable")]
        self._candidates.extend((int(slot), int(ranks[slot])) for slot in first if order[slot] != _BUSY)

    def _is_free_after_all(self, txn: lmdb.Transaction, slot: int) -> bool:
        """Of a slot ranked as being written: whether its writer is gone, or was done and did not say so."""
        name = _get(txn, _slot_key(slot), self._slots)
        data = None if name is None else _get(txn, name, self._blocks)
        record = None if name is None or data is None else decode(name, data, self.num_slots)
        return record is None or record.slot != slot or record.state == READY or self._is_abandoned(record)

    def _use(self, slots: Sequence[int]) -> None:
        """Ranks the slots of a chain as used now, the last one least.

        The counter in the file is read and written without a lock. Who loses that race shares a rank with
        the winner: an order nobody could tell from the true one.
        """
        if not slots:
            return
        with suppress(OSError):  # a use that is not noted is no harm
            stored = int.from_bytes(os.pread(self._folder.ranks, RANK_BYTES, 0), "little")
            base = max(self._rank, stored if stored < _BUSY >> 1 else 0)  # more than that is damage
            self._rank = base + len(slots)
            os.pwrite(self._folder.ranks, self._rank.to_bytes(RANK_BYTES, "little"), 0)
            for place, slot in enumerate(slots):
                self._set_rank(slot, self._rank - place)

    def _set_rank(self, slot: int, rank: int) -> None:
        with suppress(OSError):
            os.pwrite(self._folder.ranks, rank.to_bytes(RANK_BYTES, "little"), (slot + 1) * RANK_BYTES)

    def _get_rank(self, slot: int) -> int:
        return int.from_bytes(os.pread(self._folder.ranks, RANK_BYTES, (slot + 1) * RANK_BYTES), "little")

    def _read_ranks(self) -> npt.NDArray[np.uint64]:
        size = (self.num_slots + 1) * RANK_BYTES
        data = os.pread(self._folder.ranks, size, 0)
        return np.frombuffer(data.ljust(size, b"\0"), "<u8").astype(np.uint64)

    # ------------------------------------------------------------ looking at it

    def use(self) -> TierUse:
        """What is in the store now."""
        info = self._env.info()
        with self._env.begin() as txn:
            num_blocks = txn.stat(self._blocks)["entries"]
            page_bytes = txn.stat(self._blocks)["psize"]
        return TierUse(self.num_slots, self.slot_bytes, num_blocks, (info["last_pgno"] + 1) * page_bytes)

    def contents(self) -> list[Content]:
        """What is in the store, by whose it is; largest first. Reads the whole index.

        Raises:
            TierError: it cannot be read.
        """
        found: dict[tuple[str, str, str], list[int]] = {}
        try:
            with self._reading() as txn:
                purges, now_ms = self._open_purges(txn), self._now_ms()
                for name, data in _items(txn.cursor(db=self._blocks)):
                    record = decode(name, data, self.num_slots)
                    if record is not None and record.state == READY and not _is_over(record, purges, now_ms):
                        names = (record.tenant, record.model, record.prompt)
                        tenant, model, prompt = map(id_from_bytes, names)
                        found.setdefault((tenant, model, prompt), []).append(record.stored_ms)
        except lmdb.Error as error:
            raise TierError(f"the KV tier in {self._folder.path} cannot be read: {error}") from error
        ordered = sorted(found.items(), key=lambda item: -len(item[1]))
        return [Content(*ids, len(times), min(times), max(times)) for ids, times in ordered]

    def check_integrity(self, *, payloads: bool = True) -> Integrity:
        """Looks at everything: asserts the books, counts damage. For tests and for the curious; slow.

        Payloads are only counted as bad if their record is the same before and after they were read.
        """
        num_ready = num_writing = num_bad_payloads = num_bad_records = 0
        taken: dict[int, bytes] = {}
        ready: list[tuple[bytes, bytes, Record]] = []
        filed: list[Record] = []
        with self._env.begin() as txn:
            by_slot = {int.from_bytes(k, "big"): v for k, v in _items(txn.cursor(db=self._slots))}
            last = int.from_bytes(_get(txn, _GENERATION, self._meta) or b"", "little")
            for name, data in _items(txn.cursor(db=self._blocks)):
                record = decode(name, data, self.num_slots)
                if record is None:
                    num_bad_records += 1
                    continue
                assert record.slot not in taken, f"slot {record.slot} has two blocks"
                assert by_slot.get(record.slot) == name, f"slot {record.slot} is filed under another block"
                assert record.generation <= last, f"generation {record.generation} of {last}"
                assert record.payload_bytes <= self.slot_bytes, f"{record.payload_bytes} bytes in a slot"
                taken[record.slot] = name
                filed.append(record)
                num_writing += record.state == WRITING
                if record.state == READY:
                    ready.append((name, data, record))
            if num_bad_records == 0:
                self._ledger.check_integrity(txn, filed)
        num_ready = len(ready)
        assert num_ready + num_writing <= self.num_slots, "more blocks than slots"
        size = os.fstat(self._folder.slab).st_size
        assert size <= self.num_slots * self.slot_bytes, f"the slab has grown to {size} bytes"
        buffer = memoryview(bytearray(self.slot_bytes))
        for name, data, record in ready if payloads else ():
            checksum = self._read_slot(record.slot, buffer[: record.payload_bytes])
            num_bad_payloads += checksum != record.checksum and self._data(name) == data
        return Integrity(num_ready, num_writing, num_bad_payloads, num_bad_records)


def _is_over(record: Record, purges: Sequence[Purge], now_ms: int) -> bool:
    return record.expires_ms <= now_ms or any(purge.takes(record) for purge in purges)


def _items(cursor: lmdb.Cursor) -> Iterator[tuple[bytes, bytes]]:
    return ((bytes(name), bytes(data)) for name, data in cursor)


def _get(txn: lmdb.Transaction, name: bytes, db: lmdb._Database) -> bytes | None:
    data = txn.get(name, db=db)
    return None if data is None else bytes(data)


def _slot_key(slot: int) -> bytes:
    return slot.to_bytes(8, "big")
