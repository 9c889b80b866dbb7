"""Answers in PostgreSQL: for a fleet. With pgvector it also finds what is near.

Writers take turns by an advisory lock, so that numbers of entries become visible in their order and limits
hold exactly; readers wait for nobody. Every call is one transaction.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from ...errors import StoreError
from ...kv.terms import Selection
from .base import CLOCK_SLACK_MS, MAX_PURGES, Absent, Entry, Kind, Limits, Near, Removed, Use, Vector
from .envelope import Envelope, Row

if TYPE_CHECKING:
    from psycopg import Connection

_VERSION: Final = 1
_LOCK: Final = 0x6F7374696E61746F  # "ostinato"
_BATCH: Final = 256
_MAX_CONNECTIONS: Final = 8
_TIMEOUT_S: Final = 2.0
_STATEMENT_TIMEOUT_MS: Final = 10_000

_SCHEMA: Final = """
CREATE TABLE ostinato_entries (
  seq BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
  kind TEXT NOT NULL, key BYTEA NOT NULL, space BYTEA NOT NULL,
  tenant TEXT NOT NULL, model TEXT NOT NULL, prompt TEXT NOT NULL,
  stored_ms BIGINT NOT NULL, expires_ms BIGINT,
  rank BIGINT NOT NULL, size BIGINT NOT NULL,
  checksum BYTEA NOT NULL, meta BYTEA NOT NULL, vector BYTEA, value BYTEA NOT NULL,
  UNIQUE (kind, key)
);
CREATE SEQUENCE ostinato_ranks;
CREATE INDEX ON ostinato_entries (rank);
CREATE INDEX ON ostinato_entries (tenant, rank);
CREATE INDEX ON ostinato_entries (kind, space, seq);
CREATE INDEX ON ostinato_entries (key);
CREATE INDEX ON ostinato_entries (expires_ms) WHERE expires_ms IS NOT NULL;
CREATE TABLE ostinato_uses (
  tenant TEXT NOT NULL, model TEXT NOT NULL, kind TEXT NOT NULL,
  entries BIGINT NOT NULL, bytes BIGINT NOT NULL,
  PRIMARY KEY (tenant, model, kind)
);
CREATE TABLE ostinato_purges (
  number BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
  tenant TEXT, model TEXT, prompt TEXT, key BYTEA
);
CREATE TABLE ostinato_facts (name TEXT PRIMARY KEY, value BIGINT NOT NULL);
CREATE FUNCTION ostinato_count() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
  IF TG_OP IN ('DELETE', 'UPDATE') THEN
    UPDATE ostinato_uses SET entries = entries - 1, bytes = bytes - OLD.size
      WHERE tenant = OLD.tenant AND model = OLD.model AND kind = OLD.kind;
  END IF;
  IF TG_OP IN ('INSERT', 'UPDATE') THEN
    INSERT INTO ostinato_uses VALUES (NEW.tenant, NEW.model, NEW.kind, 1, NEW.size)
      ON CONFLICT (tenant, model, kind) DO UPDATE
      SET entries = ostinato_uses.entries + 1, bytes = ostinato_uses.bytes + NEW.size;
  END IF;
  RETURN NULL;
END $$;
CREATE TRIGGER ostinato_counted AFTER INSERT OR DELETE OR UPDATE OF size ON ostinato_entries
  FOR EACH ROW EXECUTE FUNCTION ostinato_count();
