"""Files that vanish, disks that fail and other versions, while the store is in use: misses, nothing else."""

from __future__ import annotations

import errno
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tier_cases import chain, payload, pieces

from ostinato.kv.tiers.base import Found, Miss, Outcome, Status
from ostinato.kv.tiers.shared import SharedTier

SLOT, SLOTS = 3000, 20
KEYS = chain(3, SLOTS)

OTHER_PROCESS = """
import sys
from pathlib import Path
from tier_cases import chain, payload, pieces
from ostinato.kv.tiers.shared import SharedTier

store = SharedTier.open(Path(sys.argv[1]), slot_bytes=3000, capacity_bytes=60000, version=int(sys.argv[2]))
for order in sys.stdin:
    what, seed = order.split()
    num = 0
    for key in chain(int(seed), 20):
        if what == "store":
            num += store.store(key, pieces(payload(key, 3000))).value == "stored"
        else:
            into = memoryview(bytearray(3000))
            if store.load(key, into):
                assert bytes(into) == payload(key, 3000), "wrong bytes were served"
                num += 1
    if what == "drop":
        num = store.drop_stale()
    print(num, flush=True)
store.close()
"""


class OtherProcess:
    """Has the same store open, and does as it is told."""

    def __init__(self, folder: Path, version: int) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", OTHER_PROCESS, str(folder), str(version)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])},
        )

    def do(self, what: str, seed: int = 0) -> int:
        """Stores, loads or drops; returns how many blocks."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{what} {seed}\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        assert answer, "the other process ended"
        return int(answer)

    def end(self) -> None:
        self._process.communicate()
        assert self._process.returncode == 0


@contextmanager
def other_process(folder: Path, version: int = 1) -> Iterator[OtherProcess]:
    process = OtherProcess(folder, version)
    try:
        yield process
    finally:
        process.end()


def open_store(folder: Path, version: int = 1) -> SharedTier:
    return SharedTier.open(folder, slot_bytes=SLOT, capacity_bytes=SLOT * SLOTS, version=version)


def store_all(store: SharedTier, seed: int = 3) -> list[Outcome]:
    return [store.store(key, pieces(payload(key, SLOT))) for key in chain(seed, SLOTS)]


def load_all(store: SharedTier, seed: int = 3) -> int:
    """How many blocks are served; each of them right."""
    num_hits = 0
    for key in chain(seed, SLOTS):
        into = memoryview(bytearray(SLOT))
        if store.load(key, into):
            assert bytes(into) == payload(key, SLOT), "wrong bytes were served"
            num_hits += 1
    return num_hits


def test_a_slab_deleted_under_a_running_process(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    store_all(store)
    (tmp_path / "slab").unlink()
    assert load_all(store) == SLOTS, "whoever has it open still has it"
    assert store.store(chain(4, 1)[0], pieces(b"x" * 99)) is Outcome.STORED
    store.close()
    store = open_store(tmp_path)
    assert load_all(store) == 0
    assert store.counters.misses[Miss.CORRUPT] == SLOTS - 1
    assert store_all(store) == [Outcome.STORED] * SLOTS
    assert load_all(store) == SLOTS
    store.close()


def test_an_index_deleted_while_nobody_looked(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    store_all(store)
    store.close()
    shutil.rmtree(tmp_path / "index")
    store = open_store(tmp_path)
    assert store.lookup(KEYS) == Found(0, Status.MISS)
    assert store_all(store) == [Outcome.STORED] * SLOTS
    assert load_all(store) == SLOTS
    store.close()


def test_an_index_deleted_under_running_processes(tmp_path: Path) -> None:
    """Two indexes over one slab then: everybody overwrites the other's slots, and nobody believes them."""
    store = open_store(tmp_path)
    store_all(store)
    shutil.rmtree(tmp_path / "index")
    with other_process(tmp_path) as other:
        assert other.do("load", 3) == 0
        assert other.do("store", 5) == SLOTS
        assert load_all(store) == 0
        assert store.counters.misses[Miss.CORRUPT] == SLOTS
        store_all(store)
        assert load_all(store) == SLOTS
        assert other.do("load", 5) == 0
    store.close()


