"""The choice: expected cached tokens against load, with a bound on how uneven loads may become."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

from xxhash import xxh3_64_intdigest

from .prefixes import PrefixMap
from .ring import Ring

Reason: TypeAlias = Literal["prefix", "session", "load", "hash", "turn"]
STRATEGIES: Final = ("prefix", "sticky", "least-loaded", "round-robin")
_MANY: Final = 32  # of so many equally good workers not all are looked at


@dataclass(frozen=True, slots=True)
class RoutingRule:
    """How workers are chosen.

    Attributes:
        strategy: ``prefix`` (all of the below), ``sticky`` (a session's worker by consistent hashing, load
            notwithstanding), ``least-loaded`` or ``round-robin``.
        hit_weight: how many tokens of waiting a cached token is worth. 1 is what this request gains; more
            counts in that a prefix computed twice takes the room of another.
        evenness: a worker is passed over whose load is above ``1 + evenness`` times the mean …
        slack_tokens: … by more than so much.
        decode_tokens: the load of a request that is writing its answer, in tokens of prefill.
        session_ttl_s: how long after its last request a session keeps its worker.
        max_sessions: sessions in mind at most.
    """

    strategy: str = "prefix"
    hit_weight: float = 4.0
    evenness: float = 0.25
    slack_tokens: int = 32_768
    decode_tokens: int = 256
    session_ttl_s: float = 3600.0
    max_sessions: int = 100_000

    def __post_init__(self) -> None:
        assert self.strategy in STRATEGIES, f"no strategy {self.strategy!r}"
        assert self.hit_weight >= 0, "a cached token cannot be worth less than nothing"
        assert self.evenness >= 0, "loads cannot be more even than equal"
        assert min(self.slack_tokens, self.decode_tokens, self.max_sessions) >= 0, "below nothing"


@dataclass(frozen=True, slots=True)
class Ask:
    """A request to place. ``names`` are its prompt's blocks (64-bit chained hashes), ``num_tokens`` all of
    it; ``session`` names its conversation, where it says so."""

    names: Sequence[int]
    num_tokens: int
    session: str = ""


@dataclass(frozen=True, slots=True)
class Choice:
    """Where a request goes; ``hit_tokens`` are probably there already. ``reason``: what decided."""

    worker: str
    hit_tokens: int
    reason: Reason


@dataclass(slots=True)
class _Worker:
    name: str
    slot: int
    is_open: bool = True
    num_running: int = 0
    num_waiting: int = 0
    waiting_tokens: int = 0


@dataclass(frozen=True, slots=True)
class _Seat:
    worker: str
    num_tokens: int
    last_s: float


class Ticket:
    """A request that is under way at a worker: what it weighs there, until it ends."""

    __slots__ = ("_is_decoding", "_is_over", "_num_tokens", "_router", "_worker")

    def __init__(self, router: Router, worker: _Worker, num_tokens: int) -> None:
        self._router, self._worker, self._num_tokens = router, worker, num_tokens
        self._is_decoding = self._is_over = False

    def first_token(self) -> None:
        """Its prompt is computed. Said again, it changes nothing."""
        if not (self._is_decoding or self._is_over):
            self._is_decoding = True
            self._worker.waiting_tokens -= self._num_tokens
            self._worker.num_waiting -= 1
            self._router.weigh(self._worker)

    def end(self) -> None:
        """However it ended. Said again, it changes nothing."""
        self.first_token()
        if not self._is_over:
            self._is_over = True
            self._worker.num_running -= 1
            self._router.weigh(self._worker)


class Router:
    """The books of all workers. Not for several threads at once.

    Args:
        rule: how workers are chosen.
        block_tokens: tokens of a block, as the names of requests count them.
        now_s: seconds that never go back, for sessions.
    """

    def __init__(self, rule: RoutingRule, *, block_tokens: int, now_s: Callable[[], float]) -> None:
        assert block_tokens >= 1, f"blocks of {block_tokens} tokens"
        self.rule = rule
        self.prefixes = PrefixMap()
        self._block_tokens = block_tokens
        self._now_s = now_s
        self._ring = Ring()
        self._workers: dict[str, _Worker] = {}
        self._slots: list[_Worker | None] = []
        self._loads: list[float] = []  # by slot; those that get nothing weigh without end
        self._total = 0.0
        self._num_open = 0
        self._next_turn = 0
        self._sessions: OrderedDict[str, _Seat] = OrderedDict()

    # ------------------------------------------------------------ workers

    def add(self, name: str, *, num_blocks: int) -> None:
        """One more worker, with room for ``num_blocks`` blocks; it is open."""
        assert name not in self._workers, f"worker {name!r} is there already"
        slot = self._slots.index(None) if None in self._slots else len(self._slots)
        if slot == len(self._slots):
            self._slots.append(None)
            self._loads.append(float("inf"))
        worker = self._workers[name] = self._slots[slot] = _Worker(name, slot)
        self.prefixes.add(slot, num_blocks)
        self._ring.add(name)
        self._num_open += 1
        self.weigh(worker)

    def remove(self, name: str) -> None:
        """A worker is no more; its requests may still end."""
        self.set_open(name, False)
        worker = self._workers.pop(name)
        self._slots[worker.slot] = None
        self.prefixes.drop(worker.slot)
        self._ring.remove(name)
        worker.slot = -1

    def set_open(self, name: str, is_open: bool) -> None:
        """Whether it gets requests. A worker that drains, or is ill, gets none; what it has is remembered."""
        worker = self._workers[name]
        if worker.is_open is not is_open:
            self._num_open += 1 if is_open else -1
            worker.is_open = is_open
            self.weigh(worker)

    def forget(self, name: str) -> None:
        """The worker's cache is empty now: it began anew."""
        self.prefixes.clear(self._workers[name].slot)

    def stored(self, name: str, names: Sequence[int]) -> None:
        """The worker says that it has these blocks."""
        self.prefixes.stored(self._workers[name].slot, names)

    def removed(self, name: str, names: Sequence[int]) -> None:
        """The worker says that it has not these blocks any more."""
        self.prefixes.removed(self._workers[name].slot, names)

    def load_of(self, name: str) -> float:
        """Tokens that it has still to compute, and what its running answers weigh."""
        return self._load(self._workers[name])

    def num_running(self, name: str) -> int:
        return self._workers[name].num_running

    def is_open(self, name: str) -> bool:
        return self._workers[name].is_open

    @property
    def workers(self) -> tuple[str, ...]:
        return tuple(self._workers)

    # ------------------------------------------------------------ requests

    def choose(self, ask: Ask, *, but: Collection[str] = ()) -> Choice | None:
        """The worker for a request, none of ``but``; ``None``: there is none. Only a turn is taken by it."""
        barred = [self._workers[name].slot for name in but if name in self._workers]
        kept = [(slot, self._loads[slot]) for slot in barred]
        for slot in barred:
            self._loads[slot] = float("inf")
        try:
            low = min(self._loads, default=float("inf"))
            if low == float("inf"):
                return None
            return self._choose(ask, low)
        finally:
            for slot, load in kept:
                self._loads[slot] = load

    def begin(self, ask: Ask, choice: Choice) -> Ticket:
        """The request is sent there: from now on it weighs, and its blocks are expected to be there."""
        worker = self._workers[choice.worker]
        left = max(ask.num_tokens - choice.hit_tokens, 1)
        worker.waiting_tokens += left
        worker.num_waiting += 1
        worker.num_running += 1
        self.weigh(worker)
        self.prefixes.stored(worker.slot, ask.names)
        if ask.session:
            self._sessions[ask.session] = _Seat(choice.worker, ask.num_tokens, self._now_s())
            self._sessions.move_to_end(ask.session)
            while len(self._sessions) > self.rule.max_sessions:
                self._sessions.popitem(last=False)
        return Ticket(self, worker, left)

    def bound(self, num_tokens: int) -> float:
        """The load above which a worker is passed over, if a request of so many tokens is placed."""
        mean = (self._total + num_tokens) / max(self._num_open, 1)
        return (1 + self.rule.evenness) * mean + self.rule.slack_tokens

    def weigh(self, worker: _Worker) -> None:
        """Its load has changed."""
        if worker.slot < 0:
            return
        before = self._loads[worker.slot]
        after = self._load(worker) if worker.is_open else float("inf")
        self._total += (0.0 if after == float("inf") else after) - (0.0 if before == float("inf") else before)
        self._loads[worker.slot] = after

    # ------------------------------------------------------------ the choice

    def _choose(self, ask: Ask, low: float) -> Choice:
        strategy = self.rule.strategy
        if strategy == "round-robin":
            while True:
                slot = self._next_turn % len(self._loads)
                self._next_turn += 1
                if self._loads[slot] < float("inf"):
                    return self._choice(slot, ask, "turn")
        lowest = self._loads.index(low)
        if strategy == "least-loaded":
            return self._choice(lowest, ask, "load")
        if strategy == "sticky":
            return self._choice(self._by_hash(_key(ask), float("inf")), ask, "hash")
        return self._by_prefix(ask, lowest)

    def _by_prefix(self, ask: Ask, lowest: int) -> Choice:
        bound = max(self.bound(ask.num_tokens), self._loads[lowest])
        hits, everywhere = self._hits(ask)
        candidates = dict(hits)
        candidates.setdefault(lowest, self._hit_tokens(lowest, ask))
        seat = self._seat(ask)
        if seat is not None:
            # What the map has lost of it the worker may have kept: a session stays unless that is costly.
            slot, num_tokens = seat
            candidates[slot] = max(candidates.get(slot, 0), num_tokens)
        allowed = {slot: hit for slot, hit in candidates.items() if self._loads[slot] <= bound}
        weight, sits = self.rule.hit_weight, -1 if seat is None else seat[0]
        best = min(allowed, key=lambda slot: (self._loads[slot] - weight * allowed[slot], slot != sits, slot))
        most = max(allowed.values())
        if best == sits or most > everywhere:
            reason: Reason = "session" if best == sits else "prefix" if allowed[best] == most else "load"
            return Choice(self._name(best), allowed[best], reason)
        # Nobody has more of it than all. By hash, all routers choose the same without a word: of those that
        # are nearly as free as the freest.
        near = self._loads[lowest] + self.rule.evenness * (self._total / max(self._num_open, 1))
        slot = self._by_hash(_key(ask), near)
        return Choice(self._name(slot), self._hit_tokens(slot, ask), "hash")

    def _hits(self, ask: Ask) -> tuple[dict[int, int], int]:
        """Open workers that have something of it, with how many tokens (of many equals only the freest); and
        how many all of them have."""
        found: dict[int, int] = {}
        num_found, least = 0, 0
        for depth, mask in self.prefixes.depths(ask.names):
            hit = min(depth * self._block_tokens, ask.num_tokens - 1)
            slots = [slot for slot in _bits(mask) if self._loads[slot] < float("inf")]
            least = hit if slots and not num_found else least
            num_found += len(slots)
            if len(slots) > _MANY:
                slots = [min(slots, key=self._loads.__getitem__)]
            found |= dict.fromkeys(slots, hit)
        num_able = sum(load < float("inf") for load in self._loads)
        return found, least if num_found == num_able else 0

    def _hit_tokens(self, slot: int, ask: Ask) -> int:
        for depth, mask in self.prefixes.depths(ask.names):
            if mask >> slot & 1:
                return min(depth * self._block_tokens, ask.num_tokens - 1)
        return 0

    def _seat(self, ask: Ask) -> tuple[int, int] | None:
        """The slot of the session's last worker and what it had there, if that is still to be counted on."""
        seat = self._sessions.get(ask.session) if ask.session else None
        if seat is None or self._now_s() - seat.last_s > self.rule.session_ttl_s:
            return None
        worker = self._workers.get(seat.worker)
        if worker is None or self._loads[worker.slot] == float("inf"):
            return None
        return worker.slot, max(min(seat.num_tokens, ask.num_tokens - 1), 0)

    def _by_hash(self, key: int, bound: float) -> int:
        """The first worker on the ring that has no more to do than ``bound``; there is one."""
        first = None
        for name in self._ring.walk(key):
            slot = self._workers[name].slot
            if self._loads[slot] < float("inf"):
                first = slot if first is None else first
                if self._loads[slot] <= bound:
                    return slot
        assert first is not None, "chose among no workers"
        return first

    def _choice(self, slot: int, ask: Ask, reason: Reason) -> Choice:
        return Choice(self._name(slot), self._hit_tokens(slot, ask), reason)

    def _name(self, slot: int) -> str:
        worker = self._slots[slot]
        assert worker is not None, f"nobody at {slot}"
        return worker.name

    def _load(self, worker: _Worker) -> float:
        num_decoding = worker.num_running - worker.num_waiting
        return worker.waiting_tokens + float(self.rule.decode_tokens * num_decoding)


def _key(ask: Ask) -> int:
    """What a request is hashed by: its session, else how it begins (the third block of it, or the last)."""
    if ask.session:
        return xxh3_64_intdigest(ask.session.encode("utf-8", "surrogatepass"))
    return ask.names[min(2, len(ask.names) - 1)] if ask.names else 0


def _bits(mask: int) -> Iterator[int]:
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low
