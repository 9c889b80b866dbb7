"""Ours: learns how likely a block comes back and for how long it must be held, and knows when not to."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterator, Sequence
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from ostinato.ports import Clock

from ..policy import LRU, NO_HINTS, HistoryPolicy, Outlook, Use
from .features import NUM_CLASSES, NUM_FEATURES, NUM_STRATA, NUM_WEIGHTS, class_of, features_of, stratum_of
from .guard import Guard
from .hazard import Floats, HazardRegression, HazardTables
from .history import History, RequestRecord, Run, Shadow, names_of

ScalarT = TypeVar("ScalarT", bound=np.generic)

_ADVANCE_S = 1.0  # bins are ten seconds and more
_SLICE_ROWS = 2048  # that one slice of put-off work looks at
_ROWS_PER_REQUEST = 512  # that refits may look at, on the average
_MAX_CHORES = 64
_MAX_LOOKED_AT = 64  # runs, for what to forget
_HUB_BRANCHES = 8  # a run that so many prompts continue is nobody's last turn


class Workload(HistoryPolicy):
    """Evicts the leaf whose memory is worth least: probability of reuse for each second it must be held.

    Two learners of that (``HazardTables`` on three features, ``HazardRegression`` on many) are multiplied. A
    guard replays the same requests through two shadows that only count, least recently used and ours, and
    falls back to the former while it leads. What is said of a sequence's future is one more thing that the
    tables learn from: what comes true is obeyed, what does not is not.

    Counting and learning are chores that ``tend`` does in slices, in the order they came up; whoever never
    calls it gets them done as requests come in.

    Args:
        num_blocks: capacity of the cache it serves.
        block_tokens: tokens of a block.
        history_factor: history holds at most ``history_factor * num_blocks + history_floor`` blocks.
    """

    obeys = False

    def __init__(
        self,
        num_blocks: int,
        block_tokens: int,
        clock: Clock,
        *,
        history_factor: int = 8,
        history_floor: int = 65_536,
    ) -> None:
        self._clock = clock
        self._block_tokens = block_tokens
        self._now_s = self._advance_at_s = 0.0
        self._order = 0
        self._num_requests = self._learn_at = 0
        self._counts: deque[Iterator[None]] = deque()
        self._lessons: deque[Iterator[None]] = deque()
        self._num_slices = 0
        self._tables = HazardTables(NUM_CLASSES, len(Outlook))
        self._regression = HazardRegression(NUM_WEIGHTS, NUM_STRATA)
        max_blocks = history_factor * num_blocks + history_floor
        self._history = History(max_blocks, self._was_split, self._forget, self._grow)
        self._lru = Shadow(0, num_blocks, LRU())
        self._ours = Shadow(1, num_blocks, _Worth(self))
        self.guard = Guard(num_blocks)
        self._path: list[Run] = []
        self._none = Run(array("q", [0]), None, RequestRecord(0, NO_HINTS, 0.0), 0)
        self._last_s: Floats = np.zeros(64)
        self._order_of: Floats = np.zeros(64)
        self._blocks: Floats = np.zeros(64)  # 0: the row is free
        self._sums: Floats = np.zeros(64)
        self._class: npt.NDArray[np.int64] = np.zeros(64, np.int64)
        self._stratum: npt.NDArray[np.int64] = np.zeros(64, np.int64)
        self._bin: npt.NDArray[np.int64] = np.zeros(64, np.int64)
        self._features: npt.NDArray[np.int16] = np.zeros((64, NUM_FEATURES), np.int16)
        self._history.new_row()  # row 0 is the run that stands for "shorter than a block"
        for _ in self._learn():  # what is assumed before anything was seen
            pass

    # ------------------------------------------------------------ what the index asks

    def observe(self, use: Use, tokens: bytes) -> list[int]:
        names = names_of(use)
        names.extend(tokens, self._block_tokens)
        self._path = []
        if not names.keys:
            return []
        self._now_s = max(self._now_s, self._clock.monotonic())
        self._order += 1
        known, num_known = self._history.walk(names.keys)
        if names.request is None:
            self._num_requests += 1
            names.request = self._record(use, known, num_known, len(names.keys), len(tokens) // 4)
        is_told_more = names.request.hints is not use.hints
        names.request.hints = use.hints
        self._use(known, num_known, names.keys, names.request, is_told_more=is_told_more)
        self._put_off(names.request, len(names.keys))
        return [(run.depth + len(run.keys)) * self._block_tokens for run in self._path[:-1]]

    def tag_at(self, depth_tokens: int) -> Run:
        block = depth_tokens // self._block_tokens
        for run in reversed(self._path):
            if run.depth <= block:
                return run
        return self._none

    def scores(self, tags: Sequence[Run]) -> Floats:
        if self.guard.is_fallen_back:
            rows = np.fromiter((run.slot for run in tags), np.intp, len(tags))
            return self._order_of[rows]
        return self.worth(tags)

    def worth(self, runs: Sequence[Run]) -> Floats:
        """Probability of a reuse for each second held, times the same by the other learner."""
        rows = np.fromiter((run.slot for run in runs), np.intp, len(runs))
        ages_s = self._now_s - self._last_s[rows]
        by_table = self._tables.worth(self._class[rows], ages_s)
        by_weights = self._regression.worth(self._sums[rows], self._stratum[rows], ages_s)
        return np.asarray(by_table * by_weights)

    def hinted(self, tag: Run, outlook: Outlook) -> None:
        if tag.slot:
            self._class[tag.slot] = self._class[tag.slot] % NUM_CLASSES + NUM_CLASSES * outlook

    def tend(self) -> bool:
        """Counting goes first, in order; learning gets every third slice even then."""
        self._num_slices += 1
        is_lesson = bool(self._lessons) and (not self._counts or self._num_slices % 3 == 0)
        chores = self._lessons if is_lesson else self._counts
        if chores and next(chores[0], self) is self:
            chores.popleft()
        return bool(self._counts or self._lessons)

    @property
    def size_bytes(self) -> int:
        return self._history.size_bytes

    # ------------------------------------------------------------ one request

    def _record(
        self, use: Use, known: list[Run], num_known: int, num_blocks: int, num_tokens: int
    ) -> RequestRecord:
        hints = use.hints
        record = RequestRecord(num_blocks, hints, self._now_s)
        record.num_known = num_known
        record.input_tokens = hints.input_tokens or num_tokens
        if known:
            above = known[-1]
            if num_known < num_blocks:
                above.branches += 1
            if above.branches < _HUB_BRANCHES:
                parent = above.request
                record.turn = parent.turn + 1
                record.parent_gap_s = self._now_s - parent.time_s
                record.message_tokens = record.input_tokens - parent.input_tokens - parent.hints.output_tokens
        return record

    def _use(
        self,
        known: list[Run],
        num_known: int,
        keys: array[int],
        request: RequestRecord,
        *,
        is_told_more: bool,
    ) -> None:
        """Known runs were used again, what is behind them is new."""
        again = [run for run in known if run.request is not request]
        self._reward(again)
        path = list(known)
        fresh = keys[num_known:]
        if fresh:
            last = path[-1] if path else None
            if last is not None and last.request is request and last.uses == 1 and not last.num_children:
                self._history.extend(last, fresh)
            else:
                cut = len(fresh) - 1 if request.hints.has_part_block else len(fresh)
                for part in (fresh[:cut], fresh[cut:]):
                    if part:
                        path.append(self._history.add(part, path[-1] if path else None, request))
                path[-1].is_part = request.hints.has_part_block
        self._path = path
        self._history.touch(path)
        for run in path:
            if run.request is not request or run.uses == 0:
                run.last_gap_s = self._now_s - run.last_s if run.uses else -1.0
                run.uses += 1
                run.older, run.order = run.order, self._order
                run.last_s = self._now_s
                run.request = request
                self._start(run, run is path[-1])
            elif is_told_more:
                self._describe(run, run is path[-1])
            else:
                self._blocks[run.slot] = len(run.keys)

    def _start(self, run: Run, is_last: bool) -> None:
        """A wait for the next use begins."""
        row = run.slot
        self._last_s[row] = run.last_s
        self._order_of[row] = run.order
        self._bin[row] = 0
        self._describe(run, is_last)

    def _describe(self, run: Run, is_last: bool) -> None:
        row = run.slot
        self._blocks[row] = len(run.keys)
        self._class[row] = class_of(run)
        self._stratum[row] = stratum_of(run)
        self._features[row] = features_of(run, is_last)
        self._sums[row] = self._regression.sums(self._features[row][None])[0]

    # ------------------------------------------------------------ chores

    def _put_off(self, request: RequestRecord, num_blocks: int) -> None:
        """What has to be done because of a request, and need not be done now."""
        if request.last is None:
            self._counts.append(self._count(request))
        request.last, request.order = self._path[-1], self._order
        request.num_blocks = num_blocks
        if self._now_s >= self._advance_at_s:
            self._lessons.append(self._advance())
            # Looking at a row takes some 10 ns: a hundred thousand a second are a thousandth of the time.
            self._advance_at_s = self._now_s + max(_ADVANCE_S, self._history.num_rows / 100_000)
        if self._num_requests >= self._learn_at:
            self._lessons.append(self._learn())
            every = 10 if self._num_requests < 500 else 50
            self._learn_at = self._num_requests + max(every, self._history.num_rows // _ROWS_PER_REQUEST)
        self._history.trim(_MAX_LOOKED_AT)
        while len(self._counts) > _MAX_CHORES or len(self._lessons) > _MAX_CHORES:
            self.tend()  # nobody else does

    def _count(self, request: RequestRecord) -> Iterator[None]:
        """Plays a request's path, as it is by now, through both shadows; counts blocks not counted before."""
        last, request.last = request.last, None
        assert last is not None, "nothing was left to count"
        if not last.stands:
            return  # forgotten meanwhile
        path: list[Run] = []
        above: Run | None = last
        while above is not None:
            path.append(above)
            above = above.parent
        path.reverse()
        asked = request.hints.input_tokens // self._block_tokens or request.num_blocks
        num_asked, num_counted = min(asked, request.num_blocks), request.num_counted
        if num_asked > num_counted:
            hits = self._lru.hits(path), self._ours.hits(path)
            lru_hits, our_hits = (
                max(0, min(hit, num_asked) - num_counted) if through else 0
                for hit, through in zip(hits, request.went_through, strict=True)
            )
            self.guard.count(lru_hits, our_hits, num_asked - num_counted)
            request.went_through = hits[0] >= num_asked, hits[1] >= num_asked
            request.num_counted = num_asked
        self._lru.place(path, request.order)
        yield
        self._ours.place(path, request.order)

    def _reward(self, runs: list[Run]) -> None:
        """What was used again is a sample: of what it looked like, before it looks otherwise."""
        if not runs:
            return
        rows = np.fromiter((run.slot for run in runs), np.intp, len(runs))
        ages_s = self._now_s - self._last_s[rows]
        self._tables.close(self._class[rows], ages_s, self._blocks[rows], is_reuse=True)
        rows = rows[self._bin[rows] < HazardRegression.num_bins]
        weight = np.ones(len(rows))
        self._regression.learn(self._features[rows], self._stratum[rows], self._bin[rows], True, weight)

    def _advance(self) -> Iterator[None]:
        """Bins that passed without a use are samples too."""
        edges = HazardRegression.edges_s
        for start in range(0, self._history.num_rows, _SLICE_ROWS):
            part = slice(start, start + _SLICE_ROWS)
            while True:
                bins = self._bin[part]
                ends_s = self._last_s[part] + edges[np.minimum(bins + 1, len(edges) - 1)]
                is_over = (ends_s <= self._now_s) & (self._blocks[part] > 0) & (bins < len(edges) - 1)
                rows = start + np.flatnonzero(is_over)
                if not len(rows):
                    break
                weight = np.ones(len(rows))
                self._regression.learn(
                    self._features[rows], self._stratum[rows], self._bin[rows], False, weight
                )
                self._bin[rows] += 1
                yield

    def _learn(self) -> Iterator[None]:
        """Puts both learners' indices together from what they know now."""
        for start in range(0, self._history.num_rows, _SLICE_ROWS):
            rows = start + np.flatnonzero(self._blocks[start : start + _SLICE_ROWS])
            self._tables.wait(self._class[rows], self._now_s - self._last_s[rows], self._blocks[rows])
            yield
        yield from self._tables.learn()
        yield from self._regression.refresh()
        for start in range(0, self._history.num_rows, _SLICE_ROWS):
            rows = start + np.flatnonzero(self._blocks[start : start + _SLICE_ROWS])
            self._sums[rows] = self._regression.sums(self._features[rows])
            yield

    # ------------------------------------------------------------ what the history says

    def _was_split(self, upper: Run, lower: Run) -> None:
        for column in (
            self._last_s,
            self._order_of,
            self._sums,
            self._class,
            self._stratum,
            self._bin,
            self._features,
        ):
            column[upper.slot] = column[lower.slot]
        self._blocks[upper.slot] = len(upper.keys)
        self._blocks[lower.slot] = len(lower.keys)
        self._lru.was_split(upper, lower)
        self._ours.was_split(upper, lower)

    def _forget(self, run: Run) -> None:
        row = np.array([run.slot])
        self._tables.close(
            self._class[row], self._now_s - self._last_s[row], self._blocks[row], is_reuse=False
        )
        self._blocks[row] = 0

    def _grow(self, num_rows: int) -> None:
        if num_rows <= len(self._last_s):
            return
        size = 2 * num_rows
        self._last_s, self._order_of = _grown(self._last_s, size), _grown(self._order_of, size)
        self._blocks, self._sums = _grown(self._blocks, size), _grown(self._sums, size)
        self._class, self._stratum = _grown(self._class, size), _grown(self._stratum, size)
        self._bin, self._features = _grown(self._bin, size), _grown(self._features, size)


class _Worth(HistoryPolicy):
    """Ours without the guard: what its shadow evicts by."""

    def __init__(self, owner: Workload) -> None:
        self._owner = owner

    def observe(self, use: Use, tokens: bytes) -> list[int]:
        raise AssertionError("a shadow's rule observes nothing itself")

    def tag_at(self, depth_tokens: int) -> Run:
        raise AssertionError("a shadow's rule observes nothing itself")

    def scores(self, tags: Sequence[Run]) -> Floats:
        return self._owner.worth(tags)

    @property
    def size_bytes(self) -> int:
        return 0


def _grown(column: npt.NDArray[ScalarT], num_rows: int) -> npt.NDArray[ScalarT]:
    """A copy with room for ``num_rows`` rows; the new ones are zero."""
    fresh = np.zeros((num_rows, *column.shape[1:]), column.dtype)
    fresh[: len(column)] = column
    return fresh
