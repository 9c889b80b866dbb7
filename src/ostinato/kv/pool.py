"""Who has which block, which are free, and where a sequence's blocks lie.

A block has two counts: ``holds`` by leases and ``owners`` among the nodes of the index. It is free when both
are zero and *evictable* when only the index has it. Free blocks are kept as maximal extents, so that a
sequence's blocks come out consecutive: what lies in a row is read faster.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from ostinato.types import BlockIds, TokenArray


class FreeExtents:
    """The free blocks as maximal runs of consecutive ids, found by either end or by length.

    Distinct lengths add up to at most the number of blocks, so there are at most about ``sqrt(2 * blocks)``
    of them and the sorted list of lengths stays short however fragmented the pool is.
    """

    __slots__ = ("_by_length", "_length_at", "_lengths", "_start_before")

    def __init__(self) -> None:
        self._length_at: dict[int, int] = {}  # first block -> length
        self._start_before: dict[int, int] = {}  # block behind the last one -> first block
        self._by_length: dict[int, dict[int, None]] = {}  # length -> first blocks, latest last
        self._lengths: list[int] = []

    def length_at(self, start: int) -> int:
        """Length of the extent that begins at block ``start``; 0 when none begins there."""
        return self._length_at.get(start, 0)

    def best_fit(self, length: int) -> int:
        """Start of the shortest extent of at least ``length`` blocks, else of the longest there is."""
        at = min(bisect_left(self._lengths, length), len(self._lengths) - 1)
        return next(reversed(self._by_length[self._lengths[at]]))

    def add(self, start: int, length: int) -> None:
        """Blocks ``[start, start + length)`` became free; merges with the neighbours."""
        before = self._start_before.get(start)
        if before is not None:
            length += self._unlink(before)
            start = before
        if start + length in self._length_at:
            length += self._unlink(start + length)
        self._link(start, length)

    def take(self, start: int, length: int) -> None:
        """Takes the first ``length`` blocks of the extent that begins at ``start``."""
        available = self._unlink(start)
        assert length <= available, f"took {length} blocks of an extent of {available}"
        if length < available:
            self._link(start + length, available - length)

    def _link(self, start: int, length: int) -> None:
        self._length_at[start] = length
        self._start_before[start + length] = start
        peers = self._by_length.get(length)
        if peers is None:
            peers = self._by_length[length] = {}
            insort(self._lengths, length)
        peers[start] = None

    def _unlink(self, start: int) -> int:
        length = self._length_at.pop(start)
        del self._start_before[start + length]
        peers = self._by_length[length]
        del peers[start]
        if not peers:
            del self._by_length[length]
            del self._lengths[bisect_left(self._lengths, length)]
        return length

    def check_integrity(self, is_free: npt.NDArray[np.bool_]) -> None:
        """Asserts that the extents are exactly the maximal runs of ``is_free``."""
        edges = np.flatnonzero(np.diff(np.concatenate(([False], is_free, [False])).astype(np.int8)))
        expected = {int(a): int(b - a) for a, b in edges.reshape(-1, 2)}
        assert self._length_at == expected, f"free extents {self._length_at}, free blocks {expected}"
        assert self._start_before == {start + length: start for start, length in expected.items()}
        by_length: dict[int, set[int]] = {}
        for start, length in expected.items():
            by_length.setdefault(length, set()).add(start)
        assert {length: set(peers) for length, peers in self._by_length.items()} == by_length
        assert self._lengths == sorted(by_length)


class BlockPool:
    """Counts of every block. All ``block_ids`` arguments hold distinct ids; nothing here locks."""

    __slots__ = (
        "_free",
        "_freed",
        "_holds",
        "_owners",
        "num_blocks",
        "num_evictable",
        "num_free",
        "num_held",
    )

    def __init__(self, num_blocks: int, freed: Callable[[BlockIds], None] | None = None) -> None:
        """``freed`` is told of all blocks that become free."""
        assert num_blocks >= 1, f"a pool of {num_blocks} blocks"
        self._freed = freed
        self.num_blocks = num_blocks
        self.num_free = num_blocks
        self.num_held = 0
        self.num_evictable = 0
        self._holds = np.zeros(num_blocks, np.int32)
        self._owners = np.zeros(num_blocks, np.int32)
        self._free = FreeExtents()
        self._free.add(0, num_blocks)

    # ------------------------------------------------------------ leases

    def allocate(self, num_blocks: int, *, after: int | None = None, num_spare: int = 0) -> BlockIds:
        """Takes ``num_blocks`` free blocks, held once, in as few runs as can be.

        Begins right behind block ``after`` where that is free, goes on with the best fitting extent.
        Up to ``num_spare`` more come along when they are free and continue the last run.
        """
        assert 0 < num_blocks <= self.num_free, f"allocated {num_blocks} of {self.num_free} free blocks"
        pieces: list[BlockIds] = []
        missing = num_blocks
        start = -1 if after is None else after + 1
        length = self._free.length_at(start)
        while missing > 0:
            if length == 0:
                start = self._free.best_fit(missing + num_spare)
                length = self._free.length_at(start)
            length = min(length, missing + num_spare)
            self._free.take(start, length)
            pieces.append(np.arange(start, start + length, dtype=np.intp))
            missing -= length
            length = 0
        block_ids = pieces[0] if len(pieces) == 1 else np.concatenate(pieces)
        self._holds[block_ids] = 1
        self.num_held += len(block_ids)
        self.num_free -= len(block_ids)
        return block_ids

    def hold(self, block_ids: BlockIds) -> None:
        """One more lease holds these blocks, none of which may be free."""
        holds = self._holds[block_ids]
        num_unheld = len(holds) - int(np.count_nonzero(holds))
        if num_unheld:
            assert self._owners[block_ids[holds == 0]].all(), "held a free block"
            self.num_held += num_unheld
            self.num_evictable -= num_unheld
        self._holds[block_ids] = holds + 1

    def release(self, block_ids: BlockIds) -> BlockIds:
        """One lease fewer holds these blocks; those nobody else has become free.

        Returns the blocks that became evictable.
        """
        holds = self._holds[block_ids]
        assert holds.all(), f"released blocks nobody holds: {block_ids[holds == 0]}"
        self._holds[block_ids] = holds - 1
        unheld = block_ids[holds == 1]
        is_owned = self._owners[unheld] > 0
        evictable: BlockIds = unheld[is_owned]
        self.num_held -= len(unheld)
        self.num_evictable += len(evictable)
        if len(evictable) < len(unheld):
            self._add_free(unheld[~is_owned])
        return evictable

    # ------------------------------------------------------------ index

    def own(self, block_ids: BlockIds) -> int:
        """One more node owns these blocks; returns how many had no owner. Free blocks cannot be owned."""
        owners = self._owners[block_ids]
        is_first = owners == 0
        assert self._holds[block_ids[is_first]].all(), "owned a free block"
        self._owners[block_ids] = owners + 1
        return int(np.count_nonzero(is_first))

    def disown(self, block_ids: BlockIds) -> int:
        """One node fewer owns these blocks; those nobody has become free. Returns how many did."""
        owners = self._owners[block_ids]
        assert owners.all(), f"disowned blocks nobody owns: {block_ids[owners == 0]}"
        self._owners[block_ids] = owners - 1
        unowned = block_ids[owners == 1]
        freed: BlockIds = unowned[self._holds[unowned] == 0]
        if len(freed):
            self.num_evictable -= len(freed)
            self._add_free(freed)
        return len(freed)

    def count_held(self, block_ids: BlockIds) -> int:
        """How many of these blocks a lease holds."""
        return int(np.count_nonzero(self._holds[block_ids]))

    # ------------------------------------------------------------ inside

    def _add_free(self, block_ids: BlockIds) -> None:
        self.num_free += len(block_ids)
        if self._freed is not None:
            self._freed(block_ids)
        ordered = np.sort(block_ids)
        bounds = [0, *(np.flatnonzero(np.diff(ordered) != 1) + 1).tolist(), len(ordered)]
        for first, behind in pairwise(bounds):
            self._free.add(int(ordered[first]), behind - first)

    def check_integrity(self, holds: npt.NDArray[np.int32], owners: npt.NDArray[np.int32]) -> None:
        """Asserts every count against ``holds`` and ``owners`` tallied by those who hold and own."""
        wrong = np.flatnonzero((self._holds != holds) | (self._owners != owners))
        assert not len(wrong), (
            f"blocks {wrong}: held {self._holds[wrong]}, leases say {holds[wrong]}; "
            f"owned {self._owners[wrong]}, index says {owners[wrong]}"
        )
        is_held, is_owned = holds > 0, owners > 0
        assert self.num_held == np.count_nonzero(is_held)
        assert self.num_evictable == np.count_nonzero(is_owned & ~is_held)
        assert self.num_free == np.count_nonzero(~(is_held | is_owned))
        self._free.check_integrity(~(is_held | is_owned))


class BlockTable:
    """A sequence's blocks in order: token ``i`` lives in block ``ids[i // block_size]``."""

    __slots__ = ("_block_size", "_ids", "num_blocks")

    def __init__(self, block_ids: BlockIds, block_size: int) -> None:
        self._ids = block_ids  # never written in place before it was copied: it may be the index's own array
        self._block_size = block_size
        self.num_blocks = len(block_ids)

    @property
    def ids(self) -> BlockIds:
        """The block ids; do not write to it."""
        return self._ids[: self.num_blocks]

    def append(self, block_ids: BlockIds) -> None:
        needed = self.num_blocks + len(block_ids)
        if self.num_blocks == len(self._ids) or needed > len(self._ids):
            grown = np.empty(max(needed, self.num_blocks * 2), np.intp)
            grown[: self.num_blocks] = self.ids
            self._ids = grown
        self._ids[self.num_blocks : needed] = block_ids
        self.num_blocks = needed

    def drop_last(self) -> None:
        """Forgets the last block."""
        self.num_blocks -= 1
        self._ids = self.ids.copy()

    def slots(self, start: int, end: int) -> TokenArray:
        """Slots of the tokens ``[start, end)``, int32."""
        index, offset = np.divmod(np.arange(start, end), self._block_size)
        return (self._ids[index] * self._block_size + offset).astype(np.int32)
