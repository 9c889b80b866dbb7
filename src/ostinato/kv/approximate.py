"""Which of the arena's KV is not exactly what computing it would give.

Only what comes through a lossy codec is like that, and what was computed from such: whatever stands behind an
approximate token in its sequence attended to it. So a sequence is exact up to some token and approximate from
there on, and it is enough to note for every slot on which side it lies.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from ostinato.types import SlotCopy, TokenArray


class ApproximateSlots:
    """A mark for each of ``num_slots`` slots. A slot's mark means something once its KV is written."""

    def __init__(self, num_slots: int) -> None:
        self._marks = np.zeros(num_slots, np.bool_)

    def first(self, slots: TokenArray) -> int:
        """Where a sequence's ``slots`` stop being exact: an index; their number if all are."""
        marked = self._marks[slots]
        return int(marked.argmax()) if marked.any() else len(slots)

    def mark(self, slots: TokenArray, num_exact: int) -> None:
        """The first ``num_exact`` of ``slots`` are exact, the others are not."""
        self._marks[slots[:num_exact]] = False
        self._marks[slots[num_exact:]] = True

    def copy(self, copies: Iterable[SlotCopy]) -> None:
        """What is copied is as exact as what it is copied from."""
        for copy in copies:
            source = self._marks[copy.source : copy.source + copy.length]
            self._marks[copy.target : copy.target + copy.length] = source
