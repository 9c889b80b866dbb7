"""The local store: complete models on disk, each with a manifest that says what every file must be.

Layout below the root (``$XDG_CACHE_HOME/ostinato/models`` unless configured otherwise)::

    <key>/                  one complete model, never changed after it appeared
        manifest.json       format, name, source, and size and BLAKE3 digest of every other file
        config.json model.safetensors tokenizer.json tokenizer_config.json generation_config.json …
    .staging/<key>/         a model in the making; kept after an interruption, for going on
    .staging/.trash-…/      what was removed and is being deleted
    .locks/<key>.lock       held by the process that makes or removes that model

A model becomes visible by one rename of a finished, synced folder, and vanishes by one rename. Opening it
checks size and digest of *every* file: reading the weights is part of loading anyway (the load then finds
them in memory), and the digest runs faster than the disk (538 MB: 0.12 s in memory, 0.25 s from a fast
disk). So there is no weaker mode that would trust time stamps.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from ostinato.errors import ModelCorruptError, ModelUnavailableError, ModelUnsupportedError
from ostinato.ports import Clock, SystemClock

from . import disk
from .digest import combine, digest_file
from .progress import Progress, step

_log = logging.getLogger(__name__)

MANIFEST = "manifest.json"
_FORMAT = 1
_TRASH = ".trash-"
_WEEK_S = 7 * 24 * 3600.0


@dataclass(frozen=True, slots=True)
class LocalModel:
    """A model on this machine, checked and ready to load without a network.

    ``name`` is what users call it and the server lists; ``path`` the folder with ``config.json``,
    ``*.safetensors`` and ``tokenizer.json``; ``weights_digest`` (``b3:…``) covers the content of the weight
    files and of ``config.json``; ``source`` says where it came from.
    """

    name: str
    path: Path
    weights_digest: str
    source: str


@dataclass(frozen=True, slots=True)
class StoredModel:
    """A model in the store as its manifest describes it; ``key`` names its folder and is unique."""

    model: LocalModel
    key: str
    size_bytes: int


@dataclass(frozen=True, slots=True)
class FileEntry:
    size_bytes: int
    digest: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a stored model is. ``origin`` lets a later call recognise the same source file cheaply."""

    name: str
    source: str
    weights_digest: str
    files: Mapping[str, FileEntry]
    origin: Mapping[str, Any]
    ostinato_version: str

    def to_json(self) -> bytes:
        files = {name: {"size_bytes": e.size_bytes, "digest": e.digest} for name, e in self.files.items()}
        body = {
            "format": _FORMAT,
            "name": self.name,
            "source": self.source,
            "weights_digest": self.weights_digest,
            "files": files,
            "origin": dict(self.origin),
            "ostinato_version": self.ostinato_version,
        }
        return orjson.dumps(body, option=orjson.OPT_INDENT_2 | orjson.OPT_SORT_KEYS)

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """Raises ModelCorruptError, or ModelUnsupportedError for a manifest of another format."""
        try:
            body = orjson.loads((folder / MANIFEST).read_bytes())
            if body["format"] != _FORMAT:
                raise ModelUnsupportedError(
                    f"{folder} was stored in format {body['format']}, this version of Ostinato reads format"
                    f" {_FORMAT}. Remove the folder and fetch the model again."
                )
            files = {
                str(name): FileEntry(size_bytes=int(entry["size_bytes"]), digest=str(entry["digest"]))
                for name, entry in body["files"].items()
            }
            return cls(
                name=str(body["name"]),
                source=str(body["source"]),
                weights_digest=str(body["weights_digest"]),
                files=files,
                origin=dict(body["origin"]),
                ostinato_version=str(body["ostinato_version"]),
            )
        except (orjson.JSONDecodeError, KeyError, TypeError, ValueError, AttributeError) as error:
            raise ModelCorruptError(
                f"The manifest of {folder} is unreadable. {_cure(folder.name)}"
            ) from error


def key_of(name: str, *digests: str) -> str:
    """A folder name for a model: its name in safe characters, and digests where a name is not unique."""
    safe = re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip(".-")[:80] or "model"
    return "-".join((safe, *digests))


