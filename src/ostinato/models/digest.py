"""Digests of files and of whole weights, by content.

Files are read in order, not mapped: measured, both run at memory speed once the file is in the page cache
(538 MB: 0.12 s), and a bad sector or a file cut short under us is then an error instead of a dead process.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

_BUFFER_BYTES = 8 << 20


def digest_file(path: Path, advance: Callable[[int], None] | None = None) -> str:
    """``b3:…`` of a file's content. ``advance`` is told how many bytes were read.

    Raises:
        OSError: the file cannot be read.
    """
    from blake3 import blake3

    hasher = blake3(max_threads=blake3.AUTO)
    buffer = bytearray(_BUFFER_BYTES)
    view = memoryview(buffer)
    with path.open("rb", buffering=0) as file:
        while num_read := file.readinto(buffer):
            hasher.update(view[:num_read])
            if advance is not None:
                advance(num_read)
    return f"b3:{hasher.hexdigest()}"


def digest_bytes(data: bytes | memoryview) -> str:
    """``b3:…`` of these bytes."""
    from blake3 import blake3

    return f"b3:{blake3(data, max_threads=blake3.AUTO).hexdigest()}"


def combine(digests: Mapping[str, str]) -> str:
    """``b3:…`` over named digests, whatever their order: two folders agree if names and contents do."""
    lines = [f"{name}\0{digests[name]}\n" for name in sorted(digests)]
    return digest_bytes(("ostinato weights 1\n" + "".join(lines)).encode())


def short(digest: str) -> str:
    """The first 8 hexadecimal digits, for names that people read."""
    return digest.removeprefix("b3:")[:8]
