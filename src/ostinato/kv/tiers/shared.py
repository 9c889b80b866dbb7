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
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from math import inf
from pathlib import Path
from typing import Self

import lmdb

from ostinato.errors import TierError
from ostinato.ports import Clock

from ..hashing import BlockKey
from ..terms import (
    FREE_FOR_ALL,
    Allowances,
    Origin,
    Selection,
    id_from_bytes,
    id_to_bytes,
)
from .base import Content, Found, Miss, Outcome, Status, TierCounters, TierUse
from .books import Books
from .drops import BATCH, REVOKED, Drops
from .folder import FORMAT, Folder, Geometry, read_geometry
from .ledger import Purge, purge_of
from .ranks import BUSY, Ranks
from .records import CHECKSUM_BYTES, NEVER_MS, READY, WRITING, Record
from .slab import Slab, is_in_memory
from .slots import Slots

_NO_CHECKSUM = bytes(CHECKSUM_BYTES)


@dataclass(frozen=True, slots=True)
class Integrity:
    """What a look at everything found."""

    num_ready: int
    num_writing: int
    num_bad_payloads: int
    num_bad_records: int


class _Writes:
    """Who writes what: this process, by generation and as it is filed, and others as long as they live."""

    def __init__(self, folder: Folder) -> None:
        self._folder = folder
        self.own: dict[int, bytes] = {}

    def is_abandoned(self, record: Record) -> bool:
        """Whether nobody will go on writing this record's block."""
        if record.owner == self._folder.number:
            return record.generation not in self.own
        return not self._folder.is_alive(record.owner)


