"""One safetensors file, written tensor by tensor, that survives being interrupted at any byte.

The header is known before the first tensor, so every tensor has its place from the start. Beside the file
lies a journal: a first line that says what exactly is being written, then one line for each finished tensor
with the digest of its bytes. Whoever continues believes a line only if the bytes still have that digest; a
torn line, or bytes that a power cut lost, are simply written again.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson

from .digest import digest_bytes

_FLOAT_BYTES = 4
_ALIGNMENT = 8


@dataclass(frozen=True, slots=True)
class Layout:
    """An fp32 safetensors file before it exists: its first bytes, and each tensor's shape and byte range."""

    header: bytes
    shapes: Mapping[str, tuple[int, ...]]
    spans: Mapping[str, tuple[int, int]]
    size_bytes: int


def layout_of(shapes: Mapping[str, tuple[int, ...]]) -> Layout:
    """Place fp32 tensors one after the other, in the order given."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, shape in shapes.items():
        end = offset + prod(shape) * _FLOAT_BYTES
        entries[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    body = orjson.dumps(entries)
    body += b" " * (-len(body) % _ALIGNMENT)
    header = len(body).to_bytes(8, "little") + body
    spans = {
        name: (
            len(header) + entries[name]["data_offsets"][0],
            len(header) + entries[name]["data_offsets"][1],
        )
        for name in shapes
    }
    return Layout(header, dict(shapes), spans, len(header) + offset)


class ResumableWriter:
    """Writes a layout's tensors in their order. ``num_done`` of them, ``done_bytes`` of the file, are there.

    Args:
        path: the safetensors file.
        journal_path: the journal beside it.
        layout: the file's layout.
        identity: digest of everything the content depends on; with another one the work starts afresh.
    """

    def __init__(self, path: Path, journal_path: Path, layout: Layout, identity: str) -> None:
        self._layout = layout
        self._names = tuple(layout.spans)
        self._file = path.open("r+b" if path.exists() else "w+b", buffering=0)
        done = self._believable(journal_path, identity)
        self.num_done = len(done)
        self._journal = journal_path.open("wb", buffering=0)
        for line in ({"identity": identity}, *done):
            self._append(line)
        if not done:
            self._file.truncate(0)
            self._write_at(0, layout.header)

    @property
    def done_bytes(self) -> int:
        if self.num_done == 0:
            return len(self._layout.header)
        return self._layout.spans[self._names[self.num_done - 1]][1]

    def __enter__(self) -> ResumableWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()
        self._journal.close()

    def write(self, name: str, tensor: npt.NDArray[np.float32]) -> None:
        """Write the next tensor: fp32, C-contiguous and of the layout's shape."""
        assert name == self._names[self.num_done], f"{name} is not next, {self._names[self.num_done]} is"
        expected = self._layout.shapes[name]
        assert tensor.shape == expected, f"{name} has shape {tensor.shape}, not {expected}"
        assert tensor.dtype == np.float32, f"{name} is {tensor.dtype}, not float32"
        assert tensor.flags.c_contiguous, f"{name} is not contiguous"
        data = tensor.data.cast("B")
        self._write_at(self._layout.spans[name][0], data)
        self.num_done += 1
        self._append({"digest": digest_bytes(data)})

    def finish(self) -> None:
        """All tensors are written: returns when they are on the disk."""
        assert self.num_done == len(self._names), f"only {self.num_done} of {len(self._names)} are written"
        self._file.truncate(self._layout.size_bytes)
        os.fsync(self._file.fileno())

    # ------------------------------------------------------------ inside

    def _believable(self, journal_path: Path, identity: str) -> list[dict[str, Any]]:
        lines = journal_path.read_bytes().splitlines() if journal_path.exists() else []
        parsed = list(map(_parse, lines))
        if not parsed or parsed[0].get("identity") != identity:
            return []
        if self._read(0, len(self._layout.header)) != self._layout.header:
            return []
        done = []
        for (start, end), line in zip(self._layout.spans.values(), parsed[1:], strict=False):
            if line.get("digest") != digest_bytes(self._read(start, end)):
                break
            done.append(line)
        return done

    def _read(self, start: int, end: int) -> bytes:
        self._file.seek(start)
        chunks = []
        while start < end and (chunk := self._file.read(end - start)):
            chunks.append(chunk)
            start += len(chunk)
        return b"".join(chunks)

    def _write_at(self, start: int, data: bytes | memoryview) -> None:
        self._file.seek(start)
        rest = memoryview(data)
        while rest:
            rest = rest[self._file.write(rest) :]

    def _append(self, line: Mapping[str, Any]) -> None:
        rest = memoryview(orjson.dumps(dict(line)) + b"\n")
        while rest:
            rest = rest[self._journal.write(rest) :]


def _parse(line: bytes) -> dict[str, Any]:
    try:
        value = orjson.loads(line)
    except orjson.JSONDecodeError:
        return {}
    return value if isinstance(value, dict) else {}