def test_a_folder_deleted_under_running_processes(tmp_path: Path) -> None:
    folder = tmp_path / "tier"
    store = open_store(folder)
    with other_process(folder) as old:
        store_all(store)
        assert old.do("load", 3) == SLOTS
        shutil.rmtree(folder)
        assert old.do("load", 3) == SLOTS
        assert old.do("store", 4) == SLOTS
        assert load_all(store, 4) == SLOTS
        with other_process(folder) as new:
            assert new.do("load", 4) == 0, "the new folder is nobody's copy"
            assert new.do("store", 6) == SLOTS
            assert load_all(store, 6) == 0
            assert load_all(store, 4) == SLOTS
    store.close()


def test_two_versions_at_once(tmp_path: Path) -> None:
    """As when servers are renewed one after the other: no block of the other's, and the lower ones go."""
    old = open_store(tmp_path, version=1)
    store_all(old, 3)
    with other_process(tmp_path, version=2) as new:
        assert new.do("load", 3) == 0
        assert load_all(old, 3) == SLOTS, "looked at by the new one, and left alone"
        assert new.do("drop") == SLOTS
        assert load_all(old, 3) == 0
        assert new.do("store", 3) == SLOTS
        assert load_all(old, 3) == 0
        assert set(store_all(old, 3)) == {Outcome.KNOWN}, "a lower version does not replace a higher one's"
        assert old.drop_stale() == 0
        assert new.do("load", 3) == SLOTS
        # What the lower one still computes takes turns with the rest, and goes with the next round.
        assert store_all(old, 7)[0] is Outcome.STORED
        assert new.do("load", 7) == 0
    old.close()


@pytest.mark.parametrize("code", [errno.EIO, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.EACCES])
def test_what_the_disk_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    """Permissions and room lost, disks failing: reads are misses, writes not stored, and it comes back."""
    store = open_store(tmp_path)
    half = [store.store(key, pieces(payload(key, SLOT))) for key in KEYS[:10]]
    assert set(half) == {Outcome.STORED}

    def fails(*_: object) -> int:
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as disk:
        disk.setattr(os, "preadv", fails)
        disk.setattr(os, "pwrite", fails)
        assert load_all(store) == 0
        assert [store.store(key, pieces(payload(key, SLOT))) for key in KEYS[10:]] == [Outcome.FULL] * 10
    assert store.counters.misses[Miss.IO_ERROR] == 10
    assert load_all(store) == 10, "an error of the disk is no damage to the block"
    assert [store.store(key, pieces(payload(key, SLOT))) for key in KEYS[10:]] == [Outcome.STORED] * 10
    assert load_all(store) == SLOTS
    found = store.check_integrity()
    assert (found.num_ready, found.num_writing) == (SLOTS, 0)
    store.close()


def test_a_limit_on_the_size_of_files(tmp_path: Path) -> None:
    """The real thing: the kernel refuses to write behind a limit."""
    size = 64 << 10
    store = SharedTier.open(tmp_path, slot_bytes=size, capacity_bytes=size * SLOTS)

    def store_large() -> list[Outcome]:
        return [store.store(key, pieces(payload(key, size))) for key in KEYS]

    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size * 7 + 100, hard))
    try:
        outcomes = store_large()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    # A write that failed gives its slot back, and the next block tries the same one.
    assert 5 <= outcomes.count(Outcome.STORED) <= 7
    assert set(outcomes) == {Outcome.STORED, Outcome.FULL}
    into = memoryview(bytearray(size))
    assert [store.load(key, into) for key in KEYS] == [outcome is Outcome.STORED for outcome in outcomes]
    assert set(store_large()) == {Outcome.STORED, Outcome.KNOWN}
    for key in KEYS:
        assert store.load(key, into)
        assert bytes(into) == payload(key, size)
    found = store.check_integrity()
    assert (found.num_ready, found.num_writing, found.num_bad_payloads) == (SLOTS, 0, 0)
    store.close()


def test_a_bit_flips_while_the_store_is_in_use(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    blocks = [payload(key, SLOT) for key in KEYS]
    store_all(store)
    slab = (tmp_path / "slab").read_bytes()
    with (tmp_path / "slab").open("r+b") as file:
        for place in (0, 7, 19):
            at = slab.index(blocks[place]) + SLOT - 1 - place
            file.seek(at)
            file.write(bytes([slab[at] ^ 0x10]))
    assert load_all(store) == SLOTS - 3
    assert store.counters.misses[Miss.CORRUPT] == 3
    assert store.lookup(KEYS).num_hits == 0, "the root is one of them"
    assert store.store(KEYS[0], pieces(blocks[0])) is Outcome.STORED
    assert store.lookup(KEYS).num_hits == 7
    store.close()
