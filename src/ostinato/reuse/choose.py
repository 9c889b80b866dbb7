"""Which of several overlapping runs to use."""

from __future__ import annotations

from collections import deque
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
    first ends: what stands before its part then is the same as where it was. Takes as long as sorting.
    """
    order = sorted(range(len(intervals)), key=lambda i: (intervals[i][0], -intervals[i][1]))
    kept: list[int] = []  # none inside another: starts and ends both ascend
    for i in order:
        if not kept or intervals[i][1] > intervals[kept[-1]][1]:
            kept.append(i)
    best: list[tuple[int, int, int]] = []  # with this one last: worth, minus parts, the one before
    apart, num_apart = (0, 0, -1), 0  # the best of those that end before this one begins
    overlapping: deque[int] = deque()  # the others, without those that a later one is better than
    ends = [intervals[index][1] for index in kept]
    for i, index in enumerate(kept):
        start, end = intervals[index]
        while num_apart < i and ends[num_apart] <= start:
            apart = max(apart, (*best[num_apart][:2], num_apart))
            num_apart += 1
        while overlapping and overlapping[0] < num_apart:
            overlapping.popleft()
        option = (apart[0] + end - start - seam_tokens, apart[1] - 1, apart[2])
        if overlapping:
            before = overlapping[0]
            worth, parts, _ = best[before]
            option = max(option, (worth + end - ends[before] - seam_tokens, parts - 1, before))
        best.append(option)
        while overlapping and _rest(best, ends, overlapping[-1]) <= _rest(best, ends, i):
            overlapping.pop()
        overlapping.append(i)
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


def _rest(best: list[tuple[int, int, int]], ends: list[int], at: int) -> tuple[int, int]:
    """What decides between two that a later interval overlaps: it takes over where they end."""
    return best[at][0] - ends[at], best[at][1]
