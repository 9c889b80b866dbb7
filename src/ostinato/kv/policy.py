"""Which cached tokens go first when room is needed: the rule, and the queue that it orders."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from heapq import heapify, heappop, heappush
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
import numpy.typing as npt


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


class Outlook(IntEnum):
    """What somebody says of a sequence's future, once it was answered.

    ``SOON``: the answer ended in tool calls, their results will follow. ``LATER``: somebody has to think
    first, or is away. ``ABANDONED``: whoever asked left before the end. ``OVER``: it will not go on.
    """

    UNKNOWN = 0
    SOON = 1
    LATER = 2
    ABANDONED = 3
    OVER = 4


@dataclass(frozen=True, slots=True)
class RequestHints:
    """What a caller may know of a request beyond its tokens. Every field is optional and only a hint.

    ``input_tokens`` of the sequence are the prompt; ``output_tokens``, the answer's length, is often known
    at the end only (:meth:`~ostinato.kv.lease.Lease.note_output`).
    ``has_part_block``: the last token stands for a block that is not full (a trace of blocks), so that
    nothing longer can continue it.
    """

    input_tokens: int = 0
    output_tokens: int = 0
    has_part_block: bool = False


NO_HINTS = RequestHints()


class Use:
    """One request's use of the cache, from its first commit to its last. ``state`` is the policy's own."""

    __slots__ = ("hints", "namespace", "state")

    def __init__(self, namespace: str, hints: RequestHints = NO_HINTS) -> None:
        self.namespace = namespace
        self.hints = hints
        self.state: Any = None


class HistoryPolicy(ABC):
    """A policy that remembers what was used, also after it was evicted.

    The index tells it of every commit, cuts its nodes where the policy says that fates part, tags each node
    with what the policy says stands there, and asks for the order of tags. All under the manager's lock.

    What need not be known at once (counting, learning) is put off: ``tend`` does a slice of it.
    """

    obeys = True
    """Whether ``hinted`` moves a rank whoever says so; else what is said is weighed, and may be a lie."""

    @abstractmethod
    def observe(self, use: Use, tokens: bytes) -> list[int]:
        """A request now consists of ``tokens`` (int32 bytes), all of them findable from now on.

        Returns ascending token counts at which to cut nodes, all below the length of ``tokens``.
        """

    @abstractmethod
    def tag_at(self, depth_tokens: int) -> Any:
        """What stands at this depth of the tokens observed last."""

    @abstractmethod
    def scores(self, tags: Sequence[Any]) -> npt.NDArray[np.float64]:
        """One number a tag, the smallest is evicted first; constant between two calls of ``observe``."""

    def spares(self, tag: Any) -> bool:
        """Asked when it is a victim's turn: true gives it another chance, at the score it has then."""
        return False

    def hinted(self, tag: Any, outlook: Outlook) -> None:
        """Whoever used it says what will become of it; a use makes that void."""
        return

    def tend(self) -> bool:
        """Does one bounded slice of what was put off; true while more is left."""
        return False

    def evicted(self, tag: Any) -> None:
        """The last of a node with this tag is gone."""
        return

    @property
    @abstractmethod
    def size_bytes(self) -> int:
        """Memory that all of its history takes, bounded whatever the traffic."""


class LRU:
    """Least recently used first."""

    def priority(self, stats: NodeStats) -> int:
        return stats.last_used


class Candidate(NodeStats):
    """Statistics that can stand in a victim queue. Two marks belong to the queue, ``tag`` to the policy."""

    __slots__ = ("parked_on", "tag", "ticket")

    def __init__(self, *, rank: int, depth_tokens: int, num_tokens: int) -> None:
        super().__init__(rank, rank, 0, depth_tokens, num_tokens)
        self.tag: Any = None
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


