"""When each slot was last used: eight bytes a slot, in a file that all processes use without a lock."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress

import numpy as np
import numpy.typing as npt

from .folder import RANK_BYTES

BUSY = (1 << 64) - 1  # the rank of a slot that is being written


class Ranks:
    """The file: first the rank given last, then one of every slot. 0: never used, or free."""

    def __init__(self, fd: int, num_slots: int) -> None:
        self._fd = fd
        self._num_slots = num_slots
        self._last = 0

    def use(self, slots: Sequence[int]) -> None:
        """Ranks the slots of a chain as used now, the last one least.

        The counter in the file is read and written without a lock. Who loses that race shares a rank with
        the winner: an order nobody could tell from the true one.
        """
        if not slots:
            return
        with suppress(OSError):  # a use that is not noted is no harm
            stored = int.from_bytes(os.pread(self._fd, RANK_BYTES, 0), "little")
            base = max(self._last, stored if stored < BUSY >> 1 else 0)  # more than that is damage
            self._last = base + len(slots)
            os.pwrite(self._fd, self._last.to_bytes(RANK_BYTES, "little"), 0)
            for place, slot in enumerate(slots):
                self.set(slot, self._last - place)

    def set(self, slot: int, rank: int) -> None:
        with suppress(OSError):
            os.pwrite(self._fd, rank.to_bytes(RANK_BYTES, "little"), (slot + 1) * RANK_BYTES)

    def get(self, slot: int) -> int:
        return int.from_bytes(os.pread(self._fd, RANK_BYTES, (slot + 1) * RANK_BYTES), "little")

    def read(self) -> tuple[int, npt.NDArray[np.uint64]]:
        """The rank given last, and that of every slot. They may change at any time."""
        size = (self._num_slots + 1) * RANK_BYTES
        data = os.pread(self._fd, size, 0)
        ranks = np.frombuffer(data.ljust(size, b"\0"), "<u8").astype(np.uint64)
        return int(ranks[0]), ranks[1:]
