"""Moves of KV to other positions, in slots: no tensors."""

from __future__ import annotations

import numpy as np

from ostinato.types import SlotShift, TokenArray


def shifts_of(source: TokenArray, target: TokenArray, distance: int) -> tuple[SlotShift, ...]:
    """Moves of the KV in slots ``source`` to slots ``target``, token by token, in as few pieces as can be.

    No slot is in both. ``distance`` is how many positions further on the tokens stand (negative: back).
    """
    assert len(source) == len(target), f"{len(source)} slots do not go into {len(target)}"
    if not len(source):
        return ()
    breaks = np.flatnonzero((np.diff(source) != 1) | (np.diff(target) != 1)) + 1
    starts = np.concatenate(([0], breaks))
    lengths = np.diff(np.append(starts, len(source)))
    return tuple(
        SlotShift(int(source[start]), int(target[start]), int(length), distance)
        for start, length in zip(starts, lengths, strict=True)
    )