class ScoredQueue(VictimQueue[CandidateT]):
    """The same for scores that change with time: the order is renewed now and then, best when nobody waits.

    ``renew`` computes the scores of all candidates in one go and sorts the lowest few. What is put after
    that is scored when a victim is wanted. Nobody needs to call it: where the order is older than
    ``max_behind`` requests, or used up, it is renewed at once.
    """

    _NUM_SORTED = 192

    def __init__(self, policy: HistoryPolicy, *, max_behind: int = 0) -> None:
        super().__init__(_NoPriority())
        self._scorer = policy
        self._max_behind = max_behind
        self._num_behind = 1
        self._waiting: dict[int, CandidateT] = {}  # by ticket, in order of arrival
        self._sorted: list[tuple[float, int]] = []
        self._bound = math.inf  # what is not among the sorted has no lower score
        self._unscored: list[int] = []

    def observed(self) -> None:
        """All scores may have changed."""
        self._num_behind += 1

    def renew(self) -> None:
        """Puts the order right, unless it is already; less often where there are many to sort."""
        if self._num_behind > self._num_borne:
            self._sort()

    @property
    def _num_borne(self) -> int:
        """How many requests old an order may be: then a request pays for some thousand scores at most."""
        return len(self._waiting) // 1024

    def put(self, candidate: CandidateT) -> None:
        self.drop(candidate)
        self._last_ticket += 1
        candidate.ticket = self._last_ticket
        self._waiting[candidate.ticket] = candidate
        self._unscored.append(candidate.ticket)
        if len(self._unscored) > 64 + 2 * len(self._waiting):
            self._unscored = [ticket for ticket in self._unscored if ticket in self._waiting]

    def pop(self) -> CandidateT:
        while self._waiting:
            is_old = self._num_behind > max(self._max_behind, self._num_borne)
            if is_old or not (self._sorted or self._unscored):
                self._sort()
            elif self._unscored:
                self._score_fresh()
            while self._sorted and self._sorted[0][0] <= self._bound:
                candidate = self._waiting.pop(heappop(self._sorted)[1], None)
                if candidate is None:
                    continue
                candidate.ticket = 0
                if not self._scorer.spares(candidate.tag):
                    return candidate
                self.put(candidate)
                break
            else:
                self._sorted.clear()
        raise AssertionError("more blocks were said to be evictable than there are candidates for")

    def drop(self, candidate: CandidateT) -> None:
        self._unpark(candidate)
        if candidate.ticket:
            del self._waiting[candidate.ticket]
            candidate.ticket = 0

    def clear(self) -> None:
        super().clear()
        self._waiting.clear()
        self._sorted.clear()
        self._unscored.clear()

    def _score_fresh(self) -> None:
        fresh = [ticket for ticket in self._unscored if ticket in self._waiting]
        self._unscored.clear()
        scores = self._scorer.scores([self._waiting[ticket].tag for ticket in fresh])
        for entry in zip(scores.tolist(), fresh, strict=True):
            heappush(self._sorted, entry)

    def _sort(self) -> None:
        tickets = np.fromiter(self._waiting, np.int64, len(self._waiting))
        scores = self._scorer.scores([candidate.tag for candidate in self._waiting.values()])
        lowest: npt.NDArray[np.intp] = np.arange(len(tickets))
        if len(tickets) > self._NUM_SORTED:
            lowest = np.argpartition(scores, self._NUM_SORTED)[: self._NUM_SORTED]
        self._sorted = sorted(zip(scores[lowest].tolist(), tickets[lowest].tolist(), strict=True))
        self._bound = self._sorted[-1][0] if len(lowest) < len(tickets) else math.inf
        self._unscored.clear()
        self._num_behind = 0

    def check_integrity(self, candidates: list[CandidateT]) -> None:
        queued = {id(candidate): ticket for ticket, candidate in self._waiting.items()}
        parked = {id(candidate): block_id for block_id, candidate in self._parked.items()}
        assert len(queued) == len(self._waiting), "a candidate is queued twice"
        for candidate in candidates:
            ticket = queued.pop(id(candidate), 0)
            block_id = parked.pop(id(candidate), -1)
            assert (ticket == 0) == (block_id >= 0), "a candidate is not in exactly one place"
            assert candidate.ticket == ticket, "a candidate is queued elsewhere than it says"
            assert candidate.parked_on == block_id, "a candidate is parked elsewhere than it says"
            assert candidate.tag is not None, "a candidate was never tagged"
        assert not queued, "something is queued that is no candidate"
        assert not parked, "something is parked that is no candidate"


class _NoPriority:
    def priority(self, stats: NodeStats) -> int:
        raise AssertionError("a scored queue has no priorities")
