"""What is known of the tokens that a sequence keeps: where they stand, and how much they were attended to.

Arrays are ``[layers, heads, places]``; ``heads`` are key heads. A *place* is a token's index in the block
table: places are filled in order, so positions rise along them. Mass is attention after the softmax: a row
gives 1 in all to what it sees. Arrays have room for the whole budget from the start; only the first ``size``
places count.
"""

from __future__ import annotations

from collections import deque
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from ..types import TokenArray

Mass: TypeAlias = npt.NDArray[np.float32]
Places: TypeAlias = npt.NDArray[np.intp]

NUM_SUMMARIES = 3


class Evidence:
    """Of one sequence with ``capacity`` places in each of ``num_layers`` × ``num_heads``."""

    def __init__(self, num_layers: int, num_heads: int, capacity: int) -> None:
        shape = num_layers, num_heads, capacity
        self.size = 0
        self._positions = np.zeros(shape, np.int32)
        self._total = np.zeros(shape, np.float32)
        self._latest = np.zeros(shape, np.float32)
        self._recent = np.zeros(shape, np.float32)
        self._num_recent = 0
        self._summaries: deque[Mass] = deque(maxlen=NUM_SUMMARIES)

    @property
    def capacity(self) -> int:
        return self._positions.shape[2]

    @property
    def positions(self) -> npt.NDArray[np.int32]:
        """Which token of the sequence each place holds (a view)."""
        return self._positions[:, :, : self.size]

    @property
    def total(self) -> Mass:
        """All mass that places have got since they are there (a view)."""
        return self._total[:, :, : self.size]

    @property
    def latest(self) -> Mass:
        """The mass a row gave in the newest watched window, on average (a view)."""
        return self._latest[:, :, : self.size]

    @property
    def summaries(self) -> list[Mass]:
        """Of the last stretches, oldest first, the mass a row gave; not a number where a place is newer."""
        return [summary[:, :, : self.size] for summary in self._summaries]

    @property
    def num_recent_rows(self) -> int:
        """Rows noted since the last summary."""
        return self._num_recent

    def grow(self, positions: TokenArray) -> None:
        """The tokens at ``positions`` have taken the next places."""
        end = self.size + len(positions)
        assert end <= self.capacity, f"{end} tokens in {self.capacity} places"
        new = slice(self.size, end)
        self._positions[:, :, new] = positions
        for array in (self._total, self._latest, self._recent):
            array[:, :, new] = 0.0
        for summary in self._summaries:
            summary[:, :, new] = np.nan
        self.size = end

    def note(self, mass: Mass, num_rows: int) -> None:
        """``num_rows`` rows gave ``mass`` (their sum) to all places that there are."""
        assert mass.shape == self.positions.shape, f"mass {mass.shape} for places {self.positions.shape}"
        self.total[...] += mass
        self._recent[:, :, : self.size] += mass
        self._num_recent += num_rows
        np.divide(mass, num_rows, out=self.latest)

    def summarise(self) -> None:
        """Closes a stretch: what was noted since the last summary becomes one."""
        assert self._num_recent, "a summary of nothing"
        full = len(self._summaries) == NUM_SUMMARIES
        summary = self._summaries.popleft() if full else np.empty_like(self._recent)
        recent = self._recent[:, :, : self.size]
        np.divide(recent, self._num_recent, out=summary[:, :, : self.size])
        self._summaries.append(summary)
        recent[...] = 0.0
        self._num_recent = 0

    def keep(self, kept: Places) -> None:
        """Of the places only ``kept`` (``[layers, heads, number]``, rising) stay, in their order."""
        size = kept.shape[2]
        for array in (self._positions, self._total, self._latest, self._recent, *self._summaries):
            array[:, :, :size] = np.take_along_axis(array, kept, axis=2)
        self.size = size