"""
_NAMES: Final = (
    "kind, key, space, tenant, model, prompt, stored_ms, expires_ms, meta, vector, value, checksum"
)
_ROW: Final = f"{_NAMES}, seq"
_INSERT: Final = (
    f"INSERT INTO ostinato_entries ({_NAMES}, size, rank)"
    f" VALUES ({', '.join(['%s'] * 13)}, nextval('ostinato_ranks')) RETURNING seq"
)
_VALID: Final = "stored_ms <= %s AND (expires_ms IS NULL OR expires_ms > %s)"


class PostgresStore:
    """A :class:`~ostinato.responses.stores.base.Store` in a PostgreSQL database.

    Args:
        url: ``postgresql://user@host/database``; a password better comes from ``PGPASSWORD``.
        limits: what may be kept; give every process the same.
        envelope: how entries look at rest. Encrypted vectors cannot be searched by the database.
        now_ms: the time; what has expired by now, or had when the store was last written, goes.

    Raises:
        StoreError: it cannot be reached, is of another version, or the packages for it are not installed.
    """

    def __init__(self, url: str, *, limits: Limits, now_ms: int, envelope: Envelope | None = None) -> None:
        try:
            from psycopg_pool import ConnectionPool
        except ImportError as error:
            raise StoreError(
                "answers in PostgreSQL need packages more: pip install 'ostinato[postgres]'"
            ) from error
        self._limits = limits
        self._envelope = envelope or Envelope()
        self._pool = ConnectionPool(
            url,
            min_size=0,
            max_size=_MAX_CONNECTIONS,
            timeout=_TIMEOUT_S,
            kwargs={
                "autocommit": True,
                "connect_timeout": int(_TIMEOUT_S),
                "options": f"-c statement_timeout={_STATEMENT_TIMEOUT_MS}",
            },
            open=True,
        )
        self._can_search = False
        try:
            self._prepare(now_ms)
        except BaseException:
            self.close()
            raise

    # ------------------------------------------------------------ look up

    def get(self, kind: Kind, key: bytes, now_ms: int) -> Entry | Absent:
        with self._connection() as connection:
            found = connection.execute(
                f"SELECT {_ROW} FROM ostinato_entries WHERE kind = %s AND key = %s", (kind, key)
            ).fetchone()
        if found is None:
            return Absent("absent")
        entry, seq = self._entry(found), int(found[-1])
        if entry is None:
            return Absent("corrupt", seq)
        return entry.absence(now_ms) or entry

    def get_many(self, kind: Kind, keys: Collection[bytes], now_ms: int) -> dict[bytes, Entry]:
        with self._connection() as connection:
            rows = connection.execute(
                f"SELECT {_ROW} FROM ostinato_entries WHERE kind = %s AND key = ANY(%s) AND {_VALID}",
                (kind, list(keys), now_ms + CLOCK_SLACK_MS, now_ms),
            ).fetchall()
        entries = [entry for row in rows if (entry := self._entry(row)) is not None]
        return {entry.key: entry for entry in entries}

    def scan(self, kind: Kind, space: bytes, after_seq: int, max_entries: int, now_ms: int) -> list[Entry]:
        found: list[Entry] = []
        with self._connection() as connection:
            while len(found) < max_entries:
                rows = connection.execute(
                    f"SELECT {_ROW} FROM ostinato_entries WHERE kind = %s AND space = %s AND seq > %s"
                    f" AND {_VALID} ORDER BY seq LIMIT %s",
                    (kind, space, after_seq, now_ms + CLOCK_SLACK_MS, now_ms, max_entries),
                ).fetchall()
                found += [entry for row in rows if (entry := self._entry(row)) is not None]
                if len(rows) < max_entries:
                    break
                after_seq = int(rows[-1][-1])
        return found[:max_entries]

    def nearest(self, kind: Kind, space: bytes, vector: Vector, num: int, now_ms: int) -> list[Near] | None:
        """Searches the whole space: pgvector's approximate indexes would look past what a filter takes
        out."""
        if not self._can_search:
            return None
        wanted = _vector_text(vector)
        with self._connection() as connection:
            rows = connection.execute(
                f"SELECT {_ROW}, 1 - (embedding <=> %s::vector) FROM ostinato_entries"
                f" WHERE kind = %s AND space = %s AND vector_dims(embedding) = %s AND {_VALID}"
                " ORDER BY embedding <=> %s::vector LIMIT %s",
                (wanted, kind, space, len(vector), now_ms + CLOCK_SLACK_MS, now_ms, wanted, num),
            ).fetchall()
        return [Near(entry, float(row[-1])) for row in rows if (entry := self._entry(row[:-1])) is not None]

    def uses(self) -> list[Use]:
        with self._connection() as connection:
            rows = connection.execute(
                "SELECT tenant, model, kind, entries, bytes FROM ostinato_uses WHERE entries > 0"
            ).fetchall()
        return [Use(*row) for row in rows]

    def epoch(self) -> int:
        with self._connection() as connection:
            found = connection.execute("SELECT coalesce(max(number), 0) FROM ostinato_purges").fetchone()
        assert found is not None, "a maximum without a row"
        return int(found[0])

    # ------------------------------------------------------------ change

    def put(self, entries: Sequence[Entry], now_ms: int, epoch: int | None = None) -> int:
        num_stored = 0
        with self._writing() as connection:
            self._drop_expired(connection, now_ms)
            for entry in entries:
                if not self._limits.allow(entry):
                    continue
                if epoch is not None and self._was_meant(connection, entry, epoch):
                    continue
                connection.execute(
                    "DELETE FROM ostinato_entries WHERE kind = %s AND key = %s", (entry.kind, entry.key)
                )
                row = self._envelope.close(entry)
                inserted = connection.execute(
                    _INSERT,
                    (row.kind, row.key, row.space, row.tenant, row.model, row.prompt, row.stored_ms,
                     row.expires_ms, row.meta, row.vector, row.value, row.checksum, entry.size_bytes),
                ).fetchone()  # fmt: skip
                assert inserted is not None, "an insert without a row"
                if self._can_search and entry.vector is not None and np.any(entry.vector):
                    connection.execute(
                        "UPDATE ostinato_entries SET embedding = %s::vector WHERE seq = %s",
                        (_vector_text(entry.vector), inserted[0]),
                    )
                num_stored += 1
            for tenant in {entry.tenant for entry in entries}:
                self._make_room(connection, tenant)
            self._make_room(connection, None)
        return num_stored

    def update(self, kind: Kind, key: bytes, change: Callable[[bytes], bytes], now_ms: int) -> bytes | None:
        with self._writing() as connection:
            found = connection.execute(
                f"SELECT {_ROW} FROM ostinato_entries WHERE kind = %s AND key = %s AND {_VALID}",
                (kind, key, now_ms + CLOCK_SLACK_MS, now_ms),
            ).fetchone()
            entry = None if found is None else self._entry(found)
            if entry is None:
                return None
            changed = entry.with_meta(change(entry.meta))
            row = self._envelope.close(changed)
            connection.execute(
                "UPDATE ostinato_entries SET meta = %s, vector = %s, value = %s, checksum = %s, size = %s"
                " WHERE seq = %s",
                (row.meta, row.vector, row.value, row.checksum, changed.size_bytes, entry.seq),
            )
        return changed.meta

    def touch(self, seqs: Collection[int]) -> None:
        with self._writing() as connection:
            for seq in seqs:
                connection.execute(
                    "UPDATE ostinato_entries SET rank = nextval('ostinato_ranks') WHERE seq = %s", (seq,)
                )

    def drop(self, seqs: Collection[int]) -> None:
        with self._writing() as connection:
            connection.execute("DELETE FROM ostinato_entries WHERE seq = ANY(%s)", (list(seqs),))

    def forget(self, key: bytes) -> Removed:
        return self._remove({"key": key}, 0, now_ms=0)

    def purge(self, selection: Selection, now_ms: int) -> Removed:
        given = {name: getattr(selection, name) for name in ("tenant", "model", "prompt")}
        given = {name: value for name, value in given.items() if value is not None}
        return self._remove(given, int(selection.min_age_s * 1000), now_ms=now_ms)

    def close(self) -> None:
        self._pool.close()

    # ------------------------------------------------------------ inside

    def _prepare(self, now_ms: int) -> None:
        with self._writing() as connection:
            known = connection.execute("SELECT to_regclass('ostinato_facts') IS NOT NULL").fetchone()
            if known == (False,):
                connection.execute(_SCHEMA)
                connection.execute(
                    "INSERT INTO ostinato_facts VALUES ('version', %s), ('latest_ms', 0)", (_VERSION,)
                )
            facts = dict(connection.execute("SELECT name, value FROM ostinato_facts").fetchall())
            if facts.get("version") != _VERSION:
                raise StoreError(
                    f"the database has a store of version {facts.get('version')}, this Ostinato writes "
                    f"{_VERSION}: choose another database, or drop the tables ostinato_*"
                )
            # A clock that was put back while nobody looked brings nothing back that had expired.
            while self._drop_expired(connection, max(now_ms, facts["latest_ms"])):
                pass
            connection.execute("UPDATE ostinato_facts SET value = %s WHERE name = 'latest_ms'", (now_ms,))
        self._can_search = not self._envelope.is_sealed and self._has_pgvector()

    def _has_pgvector(self) -> bool:
        """Whether vectors can be searched; tries to make it so, for which a role may lack the right."""
        import psycopg

        try:
            with self._writing() as connection:
                connection.execute("CREATE EXTENSION IF NOT EXISTS vector")
                connection.execute("ALTER TABLE ostinato_entries ADD COLUMN IF NOT EXISTS embedding vector")
        except StoreError as error:
            if isinstance(error.__cause__, psycopg.OperationalError):
                raise
            return False
        return True

    @contextmanager
    def _connection(self) -> Iterator[Connection[tuple[Any, ...]]]:
        import psycopg
        from psycopg_pool import PoolClosed, PoolTimeout

        try:
            with self._pool.connection() as connection:
                yield connection
        except (PoolTimeout, PoolClosed) as error:
            raise StoreError("the store of answers in PostgreSQL cannot be reached") from error
        except psycopg.Error as error:
            raise StoreError(f"the store of answers in PostgreSQL failed: {error}") from error

    @contextmanager
    def _writing(self) -> Iterator[Connection[tuple[Any, ...]]]:
        with self._connection() as connection, connection.transaction():
            connection.execute("SELECT pg_advisory_xact_lock(%s)", (_LOCK,))
            yield connection

    def _entry(self, found: Sequence[Any]) -> Entry | None:
        return self._envelope.open(Row(*found[:-1]), found[-1])

    def _make_room(self, connection: Connection[tuple[Any, ...]], tenant: str | None) -> None:
        """Removes what was used longest ago, of one tenant or of all, until the limit is kept."""
        limit = self._limits.max_bytes if tenant is None else self._limits.of(tenant)
        if limit is None:
            return
        whose, values = ("", ()) if tenant is None else (" AND tenant = %s", (tenant,))
        used = connection.execute(
            f"SELECT coalesce(sum(bytes), 0)::bigint FROM ostinato_uses WHERE kind != 'state'{whose}", values
        ).fetchone()
        assert used is not None, "a sum without a row"
        needed = used[0] - limit
        while needed > 0:
            rows = connection.execute(
                f"SELECT seq, size FROM ostinato_entries WHERE kind != 'state'{whose}"
                f" ORDER BY rank LIMIT {_BATCH}",
                values,
            ).fetchall()
            if not rows:  # somebody changed the tables by hand
                connection.execute("DELETE FROM ostinato_uses")
                connection.execute(
                    "INSERT INTO ostinato_uses SELECT tenant, model, kind, count(*), sum(size)"
                    " FROM ostinato_entries GROUP BY tenant, model, kind"
                )
                return
            for seq, size in rows:
                if needed <= 0:
                    break
                connection.execute("DELETE FROM ostinato_entries WHERE seq = %s", (seq,))
                needed -= size

    def _drop_expired(self, connection: Connection[tuple[Any, ...]], now_ms: int) -> bool:
        """Some of what has expired; whether there may be more."""
        num = connection.execute(
            "DELETE FROM ostinato_entries WHERE seq IN (SELECT seq FROM ostinato_entries"
            f" WHERE expires_ms <= %s ORDER BY expires_ms LIMIT {_BATCH})",
            (now_ms,),
        ).rowcount
        connection.execute(
            "UPDATE ostinato_facts SET value = greatest(value, %s) WHERE name = 'latest_ms'", (now_ms,)
        )
        return num == _BATCH

    def _remove(self, given: Mapping[str, Any], min_age_ms: int, *, now_ms: int) -> Removed:
        """Removes entries with these values; if of any age, those as well that are being made."""
        conditions = [f"{name} = %s" for name in given]
        values = list(given.values())
        if min_age_ms > 0:
            conditions.append("stored_ms <= %s")
            values.append(now_ms - min_age_ms)
        condition = " AND ".join(conditions) or "true"
        with self._writing() as connection:
            rows = connection.execute(
                f"DELETE FROM ostinato_entries WHERE {condition} RETURNING size", values
            ).fetchall()
            if min_age_ms <= 0:
                connection.execute(
                    "INSERT INTO ostinato_purges (tenant, model, prompt, key) VALUES (%s, %s, %s, %s)",
                    [given.get(name) for name in ("tenant", "model", "prompt", "key")],
                )
                connection.execute(
                    "DELETE FROM ostinato_purges"
                    " WHERE number <= (SELECT max(number) FROM ostinato_purges) - %s",
                    (MAX_PURGES,),
                )
        return Removed(len(rows), sum(size for (size,) in rows))

    def _was_meant(self, connection: Connection[tuple[Any, ...]], entry: Entry, epoch: int) -> bool:
        """Whether a purge since ``epoch`` meant it, or may have."""
        found = connection.execute(
            "SELECT count(*), coalesce(max(number), 0) FROM ostinato_purges WHERE number > %s", (epoch,)
        ).fetchone()
        assert found is not None, "a count without a row"
        num_since, latest = found
        if num_since < latest - epoch:
            return True  # some have been forgotten
        meant = connection.execute(
            "SELECT 1 FROM ostinato_purges WHERE number > %s AND coalesce(tenant, %s) = %s"
            " AND coalesce(model, %s) = %s AND coalesce(prompt, %s) = %s"
            " AND coalesce(key, %s) = %s LIMIT 1",
            (
                *(epoch, entry.tenant, entry.tenant, entry.model, entry.model),
                *(entry.prompt, entry.prompt, entry.key, entry.key),
            ),
        ).fetchone()
        return meant is not None


def _vector_text(vector: Vector) -> str:
    return f"[{','.join(map(repr, vector.tolist()))}]"
