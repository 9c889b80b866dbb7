"""Damage, truncation, a full disk, no permission, foreign files: counted misses, or a clear error at open."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from tier_cases import NAMESPACE, chain, payload, pieces

from ostinato.errors import TierError
from ostinato.kv.terms import Selection
from ostinato.kv.tiers.base import Found, Miss, Outcome, Status
from ostinato.kv.tiers.shared import SharedTier
from ostinato.kv.tiers.slab import is_in_memory

SLOT, SLOTS = 3000, 20
KEYS = chain(3, 20)


def open_store(folder: Path, version: int = 1) -> SharedTier:
    return SharedTier.open(folder, slot_bytes=SLOT, capacity_bytes=SLOT * SLOTS, version=version)


def fill(store: SharedTier) -> None:
    for key in KEYS:
        assert store.store(key, pieces(payload(key, SLOT))) is Outcome.STORED


def load_all(store: SharedTier) -> int:
    """How many blocks are served; each of them right."""
    num_hits = 0
    for key in KEYS:
        into = memoryview(bytearray(SLOT))
        if store.load(key, into):
            assert bytes(into) == payload(key, SLOT), "wrong bytes were served"
            num_hits += 1
    return num_hits


@pytest.fixture(params=["disk", "memory"])
def any_folder(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """The slab is mapped in one and read by position in the other."""
    if request.param == "disk":
        yield tmp_path
        return
    if not is_in_memory(Path("/dev/shm")):
        pytest.skip("needs a file system in memory at /dev/shm")
    folder = Path(tempfile.mkdtemp(dir="/dev/shm"))
    yield folder
    shutil.rmtree(folder)


def test_a_truncated_slab_is_counted_misses_also_while_it_is_open(any_folder: Path) -> None:
    tmp_path = any_folder
    store = open_store(tmp_path)
    fill(store)
    os.truncate(tmp_path / "slab", SLOT * 10 + 5)
    assert load_all(store) == 10
    assert store.counters.misses[Miss.CORRUPT] == 10
    fill_again = [store.store(key, pieces(payload(key, SLOT))) for key in KEYS[10:]]
    assert fill_again == [Outcome.STORED] * 10
    assert load_all(store) == 20
    store.close()
    os.truncate(tmp_path / "slab", 0)
    store = open_store(tmp_path)
    assert load_all(store) == 0
    assert store.use().num_blocks == 0, "what is damaged is forgotten"
    store.close()


@pytest.mark.parametrize("seed", range(30))
def test_damage_anywhere_is_never_served_and_never_fatal(tmp_path: Path, seed: int) -> None:
    store = open_store(tmp_path)
    fill(store)
    store.close()
    rng = random.Random(seed)
    name = ["index/data.mdb", "index/lock.mdb", "slab", "ranks", "tier.json"][seed % 5]
    data = bytearray((tmp_path / name).read_bytes())
    if seed % 3 == 0:
        del data[rng.randrange(len(data)) :]
    else:
        for _ in range(rng.choice([1, 40])):
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    (tmp_path / name).write_bytes(data)
    try:
        store = open_store(tmp_path)
    except TierError:
        return  # which folder, and what to do, is looked at below
    load_all(store)
    for key in chain(4, 50):
        assert store.store(key, pieces(payload(key, SLOT))) is Outcome.STORED
    found = store.check_integrity()
    assert found.num_ready == SLOTS
    assert found.num_bad_payloads == found.num_bad_records == 0
    store.close()


def test_a_damaged_index_is_made_anew(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    fill(store)
    store.close()
    os.truncate(tmp_path / "index" / "data.mdb", 9000)
    store = open_store(tmp_path)
    assert store.rebuilt is not None
    assert store.rebuilt.startswith("its index was damaged")
    assert store.lookup(KEYS) == Found(0, Status.MISS)
    fill(store)
    assert load_all(store) == SLOTS
    store.close()


def test_a_record_of_another_content_is_a_counted_miss(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    fill(store)
    into = memoryview(bytearray(SLOT))
    key = KEYS[4]
    for wrong in (
        replace(key, tokens=key.tokens[::-1]),
        replace(key, parent=KEYS[7].hash),
        replace(key, namespace=bytes(32)),
    ):
        assert store.lookup([wrong]) == Found(0, Status.MISS)
        assert not store.load(wrong, into)
    assert not store.load(key, into[:-1])
    assert store.counters.misses[Miss.MISMATCH] == 4
    assert store.load(key, into)
    store.close()


def test_versions_do_not_see_each_other_and_the_higher_drops_the_lower(tmp_path: Path) -> None:
    store = open_store(tmp_path, version=1)
    fill(store)
    store.close()
    store = open_store(tmp_path, version=2)
    assert store.lookup(KEYS) == Found(0, Status.MISS)
    assert not store.load(KEYS[0], memoryview(bytearray(SLOT)))
    assert store.store(KEYS[0], pieces(payload(KEYS[0], SLOT))) is Outcome.STORED
    assert store.use().num_blocks == SLOTS
    assert store.drop_stale(limit=5) == 5
    assert store.drop_stale() == SLOTS - 6
    assert store.drop_stale() == 0
    assert store.lookup(KEYS) == Found(1, Status.MISS)
    store.close()
    store = open_store(tmp_path, version=1)
    assert store.lookup(KEYS) == Found(0, Status.MISS)
    assert store.drop_stale() == 0, "the lower version leaves the higher one's blocks alone"
    assert store.use().num_blocks == 1
    store.close()


def test_leaves_go_before_roots(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    for key in KEYS:
        store.store(key, pieces(payload(key, SLOT)))
    store.touch(KEYS)
    for key in chain(9, 6):
        assert store.store(key, pieces(payload(key, SLOT))) is Outcome.STORED
    assert store.lookup(KEYS) == Found(14, Status.MISS)
    store.close()


def test_foreign_folders_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("important")
    with pytest.raises(TierError, match=r"thesis\.tex"):
        open_store(tmp_path)
    assert os.listdir(tmp_path) == ["thesis.tex"]  # noqa: PTH208
    (tmp_path / "file").write_text("")
    with pytest.raises(TierError, match="cannot be opened"):
        open_store(tmp_path / "file")


@pytest.mark.skipif(os.geteuid() != 0, reason="needs to become another user")
def test_without_permission_opening_says_so(tmp_path: Path) -> None:
    folder = tmp_path / "tier"
    open_store(folder).close()
    assert (folder / "slab").stat().st_mode & 0o077 == 0, "KV is private"
    assert (folder / "index" / "data.mdb").stat().st_mode & 0o077 == 0
    for above in (tmp_path, *tmp_path.parents[:3]):
        above.chmod(above.stat().st_mode | 0o055)
    os.seteuid(65534)
    try:
        with pytest.raises(TierError, match="Permission denied"):
            open_store(folder)
    finally:
        os.seteuid(0)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    mount = shutil.which("mount")
    folder = tmp_path / "disk"
    folder.mkdir()
    command = [mount or "mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)]
    if mount is None or os.geteuid() != 0 or subprocess.run(command, check=False).returncode != 0:
        pytest.skip("needs to mount a file system")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_full_disk_drops_blocks_and_nothing_else(small_disk: Path) -> None:
    size = 64 << 10
    store = SharedTier.open(small_disk / "tier", slot_bytes=size, capacity_bytes=100 * size)
    keys = chain(1, 40)
    outcomes = [store.store(key, pieces(payload(key, size))) for key in keys]
    assert set(outcomes) == {Outcome.STORED, Outcome.FULL}
    assert outcomes.count(Outcome.STORED) >= 8
    into = memoryview(bytearray(size))
    for key, outcome in zip(keys, outcomes, strict=True):
        assert store.load(key, into) == (outcome is Outcome.STORED)
        assert outcome is Outcome.FULL or bytes(into) == payload(key, size)
    store.close()
    store = SharedTier.open(small_disk / "tier", slot_bytes=size, capacity_bytes=100 * size)
    found = store.check_integrity()
    assert found.num_ready == outcomes.count(Outcome.STORED)
    assert found.num_bad_payloads == found.num_bad_records == 0
    assert found.num_writing <= 1, "to forget a block takes a page of the index"
    store.close()
    subprocess.run(["mount", "-o", "remount,size=4m", str(small_disk)], check=True)
    store = SharedTier.open(small_disk / "tier", slot_bytes=size, capacity_bytes=100 * size)
    assert store.check_integrity().num_writing == 0
    assert all(store.store(key, pieces(payload(key, size))) is Outcome.STORED for key in chain(2, 20))
    store.close()


def test_a_disk_without_room_for_the_store_is_an_error_at_open(small_disk: Path) -> None:
    with (small_disk / "ballast").open("wb") as file, pytest.raises(OSError):
        while True:
            file.write(b"x" * 65536)
            file.flush()
    with pytest.raises(TierError):
        open_store(small_disk / "tier")


def test_threads_share_a_store(any_folder: Path) -> None:
    store = open_store(any_folder)
    chains = [chain(seed, 8, replace(NAMESPACE, salt=str(seed))) for seed in range(6)]
    failures: list[BaseException] = []

    def work(seed: int) -> None:
        rng = random.Random(seed)
        try:
            for _ in range(150):
                keys = rng.choice(chains)
                for key in keys:
                    store.store(key, pieces(payload(key, SLOT)))
                for key in keys[: store.lookup(keys).num_hits]:
                    into = memoryview(bytearray(SLOT))
                    assert not store.load(key, into) or bytes(into) == payload(key, SLOT)
                if rng.random() < 0.05:
                    store.purge(Selection(tenant=keys[0].origin.tenant))
        except BaseException as error:  # noqa: BLE001 - raised in the test's own thread
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures[0]
    assert store.counters.misses[Miss.CORRUPT] == 0
    found = store.check_integrity()
    assert found.num_writing == found.num_bad_payloads == 0
    store.close()


def test_of_several_stored_at_once_each_has_its_own_outcome(any_folder: Path) -> None:
    store = open_store(any_folder)
    assert store.store(KEYS[1], pieces(payload(KEYS[1], SLOT))) is Outcome.STORED
    order = [KEYS[0], KEYS[1], KEYS[2], KEYS[2]]
    outcomes = store.store_all([(key, pieces(payload(key, SLOT))) for key in order])
    assert outcomes == [Outcome.STORED, Outcome.KNOWN, Outcome.STORED, Outcome.PENDING]
    assert store.lookup(KEYS) == Found(3, Status.MISS)
    assert load_all(store) == 3
    # More at once than there are slots: those that are being written are nobody's victims.
    others = chain(9, SLOTS + 3)
    outcomes = store.store_all([(key, pieces(payload(key, SLOT))) for key in others])
    assert outcomes == [Outcome.STORED] * SLOTS + [Outcome.FULL] * 3
    assert store.check_integrity().num_ready == SLOTS
    store.close()
