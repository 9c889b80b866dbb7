"""Who probably has which prefix: names of blocks by worker, bounded, newest kept.

A block's name says everything before it as well (a chained hash), so whoever has a name has the prefix that
ends there. The map is a guess. It may say too much (the worker has evicted a block and told nobody) or too
little (it was told of by nobody); the worker's own look-up decides, so a wrong guess costs time and nothing
else.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from sys import getsizeof


@dataclass(slots=True)
class _Held:
    capacity: int
    names: dict[int, None] = field(default_factory=dict)  # least recently used first


class PrefixMap:
    """Names of blocks, and which workers have each. Workers are small whole numbers, bits of a mask.

    One look-up finds all workers: it walks the names once and narrows a mask. The books of a worker never
    hold more than its ``capacity`` names; the least recently used go first, and of one prefix the last ones.
    """

    def __init__(self) -> None:
        self._holders: dict[int, int] = {}
        self._held: dict[int, _Held] = {}

    def add(self, worker: int, capacity: int) -> None:
        """A worker that has nothing yet, of whose blocks at most ``capacity`` are kept in mind."""
        assert worker >= 0, f"worker {worker}"
        assert worker not in self._held, f"worker {worker} is there already"
        assert capacity >= 1, f"capacity {capacity}"
        self._held[worker] = _Held(capacity)

    def drop(self, worker: int) -> None:
        """A worker that is no more."""
        self.clear(worker)
        del self._held[worker]

    def stored(self, worker: int, names: Sequence[int]) -> None:
        """The worker has (or will have) these blocks, a prefix from its beginning or a piece of one.

        Those it had count as used now.
        """
        held, bit = self._held[worker], 1 << worker
        order, holders = held.names, self._holders
        # Backwards: of a prefix the first block is the newest, so that the last one goes first.
        for name in reversed(names):
            if name in order:
                del order[name]
            else:
                holders[name] = holders.get(name, 0) | bit
            order[name] = None
        for name in self._oldest(order, len(order) - held.capacity):
            self._lose(worker, name)

    def removed(self, worker: int, names: Sequence[int]) -> None:
        """The worker has evicted these; names that it was not known to have are passed over."""
        order = self._held[worker].names
        for name in names:
            if name in order:
                self._lose(worker, name)

    def clear(self, worker: int) -> None:
        """The worker has nothing any more."""
        for name in list(self._held[worker].names):
            self._lose(worker, name)

    def depths(self, names: Sequence[int]) -> Iterator[tuple[int, int]]:
        """Pairs of a number of leading blocks and the mask of workers that have just so many of ``names``.

        Shallowest first, without those that have none.
        """
        mask = -1
        for depth, name in enumerate(names):
            left = mask & self._holders.get(name, 0)
            if depth and left != mask:
                yield depth, mask & ~left
            mask = left
            if not mask:
                return
        if names and mask:
            yield len(names), mask

    def num_names(self, worker: int) -> int:
        return len(self._held[worker].names)

    @property
    def num_entries(self) -> int:
        """Names over all workers: what the memory of the map grows with."""
        return sum(len(held.names) for held in self._held.values())

    @property
    def size_bytes(self) -> int:
        """What the map takes in memory: its tables, and the numbers in them."""
        tables = getsizeof(self._holders) + sum(getsizeof(held.names) for held in self._held.values())
        numbers = sum(getsizeof(name) + getsizeof(mask) for name, mask in self._holders.items())
        return tables + numbers

    def check_integrity(self) -> None:
        """Asserts that both books say the same."""
        said: dict[int, int] = {}
        for worker, held in self._held.items():
            assert len(held.names) <= held.capacity, f"worker {worker} holds {len(held.names)}"
            for name in held.names:
                said[name] = said.get(name, 0) | 1 << worker
        assert said == self._holders, "a name's holders differ from what the workers hold"

    def _lose(self, worker: int, name: int) -> None:
        del self._held[worker].names[name]
        left = self._holders[name] & ~(1 << worker)
        if left:
            self._holders[name] = left
        else:
            del self._holders[name]

    @staticmethod
    def _oldest(order: dict[int, None], num: int) -> list[int]:
        names = iter(order)
        return [next(names) for _ in range(max(0, num))]
