"""The choice: of every row of scores the best places, what is protected among them, within the budget."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from .evidence import Mass, Places

Flags = npt.NDArray[np.bool_]

_PREFERRED_SHARE = 0.5


def choose(scores: Mass, protected: Flags, num_kept: int, preferred: Flags | None = None) -> Places:
    """Which places stay.

    Args:
        scores: ``[layers, heads, places]``, higher stays; finite.
        protected: the same shape; these stay whatever they score. In every row the same number of them, at
            most ``num_kept``: who asks has made sure of that.
        num_kept: how many stay in every row; at most all.
        preferred: the same shape; of these the best stay before all others, on half of the room that the
            protected leave.

    Returns:
        ``[layers, heads, num_kept]``, rising along the last axis. Of equal scores the later place stays.
    """
    num_places = scores.shape[2]
    assert 0 <= num_kept <= num_places, f"{num_kept} of {num_places} places"
    num_protected = int(protected.sum(axis=2).max(initial=0))
    assert num_protected <= num_kept, f"{num_protected} places are protected, {num_kept} may stay"
    # Ranks instead of scores: exact classes on top of them, and no ties.
    rank = np.empty(scores.shape, np.int64)
    order = np.argsort(scores, axis=2, kind="stable")
    np.put_along_axis(rank, order, np.broadcast_to(np.arange(num_places), scores.shape), axis=2)
    room = int((num_kept - num_protected) * _PREFERRED_SHARE)
    if preferred is not None and room:
        is_wanted = preferred & ~protected
        worst = np.sort(np.where(is_wanted, rank, -1), axis=2)[:, :, num_places - room, None]
        rank += np.where(is_wanted & (rank >= worst), num_places, 0)
    rank += np.where(protected, 2 * num_places, 0)
    best = np.argsort(rank, axis=2)[:, :, num_places - num_kept :]
    return np.sort(best, axis=2)


def smooth(scores: Mass, width: int) -> Mass:
    """Every score as the mean over ``width`` (odd) neighbours along the last axis, fewer at the ends.

    What is quoted is quoted with what stands around it: a needle's neighbours carry it as much as its digits.
    """
    assert width % 2 == 1, f"a window of {width} has no middle"
    if width == 1 or scores.shape[-1] == 0:
        return scores
    half, size = width // 2, scores.shape[-1]
    sums = np.zeros((*scores.shape[:-1], size + 1), np.float64)
    np.cumsum(scores, axis=-1, out=sums[..., 1:], dtype=np.float64)
    places = np.arange(size)
    low, high = np.maximum(places - half, 0), np.minimum(places + half + 1, size)
    means: Mass = ((sums[..., high] - sums[..., low]) / (high - low)).astype(np.float32)
    return means


def highest_of(scores: Mass, width: int) -> Mass:
    """Every score as the highest of ``width`` (odd) neighbours along the last axis."""
    assert width % 2 == 1, f"a window of {width} has no middle"
    if width == 1 or scores.shape[-1] == 0:
        return scores
    half = width // 2
    padded = np.pad(scores, [(0, 0)] * (scores.ndim - 1) + [(half, half)], constant_values=-np.inf)
    highest: Mass = np.lib.stride_tricks.sliding_window_view(padded, width, axis=-1).max(axis=-1)
    return highest