class ModelStore:
    """Complete models below ``root``, which need not exist yet. Safe between threads and processes."""

    def __init__(self, root: Path) -> None:
        self.root = root.expanduser().absolute()

    # ------------------------------------------------------------ reading

    def list_models(self) -> list[StoredModel]:
        """All complete models, by key. What cannot be read is left out and logged."""
        return [_stored(folder, manifest) for folder, manifest in self._manifests()]

    def find(self, name: str) -> StoredModel | None:
        """The model with this name or key, unchecked; ``None`` if there is none.

        Raises:
            ModelUnavailableError: several models have this name; the message lists their keys.
        """
        models = self.list_models()
        matches = [m for m in models if m.key == name] or [m for m in models if m.model.name == name]
        if len(matches) > 1:
            keys = ", ".join(m.key for m in matches)
            raise ModelUnavailableError(f"Several stored models are called {name!r}. Say which: {keys}.")
        return matches[0] if matches else None

    def find_origin(self, origin: Mapping[str, Any]) -> StoredModel | None:
        """The model made from exactly this source file (path, size and time), if there is one."""
        for folder, manifest in self._manifests():
            if dict(manifest.origin) == dict(origin):
                return _stored(folder, manifest)
        return None

    def open(self, key: str, *, progress: Progress | None = None) -> LocalModel | None:
        """The model under this key, with every file checked against the manifest; ``None`` if absent.

        Raises:
            ModelCorruptError: a file is missing, surplus, of another size or of another digest.
        """
        folder = self.root / key
        if not (folder / MANIFEST).is_file():
            return None
        manifest = Manifest.read(folder)
        self._check_sizes(folder, manifest)
        total_bytes = sum(entry.size_bytes for entry in manifest.files.values())
        with step(progress, f"Checking {manifest.name}", total_bytes) as advance:
            for name, entry in manifest.files.items():
                if digest_file(folder / name, advance) != entry.digest:
                    raise ModelCorruptError(
                        f"{folder / name} is not what was stored: its digest differs. {_cure(folder.name)}"
                    )
        return _stored(folder, manifest).model

    def verify(self, name: str, *, progress: Progress | None = None) -> LocalModel:
        """Digest every file of a stored model again.

        Raises:
            ModelUnavailableError: there is no such model here.
            ModelCorruptError: something differs from the manifest.
        """
        model = self.open(self._key(name), progress=progress)
        if model is None:
            raise ModelUnavailableError(f"{name} was removed while it was being verified.")
        return model

    # ------------------------------------------------------------ writing

    @contextmanager
    def lock(self, key: str, *, on_wait: Callable[[], None] | None = None) -> Iterator[None]:
        """Hold the right to make or remove this model; waits for another process that has it.

        The system gives the lock back when its holder dies. ``on_wait`` is called once before waiting.
        """
        from filelock import FileLock, Timeout

        folder = self.root / ".locks"
        with disk.disk_errors("The model store", self.root):
            folder.mkdir(parents=True, exist_ok=True)
            guard = FileLock(folder / f"{key}.lock")
            try:
                guard.acquire(timeout=0)
            except Timeout:
                if on_wait is not None:
                    on_wait()
                guard.acquire(poll_interval=0.1)
        try:
            yield
        finally:
            guard.release()

    def staging(self, key: str) -> Path:
        """The folder to make this model in, created if needed. Only for the holder of its lock."""
        folder = self.root / ".staging" / key
        with disk.disk_errors("The model store", self.root):
            folder.mkdir(parents=True, exist_ok=True)
        return folder

    def discard_staging(self, key: str) -> None:
        """Give up what was being made under this key."""
        shutil.rmtree(self.root / ".staging" / key, ignore_errors=True)

    def publish(
        self, key: str, folder: Path, *, name: str, source: str, origin: Mapping[str, Any] | None = None
    ) -> LocalModel:
        """Make a finished folder (inside this store's staging area) a model, in one step that cannot be
        seen half-done, and replace what was there. Only for the holder of its lock.

        Raises:
            StorageFullError: no room for the manifest.
        """
        with disk.disk_errors(f"Storing {name}", self.root):
            paths = sorted(path for path in folder.iterdir() if path.name != MANIFEST)
            files = {p.name: FileEntry(size_bytes=p.stat().st_size, digest=digest_file(p)) for p in paths}
            manifest = Manifest(
                name=name,
                source=source,
                weights_digest=weights_digest({n: entry.digest for n, entry in files.items()}),
                files=files,
                origin=origin or {},
                ostinato_version=_version(),
            )
            (folder / MANIFEST).write_bytes(manifest.to_json())
            for path in (*paths, folder / MANIFEST):
                disk.sync_file(path)
            disk.sync_folder(folder)
            target = self.root / key
            if target.exists():
                self._trash(target)
            folder.rename(target)
            disk.sync_folder(self.root)
        return _stored(target, manifest).model

    def remove(self, name: str) -> int:
        """Remove a stored model, readable or not, and what was begun under its key.

        Returns the bytes given back. A process that has it loaded keeps it until it ends.

        Raises:
            ModelUnavailableError: there is no such model here.
        """
        key = self._key(name)
        size_bytes = 0
        with self.lock(key), disk.disk_errors(f"Removing {name}", self.root):
            if (folder := self.root / key).is_dir():
                size_bytes, _ = _size_and_time(folder)
                self._trash(folder)
            self.discard_staging(key)
        return size_bytes

    def sweep(self, *, older_than_s: float = _WEEK_S, clock: Clock | None = None) -> int:
        """Delete what interrupted work left behind and nobody went on with for ``older_than_s``.

        Returns the bytes given back. A model that is being made right now is never touched.
        """
        from filelock import FileLock, Timeout

        now_s = (clock or SystemClock()).now()
        area = self.root / ".staging"
        freed_bytes = 0
        for folder in sorted(area.iterdir()) if area.is_dir() else []:
            size_bytes, newest_s = _size_and_time(folder)
            if folder.name.startswith(_TRASH):
                shutil.rmtree(folder, ignore_errors=True)
                freed_bytes += size_bytes
            elif now_s - newest_s >= older_than_s:
                try:
                    with FileLock(self.root / ".locks" / f"{folder.name}.lock", timeout=0):
                        shutil.rmtree(folder, ignore_errors=True)
                        freed_bytes += size_bytes
                except Timeout:
                    continue
        return freed_bytes

    # ------------------------------------------------------------ inside

    def _manifests(self) -> Iterator[tuple[Path, Manifest]]:
        for folder in sorted(self.root.iterdir()) if self.root.is_dir() else []:
            if folder.name.startswith(".") or not (folder / MANIFEST).is_file():
                continue
            try:
                manifest = Manifest.read(folder)
            except (ModelCorruptError, ModelUnsupportedError) as error:
                _log.warning("%s", error)
            except FileNotFoundError:  # another process removed it just now
                continue
            else:
                yield folder, manifest

    def _key(self, name: str) -> str:
        if (stored := self.find(name)) is not None:
            return stored.key
        if key_of(name) == name and (self.root / name).is_dir():
            return name
        known = ", ".join(m.model.name for m in self.list_models()) or "nothing yet"
        raise ModelUnavailableError(f"No stored model is called {name!r}; {self.root} holds: {known}.")

    def _check_sizes(self, folder: Path, manifest: Manifest) -> None:
        present = {p.name for p in folder.iterdir() if p.name != MANIFEST and not p.name.startswith(".")}
        if surplus := present - manifest.files.keys():
            raise ModelCorruptError(
                f"{folder} holds files that were not stored there: {', '.join(sorted(surplus))}."
                f" Move them away. {_cure(folder.name)}"
            )
        for name, entry in manifest.files.items():
            path = folder / name
            if not path.exists():
                raise ModelCorruptError(f"{path} is missing. {_cure(folder.name)}")
            if (size_bytes := path.stat().st_size) != entry.size_bytes:
                raise ModelCorruptError(
                    f"{path} has {size_bytes:,} bytes, but {entry.size_bytes:,} were stored."
                    f" {_cure(folder.name)}"
                )

    def _trash(self, folder: Path) -> None:
        area = self.root / ".staging"
        area.mkdir(parents=True, exist_ok=True)
        for attempt in range(1000):
            target = area / f"{_TRASH}{folder.name}-{os.getpid()}-{attempt}"
            if not target.exists():
                folder.rename(target)
                shutil.rmtree(target, ignore_errors=True)
                return
        raise AssertionError(f"a thousand leftovers in {area}: deleting never works here")


def _stored(folder: Path, manifest: Manifest) -> StoredModel:
    model = LocalModel(
        name=manifest.name, path=folder, weights_digest=manifest.weights_digest, source=manifest.source
    )
    size_bytes = sum(e.size_bytes for n, e in manifest.files.items() if not (folder / n).is_symlink())
    return StoredModel(model=model, key=folder.name, size_bytes=size_bytes)


def weights_digest(digests: Mapping[str, str]) -> str:
    """The digest that stands for a model's weights: of its weight files and its ``config.json``."""
    return combine({n: d for n, d in digests.items() if n == "config.json" or ".safetensors" in n})


def _cure(key: str) -> str:
    return f"Run `ostinato model remove {key}` and fetch it again."


def _version() -> str:
    try:
        return importlib.metadata.version("ostinato")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def _size_and_time(folder: Path) -> tuple[int, float]:
    """Bytes below a folder and the newest time in it, while others may be deleting there."""
    size_bytes, newest_s = 0, 0.0
    for parent, _, names in os.walk(folder):
        for name in (".", *names):
            with contextlib.suppress(FileNotFoundError):
                status = Path(parent, name).lstat()
                size_bytes += status.st_size
                newest_s = max(newest_s, status.st_mtime)
    return size_bytes, newest_s
