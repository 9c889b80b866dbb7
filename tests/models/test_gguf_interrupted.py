"""A conversion that is killed, doubled or starved of room leaves a whole model or none."""

from __future__ import annotations

import os
import random
import resource
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from recorder import Recorder
from zygote import Zygote

from ostinato.errors import StorageFullError
from ostinato.models.fetch import fetch
from ostinato.models.store import ModelStore
from ostinato.models.weights_file import ResumableWriter, layout_of


@pytest.fixture(scope="module")
def expected_digest(tiny_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    return fetch(str(tiny_gguf), ModelStore(tmp_path_factory.mktemp("whole"))).weights_digest


def test_killed_at_random_moments(
    zygote: Zygote, tiny_gguf: Path, store: ModelStore, tmp_path: Path, expected_digest: str
) -> None:
    """Killed again and again, it goes on; what is visible in between is whole; the end is the same."""
    moments = random.Random(7)
    began_s = time.perf_counter()
    zygote.wait(zygote.start(str(tiny_gguf), tmp_path / "undisturbed", tmp_path, delay_s=0.002))
    whole_s = time.perf_counter() - began_s
    killed, continued = 0, 0
    for attempt in range(24):
        job = zygote.start(str(tiny_gguf), store.root, tmp_path, delay_s=0.002)
        if attempt % 6 < 5:  # every sixth may finish
            time.sleep(moments.uniform(0.0, whole_s))
            if not job.outcome_path.exists():
                os.kill(job.pid, signal.SIGKILL)
        status = zygote.wait(job)
        visible = store.list_models()
        for stored in visible:
            assert store.verify(stored.key).weights_digest == expected_digest
        if status == 0:
            assert job.outcome()["digest"] == expected_digest
            continued += any("Going on" in note for note in job.outcome()["notes"])
            store.remove(visible[0].key)
        else:
            assert os.WTERMSIG(status) == signal.SIGKILL, "it may only have died of our signal"
            killed += 1
    assert killed >= 3, "it was hardly ever killed: the test shows nothing"
    assert continued >= 1, "no conversion was ever continued: the test shows nothing"


def test_killed_between_every_two_tensors(
    zygote: Zygote, tiny_gguf: Path, store: ModelStore, tmp_path: Path, expected_digest: str
) -> None:
    """Progress is never lost: with a kill after a few tensors each time, it still arrives."""
    for _ in range(60):
        before = journal_lines(store)
        job = zygote.start(str(tiny_gguf), store.root, tmp_path, delay_s=0.002)
        while journal_lines(store) < before + 8 and not job.outcome_path.exists():
            time.sleep(0.002)
        if job.outcome_path.exists():
            assert zygote.wait(job) == 0
            assert any("Going on" in note for note in job.outcome()["notes"])
            assert job.outcome()["digest"] == expected_digest
            return
        os.kill(job.pid, signal.SIGKILL)
        zygote.wait(job)
        assert store.list_models() == []
    pytest.fail("sixty runs of eight tensors did not finish some fifty tensors")


def journal_lines(store: ModelStore) -> int:
    journals = list(store.root.glob(".staging/*/journal"))
    return sum(path.read_bytes().count(b"\n") for path in journals if path.exists())


def test_two_processes_at_once(
    zygote: Zygote, tiny_gguf: Path, store: ModelStore, tmp_path: Path, expected_digest: str
) -> None:
    jobs = [zygote.start(str(tiny_gguf), store.root, tmp_path, delay_s=0.01) for _ in range(3)]
    assert [zygote.wait(job) for job in jobs] == [0, 0, 0]
    outcomes = [job.outcome() for job in jobs]
    assert {outcome["digest"] for outcome in outcomes} == {expected_digest}
    converted = [o for o in outcomes if any(s.startswith("Converting") for s in o["steps"])]
    assert len(converted) == 1
    waited = [o for o in outcomes if any("Another process" in note for note in o["notes"])]
    assert len(waited) == 2
    assert len(store.list_models()) == 1
    assert list(store.root.glob(".staging/*")) == []


# ---------------------------------------------------------------- no room


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of a few megabytes."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=12m", "tmpfs", str(folder)]
    if shutil.which("mount") is None or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("mounting a small file system is not allowed here")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


class Filler(Recorder):
    """Fills the disk to the last byte when the conversion begins, after room was asked for."""

    def __init__(self, path: Path, leave_bytes: int) -> None:
        super().__init__()
        self._path = path
        self._leave_bytes = leave_bytes

    def start(self, description: str, total_bytes: int | None) -> None:
        super().start(description, total_bytes)
        if description.startswith("Converting"):
            free_bytes = shutil.disk_usage(self._path.parent).free
            self._path.write_bytes(bytes(free_bytes - self._leave_bytes))


