"""Stores that are killed amid a write, shared by many processes, or damaged by somebody."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path

import psycopg
import pytest

from ostinato.errors import StoreError
from ostinato.kv.terms import Selection
from ostinato.responses.stores.base import Absent, Entry, Limits, Removed
from ostinato.responses.stores.envelope import Envelope
from ostinato.responses.stores.postgres import PostgresStore
from ostinato.responses.stores.sqlite import SqliteStore
from responses.writer import entry_of, key_of, open_store

WRITER = Path(__file__).with_name("writer.py")


def start_writer(place: str, writer: int, count: int | None = None) -> subprocess.Popen[str]:
    words = [sys.executable, str(WRITER), place, str(writer)] + ([] if count is None else [str(count)])
    return subprocess.Popen(words, stdout=subprocess.PIPE, text=True)


@pytest.fixture(params=["sqlite", "postgres"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "postgres":
        url: str = request.getfixturevalue("database")
        return url
    return str(tmp_path / "answers.db")


def test_a_killed_process_loses_at_most_what_it_was_writing(place: str) -> None:
    for writer, num_before in enumerate((1, 7, 23)):
        process = start_writer(place, writer)
        assert process.stdout is not None
        stored = -1
        while stored < num_before:
            stored = int(process.stdout.readline())
        os.kill(process.pid, signal.SIGKILL)
        rest = process.stdout.read().splitlines()
        process.stdout.close()
        process.wait()
        stored = max([stored, *(int(line) for line in rest if line)])
        store = open_store(place)
        for number in range(stored + 1):
            assert store.get("exact", key_of(writer, number), 1_000) == entry_of(writer, number)
        # What it was writing is there as a whole, or not at all; nothing after it is.
        last = store.get("exact", key_of(writer, stored + 1), 1_000)
        assert last in (Absent("absent"), entry_of(writer, stored + 1))
        assert store.get("exact", key_of(writer, stored + 2), 1_000) == Absent("absent")
        counted = sum(use.num_entries for use in store.uses())
        assert counted == len(store.scan("exact", bytes(32), 0, 100_000, 1_000))
        store.close()


def test_sixteen_processes_on_one_store(place: str) -> None:
    processes = [start_writer(place, writer, 6) for writer in range(16)]
    store = open_store(place)
    while any(process.poll() is None for process in processes):  # and one that reads meanwhile
        for entry in store.scan("exact", bytes(32), 0, 100_000, 1_000):
            assert entry.value == entry.key * 600
    for process in processes:
        assert process.stdout is not None
        process.stdout.close()
        assert process.returncode == 0
    for writer in range(16):
        for number in range(6):
            assert store.get("exact", key_of(writer, number), 1_000) == entry_of(writer, number)
    assert [use.num_entries for use in store.uses()] == [96]
    store.close()


# What somebody, or a failing disk, may do to a row. %s is where a value goes.
DAMAGES = {
    "cut short": "UPDATE {table} SET value = substr(value, 1, 40)",
    "emptied": "UPDATE {table} SET value = substr(value, 1, 0)",
    "turned into another's": "UPDATE {table} SET value = (SELECT value FROM {table} WHERE key = {other})",
    "moved to another key": "UPDATE {table} SET key = {third} WHERE key = {one}",
    "given to another tenant": "UPDATE {table} SET tenant = 'b3:00000000000000000000000000000000'",
    "made younger": "UPDATE {table} SET stored_ms = stored_ms + 1",
    "made to live longer": "UPDATE {table} SET expires_ms = 9000000000",
    "taught otherwise": "UPDATE {table} SET meta = {other}",
    "given another space": "UPDATE {table} SET space = {other}",
    "given another vector": "UPDATE {table} SET vector = {other}",
    "given another sum": "UPDATE {table} SET checksum = {other}",
}


@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
@pytest.mark.parametrize("secret", [None, "sesame"])
def test_damaged_rows_are_misses(
    kind: str, secret: str | None, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    one, other, third = (bytes([number]) * 32 for number in (1, 2, 3))
    url = request.getfixturevalue("database") if kind == "postgres" else ""
    path = tmp_path / "answers.db"

    def reopened() -> SqliteStore | PostgresStore:
        if kind == "postgres":
            return PostgresStore(url, limits=Limits(), now_ms=1_000, envelope=Envelope(secret))
        return SqliteStore(path, limits=Limits(), now_ms=1_000, envelope=Envelope(secret))

    def damage(statement: str) -> None:
        if kind == "postgres":
            with psycopg.connect(url, autocommit=True) as connection:
                named = {"one": one, "other": other, "third": third}
                marks = {name: f"'\\x{value.hex()}'::bytea" for name, value in named.items()}
                connection.execute(statement.format(table="ostinato_entries", **marks))
            return
        raw = sqlite3.connect(path)
        named = {"one": one, "other": other, "third": third}
        marks = {name: f"x'{value.hex()}'" for name, value in named.items()}
        with raw:
            raw.execute(statement.format(table="entries", **marks))
        raw.close()

    store = reopened()
    for name, statement in DAMAGES.items():
        store.purge(Selection(), 1_000)
        store.put([Entry("exact", each, bytes(32), each * 50, 1_000) for each in (one, other)], 1_000)
        damage(statement)
        found = store.get("exact", third if name == "moved to another key" else one, 1_000)
        assert isinstance(found, Absent), name
        assert found.reason == "corrupt", name
        assert store.get_many("exact", [one], 1_000) == {}, name
        assert all(each.key != one for each in store.scan("exact", bytes(32), 0, 9, 1_000)), name
        assert found.seq is not None
        store.drop([found.seq])
        store.put([Entry("exact", one, bytes(32), b"again", 1_000)], 1_000)
        assert isinstance(store.get("exact", one, 1_000), Entry), name
    store.close()


def test_rows_of_other_types_are_misses(tmp_path: Path) -> None:
    path = tmp_path / "answers.db"
    store = SqliteStore(path, limits=Limits(), now_ms=1_000)
    raw = sqlite3.connect(path)
    for column in ("space", "tenant", "meta", "vector", "value", "checksum", "stored_ms"):
        for value in (b"\xff\xfe", "text", 1.5, 7):
            store.put([entry_of(0, 0)], 1_000)
            with raw:
                raw.execute(f"UPDATE entries SET {column} = ?", (value,))
            found = store.get("exact", key_of(0, 0), 1_000)
            assert isinstance(found, Absent), (column, value)
            assert found.reason == "corrupt"
    with raw:  # also where the books are wrong, limits hold again
        raw.execute("UPDATE uses SET bytes = 1000000000000")
    raw.close()
    tight = SqliteStore(path, limits=Limits(max_bytes=100_000), now_ms=1_000)
    for number in range(20):
        assert tight.put([entry_of(1, number)], 1_000) == 1
    assert sum(use.num_bytes for use in tight.uses()) <= 100_000
    tight.close()
    store.close()


def test_a_file_that_is_damaged_as_a_whole_says_so(tmp_path: Path) -> None:
    path = tmp_path / "answers.db"
    store = SqliteStore(path, limits=Limits(), now_ms=1_000)
    for number in range(50):
        store.put([entry_of(0, number)], 1_000)
    store.close()
    data = bytearray(path.read_bytes())
    data[5_000:-5_000] = os.urandom(len(data) - 10_000)
    path.write_bytes(data)
    with pytest.raises(StoreError):
        broken = SqliteStore(path, limits=Limits(), now_ms=1_000)
        for number in range(50):
            broken.get("exact", key_of(0, number), 1_000)
    other = tmp_path / "other.db"
    with sqlite3.connect(other) as raw:
        raw.execute("PRAGMA user_version = 77")
    raw.close()
    with pytest.raises(StoreError, match="version 77"):
        SqliteStore(other, limits=Limits(), now_ms=1_000)


def test_what_is_removed_is_overwritten_and_the_file_is_its_owners(tmp_path: Path) -> None:
    path = tmp_path / "answers.db"
    store = SqliteStore(path, limits=Limits(), now_ms=1_000)
    secret = b"what only two of us should know " * 40
    store.put([Entry("exact", bytes([1]) * 32, bytes(32), secret, 1_000)], 1_000)

    def is_there() -> bool:
        return any(secret[:64] in file.read_bytes() for file in tmp_path.iterdir())

    assert is_there()
    assert store.forget(bytes([1]) * 32) == Removed(1, 256 + len(secret))
    assert not is_there()
    for file in tmp_path.iterdir():
        assert file.stat().st_mode & 0o077 == 0, file
    store.close()
    sealed = SqliteStore(path, limits=Limits(), now_ms=1_000, envelope=Envelope("sesame"))
    sealed.put([Entry("exact", bytes([1]) * 32, bytes(32), secret, 1_000, meta=secret)], 1_000)
    assert not is_there()
    sealed.close()


def test_a_database_that_is_away_is_an_error_soon(database: str) -> None:
    store = PostgresStore(database, limits=Limits(), now_ms=1_000)
    store.put([entry_of(0, 0)], 1_000)
    with psycopg.connect(database, autocommit=True) as connection:
        connection.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
            " WHERE datname = current_database() AND pid != pg_backend_pid()"
        )
    for _ in range(20):  # connections that were cut are replaced
        try:
            found = store.get("exact", key_of(0, 0), 1_000)
            break
        except StoreError:
            continue
    assert found == entry_of(0, 0)
    store.close()
    with pytest.raises(StoreError):
        store.get("exact", key_of(0, 0), 1_000)
    with pytest.raises(StoreError):
        PostgresStore("postgresql://127.0.0.1:1/none", limits=Limits(), now_ms=1_000)