class SharedTier:
    """See the module's text. Any number of threads and processes; not to be used on across ``fork``."""

    def __init__(self, folder: Folder, version: int, clock: Clock | None, allowances: Allowances) -> None:
        self.counters = TierCounters()
        self._clock = clock
        self._allowances = allowances
        self.slot_bytes = folder.geometry.slot_bytes
        self.num_slots = folder.geometry.num_slots
        self.rebuilt = folder.rebuilt
        self._folder = folder
        self._version = version
        self._env = folder.environment
        self._slab = Slab(folder.slab, self.num_slots * self.slot_bytes, in_memory=is_in_memory(folder.path))
        self._pid = os.getpid()
        self._generation = 0  # used under the writer lock only
        self._writes = _Writes(folder)
        try:
            self._books = Books(self._env, self.num_slots)
            self._ranks = Ranks(folder.ranks, self.num_slots)
            self._slots = Slots(
                self._books,
                self._ranks,
                self.num_slots,
                version=version,
                allowances=allowances,
                counters=self.counters,
                is_abandoned=self._writes.is_abandoned,
            )
            self._drops = Drops(
                self._env,
                self._books,
                self._ranks,
                self._slots,
                self._slab,
                slot_bytes=self.slot_bytes,
                is_abandoned=self._writes.is_abandoned,
            )
            self._env.reader_check()
            self._reclaim_abandoned()
            if folder.is_alone:
                self._books.rebuild()
            self.finish_purges()
            with self._reading() as txn:
                self._heard = self._books.ledger.last_purge(txn)
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
        assert version > REVOKED, f"version {version}"
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
            purges, now_ms = self._books.ledger.open_purges(txn), self._now_ms()
            for key in keys:
                record = self._books.record(txn, key.hash)
                if record is None or record.version != self._version or not record.is_of(key):
                    break
                if _is_over(record, purges, now_ms):
                    break
                if record.state == WRITING:
                    status = Status.MISS if self._writes.is_abandoned(record) else Status.PENDING
                    break
                hits.append(record.slot)
        self._ranks.use(hits)
        return Found(len(hits), Status.HIT if len(hits) == len(keys) else status)

    def touch(self, keys: Sequence[BlockKey]) -> None:
        with suppress(lmdb.Error), self._reading() as txn:
            records = [self._books.record(txn, key.hash) for key in keys]
            self._ranks.use([r.slot for r in records if r is not None and r.state == READY])

    def expect(self, keys: Sequence[BlockKey]) -> None:
        """Lets a disk begin to read the slots of ``keys``."""
        with suppress(OSError, lmdb.Error), self._reading() as txn:
            records = [self._books.record(txn, key.hash) for key in keys]
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
            data = self._books.data(txn, key.hash)
            purges = self._books.ledger.open_purges(txn)
        if data is None:
            return Miss.ABSENT
        record = self._books.decode(key.hash, data)
        if record is None:
            self._drops.forget(key.hash, data)
            return Miss.CORRUPT
        if record.state == WRITING:
            return Miss.PENDING
        if _is_over(record, purges, self._now_ms()):
            return Miss.ABSENT
        if record.version != self._version or not record.is_of(key) or record.payload_bytes != len(into):
            return Miss.MISMATCH
        checksum = self._slab.read(record.slot * self.slot_bytes, into)
        if self._data(key.hash) != data:
            return Miss.OVERTAKEN
        if checksum != record.checksum:
            self._drops.forget(key.hash, data)
            return Miss.CORRUPT
        return None

    def _reading(self) -> lmdb.Transaction:
        assert os.getpid() == self._pid, "a shared tier was used across a fork"
        return self._env.begin()

    def _data(self, name: bytes) -> bytes | None:
        with self._reading() as txn:
            return self._books.data(txn, name)

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
                    self._writes.own.pop(record.generation, None)
                    if outcome is not Outcome.STORED:
                        self._give_up(key, record)
        for outcome in outcomes:
            self.counters.outcomes[outcome] += 1
        return outcomes

    def _prepare_all(self, blocks: Sequence[tuple[BlockKey, Sequence[memoryview]]]) -> list[Record | Outcome]:
        prepared: list[Record | Outcome] = []
        try:
            with self._env.begin(write=True) as txn:
                self._generation = self._books.generation(txn)
                for key, parts in blocks:
                    size = sum(len(part) for part in parts)
                    assert 0 < size <= self.slot_bytes, f"{size} bytes for a slot of {self.slot_bytes}"
                    prepared.append(self._prepare(txn, key, size))
                self._books.set_generation(txn, self._generation)
        except (OSError, lmdb.Error) as error:
            if isinstance(error, lmdb.MapFullError):
                self._env.reader_check()  # so that the next one has room, if somebody died reading
            for record in prepared:
                if isinstance(record, Record):
                    self._writes.own.pop(record.generation, None)
            return [Outcome.FULL] * len(blocks)
        for record in prepared:
            if isinstance(record, Record):
                self._ranks.set(record.slot, BUSY)
        return prepared

    def _prepare(self, txn: lmdb.Transaction, key: BlockKey, num_bytes: int) -> Record | Outcome:
        """Inside a transaction: takes a slot and files the block as being written."""
        data = self._books.data(txn, key.hash)
        known = self._books.decode(key.hash, data)
        now_ms = self._now_ms()
        if (
            known is not None
            and _is_over(known, self._books.ledger.open_purges(txn), now_ms)
            and known.state == READY
        ):
            known = None
        if known is not None and known.state == READY and known.version >= self._version:
            return Outcome.KNOWN
        if known is not None and known.state == WRITING and not self._writes.is_abandoned(known):
            return Outcome.PENDING
        if data is not None:
            self._drops.drop(txn, key.hash, data)
        new = self._new_record(key, num_bytes, now_ms)
        if self._books.ledger.is_recalled(txn, key.origin.epoch, new):
            return Outcome.REFUSED
        slot = self._slots.take(txn, key, now_ms)
        if isinstance(slot, Outcome):
            return slot
        generation = self._generation = self._generation + 1
        record = new._replace(slot=slot, generation=generation)
        self._writes.own[generation] = self._books.file(txn, key.hash, record)  # before anybody can see it
        self._slots.note_filed(key, slot)
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
                    if self._books.data(txn, key.hash) != self._writes.own[record.generation]:
                        outcomes.append(Outcome.REFUSED)  # purged meanwhile
                        continue
                    if self._books.ledger.is_recalled(txn, key.origin.epoch, record):
                        pending = record._replace(state=WRITING, checksum=_NO_CHECKSUM)
                        self._drops.revoke(txn, key.hash, pending)
                        outcomes.append(Outcome.REFUSED)
                        continue
                    self._books.put(txn, key.hash, record)
                    outcomes.append(Outcome.STORED)
                    slots.append(record.slot)
        except lmdb.Error:
            return [item if isinstance(item, Outcome) else Outcome.FULL for item in written]
        self._ranks.use(slots)
        return outcomes

    def _give_up(self, key: BlockKey, record: Record) -> None:
        """Forgets a block that is still filed as being written: nobody will go on with it."""
        with suppress(lmdb.Error):
            left = self._data(key.hash)
            found = self._books.decode(key.hash, left)
            if left and found and found.state == WRITING and found.generation == record.generation:
                self._drops.forget(key.hash, left)

    # ------------------------------------------------------------ dropping

    def drop_stale(self, limit: int = BATCH) -> int:
        """Forgets up to ``limit`` blocks of lower versions; for the background. Returns how many."""
        dropped = self._drops.where(lambda record: record.version < self._version, limit=limit)
        self.counters.dropped_stale += dropped
        return dropped

    def _reclaim_abandoned(self) -> None:
        """Frees what dead processes were writing, and what an earlier bearer of our number was."""
        self.counters.reclaimed += self._drops.where(
            lambda record: record.state == WRITING and self._writes.is_abandoned(record), limit=self.num_slots
        )

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
            generation = self._books.generation(txn)
            purge = purge_of(selection, generation=generation, now_ms=self._now_ms())
            self._books.ledger.announce(txn, purge)

    def finish_purges(self) -> int:
        """Drops whatever the announced purges mean; returns how many blocks. Reads the whole index.

        Where there is no room even to forget, it is left to the next call; nobody finds it all the same.
        """
        pending: list[tuple[int, Purge]] = []
        with suppress(lmdb.Error), self._reading() as txn:
            purges = self._books.ledger.purges(txn)
            pending = [(number, purge) for number, purge in purges if not purge.is_done]
        if not pending:
            return 0

        def is_meant(record: Record) -> bool:
            return record.version != REVOKED and any(purge.takes(record) for _, purge in pending)

        num_purged = self._drops.where(is_meant, limit=self.num_slots, wipe=True)
        self.counters.purged += num_purged
        with suppress(lmdb.Error), self._env.begin(write=True) as txn:
            if not any(is_meant(record) for record in self._books.records(txn)):
                for number, _ in pending:
                    self._books.ledger.carried_out(txn, number)
        return num_purged

    @property
    def epoch(self) -> int:
        """The number of the last purge that was heard of here: what ``Origin.epoch`` means."""
        return self._heard

    def news(self) -> Iterator[Selection]:
        """Purges not heard of before, by any process. One counts as heard when the next is asked for."""
        with suppress(lmdb.Error):
            with self._reading() as txn:
                last = self._books.ledger.last_purge(txn)
                if last == self._heard:
                    return
                purges = self._books.ledger.purges(txn, after=self._heard)
            if purges and purges[0][0] > self._heard + 1:
                yield Selection()  # too many to remember: everything
            for number, purge in purges:
                yield purge.selection(self._now_ms())
                self._heard = number

    def _now_ms(self) -> int:
        """Without a clock, the end of time: what has a deadline is over. A clock before 1970 says 1970."""
        return NEVER_MS - 1 if self._clock is None else max(0, int(self._clock.now() * 1000))

    def _deadline_ms(self, origin: Origin, now_ms: int) -> int:
        ttl_s = min(origin.ttl_s, self._allowances.of(origin.tenant).ttl_s)
        if ttl_s == inf:
            return NEVER_MS
        assert self._clock is not None, "a TTL needs a clock"
        return min(NEVER_MS - 1, now_ms + int(ttl_s * 1000))

    def drop_expired(self, limit: int = BATCH) -> int:
        """Forgets up to ``limit`` blocks whose time is up; for the background. Returns how many."""
        num_dropped = 0
        with suppress(lmdb.Error), self._env.begin(write=True) as txn:
            for slot in list(islice(self._books.ledger.expired(txn, self._now_ms()), limit)):
                name = self._books.name_in(txn, slot)
                data = None if name is None else self._books.data(txn, name)
                if name is not None and data is not None:
                    self._drops.drop_or_revoke(txn, name, data, wipe=False)
                    num_dropped += 1
        self.counters.expired += num_dropped
        return num_dropped

    # ------------------------------------------------------------ looking at it

    def use(self) -> TierUse:
        """What is in the store now."""
        info = self._env.info()
        with self._env.begin() as txn:
            num_blocks, page_bytes = self._books.use(txn)
        return TierUse(self.num_slots, self.slot_bytes, num_blocks, (info["last_pgno"] + 1) * page_bytes)

    def contents(self) -> list[Content]:
        """What is in the store, by whose it is; largest first. Reads the whole index.

        Raises:
            TierError: it cannot be read.
        """
        found: dict[tuple[str, str, str], list[int]] = {}
        try:
            with self._reading() as txn:
                purges, now_ms = self._books.ledger.open_purges(txn), self._now_ms()
                for record in self._books.records(txn):
                    if record.state == READY and not _is_over(record, purges, now_ms):
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
        with self._env.begin() as txn:
            ready, num_writing, num_bad_records = self._books.check_integrity(txn, self.slot_bytes)
        assert len(ready) + num_writing <= self.num_slots, "more blocks than slots"
        size = os.fstat(self._folder.slab).st_size
        assert size <= self.num_slots * self.slot_bytes, f"the slab has grown to {size} bytes"
        num_bad_payloads = 0
        buffer = memoryview(bytearray(self.slot_bytes))
        for name, data, record in ready if payloads else ():
            checksum = self._slab.read(record.slot * self.slot_bytes, buffer[: record.payload_bytes])
            num_bad_payloads += checksum != record.checksum and self._data(name) == data
        return Integrity(len(ready), num_writing, num_bad_payloads, num_bad_records)


def _is_over(record: Record, purges: Sequence[Purge], now_ms: int) -> bool:
    return record.expires_ms <= now_ms or any(purge.takes(record) for purge in purges)
