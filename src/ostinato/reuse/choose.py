"""Which of several overlapping runs to use."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Part:
    """The part ``[start, end)`` of interval number ``index``."""

    index: int
    start: int
    end: int


def choose(intervals: Sequence[tuple[int, int]], seam_tokens: int) -> list[Part]:
    """Parts of ``intervals`` that do not overlap and cover the most, less ``seam_tokens`` for each part.

    Of what covers as much, the fewest parts. Where two that are chosen overlap, the second begins where the
    first ends: what stands before its part then is the same as where it was.
    """
    order = sorted(range(len(intervals)), key=lambda i: (intervals[i][0], -intervals[i][1]))
    kept: list[int] = []  # none inside another: starts and ends both ascend
    for i in order:
        if not kept or intervals[i][1] > intervals[kept[-1]][1]:
            kept.append(i)
    best: list[tuple[int, int, int]] = []  # with this one last: worth, minus parts, the one before
    for i, (start, end) in enumerate(intervals[index] for index in kept):
        option = (end - start - seam_tokens, -1, -1)
        for j in range(i):
            worth, parts, _ = best[j]
            before_end = intervals[kept[j]][1]
            option = max(option, (worth + end - max(start, before_end) - seam_tokens, parts - 1, j))
        best.append(option)
    at = max(range(len(best)), key=lambda i: best[i][:2], default=-1)
    if at < 0 or best[at][0] <= 0:
        return []
    chosen: list[int] = []
    while at >= 0:
        chosen.append(at)
        at = best[at][2]
    parts_chosen: list[Part] = []
    covered = 0
    for at in reversed(chosen):
        start, end = intervals[kept[at]]
        parts_chosen.append(Part(kept[at], max(start, covered), end))
        covered = end
    return parts_chosen
