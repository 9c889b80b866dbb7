"""Answers in an SQLite file: for one machine, and all processes on it.

Writers take turns, readers wait for nobody (WAL). A process that is killed loses at most what it was writing:
a transaction is there as a whole or not at all. What is removed is overwritten. The file is its owner's
alone.
"""

from __future__ import annotations

import os
import sqlite3
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

from ...errors import StoreError
from ...kv.terms import Selection
from .base import CLOCK_SLACK_MS, MAX_PURGES, Absent, Entry, Kind, Limits, Near, Removed, Use, Vector
from .envelope import Envelope, Row

_VERSION: Final = 1
_BUSY_TIMEOUT_S: Final = 10.0
_BATCH: Final = 256
_MAX_IDLE_READERS: Final = 8
_MAX_VARIABLES: Final = 500

_SCHEMA: Final = """
CREATE TABLE entries (
  seq INTEGER PRIMARY KEY AUTOINCREMENT,
  kind TEXT NOT NULL, key BLOB NOT NULL, space BLOB NOT NULL,
  tenant TEXT NOT NULL, model TEXT NOT NULL, prompt TEXT NOT NULL,
  stored_ms INTEGER NOT NULL, expires_ms INTEGER,
  rank INTEGER NOT NULL, size INTEGER NOT NULL,
  checksum BLOB NOT NULL, meta BLOB NOT NULL, vector BLOB, value BLOB NOT NULL,
  UNIQUE (kind, key)
);
CREATE INDEX entries_by_rank ON entries (rank);
CREATE INDEX entries_by_tenant ON entries (tenant, rank);
CREATE INDEX entries_by_space ON entries (kind, space, seq);
CREATE INDEX entries_by_key ON entries (key);
CREATE INDEX entries_by_expiry ON entries (expires_ms) WHERE expires_ms IS NOT NULL;
CREATE TABLE uses (
  tenant TEXT NOT NULL, model TEXT NOT NULL, kind TEXT NOT NULL,
  entries INTEGER NOT NULL, bytes INTEGER NOT NULL,
  PRIMARY KEY (tenant, model, kind)
);
CREATE TABLE purges (
  number INTEGER PRIMARY KEY AUTOINCREMENT,
  tenant TEXT, model TEXT, prompt TEXT, key BLOB
);
CREATE TABLE facts (name TEXT PRIMARY KEY, value INTEGER NOT NULL);
INSERT INTO facts VALUES ('latest_ms', 0);
CREATE TRIGGER entries_added AFTER INSERT ON entries BEGIN
  INSERT INTO uses VALUES (NEW.tenant, NEW.model, NEW.kind, 1, NEW.size)
    ON CONFLICT DO UPDATE SET entries = entries + 1, bytes = bytes + NEW.size;
END;
CREATE TRIGGER entries_removed AFTER DELETE ON entries BEGIN
  UPDATE uses SET entries = entries - 1, bytes = bytes - OLD.size
    WHERE tenant = OLD.tenant AND model = OLD.model AND kind = OLD.kind;
END;
CREATE TRIGGER entries_resized AFTER UPDATE OF size ON entries BEGIN
  UPDATE uses SET bytes = bytes + NEW.size - OLD.size
    WHERE tenant = OLD.tenant AND model = OLD.model AND kind = OLD.kind;
END;
"""
_ROW: Final = (
    "kind, key, space, tenant, model, prompt, stored_ms, expires_ms, meta, vector, value, checksum, seq"
)
_INSERT: Final = (
    "INSERT INTO entries (kind, key, space, tenant, model, prompt, stored_ms, expires_ms,"
    " meta, vector, value, checksum, size, rank)"
    " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, (SELECT coalesce(max(rank), 0) + 1 FROM entries))"
)
_VALID: Final = "stored_ms <= ? AND (expires_ms IS NULL OR expires_ms > ?)"


