"""How blocks leave the shared tier: what is filed is dropped, what is being written is revoked.

A record goes and its slot is free in one transaction. What somebody is writing at that moment keeps its slot
until then, but is not published.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

import lmdb

from .books import Books
from .ranks import Ranks
from .records import WRITING, Record
from .slab import Slab
from .slots import Slots

BATCH = 256  # records looked at in one transaction by what works in the background
REVOKED = 0  # the version of a record whose writer must not publish it
_WIPE_BATCH = 8  # slots overwritten in one transaction: nobody else can take a slot meanwhile


class Drops:
    """Methods that take a transaction work inside it, a writing one."""

    def __init__(
        self,
        env: lmdb.Environment,
        books: Books,
        ranks: Ranks,
        slots: Slots,
        slab: Slab,
        *,
        slot_bytes: int,
        is_abandoned: Callable[[Record], bool],
    ) -> None:
        """``is_abandoned``: nobody will go on writing this record's block."""
        self._env = env
        self._books = books
        self._ranks = ranks
        self._slots = slots
        self._slab = slab
        self._slot_bytes = slot_bytes
        self._is_abandoned = is_abandoned

    def where(self, is_meant: Callable[[Record], bool], *, limit: int, wipe: bool = False) -> int:
        """Drops what is meant and what is damaged, in short transactions so that no writer waits long.

        ``wipe``: payloads are overwritten as well.
        """
        batch = _WIPE_BATCH if wipe else BATCH
        meant: list[tuple[bytes, bytes]] = []
        with self._env.begin() as txn:
            for name, data in self._books.items(txn):
                record = self._books.decode(name, data)
                if record is None or is_meant(record):
                    meant.append((name, data))
                    if len(meant) == limit:
                        break
        num_dropped = 0
        with suppress(lmdb.Error):  # no room even to forget: the next round, or eviction, will
            for start in range(0, len(meant), batch):
                with self._env.begin(write=True) as txn:
                    for name, data in meant[start : start + batch]:
                        if self._books.data(txn, name) == data:
                            self.drop_or_revoke(txn, name, data, wipe=wipe)
                            num_dropped += 1
        return num_dropped

    def drop_or_revoke(self, txn: lmdb.Transaction, name: bytes, data: bytes, *, wipe: bool) -> None:
        """Inside a transaction: what is being written keeps its slot until then, but is not published."""
        record = self._books.decode(name, data)
        if record is not None and record.state == WRITING and not self._is_abandoned(record):
            self.revoke(txn, name, record)
        else:
            self.drop(txn, name, data, wipe=wipe)

    def revoke(self, txn: lmdb.Transaction, name: bytes, record: Record) -> None:
        self._books.put(txn, name, record._replace(version=REVOKED))

    def forget(self, name: bytes, data: bytes) -> None:
        """Drops a record if it still is ``data``."""
        with suppress(lmdb.Error), self._env.begin(write=True) as txn:
            if self._books.data(txn, name) == data:
                self.drop(txn, name, data)

    def drop(self, txn: lmdb.Transaction, name: bytes, data: bytes, *, wipe: bool = False) -> None:
        """Inside a transaction: the record goes, and its slot is free if it still is that record's.

        ``wipe``: nobody can read what was in the slot any more. So it is with what was revoked.
        """
        freed = self._books.drop(txn, name, data)
        if freed is None:
            return
        if wipe or freed.version == REVOKED:
            self._wipe(freed)
        self._ranks.set(freed.slot, 0)
        self._slots.note_freed()

    def _wipe(self, record: Record) -> None:
        with suppress(OSError):  # no memory left for a slot is nothing left in it
            zeros = memoryview(bytes(record.payload_bytes))
            self._slab.write(record.slot * self._slot_bytes, [zeros])
