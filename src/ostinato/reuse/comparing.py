"""Comparing what fingerprints propose with what is stored."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ostinato.types import TokenArray, num_common

from .fingerprints import SHORT_GRAM, Places
from .pieces import Piece, Tree, owner

_MAX_GROUPS = 128
_MAX_SEEDS = 512
_MAX_EACH = 2  # groups that a token of the prompt may bring in where there are more than can be tried
_FIRST_LOOK = 128
_32, _LOW = np.uint64(32), np.uint64(0xFFFFFFFF)


def place_of(number: int, tokens: npt.NDArray[np.intp]) -> Places:
    """Places of ``tokens`` in the sequence through the piece of that number, as the table has them."""
    return tokens.astype(np.uint64) | np.uint64(number << 32)


@dataclass(frozen=True, slots=True)
class Run:
    """Tokens ``[start, end)`` of the prompt, ``shift`` further than in the sequence through ``piece``."""

    start: int
    end: int
    shift: int
    piece: Piece


class Matcher:
    """One prompt's proposals, compared with what is stored."""

    def __init__(
        self, pieces: list[Piece | None], tree: Tree, tokens: TokenArray, start: int, end: int
    ) -> None:
        self._pieces = pieces
        self._tree = tree
        self._tokens = tokens
        self._start = start
        self._end = end
        self._runs: list[Run] = []
        self._longest = np.full(end - start, -1, np.int32)  # for each token: the longest run it is in
        self._lengths = np.zeros(end - start, np.int32)  # ... and how long that is

    def runs(self, at: npt.NDArray[np.intp], places: Places) -> list[Run]:
        """All maximal runs that ``places`` propose, but for those inside another that begins no elsewhere."""
        num_seeds = 0
        for piece, shift, seeds in self._groups(at, places):
            behind = -1
            for seed in seeds.tolist():
                if seed >= behind:
                    behind = self._known_until(piece, shift, seed)
                if seed < behind:
                    continue
                num_seeds += 1
                if num_seeds > _MAX_SEEDS:
                    return self._runs
                run = self._extend(piece, shift, seed)
                if run is not None:
                    behind = run.end
                    self._keep(run)
        return self._runs

    def _groups(
        self, at: npt.NDArray[np.intp], places: Places
    ) -> Iterator[tuple[Piece, int, npt.NDArray[np.intp]]]:
        """Proposals of one piece and one shift together, those with the most to be expected first."""
        if not len(at):
            return
        numbers = (places >> _32).astype(np.int64)
        shifts = at - (places & _LOW).astype(np.int64)
        order = np.lexsort((at, shifts, numbers))
        at, numbers, shifts = at[order], numbers[order], shifts[order]
        is_first = np.ones(len(at), np.bool_)
        is_first[1:] = (numbers[1:] != numbers[:-1]) | (shifts[1:] != shifts[:-1])
        first = np.flatnonzero(is_first)
        counts = np.diff(np.append(first, len(at)))
        names, which = np.unique(numbers[first], return_inverse=True)
        ends = np.array([self._pieces[name].end for name in names.tolist()])
        seed, shift = at[first], shifts[first]
        room = np.minimum(self._end - seed, ends[which] - (seed - shift))
        room += np.minimum(seed - self._start, seed - shift)
        best = np.lexsort((-room, -counts))
        if len(best) > _MAX_GROUPS:
            best = best[_best_of_each(at, counts, best)][:_MAX_GROUPS]
        for group in best.tolist():
            piece = self._pieces[int(numbers[first[group]])]
            if piece is not None and piece.tree is self._tree:
                yield piece, int(shift[group]), at[first[group] : first[group] + counts[group]]

    def _known_until(self, piece: Piece, shift: int, seed: int) -> int:
        """Up to where every run of this shift is part of one that is known; 0: that through ``seed`` is not.

        A run that is not all inside the known one has the token before or the token behind that.
        """
        known = int(self._longest[seed - self._start])
        if known < 0:
            return 0
        run, tokens = self._runs[known], self._tokens
        if run.start > self._start and run.start > shift:
            place = run.start - 1 - shift
            above = owner(piece, place)
            if above.tokens[place - above.start] == tokens[run.start - 1]:
                return 0
        if run.end < self._end:
            place = run.end - shift
            if place < piece.end:
                above = owner(piece, place)
                goes_on = bool(above.tokens[place - above.start] == tokens[run.end])
            else:
                goes_on = int(tokens[piece.end + shift]) in piece.children
            if goes_on:
                return 0
        return run.end

    def _extend(self, piece: Piece, shift: int, seed: int) -> Run | None:
        """The maximal run through token ``seed`` of the prompt; ``None`` where it was a mere fingerprint."""
        tokens, end = self._tokens, seed
        last = above = owner(piece, seed - shift)
        while True:
            end += _num_common(last.tokens[end - shift - last.start :], tokens[end : self._end])
            if end - shift < last.end or end >= self._end:
                break
            child = last.children.get(int(tokens[end]))
            if child is None:
                break
            last = child
        if end - seed < SHORT_GRAM:
            return None
        start = seed
        while start > self._start and start > shift:
            above = owner(above, start - 1 - shift)
            low = max(above.start + shift, self._start)
            stored = above.tokens[low - shift - above.start : start - shift - above.start]
            start -= _num_common(stored[::-1], tokens[low:start][::-1])
            if start > low:
                break
        return Run(start, end, shift, last)

    def _keep(self, run: Run) -> None:
        length = run.end - run.start
        part = slice(run.start - self._start, run.end - self._start)
        is_longer = self._lengths[part] < length
        self._lengths[part][is_longer] = length
        self._longest[part][is_longer] = len(self._runs)
        self._runs.append(run)


def _best_of_each(
    at: npt.NDArray[np.intp], counts: npt.NDArray[np.intp], best: npt.NDArray[np.intp]
) -> npt.NDArray[np.bool_]:
    """Which of the groups ``best`` (best first) are among the best few at any of their tokens.

    Else a text that is stored many times would keep out all else that the prompt has.
    """
    rank = np.empty(len(best), np.intp)
    rank[best] = np.arange(len(best))
    ranks = np.repeat(rank, counts)
    order = np.lexsort((ranks, at))
    is_among = np.ones(len(at), np.bool_)
    is_among[_MAX_EACH:] = at[order][_MAX_EACH:] != at[order][:-_MAX_EACH]
    is_kept = np.zeros(len(best), np.bool_)
    is_kept[ranks[order[is_among]]] = True
    return is_kept


def _num_common(a: TokenArray, b: TokenArray) -> int:
    """``num_common``, which looks at a little first: most runs are shorter than what is stored there."""
    if min(len(a), len(b)) > _FIRST_LOOK:
        found = num_common(a[:_FIRST_LOOK], b[:_FIRST_LOOK])
        if found < _FIRST_LOOK:
            return found
    return num_common(a, b)
