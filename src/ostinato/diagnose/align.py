"""Where two prompts are the same: from the first token, and again after every place where they part.

Runs of equal tokens in order are found by words of eight tokens that stand exactly once in both texts, of
which the longest chain that ascends in both is taken (patience differences); what lies between two of them
and is short is compared token by token. It is linear but for sorting, whatever repeats in the prompts.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from difflib import SequenceMatcher
from typing import Final

import numpy as np
import numpy.typing as npt

from ..types import TokenArray, num_common

_WORD: Final = 8
_MIN_RUN: Final = 4
"""Shorter runs in the middle of other text are chance: punctuation, a common word."""
_MAX_EXACT: Final = 600
_MIX: Final = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True, slots=True)
class Run:
    """``length`` equal tokens, from ``a`` in one prompt and from ``b`` in the other."""

    a: int
    b: int
    length: int

    @property
    def a_end(self) -> int:
        return self.a + self.length

    @property
    def b_end(self) -> int:
        return self.b + self.length


def align(a: TokenArray, b: TokenArray) -> tuple[Run, ...]:
    """The runs that both have in the same order, from the left; the first one begins at 0 if there is a
    common beginning, however short."""
    start = num_common(a, b)
    rest = min(len(a), len(b)) - start
    end = num_common(a[start:][::-1][:rest], b[start:][::-1][:rest])
    runs = [Run(0, 0, start)] if start else []
    middle_a, middle_b = a[start : len(a) - end], b[start : len(b) - end]
    runs += (Run(start + run.a, start + run.b, run.length) for run in _within(middle_a, middle_b))
    if end:
        runs.append(Run(len(a) - end, len(b) - end, end))
    return tuple(_joined(runs))


def elsewhere(a: TokenArray, b: TokenArray, runs: tuple[Run, ...], *, min_tokens: int) -> tuple[Run, ...]:
    """Runs of ``b`` that stand in ``a`` in another order than ``runs`` has it; none shorter than that."""
    if len(a) < min_tokens or len(b) < min_tokens:
        return ()
    places: dict[int, int] = {}
    words = _words(a, min_tokens)
    for place in range(len(words) - 1, -1, -1):
        places[int(words[place])] = place
    found: list[Run] = []
    words_b = _words(b, min_tokens)
    for start, stop in _gaps(runs, len(b)):
        place = start
        while place + min_tokens <= stop:
            at = places.get(int(words_b[place]))
            if at is None:
                place += 1
                continue
            length = num_common(a[at:], b[place:stop])
            if length >= min_tokens:
                found.append(Run(at, place, length))
                place += length
            else:
                place += 1
    return tuple(found)


def _gaps(runs: tuple[Run, ...], length: int) -> Iterator[tuple[int, int]]:
    place = 0
    for run in runs:
        if run.b > place:
            yield place, run.b
        place = run.b_end
    if place < length:
        yield place, length


def _within(a: TokenArray, b: TokenArray) -> list[Run]:
    """Runs of two texts that have neither beginning nor end in common."""
    if len(a) == 0 or len(b) == 0:
        return []
    anchors = _anchors(a, b)
    if not anchors:
        return _compared(a, b) if min(len(a), len(b)) <= _MAX_EXACT >= max(len(a), len(b)) // 4 else []
    runs: list[Run] = []
    done_a = done_b = 0
    for at_a, at_b in anchors:
        if at_a < done_a or at_b < done_b:
            continue
        back = num_common(a[done_a:at_a][::-1], b[done_b:at_b][::-1])
        start_a, start_b = at_a - back, at_b - back
        length = back + num_common(a[at_a:], b[at_b:])
        runs += _between(a, b, (done_a, start_a), (done_b, start_b))
        runs.append(Run(start_a, start_b, length))
        done_a, done_b = start_a + length, start_b + length
    runs += _between(a, b, (done_a, len(a)), (done_b, len(b)))
    return runs


def _between(a: TokenArray, b: TokenArray, of_a: tuple[int, int], of_b: tuple[int, int]) -> list[Run]:
    if not 0 < of_a[1] - of_a[0] <= _MAX_EXACT or not 0 < of_b[1] - of_b[0] <= _MAX_EXACT:
        return []
    found = _compared(a[slice(*of_a)], b[slice(*of_b)])
    return [Run(run.a + of_a[0], run.b + of_b[0], run.length) for run in found]


def _compared(a: TokenArray, b: TokenArray) -> list[Run]:
    matcher = SequenceMatcher(None, a.tolist(), b.tolist(), autojunk=False)
    return [Run(*block) for block in matcher.get_matching_blocks() if block.size >= _MIN_RUN]


def _anchors(a: TokenArray, b: TokenArray) -> list[tuple[int, int]]:
    """Where words stand that each text has exactly once: those that ascend in both."""
    if len(a) < _WORD or len(b) < _WORD:
        return []
    once_a, at_a = _once(_words(a, _WORD))
    once_b, at_b = _once(_words(b, _WORD))
    _, of_a, of_b = np.intersect1d(once_a, once_b, assume_unique=True, return_indices=True)
    pairs = sorted(zip(at_a[of_a].tolist(), at_b[of_b].tolist(), strict=True))
    pairs = [(x, y) for x, y in pairs if np.array_equal(a[x : x + _WORD], b[y : y + _WORD])]
    return _ascending(pairs)


def _once(words: npt.NDArray[np.uint64]) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.intp]]:
    values, places, counts = np.unique(words, return_index=True, return_counts=True)
    return values[counts == 1], places[counts == 1]


def _words(tokens: TokenArray, length: int) -> npt.NDArray[np.uint64]:
    """A number for each run of ``length`` tokens; equal runs have equal ones."""
    wide = tokens.astype(np.uint64) + np.uint64(1)
    count = len(tokens) - length + 1
    words = np.zeros(max(0, count), np.uint64)
    for offset in range(length):
        words = words * _MIX + wide[offset : offset + count]
        words ^= words >> np.uint64(29)
    return words


def _ascending(pairs: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """The longest chain in which the second numbers ascend, too."""
    tails: list[int] = []
    at: list[int] = []
    before: list[int] = []
    for number, (_, second) in enumerate(pairs):
        place = bisect_left(tails, second)
        before.append(at[place - 1] if place else -1)
        if place == len(tails):
            tails.append(second)
            at.append(number)
        else:
            tails[place], at[place] = second, number
    chain: list[tuple[int, int]] = []
    number = at[-1] if at else -1
    while number >= 0:
        chain.append(pairs[number])
        number = before[number]
    return chain[::-1]


def _joined(runs: list[Run]) -> Iterator[Run]:
    last: Run | None = None
    for run in runs:
        if last is not None and last.a_end == run.a and last.b_end == run.b:
            last = Run(last.a, last.b, last.length + run.length)
            continue
        if last is not None:
            yield last
        last = run
    if last is not None:
        yield last
