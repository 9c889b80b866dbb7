"""The disk's side of a model: room, durability, and its errors in our words."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ostinato.errors import ModelUnavailableError, StorageFullError

# Beside the big file there are small ones: tokenizer, manifest, journal, directory blocks.
_MARGIN_BYTES = 4 << 20
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_FORBIDDEN = frozenset({errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST})


def require_space(folder: Path, needed_bytes: int, purpose: str) -> None:
    """Refuse before the work when the disk has no room for its result.

    Raises:
        StorageFullError: fewer than ``needed_bytes`` and a small margin are free where ``folder`` lies.
    """
    existing = folder
    while not existing.exists():
        existing = existing.parent
    free_bytes = shutil.disk_usage(existing).free
    if free_bytes < needed_bytes + _MARGIN_BYTES:
        raise StorageFullError(
            f"{purpose} needs {_megabytes(needed_bytes + _MARGIN_BYTES)} in {folder}, but only"
            f" {_megabytes(free_bytes)} are free. Free some space, or move the cache to another disk"
            " (XDG_CACHE_HOME)."
        )


@contextmanager
def disk_errors(purpose: str, folder: Path) -> Iterator[None]:
    """Within the block, "no room" and "no permission" from the system become our errors.

    Raises:
        StorageFullError: the disk, a quota or a file size limit is exhausted.
        ModelUnavailableError: the place cannot be written.
    """
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
            raise StorageFullError(
                f"{purpose} ran out of room in {folder} ({error.strerror}). Nothing half-done was kept. Free"
                " some space, or move the cache to another disk (XDG_CACHE_HOME), and try again."
            ) from error
        if error.errno in _FORBIDDEN:
            raise ModelUnavailableError(
                f"{purpose} cannot use {error.filename or folder} ({error.strerror}). Make it a folder that"
                " this user may write, or point XDG_CACHE_HOME to another one."
            ) from error
        raise


def sync_file(path: Path) -> None:
    """Returns when the file's content is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_folder(path: Path) -> None:
    """Returns when the folder's entries are on the disk, where the file system can tell."""
    with contextlib.suppress(OSError):
        sync_file(path)


def _megabytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:,.0f} MB"
