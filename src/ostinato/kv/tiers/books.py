"""The shared tier's index in LMDB: which block lies in which slot, and whose it is.

::

    blocks   hash → record
    slots    slot → hash
    meta     the last generation
    and what the :class:`~ostinato.kv.tiers.ledger.Ledger` keeps

A record and its slot are filed and dropped in one transaction, so the books agree after any crash.
"""

from __future__ import annotations

from collections.abc import Iterator

import lmdb

from .ledger import Ledger
from .records import READY, WRITING, Record, decode, encode

_GENERATION = b"generation"


class Books:
    """Methods that take a transaction work inside it; those that change something need a writing one."""

    def __init__(self, env: lmdb.Environment, num_slots: int) -> None:
        self._env = env
        self._num_slots = num_slots
        self._blocks, self._slots, self._meta = map(env.open_db, (b"blocks", b"slots", b"meta"))
        self.ledger = Ledger(env)

    # ------------------------------------------------------------ reading

    def data(self, txn: lmdb.Transaction, name: bytes) -> bytes | None:
        """The bytes of the record filed under a block's hash."""
        return _get(txn, name, self._blocks)

    def decode(self, name: bytes, data: bytes | None) -> Record | None:
        """``None`` where it is not what was written under ``name``."""
        return None if data is None else decode(name, data, self._num_slots)

    def record(self, txn: lmdb.Transaction, name: bytes) -> Record | None:
        return self.decode(name, self.data(txn, name))

    def name_in(self, txn: lmdb.Transaction, slot: int) -> bytes | None:
        """The hash of the block that a slot is filed under; ``None``: the slot is free."""
        return _get(txn, _slot_key(slot), self._slots)

    def items(self, txn: lmdb.Transaction) -> Iterator[tuple[bytes, bytes]]:
        """All records' names and bytes."""
        return _items(txn, self._blocks)

    def records(self, txn: lmdb.Transaction) -> Iterator[Record]:
        """All that are not damaged."""
        for name, data in self.items(txn):
            record = self.decode(name, data)
            if record is not None:
                yield record

    def use(self, txn: lmdb.Transaction) -> tuple[int, int]:
        """How many blocks are filed, and the bytes of a page."""
        stat = txn.stat(self._blocks)
        return stat["entries"], stat["psize"]

    # ------------------------------------------------------------ writing

    def generation(self, txn: lmdb.Transaction) -> int:
        """The last one given to a record."""
        return int.from_bytes(_get(txn, _GENERATION, self._meta) or b"", "little")

    def set_generation(self, txn: lmdb.Transaction, generation: int) -> None:
        txn.put(_GENERATION, generation.to_bytes(8, "little"), db=self._meta)

    def put(self, txn: lmdb.Transaction, name: bytes, record: Record) -> bytes:
        """Writes a record whose slot is filed already; returns its bytes."""
        data = encode(name, record)
        txn.put(name, data, db=self._blocks)
        return data

    def file(self, txn: lmdb.Transaction, name: bytes, record: Record) -> bytes:
        """Writes a record that takes its slot; returns its bytes."""
        data = self.put(txn, name, record)
        txn.put(_slot_key(record.slot), name, db=self._slots)
        self.ledger.enter(txn, record)
        return data

    def drop(self, txn: lmdb.Transaction, name: bytes, data: bytes) -> Record | None:
        """The record goes; returned if its slot was still its own, and is free now."""
        txn.delete(name, db=self._blocks)
        record = self.decode(name, data)
        if record is None or self.name_in(txn, record.slot) != name:
            return None
        self._free(txn, record.slot)
        return record

    def vacate(self, txn: lmdb.Transaction, slot: int, name: bytes, record: Record | None) -> None:
        """The block that a slot is filed under goes; ``name`` is that, ``record`` what can be read of it.

        The slot stays filed and claimed: ``file`` in the same transaction has it change hands.
        """
        if record is None or record.slot == slot:
            txn.delete(name, db=self._blocks)

    def _free(self, txn: lmdb.Transaction, slot: int) -> None:
        txn.delete(_slot_key(slot), db=self._slots)
        self.ledger.leave(txn, slot)

    def rebuild(self) -> None:
        """Makes anew what follows from the records, which alone know when they are damaged."""
        with self._env.begin(write=True) as txn:
            records: dict[int, tuple[bytes, Record]] = {}
            for name, data in list(self.items(txn)):
                record = self.decode(name, data)
                known = None if record is None else records.get(record.slot)
                if record is None or (known is not None and known[1].generation > record.generation):
                    txn.delete(name, db=self._blocks)
                    continue
                if known is not None:
                    txn.delete(known[0], db=self._blocks)
                records[record.slot] = name, record
            txn.drop(self._slots, delete=False)
            self.ledger.clear(txn)
            for name, record in records.values():
                txn.put(_slot_key(record.slot), name, db=self._slots)
                self.ledger.enter(txn, record)
            generations = (record.generation for _, record in records.values())
            self.set_generation(txn, max((self.generation(txn), *generations)))

    def check_integrity(
        self, txn: lmdb.Transaction, slot_bytes: int
    ) -> tuple[list[tuple[bytes, bytes, Record]], int, int]:
        """Asserts that records, slots and ledger agree.

        Returns the complete records, with their names and bytes; how many are being written; how many are
        damaged.
        """
        num_writing = num_bad = 0
        names = {int.from_bytes(key, "big"): name for key, name in _items(txn, self._slots)}
        last = self.generation(txn)
        taken: set[int] = set()
        ready: list[tuple[bytes, bytes, Record]] = []
        filed: list[Record] = []
        for name, data in self.items(txn):
            record = self.decode(name, data)
            if record is None:
                num_bad += 1
                continue
            assert record.slot not in taken, f"slot {record.slot} has two blocks"
            assert names.get(record.slot) == name, f"slot {record.slot} is filed under another block"
            assert record.generation <= last, f"generation {record.generation} of {last}"
            assert record.payload_bytes <= slot_bytes, f"{record.payload_bytes} bytes in a slot"
            taken.add(record.slot)
            filed.append(record)
            num_writing += record.state == WRITING
            if record.state == READY:
                ready.append((name, data, record))
        if num_bad == 0:
            self.ledger.check_integrity(txn, filed)
        return ready, num_writing, num_bad


def _items(txn: lmdb.Transaction, db: lmdb._Database) -> Iterator[tuple[bytes, bytes]]:
    return ((bytes(name), bytes(data)) for name, data in txn.cursor(db=db))


def _get(txn: lmdb.Transaction, name: bytes, db: lmdb._Database) -> bytes | None:
    data = txn.get(name, db=db)
    return None if data is None else bytes(data)


def _slot_key(slot: int) -> bytes:
    return slot.to_bytes(8, "big")
