"""Which cached tokens go first when room is needed: the rule, and the queue that it orders."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from typing import Any, Generic, Protocol, TypeVar


@dataclass(slots=True, eq=False)
class NodeStats:
    """What the index knows of one node, and a policy may judge by.

    Ranks are ticks of the manager's counter: they order events and measure nothing. ``last_used`` and
    ``inserted`` are ranks, ``num_uses`` counts the look-ups that ran through the node since it was
    inserted, ``depth_tokens`` is how many tokens stand before it and ``num_tokens`` how many it holds.
    """

    last_used: int
    inserted: int
    num_uses: int
    depth_tokens: int
    num_tokens: int


class Priority(Protocol):
    """Anything that can be ordered against its own kind."""

    def __lt__(self, other: Any, /) -> bool: ...


class EvictionPolicy(Protocol):
    """Says which leaf of the index is given up first."""

    def priority(self, stats: NodeStats) -> Priority:
        """The smallest is evicted first; a pure function of ``stats``, asked again whenever they change.

        Among equals the one that came to this priority first goes first.
        """


class LRU:
    """Least recently used first."""

    def priority(self, stats: NodeStats) -> int:
        return stats.last_used


class Candidate(NodeStats):
    """Statistics that can stand in a victim queue. The two marks belong to the queue."""

    __slots__ = ("parked_on", "ticket")

    def __init__(self, *, rank: int, depth_tokens: int, num_tokens: int) -> None:
        super().__init__(rank, rank, 0, depth_tokens, num_tokens)
        self.ticket = 0  # of the one live heap entry; 0: none
        self.parked_on = -1  # the block waited for; -1: none


CandidateT = TypeVar("CandidateT", bound=Candidate)


class VictimQueue(Generic[CandidateT]):
    """Candidates in order of priority, each at most once.

    A heap in which only an entry with its candidate's latest ticket counts, so that a change of priority is
    one push; dead entries are swept when they outnumber the live ones. A candidate that cannot go now because
    a block is held is *parked* on that block and costs nothing until the block wakes it.
    """

    def __init__(self, policy: EvictionPolicy) -> None:
        self._policy = policy
        self._heap: list[tuple[Priority, int, CandidateT]] = []
        self._last_ticket = 0
        self._num_queued = 0
        self._parked: dict[int, CandidateT] = {}

    def put(self, candidate: CandidateT) -> None:
        """Queues it at its present priority, wherever it stood before."""
        self._unpark(candidate)
        if not candidate.ticket:
            self._num_queued += 1
        self._last_ticket += 1
        candidate.ticket = self._last_ticket
        heappush(self._heap, (self._policy.priority(candidate), candidate.ticket, candidate))
        if len(self._heap) > 64 + 2 * self._num_queued:
            self._heap = [entry for entry in self._heap if entry[2].ticket == entry[1]]
            heapify(self._heap)

    def refresh(self, candidate: CandidateT) -> None:
        """Its statistics changed: puts it where it belongs now, if it is queued at all."""
        if candidate.ticket:
            self.put(candidate)

    def pop(self) -> CandidateT:
        """Takes the one with the smallest priority."""
        while self._heap:
            _, ticket, candidate = heappop(self._heap)
            if candidate.ticket == ticket:
                candidate.ticket = 0
                self._num_queued -= 1
                return candidate
        raise AssertionError("more blocks were said to be evictable than there are candidates for")

    def drop(self, candidate: CandidateT) -> None:
        """Takes it out, wherever it stands."""
        self._unpark(candidate)
        if candidate.ticket:
            candidate.ticket = 0
            self._num_queued -= 1

    def park(self, candidate: CandidateT, block_id: int) -> None:
        """Sets it aside until ``block_id`` wakes it."""
        self.drop(candidate)
        assert block_id not in self._parked, f"two candidates wait for block {block_id}"
        candidate.parked_on = block_id
        self._parked[block_id] = candidate

    def wake(self, block_ids: Iterable[int]) -> None:
        """Queues again whatever waits for one of these blocks."""
        if self._parked:
            for block_id in self._parked.keys() & block_ids:
                self.put(self._parked[block_id])

    def clear(self) -> None:
        """Forgets everything; the candidates must not be used again."""
        self._heap.clear()
        self._parked.clear()
        self._num_queued = 0

    def _unpark(self, candidate: CandidateT) -> None:
        if candidate.parked_on >= 0:
            del self._parked[candidate.parked_on]
            candidate.parked_on = -1

    def check_integrity(self, candidates: list[CandidateT]) -> None:
        """Asserts that exactly ``candidates`` stand here, each once and at its present priority."""
        queued = {id(entry[2]): entry for entry in self._heap if entry[2].ticket == entry[1]}
        parked = {id(candidate): block_id for block_id, candidate in self._parked.items()}
        assert len(queued) == self._num_queued, f"{len(queued)} live entries, {self._num_queued} counted"
        assert len(parked) == len(self._parked), "a candidate is parked twice"
        for candidate in candidates:
            entry = queued.pop(id(candidate), None)
            block_id = parked.pop(id(candidate), -1)
            assert (entry is None) == (block_id >= 0), "a candidate is not in exactly one place"
            assert candidate.parked_on == block_id, "a candidate is parked elsewhere than it says"
            if entry is not None:
                assert entry[0] == self._policy.priority(candidate), (
                    "a candidate is queued at an old priority"
                )
        assert not queued, "something is queued that is no candidate"
        assert not parked, "something is parked that is no candidate"
