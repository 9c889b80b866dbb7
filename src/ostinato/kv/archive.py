"""What sequences within a budget dropped: their KV in memory beside the arena, to be brought back.

An archive has a token's KV for every layer and key head, wherever it was dropped or kept last; so a
conversation that goes on need not compute its past again. That KV was computed over what was kept at the
time: it is only for sequences that are kept in the same way, and never for the exact index.
"""

from __future__ import annotations

from collections import OrderedDict
from threading import Lock

import numpy as np
import numpy.typing as npt
import torch

from ostinato.types import TokenArray, num_common

from .arena import Arena

_Numbers = npt.NDArray[np.int64]
Setting = tuple[str, ...]


class Archive:
    """Room for the KV of ``num_tokens`` tokens, by position. Used by the engine's thread."""

    def __init__(self, arena: Arena, num_tokens: int) -> None:
        self._arena = arena
        self.tokens: TokenArray = np.empty(0, np.int32)
        """Whose KV is all there."""
        make = torch.empty  # given by the system as it is written to
        self._keys = [make(s.kv_heads, num_tokens, s.key_dim, dtype=arena.dtype) for s in arena.layers]
        self._values = [make(s.kv_heads, num_tokens, s.value_dim, dtype=arena.dtype) for s in arena.layers]

    @property
    def size_bytes(self) -> int:
        """What the KV of its tokens takes; memory that was never written to takes nothing."""
        return len(self.tokens) * self._arena.bytes_per_slot(self._arena.layers, self._arena.dtype)

    def save(self, positions: npt.NDArray[np.integer], slots: npt.NDArray[np.integer]) -> None:
        """Copies KV of tokens at ``slots`` out of the arena; both arrays ``[layers, kv_heads, number]``."""
        arena = self._arena
        places = torch.from_numpy(positions.astype(np.int64))
        sources = torch.from_numpy(slots.astype(np.int64)).to(arena.device)
        for layer, shape in enumerate(arena.layers):
            for head in range(shape.kv_heads):
                for own, there in ((self._keys, arena.keys), (self._values, arena.values)):
                    taken = there[layer][head].index_select(0, sources[layer, head])
                    own[layer][head].index_copy_(0, places[layer, head], taken.cpu())

    def load(self, start: int, end: int, slots: TokenArray) -> None:
        """Copies the KV of tokens ``[start, end)`` to ``slots`` of the arena."""
        arena = self._arena
        targets = torch.from_numpy(slots.astype(np.int64)).to(arena.device)
        for layer in range(len(arena.layers)):
            for own, there in ((self._keys, arena.keys), (self._values, arena.values)):
                there[layer].index_copy_(1, targets, own[layer][:, start:end].to(arena.device))

    def take_over(self, other: Archive, num_tokens: int) -> None:
        """Begins with the first tokens of another one."""
        for own, theirs in ((self._keys, other._keys), (self._values, other._values)):
            for mine, given in zip(own, theirs, strict=True):
                mine[:, :num_tokens] = given[:, :num_tokens]


class Archives:
    """The archives of one arena, ``max_bytes`` of them at most; the least recently used go.

    Any thread may ``clear``; everything else is the engine's.
    """

    def __init__(self, arena: Arena, max_bytes: int) -> None:
        self._arena = arena
        self._max_bytes = max_bytes
        self._kept: OrderedDict[int, tuple[Setting, Archive]] = OrderedDict()
        self._lock = Lock()
        self._next_id = 0
        self._num_clears = 0

    @property
    def size_bytes(self) -> int:
        """What is kept takes."""
        with self._lock:
            return self._size_bytes()

    def _size_bytes(self) -> int:
        return sum(archive.size_bytes for _, archive in self._kept.values())

    @property
    def epoch(self) -> int:
        """Goes up with every ``clear``."""
        return self._num_clears

    def open(self, num_tokens: int) -> Archive:
        """An empty one, for up to so many tokens."""
        return Archive(self._arena, num_tokens)

    def find(self, setting: Setting, tokens: TokenArray) -> tuple[Archive, int] | None:
        """The one that has most of the beginning of ``tokens``, under the same setting, and how much."""
        with self._lock:
            lengths = {
                number: num_common(archive.tokens, tokens)
                for number, (known, archive) in self._kept.items()
                if known == setting
            }
            best = max(lengths, key=lengths.__getitem__, default=None)
            if best is None or not lengths[best]:
                return None
            self._kept.move_to_end(best)
            return self._kept[best][1], lengths[best]

    def keep(self, setting: Setting, archive: Archive, tokens: TokenArray, epoch: int) -> None:
        """Keeps an archive that has the KV of ``tokens``, unless others were cleared since ``epoch``.

        One that alone takes more than all may take is not kept.
        """
        with self._lock:
            archive.tokens = tokens.copy()
            if epoch != self._num_clears or not 0 < archive.size_bytes <= self._max_bytes:
                return
            for number, (known, other) in list(self._kept.items()):  # those it goes on from
                if known == setting and num_common(other.tokens, tokens) == len(other.tokens):
                    del self._kept[number]
            self._kept[self._next_id] = setting, archive
            self._next_id += 1
            while self._size_bytes() > self._max_bytes:
                self._kept.popitem(last=False)

    def clear(self) -> None:
        """Forgets all of them, those that are being made, too."""
        with self._lock:
            self._num_clears += 1
            self._kept.clear()
