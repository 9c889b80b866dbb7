"""The bytes of the slots: copied and checked in one go.

Two ways to the same file. In memory (``/dev/shm``) it is mapped: copying then runs at memory's speed, which
positional calls reach two thirds of. On a disk it is read and written by position: the speed is nearly the
same there, and what a disk can do wrong comes as an error code. Through a mapping it would come as a signal
that ends the process. What can go wrong in memory is looked at before: that the file still is as long as
it was, and, before a write, that there is room.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from pathlib import Path

import psutil
from xxhash import xxh3_128

CHUNK_BYTES = 256 << 10
"""Copied, and checked while it still is in the processor's cache."""

_IN_MEMORY = {"tmpfs", "ramfs"}


def is_in_memory(path: Path) -> bool:
    """Whether the file system at ``path`` keeps files in memory."""
    place = path.resolve()
    mounts = [m for m in psutil.disk_partitions(all=True) if place.is_relative_to(m.mountpoint)]
    return bool(mounts) and max(mounts, key=lambda m: len(m.mountpoint)).fstype in _IN_MEMORY


class Slab:
    """``size_bytes`` of the open file ``fd``, which stays its owner's. Nothing here locks."""

    def __init__(self, fd: int, size_bytes: int, *, in_memory: bool) -> None:
        self._fd = fd
        self._size_bytes = size_bytes
        self._taken: dict[int, int] = {}  # start of a slot -> bytes of it that have their memory
        self._mapped = memoryview(mmap.mmap(fd, size_bytes)) if in_memory else None

    def expect(self, at: int, num_bytes: int) -> None:
        """Has a disk read bytes ahead; does not wait for them."""
        if self._mapped is None and hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._fd, at, num_bytes, os.POSIX_FADV_WILLNEED)

    def read(self, at: int, into: memoryview) -> bytes:
        """Copies the bytes at ``at`` and returns the copy's XXH3-128; nothing where the file is too short.

        Raises:
            OSError: the disk did not give them.
        """
        if os.fstat(self._fd).st_size < at + len(into):
            return b""
        hasher = xxh3_128()
        done = 0
        while done < len(into):
            piece = into[done : done + CHUNK_BYTES]
            if self._mapped is not None:
                start = at + done
                piece[:] = self._mapped[start : start + len(piece)]
            else:
                got = os.preadv(self._fd, [piece], at + done)
                if got == 0:
                    return b""
                piece = piece[:got]
            hasher.update(piece)
            done += len(piece)
        return hasher.digest()

    def write(self, at: int, parts: Sequence[memoryview]) -> bytes:
        """Writes pieces of bytes one after the other and returns the XXH3-128 of all of them.

        Raises:
            OSError: no room, or the disk did not take them.
        """
        if self._mapped is not None:
            self._make_room(at, sum(len(part) for part in parts))
        hasher = xxh3_128()
        for part in parts:
            for start in range(0, len(part), CHUNK_BYTES):
                piece = part[start : start + CHUNK_BYTES]
                hasher.update(piece)
                if self._mapped is not None:
                    self._mapped[at : at + len(piece)] = piece
                    at += len(piece)
                    continue
                while len(piece):
                    written = os.pwrite(self._fd, piece, at)
                    at += written
                    piece = piece[written:]
        return hasher.digest()

    def _make_room(self, at: int, num_bytes: int) -> None:
        """Takes the memory of a range of the file, unless this process has and it was not truncated since."""
        if os.fstat(self._fd).st_size < self._size_bytes:
            self._taken.clear()
            os.ftruncate(self._fd, self._size_bytes)
        if self._taken.get(at, 0) < num_bytes:
            os.posix_fallocate(self._fd, at, num_bytes)
            self._taken[at] = num_bytes
