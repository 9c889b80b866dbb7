"""Processes that share a store, die in it, or bring other sizes and versions."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tier_cases import chain, payload, pieces

from ostinato.errors import TierError
from ostinato.kv.tiers.base import Outcome
from ostinato.kv.tiers.shared import SharedTier
from ostinato.kv.tiers.slab import is_in_memory

DRIVER = Path(__file__).parent / "crash_driver.py"


def start(*arguments: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, str(DRIVER), *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def result_of(process: subprocess.Popen[str], timeout_s: float) -> dict[str, int]:
    output, errors = process.communicate(timeout=timeout_s)
    assert process.returncode == 0, errors
    result: dict[str, int] = json.loads(output.splitlines()[-1])
    return result


@contextmanager
def held_open(folder: Path, slot_bytes: int, capacity_bytes: int) -> Iterator[None]:
    process = start("hold", folder, slot_bytes, capacity_bytes)
    assert process.stdout is not None
    assert process.stdout.readline() == "open\n"
    yield
    result_of(process, 30)


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


@pytest.mark.slow
def test_killed_writers_leave_no_wrong_byte_and_no_lost_slot(any_folder: Path) -> None:
    """Two hundred of them, in both ways to write."""
    result = result_of(start("crash", any_folder / "tier", 100, 20), timeout_s=300)
    assert result["rounds"] == 100
    assert result["reclaimed"] >= 10, "the kills never hit a writer in the middle of a slot"


def hammer(folder: Path, num_processes: int, seconds: float) -> None:
    processes = [start("hammer", folder, seconds, seed) for seed in range(num_processes)]
    results = [result_of(process, seconds * 5 + 60) for process in processes]
    assert all(result["stored"] and result["loaded"] and result["evicted"] for result in results), results
    # Nobody died and nothing was damaged: what is not right was overtaken, and is told from damage.
    assert sum(result["corrupt"] + result["mismatch"] + result["io_error"] for result in results) == 0, (
        results
    )


def test_processes_hammer_one_store(any_folder: Path) -> None:
    hammer(any_folder / "tier", 4, 2.0)


@pytest.mark.slow
def test_eight_processes_hammer_one_store_for_longer(tmp_path: Path) -> None:
    """``OSTINATO_STRESS_S=300`` makes it minutes."""
    hammer(tmp_path / "tier", 8, float(os.environ.get("OSTINATO_STRESS_S", "6")))


def test_a_block_stored_here_is_found_by_another_process(tmp_path: Path) -> None:
    slot = 192 << 10
    with held_open(tmp_path, slot, 16 * slot):
        store = SharedTier.open(tmp_path, slot_bytes=slot, capacity_bytes=16 * slot)
        key = chain(5, 1)[0]
        assert store.store(key, pieces(payload(key, 5000))) is Outcome.STORED
        store.close()
    with held_open(tmp_path, slot, 16 * slot):
        store = SharedTier.open(tmp_path, slot_bytes=slot, capacity_bytes=16 * slot)
        assert store.rebuilt is None
        into = memoryview(bytearray(5000))
        assert store.load(key, into)
        assert bytes(into) == payload(key, 5000)
        store.close()


def test_other_sizes_are_refused_while_in_use_and_start_anew_afterwards(tmp_path: Path) -> None:
    key = chain(1, 1)[0]
    with held_open(tmp_path, 4096, 40960):
        with pytest.raises(TierError, match="in use, and it was made for 10 slots of 4096 bytes"):
            SharedTier.open(tmp_path, slot_bytes=8192, capacity_bytes=40960)
        store = SharedTier.open(tmp_path, slot_bytes=4096, capacity_bytes=40960)
        assert store.store(key, pieces(payload(key, 99))) is Outcome.STORED
        store.close()
    store = SharedTier.open(tmp_path, slot_bytes=8192, capacity_bytes=40960)
    assert store.rebuilt == "it was made for 10 slots of 4096 bytes, format 2"
    assert store.use().num_blocks == 0
    assert (tmp_path / "slab").stat().st_size == 40960
    store.close()


def test_a_newer_format_is_left_alone_and_an_older_one_replaced(tmp_path: Path) -> None:
    SharedTier.open(tmp_path, slot_bytes=4096, capacity_bytes=40960).close()
    description = tmp_path / "tier.json"
    made = json.loads(description.read_text())
    description.write_text(json.dumps({**made, "format": made["format"] + 1}))
    with pytest.raises(TierError, match="newer version"):
        SharedTier.open(tmp_path, slot_bytes=4096, capacity_bytes=40960)
    description.write_text(json.dumps({**made, "format": 0}))
    store = SharedTier.open(tmp_path, slot_bytes=4096, capacity_bytes=40960)
    assert store.rebuilt is not None
    store.close()


def test_an_index_in_use_when_the_machine_went_down_is_not_trusted(tmp_path: Path) -> None:
    key = chain(1, 1)[0]
    store = SharedTier.open(tmp_path, slot_bytes=4096, capacity_bytes=40960)
    store.store(key, pieces(payload(key, 99)))
    store.close()
    assert not (tmp_path / "session").exists(), "a clean close leaves a trusted index"
    store = SharedTier.open(tmp_path, slot_bytes=4096, capacity_bytes=40960)
    assert store.use().num_blocks == 1
    store.close()
    (tmp_path / "session").write_text("another boot")
    store = SharedTier.open(tmp_path, slot_bytes=4096, capacity_bytes=40960)
    assert store.rebuilt == "the machine went down while it was in use"
    assert store.use().num_blocks == 0
    store.close()


def test_one_process_opens_a_store_once(tmp_path: Path) -> None:
    store = SharedTier.open(tmp_path, slot_bytes=4096, capacity_bytes=40960)
    with pytest.raises(TierError, match="already open in this process"):
        SharedTier.open(tmp_path, slot_bytes=4096, capacity_bytes=40960)
    num_files = len(os.listdir("/proc/self/fd")) if os.path.exists("/proc/self/fd") else 0  # noqa: PTH110, PTH208
    with pytest.raises(TierError):
        SharedTier.open(tmp_path, slot_bytes=4096, capacity_bytes=40960)
    if num_files:
        assert len(os.listdir("/proc/self/fd")) == num_files, "a failed open leaves no file open"  # noqa: PTH208
    store.close()