class SqliteStore:
    """A :class:`~ostinato.responses.stores.base.Store` in a file, or in this process' memory.

    Args:
        path: the file; made where there is none. ``None``: in memory, gone with the store.
        limits: what may be kept. Every process on a file brings its own: give all of them the same.
        envelope: how entries look at rest.
        now_ms: the time; what has expired by now, or had when the file was last written, goes.

    Raises:
        StoreError: it cannot be opened, or is not a store of this version.
    """

    def __init__(
        self, path: Path | None, *, limits: Limits, now_ms: int, envelope: Envelope | None = None
    ) -> None:
        self.path = path
        self._limits = limits
        self._envelope = envelope or Envelope()
        self._name = ":memory:" if path is None else str(path)
        self._lock = threading.Lock()  # of the writer, and in memory of the only connection
        self._readers: deque[sqlite3.Connection] = deque()
        self._is_closed = False
        try:
            if path is not None:
                path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
                os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
            self._writer = self._connect()
        except (OSError, sqlite3.Error) as error:
            raise StoreError(
                f"the store of answers {self._name} cannot be opened ({error}): "
                "choose another file, or remove it"
            ) from error
        try:
            self._prepare(now_ms)
        except BaseException:
            self.close()
            raise

    # ------------------------------------------------------------ look up

    def get(self, kind: Kind, key: bytes, now_ms: int) -> Entry | Absent:
        with self._reading() as reader:
            found = reader.execute(
                f"SELECT {_ROW} FROM entries WHERE kind = ? AND key = ?", (kind, key)
            ).fetchone()
        if found is None:
            return Absent("absent")
        entry = self._entry(found)
        seq = int(found[-1])
        if entry is None:
            return Absent("corrupt", seq)
        return entry.absence(now_ms) or entry

    def get_many(self, kind: Kind, keys: Collection[bytes], now_ms: int) -> dict[bytes, Entry]:
        found: dict[bytes, Entry] = {}
        wanted = list(dict.fromkeys(keys))
        with self._reading() as reader:
            for at in range(0, len(wanted), _MAX_VARIABLES):
                some = wanted[at : at + _MAX_VARIABLES]
                marks = ", ".join("?" * len(some))
                rows = reader.execute(
                    f"SELECT {_ROW} FROM entries WHERE kind = ? AND key IN ({marks}) AND {_VALID}",
                    (kind, *some, now_ms + CLOCK_SLACK_MS, now_ms),
                )
                for row in rows:
                    if (entry := self._entry(row)) is not None:
                        found[entry.key] = entry
        return found

    def scan(self, kind: Kind, space: bytes, after_seq: int, max_entries: int, now_ms: int) -> list[Entry]:
        found: list[Entry] = []
        with self._reading() as reader:
            while len(found) < max_entries:
                rows = reader.execute(
                    f"SELECT {_ROW} FROM entries WHERE kind = ? AND space = ? AND seq > ? AND {_VALID}"
                    " ORDER BY seq LIMIT ?",
                    (kind, space, after_seq, now_ms + CLOCK_SLACK_MS, now_ms, max_entries),
                ).fetchall()
                found += [entry for row in rows if (entry := self._entry(row)) is not None]
                if len(rows) < max_entries:
                    break
                after_seq = int(rows[-1][-1])
        return found[:max_entries]

    def nearest(self, kind: Kind, space: bytes, vector: Vector, num: int, now_ms: int) -> list[Near] | None:
        return None

    def uses(self) -> list[Use]:
        with self._reading() as reader:
            rows = reader.execute("SELECT tenant, model, kind, entries, bytes FROM uses WHERE entries > 0")
            return [Use(*row) for row in rows]

    def epoch(self) -> int:
        with self._reading() as reader:
            (number,) = reader.execute("SELECT coalesce(max(number), 0) FROM purges").fetchone()
        return int(number)

    # ------------------------------------------------------------ change

    def put(self, entries: Sequence[Entry], now_ms: int, epoch: int | None = None) -> int:
        num_stored = 0
        with self._writing() as writer:
            self._drop_expired(writer, now_ms)
            for entry in entries:
                if not self._limits.allow(entry):
                    continue
                if epoch is not None and self._was_meant(writer, entry, epoch):
                    continue
                writer.execute("DELETE FROM entries WHERE kind = ? AND key = ?", (entry.kind, entry.key))
                row = self._envelope.close(entry)
                writer.execute(
                    _INSERT,
                    (row.kind, row.key, row.space, row.tenant, row.model, row.prompt, row.stored_ms,
                     row.expires_ms, row.meta, row.vector, row.value, row.checksum, entry.size_bytes),
                )  # fmt: skip
                num_stored += 1
            for tenant in {entry.tenant for entry in entries}:
                self._make_room(writer, tenant)
            self._make_room(writer, None)
        return num_stored

    def update(self, kind: Kind, key: bytes, change: Callable[[bytes], bytes], now_ms: int) -> bytes | None:
        with self._writing() as writer:
            found = writer.execute(
                f"SELECT {_ROW} FROM entries WHERE kind = ? AND key = ? AND {_VALID}",
                (kind, key, now_ms + CLOCK_SLACK_MS, now_ms),
            ).fetchone()
            entry = None if found is None else self._entry(found)
            if entry is None:
                return None
            changed = entry.with_meta(change(entry.meta))
            row = self._envelope.close(changed)
            writer.execute(
                "UPDATE entries SET meta = ?, vector = ?, value = ?, checksum = ?, size = ? WHERE seq = ?",
                (row.meta, row.vector, row.value, row.checksum, changed.size_bytes, entry.seq),
            )
        return changed.meta

    def touch(self, seqs: Collection[int]) -> None:
        with self._writing() as writer:
            writer.executemany(
                "UPDATE entries SET rank = (SELECT max(rank) + 1 FROM entries) WHERE seq = ?",
                [(seq,) for seq in seqs],
            )

    def drop(self, seqs: Collection[int]) -> None:
        with self._writing() as writer:
            writer.executemany("DELETE FROM entries WHERE seq = ?", [(seq,) for seq in seqs])

    def forget(self, key: bytes) -> Removed:
        return self._remove({"key": key}, 0, now_ms=0)

    def purge(self, selection: Selection, now_ms: int) -> Removed:
        given = {name: getattr(selection, name) for name in ("tenant", "model", "prompt")}
        given = {name: value for name, value in given.items() if value is not None}
        return self._remove(given, int(selection.min_age_s * 1000), now_ms=now_ms)

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            self._writer.close()
            while self._readers:
                self._readers.pop().close()

    # ------------------------------------------------------------ inside

    def _connect(self) -> sqlite3.Connection:
        connection = sqlite3.connect(
            self._name, timeout=_BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False
        )
        connection.text_factory = _text
        # SQLite syncs the file itself at checkpoints only: a crash of the machine may lose the last entries.
        for pragma in ("synchronous = NORMAL", "secure_delete = ON", "temp_store = MEMORY"):
            connection.execute(f"PRAGMA {pragma}")
        return connection

    def _prepare(self, now_ms: int) -> None:
        try:
            if self.path is not None:
                self._writer.execute("PRAGMA journal_mode = WAL")
            with self._writing() as writer:
                (version,) = writer.execute("PRAGMA user_version").fetchone()
                if version == 0:
                    for statement in _statements(_SCHEMA):
                        writer.execute(statement)
                    writer.execute(f"PRAGMA user_version = {_VERSION}")
                elif version != _VERSION:
                    raise StoreError(
                        f"{self._name} is a store of version {version}, this Ostinato writes {_VERSION}: "
                        "choose another file, or remove it"
                    )
                (latest_ms,) = writer.execute("SELECT value FROM facts WHERE name = 'latest_ms'").fetchone()
                # A clock that was put back while nobody looked brings nothing back that had expired.
                while self._drop_expired(writer, max(now_ms, latest_ms)):
                    pass
                writer.execute("UPDATE facts SET value = ? WHERE name = 'latest_ms'", (now_ms,))
        except sqlite3.Error as error:
            raise StoreError(
                f"the store of answers {self._name} cannot be used ({error}): "
                "choose another file, or remove it"
            ) from error

    @contextmanager
    def _reading(self) -> Iterator[sqlite3.Connection]:
        if self.path is None:
            with self._lock, _as_store_errors(self._name):
                yield self._writer
            return
        with _as_store_errors(self._name):
            try:
                reader = self._readers.pop()
            except IndexError:
                reader = self._connect()
            try:
                yield reader
            except BaseException:
                reader.close()
                raise
            if self._is_closed or len(self._readers) >= _MAX_IDLE_READERS:
                reader.close()
            else:
                self._readers.append(reader)

    @contextmanager
    def _writing(self) -> Iterator[sqlite3.Connection]:
        with self._lock, _as_store_errors(self._name):
            writer = self._writer
            writer.execute("BEGIN IMMEDIATE")
            try:
                yield writer
                writer.execute("COMMIT")
            except BaseException:
                with suppress(sqlite3.Error):  # some errors have ended the transaction already
                    writer.execute("ROLLBACK")
                raise

    def _entry(self, found: Sequence[Any]) -> Entry | None:
        return self._envelope.open(Row(*found[:-1]), found[-1])

    def _make_room(self, writer: sqlite3.Connection, tenant: str | None) -> None:
        """Removes what was used longest ago, of one tenant or of all, until the limit is kept."""
        limit = self._limits.max_bytes if tenant is None else self._limits.of(tenant)
        if limit is None:
            return
        whose, values = ("", ()) if tenant is None else (" AND tenant = ?", (tenant,))
        (used,) = writer.execute(
            f"SELECT coalesce(sum(bytes), 0) FROM uses WHERE kind != 'state'{whose}", values
        ).fetchone()
        needed = used - limit
        while needed > 0:
            rows = writer.execute(
                f"SELECT seq, size FROM entries WHERE kind != 'state'{whose} ORDER BY rank LIMIT {_BATCH}",
                values,
            ).fetchall()
            if not rows:  # somebody changed the tables by hand
                writer.execute("DELETE FROM uses")
                writer.execute(
                    "INSERT INTO uses SELECT tenant, model, kind, count(*), sum(size)"
                    " FROM entries GROUP BY tenant, model, kind"
                )
                return
            for seq, size in rows:
                if needed <= 0:
                    break
                writer.execute("DELETE FROM entries WHERE seq = ?", (seq,))
                needed -= size

    def _drop_expired(self, writer: sqlite3.Connection, now_ms: int) -> bool:
        """Some of what has expired; whether there may be more."""
        num = writer.execute(
            "DELETE FROM entries WHERE seq IN"
            f" (SELECT seq FROM entries WHERE expires_ms <= ? ORDER BY expires_ms LIMIT {_BATCH})",
            (now_ms,),
        ).rowcount
        writer.execute("UPDATE facts SET value = max(value, ?) WHERE name = 'latest_ms'", (now_ms,))
        return num == _BATCH

    def _remove(self, given: Mapping[str, Any], min_age_ms: int, *, now_ms: int) -> Removed:
        """Removes entries with these values; if of any age, those as well that are being made."""
        conditions = [f"{name} = ?" for name in given]
        values = list(given.values())
        if min_age_ms > 0:
            conditions.append("stored_ms <= ?")
            values.append(now_ms - min_age_ms)
        condition = " AND ".join(conditions) or "true"
        with self._writing() as writer:
            rows = writer.execute(f"DELETE FROM entries WHERE {condition} RETURNING size", values).fetchall()
            if min_age_ms <= 0:
                writer.execute(
                    "INSERT INTO purges (tenant, model, prompt, key) VALUES (?, ?, ?, ?)",
                    [given.get(name) for name in ("tenant", "model", "prompt", "key")],
                )
                writer.execute(
                    "DELETE FROM purges WHERE number <= (SELECT max(number) FROM purges) - ?",
                    (MAX_PURGES,),
                )
        if rows and self.path is not None:
            # The log of writes still has the old pages. With a reader in the way they go at the next chance.
            with self._lock, _as_store_errors(self._name):
                self._writer.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
        return Removed(len(rows), sum(size for (size,) in rows))

    def _was_meant(self, writer: sqlite3.Connection, entry: Entry, epoch: int) -> bool:
        """Whether a purge since ``epoch`` meant it, or may have."""
        found = writer.execute(
            "SELECT count(*), coalesce(max(number), 0) FROM purges WHERE number > ?", (epoch,)
        ).fetchone()
        assert found is not None, "a count without a row"
        num_since, latest = found
        if num_since < latest - epoch:
            return True  # some have been forgotten
        meant = writer.execute(
            "SELECT 1 FROM purges WHERE number > ? AND coalesce(tenant, ?) = ?"
            " AND coalesce(model, ?) = ? AND coalesce(prompt, ?) = ?"
            " AND coalesce(key, ?) = ? LIMIT 1",
            (
                *(epoch, entry.tenant, entry.tenant, entry.model, entry.model),
                *(entry.prompt, entry.prompt, entry.key, entry.key),
            ),
        ).fetchone()
        return meant is not None


@contextmanager
def _as_store_errors(name: str) -> Iterator[None]:
    try:
        yield
    except sqlite3.Error as error:
        raise StoreError(f"the store of answers {name} failed: {error}") from error


def _text(data: bytes) -> str:
    """What is no text in a damaged row is one that no checksum fits."""
    return data.decode("utf-8", "replace")


def _statements(script: str) -> Iterator[str]:
    """Its statements one by one: executescript() would end the transaction that is to hold all of them."""
    statement = ""
    for line in script.splitlines(keepends=True):
        statement += line
        if sqlite3.complete_statement(statement):
            yield statement
            statement = ""