def test_disk_full_before_the_work(small_disk: Path, tiny_gguf: Path) -> None:
    store = ModelStore(small_disk / "store")
    filler = small_disk / "filler"
    filler.write_bytes(bytes(shutil.disk_usage(small_disk).free - (4 << 20)))
    with pytest.raises(StorageFullError, match=r"needs 5 MB in .* only 4 MB are free"):
        fetch(str(tiny_gguf), store)
    assert store.list_models() == []
    assert list(store.root.glob(".staging/*")) == []


def test_disk_full_in_the_middle(small_disk: Path, tiny_gguf: Path, expected_digest: str) -> None:
    store = ModelStore(small_disk / "store")
    filler = Filler(small_disk / "filler", leave_bytes=200_000)
    with pytest.raises(StorageFullError, match=r"ran out of room in .*No space left on device"):
        fetch(str(tiny_gguf), store, progress=filler)
    assert store.list_models() == []
    assert list(store.root.glob(".staging/*")) == [], "what was begun must give its room back"
    (small_disk / "filler").unlink()
    assert fetch(str(tiny_gguf), store).weights_digest == expected_digest


def test_file_size_limit(tiny_gguf: Path, store: ModelStore, expected_digest: str) -> None:
    """A quota of another kind: the system refuses a file to grow further."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, hard))
    try:
        with pytest.raises(StorageFullError, match="File too large"):
            fetch(str(tiny_gguf), store)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert store.list_models() == []
    assert fetch(str(tiny_gguf), store).weights_digest == expected_digest


# ---------------------------------------------------------------- the file that can be continued

SHAPES = {"a": (3, 5), "b": (7,), "c": (2, 2, 2), "d": (1,)}


def tensors() -> dict[str, np.ndarray]:
    random_values = np.random.default_rng(3)
    return {n: random_values.standard_normal(s).astype(np.float32) for n, s in SHAPES.items()}


def write(folder: Path, identity: str = "b3:x", *, stop_after: int | None = None) -> int:
    """Write the remaining tensors, at most ``stop_after`` of them; returns how many were there before."""
    values = tensors()
    with ResumableWriter(folder / "w.safetensors", folder / "journal", layout_of(SHAPES), identity) as writer:
        found = writer.num_done
        names = list(SHAPES)[found:]
        for name in names if stop_after is None else names[:stop_after]:
            writer.write(name, values[name])
        if writer.num_done == len(SHAPES):
            writer.finish()
    return found


def assert_whole(folder: Path) -> None:
    from safetensors.numpy import load_file

    loaded = load_file(folder / "w.safetensors")
    assert {n: v.tobytes() for n, v in loaded.items()} == {n: v.tobytes() for n, v in tensors().items()}


@pytest.mark.parametrize("num_done", range(5))
def test_writer_goes_on_where_it_stopped(num_done: int, tmp_path: Path) -> None:
    assert write(tmp_path, stop_after=num_done) == 0
    assert write(tmp_path) == num_done
    assert_whole(tmp_path)


def test_writer_believes_no_torn_journal(tmp_path: Path) -> None:
    """Whatever prefix of the journal reached the disk, the result is whole."""
    write(tmp_path, stop_after=3)
    journal = (tmp_path / "journal").read_bytes()
    data = (tmp_path / "w.safetensors").read_bytes()
    for length in range(len(journal) + 1):
        (tmp_path / "journal").write_bytes(journal[:length])
        (tmp_path / "w.safetensors").write_bytes(data)
        found = write(tmp_path)
        assert found <= journal[:length].count(b"\n") or length in _line_ends(journal)
        assert_whole(tmp_path)


def _line_ends(journal: bytes) -> set[int]:
    """Lengths at which the last line lacks nothing but its newline."""
    return {i for i, byte in enumerate(journal) if byte == ord("\n")}


def test_writer_believes_no_lost_bytes(tmp_path: Path) -> None:
    """Whatever part of the file did not reach the disk, the result is whole."""
    write(tmp_path, stop_after=3)
    journal = (tmp_path / "journal").read_bytes()
    data = (tmp_path / "w.safetensors").read_bytes()
    for length in range(0, len(data) + 1, 11):
        for lost in (data[:length], data[:length] + bytes(len(data) - length)):
            (tmp_path / "journal").write_bytes(journal)
            (tmp_path / "w.safetensors").write_bytes(lost)
            write(tmp_path)
            assert_whole(tmp_path)


def test_writer_starts_afresh_for_another_source(tmp_path: Path) -> None:
    write(tmp_path, "b3:one", stop_after=2)
    assert write(tmp_path, "b3:two") == 0
    assert_whole(tmp_path)
