"""Known rules that remember what was evicted: LRU-2, LIRS-like, S3-FIFO, ARC. Time counts commits."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ..policy import NO_HINTS, HistoryPolicy, Outlook, Use
from .history import History, RequestRecord, Run, names_of

_NEVER = float(2**50)


class Remembering(HistoryPolicy):
    """Keeps a bounded history of runs and tells each rule of uses; the rule says the order."""

    def __init__(self, block_tokens: int, max_blocks: int) -> None:
        self._block_tokens = block_tokens
        self._order = 0
        self._path: list[Run] = []
        self._history = History(max_blocks, self._was_split, self._forget, self._grow)
        self._none = Run(array("q", [0]), None, RequestRecord(0, NO_HINTS, 0.0), self._history.new_row())

    def observe(self, use: Use, tokens: bytes) -> list[int]:
        names = names_of(use)
        names.extend(tokens, self._block_tokens)
        self._path = []
        if not names.keys:
            return []
        self._order += 1
        path, num_known = self._history.walk(names.keys)
        if names.request is None:
            names.request = RequestRecord(len(names.keys), use.hints, 0.0)
        for run in path:
            if run.request is not names.request:
                self._use(run, names.request)
        fresh = names.keys[num_known:]
        if fresh:
            last = path[-1] if path else None
            is_own = last is not None and last.request is names.request and last.uses == 1
            if last is not None and is_own and not last.num_children:
                self._history.extend(last, fresh)
                self._lengthened(last, len(fresh))
            else:
                path.append(self._history.add(fresh, last, names.request))
                self._use(path[-1], names.request)
        self._path = path
        self._history.touch(path)
        self._history.trim()
        return [(run.depth + len(run.keys)) * self._block_tokens for run in path[:-1]]

    def tag_at(self, depth_tokens: int) -> Run:
        block = depth_tokens // self._block_tokens
        for run in reversed(self._path):
            if run.depth <= block:
                return run
        return self._none

    @property
    def size_bytes(self) -> int:
        return self._history.size_bytes

    def hinted(self, tag: Run, outlook: Outlook) -> None:
        if outlook >= Outlook.ABANDONED:
            tag.order, tag.older = -self._order, 0  # before all that was used once

    def _use(self, run: Run, request: RequestRecord) -> None:
        run.request = request
        run.uses += 1
        run.older, run.order = max(0, run.order), self._order
        self._used(run)

    def _used(self, run: Run) -> None:
        """For a rule with lists of its own: ``run`` was used, for the first time if ``uses`` is 1."""

    def _lengthened(self, run: Run, num_blocks: int) -> None:
        """So many blocks more."""

    def _was_split(self, upper: Run, lower: Run) -> None:
        return

    def _forget(self, run: Run) -> None:
        return

    def _grow(self, num_rows: int) -> None:
        return


class LRU2(Remembering):
    """Oldest second-last use first; what was used once goes before all, least recently used first."""

    def scores(self, tags: Sequence[Run]) -> npt.NDArray[np.float64]:
        return np.array([run.older or run.order - _NEVER for run in tags])


class LIRSLike(Remembering):
    """Largest of inter-reference recency (infinite after one use) and recency first; ties by recency.

    LIRS's measure without its two stacks.
    """

    def scores(self, tags: Sequence[Run]) -> npt.NDArray[np.float64]:
        now = self._order
        return np.array(
            [
                -max(run.order - run.older, now - run.order) if run.older else run.order - _NEVER
                for run in tags
            ],
            float,
        )


class TwoLists(Remembering):
    """Rules of a list of newcomers (1) and one of the proven (2), in sizes of blocks.

    What was evicted is a ghost until as many blocks as the cache has were evicted after it.
    """

    def __init__(self, num_blocks: int, block_tokens: int, max_blocks: int) -> None:
        super().__init__(block_tokens, max_blocks)
        self._num_blocks = num_blocks
        self._num_evicted = 0
        self._sizes = [0, 0, 0]

    def _is_ghost(self, run: Run) -> bool:
        return run.uses > 1 and not run.home and self._num_evicted - run.left_at <= self._num_blocks

    def _move(self, run: Run, home: int) -> None:
        if run.home:
            self._sizes[run.home] -= len(run.keys)
        if home:
            self._sizes[home] += len(run.keys)
        run.home = home

    def _lengthened(self, run: Run, num_blocks: int) -> None:
        if run.home:
            self._sizes[run.home] += num_blocks

    def evicted(self, tag: Run) -> None:
        if tag.home:
            self._num_evicted += len(tag.keys)
            tag.left_at = self._num_evicted
            tag.was_proven = tag.home == 2
            self._move(tag, 0)

    def _forget(self, run: Run) -> None:
        self._move(run, 0)

    def _takes_newcomer(self) -> bool:
        raise NotImplementedError

    def scores(self, tags: Sequence[Run]) -> npt.NDArray[np.float64]:
        first = 1 if self._takes_newcomer() else 2
        return np.array([run.order if run.home == first else run.order + _NEVER for run in tags])


class S3FIFO(TwoLists):
    """Newcomers share a tenth of the cache and leave first in, first out; what is used twice there moves up.

    The proven go round: each use, up to three, saves them one turn. What comes back while it is remembered
    goes to the proven at once.
    """

    _SHARE = 0.1
    _MAX_SPARED = 3

    def _use(self, run: Run, request: RequestRecord) -> None:
        is_resident = run.home != 0
        run.request = request
        run.uses += 1
        if is_resident:
            run.spare_uses = min(self._MAX_SPARED, run.spare_uses + 1)
            return
        run.spare_uses, run.order = 0, self._order
        self._move(run, 2 if self._is_ghost(run) else 1)

    def _takes_newcomer(self) -> bool:
        return self._sizes[1] > self._SHARE * self._num_blocks or self._sizes[2] == 0

    def spares(self, tag: Run) -> bool:
        if tag.home == 1 and tag.spare_uses > 1:
            self._move(tag, 2)
            tag.spare_uses = 0
        elif tag.home == 2 and tag.spare_uses:
            tag.spare_uses -= 1
        else:
            return False
        tag.order = self._order
        return True


class ARC(TwoLists):
    """Used once against used again, both least recently used first; ghosts that come back move the border."""

    def __init__(self, num_blocks: int, block_tokens: int, max_blocks: int) -> None:
        super().__init__(num_blocks, block_tokens, max_blocks)
        self._target = 0.0  # blocks that newcomers may have

    def _used(self, run: Run) -> None:
        if run.home:
            self._move(run, 2)
        elif self._is_ghost(run):
            step = -len(run.keys) if run.was_proven else len(run.keys)
            self._target = min(self._num_blocks, max(0.0, self._target + step))
            self._move(run, 2)
        else:
            self._move(run, 1)

    def _takes_newcomer(self) -> bool:
        return self._sizes[1] > self._target or self._sizes[2] == 0
