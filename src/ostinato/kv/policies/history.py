"""What was used, also after it was evicted: a bounded tree of runs of blocks that share one fate.

A *run* is blocks one behind the other that were always used together, so that one record serves them all.
Runs part where prompts part. Blocks are named by chained 64-bit hashes: a collision can only make the policy
judge wrongly, the index compares tokens. Only full blocks have a name; a tail shorter than a block shares the
fate of the block before it.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import dataclass

from ..policy import LRU, Candidate, HistoryPolicy, RequestHints, ScoredQueue, Use, VictimQueue

_TOKEN_BYTES = 4
# Measured, rounded up: a Run with its stands, its places in dicts and queues and its rows of tables; a name.
_RUN_BYTES, _NAME_BYTES = 1600, 10


@dataclass(eq=False, slots=True)
class RequestRecord:
    """What of a request its runs remember.

    ``turn`` counts from 0, ``message_tokens`` is what came on top of the turn before and its answer,
    ``num_known`` of its ``num_blocks`` blocks had been seen before. Of the first ``num_counted`` it was
    counted which a shadow had; ``went_through`` says for each shadow whether it had them all. ``last`` is
    where its path ends, while that has still to be counted, and ``order`` when it was used.
    """

    num_blocks: int
    hints: RequestHints
    time_s: float
    turn: int = 0
    num_known: int = 0
    input_tokens: int = 0
    message_tokens: int = 0
    parent_gap_s: float = -1.0
    num_counted: int = 0
    went_through: tuple[bool, bool] = (True, True)
    last: Run | None = None
    order: int = 0


class Stand(Candidate):
    """How much of a run a shadow cache holds: its first ``num_resident`` blocks."""

    __slots__ = ("num_below", "num_resident")

    def __init__(self, run: Run) -> None:
        super().__init__(rank=0, depth_tokens=0, num_tokens=0)
        self.tag = run
        self.num_resident = 0
        self.num_below = 0  # runs below this one that the shadow holds something of


class Run:
    """Blocks in a row. ``order`` and ``older`` are its last two uses (0: none), ``slot`` a row of tables."""

    __slots__ = (
        "branches",
        "depth",
        "first_s",
        "home",
        "is_part",
        "keys",
        "last_gap_s",
        "last_s",
        "left_at",
        "num_children",
        "older",
        "order",
        "parent",
        "request",
        "slot",
        "spare_uses",
        "stands",
        "uses",
        "was_proven",
    )

    def __init__(self, keys: array[int], parent: Run | None, request: RequestRecord, slot: int) -> None:
        self.keys = keys
        self.parent = parent
        self.request = request
        self.slot = slot
        self.depth: int = 0 if parent is None else parent.depth + len(parent.keys)
        self.uses = 0
        self.branches = 0
        self.num_children = 0
        self.order = self.older = 0
        self.first_s = self.last_s = request.time_s
        self.last_gap_s = -1.0
        self.is_part = False
        self.home = 0  # the list it is in, for policies of two lists; 0: in none
        self.spare_uses = 0
        self.was_proven = False
        self.left_at = 0  # blocks evicted before it was
        self.stands: tuple[Stand, ...] = (Stand(self), Stand(self))


class History:
    """All runs, at most ``max_blocks`` blocks of them; the longest unused are forgotten.

    ``was_split(upper, lower)`` is called when a run was split (``upper`` has a fresh row), ``forget`` before
    one is forgotten, ``grow`` with the number of rows that there are now.
    """

    def __init__(
        self,
        max_blocks: int,
        was_split: Callable[[Run, Run], None],
        forget: Callable[[Run], None],
        grow: Callable[[int], None],
    ) -> None:
        self.num_blocks = 0
        self.num_rows = 0
        self.max_blocks = max_blocks
        self._was_split, self._forget, self._grow = was_split, forget, grow
        self._first: dict[int, Run] = {}
        self._by_age: dict[Run, None] = {}
        self._free_rows: list[int] = []

    @property
    def num_runs(self) -> int:
        return len(self._by_age)

    @property
    def size_bytes(self) -> int:
        return self.num_rows * _RUN_BYTES + self.num_blocks * _NAME_BYTES

    def walk(self, keys: array[int]) -> tuple[list[Run], int]:
        """The known runs that ``keys`` run through, the last of them split where they part."""
        path: list[Run] = []
        at = 0
        while at < len(keys):
            run = self._first.get(keys[at])
            if run is None:
                break
            length = _common(run.keys, keys, at)
            if length < len(run.keys):
                run = self._split(run, length)
            path.append(run)
            at += length
        return path, at

    def add(self, keys: array[int], parent: Run | None, request: RequestRecord) -> Run:
        run = Run(keys, parent, request, self.new_row())
        if parent is not None:
            parent.num_children += 1
        self._first[keys[0]] = run
        self._by_age[run] = None
        self.num_blocks += len(keys)
        return run

    def extend(self, run: Run, keys: array[int]) -> None:
        run.keys += keys
        self.num_blocks += len(keys)

    def touch(self, path: list[Run]) -> None:
        """These were used: the deepest counts as the oldest, so that what is forgotten first is a leaf."""
        for run in reversed(path):
            del self._by_age[run]
            self._by_age[run] = None

    def trim(self, max_looked_at: int | None = None) -> None:
        """Forgets down to the bound, looking at so many runs; ``None``: at all, if it must be."""
        num_runs = len(self._by_age)
        for _ in range(num_runs if max_looked_at is None else min(max_looked_at, num_runs)):
            if self.num_blocks <= self.max_blocks:
                return
            run = next(iter(self._by_age))
            del self._by_age[run]
            if run.num_children or any(stand.num_resident for stand in run.stands):
                self._by_age[run] = None  # a shadow holds it: at most twice the cache's blocks
                continue
            self._forget(run)
            del self._first[run.keys[0]]
            if run.parent is not None:
                run.parent.num_children -= 1
            self.num_blocks -= len(run.keys)
            self._free_rows.append(run.slot)
            run.slot = 0  # the index may have blocks of it still: row 0 tells nothing of anybody
            run.stands = ()  # no cycle: it goes at once

    def _split(self, lower: Run, at: int) -> Run:
        upper = Run(lower.keys[:at], lower.parent, lower.request, self.new_row())
        upper.depth, upper.uses, upper.branches, upper.num_children = lower.depth, lower.uses, 1, 1
        upper.order, upper.older = lower.order, lower.older
        upper.home, upper.spare_uses, upper.left_at = lower.home, lower.spare_uses, lower.left_at
        upper.was_proven = lower.was_proven
        upper.first_s, upper.last_s, upper.last_gap_s = lower.first_s, lower.last_s, lower.last_gap_s
        lower.keys, lower.parent, lower.depth = lower.keys[at:], upper, lower.depth + at
        self._first[upper.keys[0]] = upper
        self._first[lower.keys[0]] = lower
        del self._by_age[lower]
        self._by_age[lower] = None
        self._by_age[upper] = None
        self._was_split(upper, lower)
        return upper

    def new_row(self) -> int:
        if self._free_rows:
            return self._free_rows.pop()
        self.num_rows += 1
        self._grow(self.num_rows)
        return self.num_rows - 1


class Shadow:
    """A cache of the same size in which nothing is stored, only counted: how would another rule have done?"""

    def __init__(self, which: int, capacity: int, policy: LRU | HistoryPolicy) -> None:
        self.num_blocks = 0
        self._which = which
        self._capacity = capacity
        self._queue: VictimQueue[Stand]
        self._queue = VictimQueue(policy) if isinstance(policy, LRU) else ScoredQueue(policy)

    def hits(self, path: list[Run]) -> int:
        """Blocks of a known path that are here."""
        total = 0
        for run in path:
            resident = run.stands[self._which].num_resident
            total += resident
            if resident < len(run.keys):
                break
        return total

    def was_split(self, upper: Run, lower: Run) -> None:
        above, below = upper.stands[self._which], lower.stands[self._which]
        length = len(upper.keys)
        above.num_resident = min(length, below.num_resident)
        below.num_resident -= above.num_resident
        above.last_used = below.last_used
        if below.num_resident:
            above.num_below = 1
        elif above.num_resident:
            self._queue.drop(below)
            self._queue.put(above)

    def place(self, path: list[Run], order: int) -> None:
        """Inserts a path whole, then evicts leaves of others down to capacity."""
        for run in path:
            stand = run.stands[self._which]
            stand.last_used = order
            if not stand.num_resident and run.parent is not None:
                above = run.parent.stands[self._which]
                above.num_below += 1
                self._queue.drop(above)
            self.num_blocks += len(run.keys) - stand.num_resident
            stand.num_resident = len(run.keys)
            if not stand.num_below:
                self._queue.put(stand)
        if isinstance(self._queue, ScoredQueue):
            self._queue.observed()
        own = set(path)
        kept: list[Stand] = []
        while self.num_blocks > self._capacity:
            stand = self._queue.pop()
            if stand.tag in own:
                kept.append(stand)
                if len(kept) == len(own):
                    break  # a prompt larger than the cache: nothing else is left
                continue
            self._take(stand)
        for stand in kept:
            self._queue.put(stand)

    def _take(self, stand: Stand) -> None:
        run: Run = stand.tag
        taken = min(stand.num_resident, self.num_blocks - self._capacity)
        stand.num_resident -= taken
        self.num_blocks -= taken
        if stand.num_resident:
            self._queue.put(stand)
        elif run.parent is not None:
            above = run.parent.stands[self._which]
            above.num_below -= 1
            if not above.num_below and above.num_resident:
                self._queue.put(above)


class Names:
    """The chained hashes of a growing sequence's full blocks."""

    def __init__(self, namespace: str) -> None:
        self.keys: array[int] = array("q")
        self.request: RequestRecord | None = None
        self._above = hash(namespace)

    def extend(self, tokens: bytes, block_tokens: int) -> None:
        size = block_tokens * _TOKEN_BYTES
        above, add = self._above, self.keys.append
        for start in range(len(self.keys) * size, len(tokens) // size * size, size):
            above = hash((above, tokens[start : start + size]))
            add(above)
        self._above = above


def names_of(use: Use) -> Names:
    if use.state is None:
        use.state = Names(use.namespace)
    assert isinstance(use.state, Names)
    return use.state


def _common(run: array[int], keys: array[int], at: int) -> int:
    length = min(len(run), len(keys) - at)
    if run[:length] == keys[at : at + length]:
        return length
    return next(i for i in range(length) if run[i] != keys[at + i])
