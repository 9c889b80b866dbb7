"""A process that files answers until it is stopped: ``python writer.py STORE NUMBER [COUNT]``.

Each answer tells its key, so that a reader can see whether it is whole and the right one. A line is written
once an answer is stored.
"""

from __future__ import annotations

import sys
from pathlib import Path

from blake3 import blake3

from ostinato.responses.stores.base import Entry, Limits, Store
from ostinato.responses.stores.postgres import PostgresStore
from ostinato.responses.stores.sqlite import SqliteStore

VALUE_REPEATS = 600


def key_of(writer: int, number: int) -> bytes:
    return blake3(f"{writer} {number}".encode()).digest()


def entry_of(writer: int, number: int) -> Entry:
    key = key_of(writer, number)
    return Entry("exact", key, bytes(32), key * VALUE_REPEATS, 1_000)


def open_store(place: str) -> Store:
    if place.startswith("postgresql://"):
        return PostgresStore(place, limits=Limits(), now_ms=1_000)
    return SqliteStore(Path(place), limits=Limits(), now_ms=1_000)


def main() -> None:
    place, writer = sys.argv[1], int(sys.argv[2])
    count = int(sys.argv[3]) if len(sys.argv) > 3 else None
    store = open_store(place)
    number = 0
    while count is None or number < count:
        store.put([entry_of(writer, number)], 1_000)
        found = store.get("exact", key_of(writer, number), 1_000)
        assert isinstance(found, Entry), found
        sys.stdout.write(f"{number}\n")
        sys.stdout.flush()
        number += 1
    store.close()


if __name__ == "__main__":
    main()
