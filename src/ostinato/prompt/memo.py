"""A memory of pieces of text and their tokens, bounded by size, oldest use forgotten first."""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import TypeAlias

from ..types import TokenArray

# Kind of the marker before, text, kind of the marker after.
PieceKey: TypeAlias = tuple[str, str, str]

# What a piece costs besides its text and ids: objects and table entries.
_OVERHEAD_BYTES = 400


class PieceMemo:
    """Pieces of text with their ids, at most ``capacity_bytes`` of them. Safe to use from several threads."""

    def __init__(self, capacity_bytes: int = 32 * 1024 * 1024) -> None:
        self._capacity_bytes = capacity_bytes
        self._size_bytes = 0
        self._pieces: OrderedDict[PieceKey, TokenArray] = OrderedDict()
        self._lock = threading.Lock()

    @property
    def size_bytes(self) -> int:
        return self._size_bytes

    def __len__(self) -> int:
        return len(self._pieces)

    def get(self, key: PieceKey) -> TokenArray | None:
        with self._lock:
            ids = self._pieces.get(key)
            if ids is not None:
                self._pieces.move_to_end(key)
            return ids

    def put(self, key: PieceKey, ids: TokenArray) -> None:
        size_bytes = _size_bytes(key, ids)
        if size_bytes > self._capacity_bytes // 4:  # one giant must not push out everything else
            return
        with self._lock:
            if key in self._pieces:
                return
            self._pieces[key] = ids
            self._size_bytes += size_bytes
            while self._size_bytes > self._capacity_bytes:
                old_key, old_ids = self._pieces.popitem(last=False)
                self._size_bytes -= _size_bytes(old_key, old_ids)


def _size_bytes(key: PieceKey, ids: TokenArray) -> int:
    text = key[1]
    width = 1 if text.isascii() else 4
    return len(text) * width + ids.nbytes + _OVERHEAD_BYTES
