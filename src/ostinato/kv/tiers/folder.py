"""The shared tier's folder: who uses it, whether it can be trusted, and making it anew where it cannot.

::

    tier.json   what it was made for; written last, in one step
    slab        the slots, a sparse file
    index/      LMDB: hash → record, slot → hash
    ranks       eight bytes a slot: when it was last used
    session     the boot of the machine in which the index was last written to without a sync
    opening     locked while somebody opens or closes
    writers/N   locked by process N for as long as it lives

Locks are advisory file locks, which the kernel drops with their process: nothing has to be cleaned up after
a ``kill -9``, and process numbers can be told dead or alive without asking for pids.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import lmdb
from lmdb.verify import VerifyError, verify

from ostinato.errors import TierError

from .ledger import MAX_DATABASES

FORMAT = 2
MAX_WRITERS = 256
RANK_BYTES = 8
_OURS = {"tier.json", "tier.json.new", "slab", "index", "ranks", "session", "opening", "writers"}
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True, slots=True)
class Geometry:
    """What a folder was made for."""

    format: int
    slot_bytes: int
    num_slots: int


class Folder:
    """An open folder: its files' descriptors, its LMDB environment, and this process' number in it."""

    def __init__(self, path: Path, geometry: Geometry) -> None:
        """Opens or makes it; what cannot be trusted is made anew, as long as nobody else uses it.

        Raises:
            TierError: not our folder, no permission, no room, or in use by someone it does not fit.
        """
        self.path = path
        self.geometry = geometry
        self.rebuilt: str | None = None
        self._fds: list[int] = []
        try:
            _make_folder(path)
            foreign = sorted(item.name for item in path.iterdir() if item.name not in _OURS)
            if foreign:
                raise TierError(
                    f"{path} has files of someone else in it ({foreign[0]}): give the KV tier its own folder"
                )
            (path / "writers").mkdir(mode=0o700, exist_ok=True)
            with self._opening():
                self.is_alone = not any(self.is_alive(number) for number in range(MAX_WRITERS))
                self.number = self._take_number()
                self._make_ready()
                self.environment = self._open_index()
        except OSError as error:
            self._close_files()
            raise TierError(
                f"the KV tier in {path} cannot be opened: {error.strerror}; mend it or choose another folder"
            ) from error
        except BaseException:
            self._close_files()
            raise

    def close(self) -> None:
        """Syncs the index if nobody else goes on using it, so that it is trusted after a power cut, too."""
        with suppress(OSError, lmdb.Error), self._opening():
            others = (number for number in range(MAX_WRITERS) if number != self.number)
            if not any(self.is_alive(number) for number in others):
                self.environment.sync(True)
                (self.path / "session").unlink(missing_ok=True)
        self.environment.close()
        self._close_files()

    def is_alive(self, number: int) -> bool:
        """Whether a process has this number now. Never waits."""
        try:
            fd = os.open(self.path / "writers" / str(number), os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            return False
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(fd)
        return False

    # ------------------------------------------------------------ opening

    @contextmanager
    def _opening(self) -> Iterator[None]:
        fd = os.open(self.path / "opening", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            yield
        finally:
            os.close(fd)

    def _take_number(self) -> int:
        for number in range(MAX_WRITERS):
            fd = self._open_file(f"writers/{number}")
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(self._fds.pop())
                continue
            return number
        raise TierError(f"{MAX_WRITERS} processes use the KV tier in {self.path} already")

    def _make_ready(self) -> None:
        """The files as ``geometry`` wants them."""
        found = self._read_geometry()
        if found is not None and found != self.geometry:
            why = (
                f"it was made for {found.num_slots} slots of {found.slot_bytes} bytes, format {found.format}"
            )
            if not self.is_alone:
                raise TierError(
                    f"the KV tier in {self.path} is in use, and {why}: use the same sizes or another folder"
                )
            if found.format > FORMAT:
                raise TierError(f"the KV tier in {self.path} is of a newer version: choose another folder")
            self._wipe(why)
        elif found is None and any((self.path / name).exists() for name in ("slab", "index", "ranks")):
            if not self.is_alone:
                raise TierError(f"{self.path}/tier.json is damaged while others use it: stop them first")
            self._wipe("its description was missing or damaged")
        slab_bytes = self.geometry.num_slots * self.geometry.slot_bytes
        self.slab = self._open_file("slab", slab_bytes)
        self.ranks = self._open_file("ranks", (self.geometry.num_slots + 1) * RANK_BYTES)
        if found != self.geometry:
            new = self.path / "tier.json.new"
            _write_private(new, json.dumps(asdict(self.geometry)))
            new.replace(self.path / "tier.json")

    def _read_geometry(self) -> Geometry | None:
        return read_geometry(self.path)

    def _open_file(self, name: str, size_bytes: int = 0) -> int:
        fd = os.open(self.path / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._fds.append(fd)
        if os.fstat(fd).st_size < size_bytes:
            os.ftruncate(fd, size_bytes)  # new, or truncated by someone: what is missing fails its checksum
        return fd

    def _open_index(self) -> lmdb.Environment:
        boot = _boot_id()
        session = self.path / "session"
        data = self.path / "index" / "data.mdb"
        if self.is_alone and data.exists():
            last = session.read_text(encoding="utf-8", errors="replace") if session.exists() else boot
            if boot and last != boot:
                self._wipe_index("the machine went down while it was in use")
            else:
                # LMDB trusts its pages: a damaged file could end the process. So it is looked at first.
                try:
                    problems: list[str] = verify(str(data))  # type: ignore[no-untyped-call]
                except VerifyError as error:
                    problems = [str(error)]
                if problems:
                    self._wipe_index(f"its index was damaged: {problems[0]}")
                else:
                    (self.path / "index" / "lock.mdb").unlink(missing_ok=True)  # nobody is left in it
        if boot:
            _write_private(session, boot)
        (self.path / "index").mkdir(mode=0o700, exist_ok=True)
        try:
            return self._open_environment(sync=not boot)
        except lmdb.Error as error:
            raise TierError(f"the index of the KV tier in {self.path} cannot be opened: {error}") from error

    def _open_environment(self, *, sync: bool) -> lmdb.Environment:
        return lmdb.open(
            str(self.path / "index"),
            # Far more than is used: while somebody reads, or died reading, old pages cannot be used again.
            map_size=max(64 << 20, self.geometry.num_slots * 8192),
            max_dbs=MAX_DATABASES,
            max_readers=2048,
            mode=0o600,
            sync=sync,
            metasync=sync,
        )

    def _wipe(self, why: str) -> None:
        self._wipe_index(why)
        for name in ("tier.json", "tier.json.new", "slab", "ranks", "session"):
            (self.path / name).unlink(missing_ok=True)

    def _wipe_index(self, why: str) -> None:
        self.rebuilt = why
        index = self.path / "index"
        if index.exists():
            shutil.rmtree(index)

    def _close_files(self) -> None:
        for fd in reversed(self._fds):
            os.close(fd)
        self._fds.clear()


def read_geometry(path: Path) -> Geometry | None:
    """What the store in this folder was made for; ``None`` where there is none, or no saying.

    Raises:
        OSError: it cannot be read.
    """
    try:
        found = json.loads((path / "tier.json").read_bytes())
        return Geometry(int(found["format"]), int(found["slot_bytes"]), int(found["num_slots"]))
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError):
        return None


def _make_folder(path: Path) -> None:
    """With all folders above it that are missing, for their owner only: KV tells what it was made from."""
    for missing in reversed([folder for folder in (path, *path.parents) if not folder.exists()]):
        missing.mkdir(mode=0o700, exist_ok=True)


def _write_private(path: Path, text: str) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with os.fdopen(fd, "w", encoding="utf-8") as file:
        file.write(text)


def _boot_id() -> str:
    """Names the time since the machine was started; empty where the system does not say."""
    try:
        return _BOOT_ID.read_text(encoding="ascii").strip()
    except OSError:
        return ""
