"""Whose the slots of the shared tier are, until when, and what has been purged: beside its index, in LMDB.

::

    claims      slot → tenant, deadline           of every slot that is filed
    owned       tenant, slot →                    the same by tenant
    deadlines   deadline, slot →                  the same in order of time, of those that have one
    tenants     tenant → number of slots
    purges      number → what was purged, up to which generation, and whether that is carried out

Everything changes in the transaction that files or frees the slot, so it is right after any crash.

A purge holds from the transaction that announces it: records that it means count as absent for everyone from
then on. Dropping them, which takes longer, comes afterwards, and whoever opens the store next finishes what
a dead process began.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass, replace

import lmdb

from ..terms import ID_BYTES, Selection, id_from_bytes, id_to_bytes
from .records import NEVER_MS, Record

MAX_DATABASES = 16
_MAX_PURGES = 1024  # remembered; who has not looked for longer forgets everything
_PURGE = struct.Struct("<BQQ16s16s16s")
_TENANT, _MODEL, _PROMPT, _DONE = 1, 2, 4, 8
_BIG = struct.Struct(">Q")  # in keys: their order is that of the numbers


@dataclass(frozen=True, slots=True)
class Purge:
    """Blocks of generations up to ``generation``, stored no later than ``before_ms``, that are selected.

    ``tenant``, ``model`` and ``prompt`` are ids as bytes, ``None`` where any is meant.
    """

    generation: int
    before_ms: int
    tenant: bytes | None
    model: bytes | None
    prompt: bytes | None
    is_done: bool = False

    def takes(self, record: Record) -> bool:
        return (
            record.generation <= self.generation
            and record.stored_ms <= self.before_ms
            and self.tenant in (None, record.tenant)
            and self.model in (None, record.model)
            and self.prompt in (None, record.prompt)
        )

    def selection(self, now_ms: int) -> Selection:
        """For whoever keeps something of it elsewhere. Ages are as of now."""
        age_s = 0.0 if self.before_ms == NEVER_MS else max(0.0, (now_ms - self.before_ms) / 1000)
        tenant, model, prompt = (
            None if name is None else id_from_bytes(name) for name in (self.tenant, self.model, self.prompt)
        )
        return Selection(tenant, model, prompt, age_s)


def purge_of(selection: Selection, *, generation: int, now_ms: int) -> Purge:
    """A selection, as of now."""
    names = (selection.tenant, selection.model, selection.prompt)
    tenant, model, prompt = (None if name is None else id_to_bytes(name) for name in names)
    before_ms = NEVER_MS if selection.min_age_s <= 0 else max(0, now_ms - int(selection.min_age_s * 1000))
    return Purge(generation, before_ms, tenant, model, prompt)


class Ledger:
    """All methods work inside a transaction of the caller's; those that change something in a writing one."""

    def __init__(self, env: lmdb.Environment) -> None:
        names = (b"claims", b"owned", b"deadlines", b"tenants", b"purges")
        self._claims, self._owned, self._deadlines, self._tenants, self._purges = map(env.open_db, names)
        self._settled = 0  # purges up to here are carried out

    def clear(self, txn: lmdb.Transaction) -> None:
        """Forgets all slots; purges stay."""
        for db in (self._claims, self._owned, self._deadlines, self._tenants):
            txn.drop(db, delete=False)

    # ------------------------------------------------------------ slots

    def enter(self, txn: lmdb.Transaction, record: Record) -> None:
        """The slot is this record's, whoever had it before."""
        slot = _BIG.pack(record.slot)
        claim = record.tenant + _BIG.pack(record.expires_ms)
        if txn.get(slot, db=self._claims) == claim:
            return  # nothing changes, as nearly always where a tenant's oldest block gives way to its newest
        self.leave(txn, record.slot)
        txn.put(slot, claim, db=self._claims)
        txn.put(record.tenant + slot, b"", db=self._owned)
        self._add(txn, record.tenant, 1)
        if record.expires_ms != NEVER_MS:
            txn.put(_BIG.pack(record.expires_ms) + slot, b"", db=self._deadlines)

    def leave(self, txn: lmdb.Transaction, slot: int) -> None:
        """The slot is nobody's."""
        key = _BIG.pack(slot)
        claim = txn.pop(key, db=self._claims)
        if claim is None:
            return
        tenant, deadline = bytes(claim[:ID_BYTES]), bytes(claim[ID_BYTES:])
        txn.delete(tenant + key, db=self._owned)
        txn.delete(deadline + key, db=self._deadlines)
        self._add(txn, tenant, -1)

    def num_slots(self, txn: lmdb.Transaction, tenant: bytes) -> int:
        """How many slots a tenant has."""
        data = txn.get(tenant, db=self._tenants)
        return 0 if data is None else int.from_bytes(data, "little")

    def has(self, txn: lmdb.Transaction, tenant: bytes, slot: int) -> bool:
        """Whether a slot is this tenant's."""
        return txn.get(tenant + _BIG.pack(slot), db=self._owned) is not None

    def slots(self, txn: lmdb.Transaction, tenant: bytes) -> list[int]:
        """Which."""
        cursor = txn.cursor(db=self._owned)
        slots: list[int] = []
        if cursor.set_range(tenant):
            for key in cursor.iternext(values=False):
                if key[:ID_BYTES] != tenant:
                    break
                slots.append(_BIG.unpack(key[ID_BYTES:])[0])
        return slots

    def expired(self, txn: lmdb.Transaction, now_ms: int) -> Iterator[int]:
        """Slots whose time is up, the earliest first. To be read before anything is changed."""
        for key in txn.cursor(db=self._deadlines).iternext(values=False):
            if _BIG.unpack(key[:8])[0] > now_ms:
                return
            yield _BIG.unpack(key[8:])[0]

    def _add(self, txn: lmdb.Transaction, tenant: bytes, num: int) -> None:
        count = self.num_slots(txn, tenant) + num
        if count > 0:
            txn.put(tenant, count.to_bytes(8, "little"), db=self._tenants)
        else:
            txn.delete(tenant, db=self._tenants)

    # ------------------------------------------------------------ purges

    def announce(self, txn: lmdb.Transaction, purge: Purge) -> int:
        """Remembers a purge; returns its number. From the end of the transaction on it holds."""
        number = self.last_purge(txn) + 1
        txn.put(_BIG.pack(number), _pack(purge), db=self._purges)
        if number > _MAX_PURGES:
            txn.delete(_BIG.pack(number - _MAX_PURGES), db=self._purges)
        return number

    def carried_out(self, txn: lmdb.Transaction, number: int) -> None:
        """Nothing is left of what a purge means."""
        data = txn.get(_BIG.pack(number), db=self._purges)
        if data is not None:
            done = replace(_unpack(bytes(data)), is_done=True)
            txn.put(_BIG.pack(number), _pack(done), db=self._purges)

    def last_purge(self, txn: lmdb.Transaction) -> int:
        """The number of the latest purge; 0 when there was none."""
        cursor = txn.cursor(db=self._purges)
        return int(_BIG.unpack(cursor.key())[0]) if cursor.last() else 0

    def purges(self, txn: lmdb.Transaction, after: int = 0) -> list[tuple[int, Purge]]:
        """All that are remembered with numbers above ``after``, in order."""
        cursor = txn.cursor(db=self._purges)
        if not cursor.set_range(_BIG.pack(after + 1)):
            return []
        found = ((bytes(key), bytes(data)) for key, data in cursor.iternext())
        return [(int(_BIG.unpack(key)[0]), _unpack(data)) for key, data in found if len(data) == _PURGE.size]

    def open_purges(self, txn: lmdb.Transaction) -> list[Purge]:
        """Those that hold and are not carried out yet; nearly always none."""
        last = self.last_purge(txn)
        if last == self._settled:
            return []
        pending = [purge for _, purge in self.purges(txn, after=self._settled) if not purge.is_done]
        if not pending:
            self._settled = last
        return pending

    def is_recalled(self, txn: lmdb.Transaction, epoch: int | None, record: Record) -> bool:
        """Whether a purge that a block's sender had not heard of means it; ``epoch`` is the last it had."""
        if epoch is None or self.last_purge(txn) == epoch:
            return False
        later = self.purges(txn, after=epoch)
        if later and later[0][0] > epoch + 1:
            return True
        # It was on its way before, whatever its generation is.
        sent = record._replace(generation=0)
        return any(purge.takes(sent) for _, purge in later)

    def check_integrity(self, txn: lmdb.Transaction, records: list[Record]) -> None:
        """Asserts that exactly the slots of these records are filed here, as they say."""
        claims = {key: bytes(value) for key, value in _pairs(txn, self._claims)}
        expected = {_BIG.pack(r.slot): r.tenant + _BIG.pack(r.expires_ms) for r in records}
        assert claims == expected, "a slot is claimed otherwise than its record says"
        owned = {key for key, _ in _pairs(txn, self._owned)}
        assert owned == {r.tenant + _BIG.pack(r.slot) for r in records}, "a tenant's slots are misfiled"
        deadlines = {key for key, _ in _pairs(txn, self._deadlines)}
        mortal = [r for r in records if r.expires_ms != NEVER_MS]
        assert deadlines == {_BIG.pack(r.expires_ms) + _BIG.pack(r.slot) for r in mortal}
        counts: dict[bytes, int] = {}
        for record in records:
            counts[record.tenant] = counts.get(record.tenant, 0) + 1
        found = {key: int.from_bytes(value, "little") for key, value in _pairs(txn, self._tenants)}
        assert found == counts, "a tenant's slots are miscounted"


def _pairs(txn: lmdb.Transaction, db: lmdb._Database) -> Iterator[tuple[bytes, bytes]]:
    return ((bytes(key), bytes(value)) for key, value in txn.cursor(db=db))


def _pack(purge: Purge) -> bytes:
    names = (purge.tenant, purge.model, purge.prompt)
    flags = sum(bit for bit, name in zip((_TENANT, _MODEL, _PROMPT), names, strict=True) if name is not None)
    flags |= _DONE if purge.is_done else 0
    filled = (bytes(ID_BYTES) if name is None else name for name in names)
    return _PURGE.pack(flags, purge.generation, purge.before_ms, *filled)


def _unpack(data: bytes) -> Purge:
    flags, generation, before_ms, *names = _PURGE.unpack(data)
    tenant, model, prompt = (
        name if flags & bit else None for bit, name in zip((_TENANT, _MODEL, _PROMPT), names, strict=True)
    )
    return Purge(generation, before_ms, tenant, model, prompt, bool(flags & _DONE))
