"""What came before: when prefixes came back, and how prompts go on.

A prompt whose end stands inside a later one went on. How soon, and whether at all, is counted for the same
conversation, for prompts that begin alike and end in the same kind of block, and for all. Time comes in by
argument; memory is bounded.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Final, TypeAlias

from .shape import Chain, Prompt

# Bounds of the classes into which times between requests fall, in seconds.
EDGES_S: Final = (60.0, 300.0, 600.0, 1200.0, 1800.0, 3600.0, 7200.0, 14400.0, 43200.0, 86400.0)
_NEVER: Final = len(EDGES_S)
# Behind this a prompt that did not go on counts as one that never will, until it does.
GIVEN_UP_S: Final = 3600.0
_MOST_COUNTS: Final = 256.0
_MOST_FRESH: Final = 4
_MOST_KINDS: Final = 20_000

Kind: TypeAlias = tuple[bytes, str, int]


@dataclass(slots=True)
class Gaps:
    """How many times between two requests fell into each class. Old ones count less."""

    counts: list[float] = field(default_factory=lambda: [0.0] * (_NEVER + 1))

    def add(self, gap_s: float | None, weight: float = 1.0) -> None:
        """``None``: it did not come back."""
        at = _NEVER if gap_s is None else bisect_left(EDGES_S, gap_s)
        self.counts[at] = max(0.0, self.counts[at] + weight)
        if sum(self.counts) > _MOST_COUNTS:
            self.counts = [count / 2 for count in self.counts]

    @property
    def total(self) -> float:
        return sum(self.counts)

    def within(self, time_s: float) -> float:
        """How many came back in ``time_s`` at most; a class that it cuts counts in proportion."""
        low, found = 0.0, 0.0
        for edge, count in zip(EDGES_S, self.counts, strict=False):
            if edge <= time_s:
                found += count
            elif low < time_s:
                found += count * (time_s - low) / (edge - low)
            low = edge
        return found

    def share(self, time_s: float, prior: float, weight: float) -> float:
        """The chance to come back in ``time_s``, drawn towards ``prior`` as by ``weight`` observations."""
        return (self.within(time_s) + weight * prior) / (self.total + weight)


@dataclass(slots=True)
class Prefix:
    """A prefix that was sent: when last, how often, and after what times again."""

    last_s: float
    num_sent: int = 1
    gaps: Gaps = field(default_factory=Gaps)


@dataclass(slots=True)
class Ending:
    """The end of a prompt that may go on; ``own`` are the times of the conversation that it is of."""

    sent_s: float
    kind: Kind
    own: Gaps
    num_turns: int
    is_given_up: bool = False
    is_late: bool = False


@dataclass(slots=True)
class _Continuations:
    """How prompts of one kind go on. ``num_late``: still open, but not as soon as the shortest time."""

    gaps: Gaps = field(default_factory=Gaps)
    num_late: int = 0


class Habits:
    """Everything that was observed.

    Args:
        late_s: who did not come back in it counts as late.
        capacity: prefixes, and ends of prompts, that are remembered at most.
    """

    def __init__(self, *, late_s: float = 300.0, capacity: int = 100_000) -> None:
        self._late_s = late_s
        self._capacity = capacity
        self._prefixes: OrderedDict[bytes, Prefix] = OrderedDict()
        self._endings: OrderedDict[bytes, Ending] = OrderedDict()
        self._fresh: OrderedDict[bytes, Ending] = OrderedDict()
        self._open: OrderedDict[bytes, Ending] = OrderedDict()
        self._waiting: OrderedDict[bytes, Ending] = OrderedDict()
        self._kinds: dict[Kind, _Continuations] = {}

    @property
    def size(self) -> int:
        """Prefixes and ends of prompts that are remembered."""
        return len(self._prefixes) + len(self._endings) + len(self._fresh)

    def prefix(self, digest: bytes) -> Prefix | None:
        return self._prefixes.get(digest)

    def ending(self, digest: bytes) -> Ending | None:
        return self._endings.get(digest)

    def deepest_known(self, chain: Chain) -> int | None:
        """The place in the chain up to which it was sent before."""
        return next(
            (place for place in reversed(range(len(chain))) if chain.digests[place] in self._prefixes), None
        )

    def continued(self, chain: Chain) -> tuple[int, Ending] | None:
        """The longest earlier prompt that this one goes on with: the place of its end, and what it was."""
        for place in reversed(range(len(chain) - 1)):
            if (ending := self._endings.get(chain.digests[place])) is not None:
                return place, ending
        return None

    def observe(self, prompt: Prompt, chain: Chain, now_s: float) -> None:
        """A request is sent now."""
        self._age(now_s)
        if not len(chain):
            return
        earlier = self.continued(chain)
        known_place = self.deepest_known(chain)
        for place in range(len(chain) if known_place is None else known_place + 1):
            ending = self._fresh.get(chain.digests[place])
            if ending is not None:
                self._settle(chain.digests[place], ending, now_s - ending.sent_s)
        own, num_turns = Gaps(), 1
        if earlier is not None:
            place, ending = earlier
            gap_s = now_s - ending.sent_s
            own, num_turns = ending.own, ending.num_turns + 1
            own.add(gap_s)
            self._settle(chain.digests[place], ending, gap_s)
        for digest in chain.digests:
            known = self._prefixes.pop(digest, None)
            if known is None:
                known = Prefix(now_s)
            else:
                known.gaps.add(now_s - known.last_s)
                known.last_s, known.num_sent = now_s, known.num_sent + 1
            self._prefixes[digest] = known
        end = chain.digests[-1]
        if end not in self._endings:
            self._await(end, Ending(now_s, kind_of(prompt, chain, num_turns), own, num_turns))
        for place, kind in fresh_places(prompt, chain, known_place):
            self._await(chain.digests[place], Ending(now_s, kind, Gaps(), 0))
        while len(self._prefixes) > self._capacity:
            self._prefixes.popitem(last=False)
        for known_ends in (self._endings, self._fresh):
            while len(known_ends) > self._capacity:
                digest, _ = known_ends.popitem(last=False)
                self._waiting.pop(digest, None)
                self._open.pop(digest, None)

    def chance_to_go_on(self, kind: Kind, own: Gaps, time_s: float, prior: float) -> float:
        """The chance that such a prompt goes on in ``time_s``; ``own`` are its conversation's times."""
        soon = self._chance_of_kind(kind, time_s, prior)
        if time_s >= GIVEN_UP_S or not own.total:
            return soon
        # That a conversation has gone on so far says how fast it is, not that it goes on once more.
        ever = self._chance_of_kind(kind, GIVEN_UP_S, prior)
        soon = min(soon, ever)
        return ever * own.share(time_s, soon / ever if ever else 0.0, 6.0)

    def _chance_of_kind(self, kind: Kind, time_s: float, prior: float) -> float:
        chance = prior
        for key, weight in ((_everything(kind), 2.0), (kind, 4.0)):
            known = self._kinds.get(key)
            if known is not None:
                # Who is late may still come, but seldom does: until then it counts as lost.
                seen = known.gaps.total + known.num_late
                chance = (known.gaps.within(time_s) + weight * chance) / (seen + weight)
        return chance

    def _of_kind(self, key: Kind) -> _Continuations:
        """Kinds come from clients' prompts: the one that was new longest ago goes when there are too many."""
        if key not in self._kinds and len(self._kinds) >= _MOST_KINDS:
            del self._kinds[next(iter(self._kinds))]
        return self._kinds.setdefault(key, _Continuations())

    def _await(self, digest: bytes, ending: Ending) -> None:
        self._waiting[digest] = ending
        (self._endings if ending.num_turns else self._fresh)[digest] = ending

    def _settle(self, digest: bytes, ending: Ending, gap_s: float) -> None:
        """It went on. Only the first time counts: what is sent again is no other continuation."""
        if self._waiting.pop(digest, None) is None and self._open.pop(digest, None) is None:
            if ending.is_given_up:  # it was counted as lost
                ending.is_given_up = False
                for key in (ending.kind, _everything(ending.kind)):
                    self._of_kind(key).gaps.add(None, -1.0)
            else:
                return
        for key in (ending.kind, _everything(ending.kind)):
            known = self._of_kind(key)
            known.num_late = max(0, known.num_late - ending.is_late)
            known.gaps.add(gap_s)
        ending.is_late = False

    def _age(self, now_s: float) -> None:
        while self._waiting:
            digest, ending = next(iter(self._waiting.items()))
            if now_s - ending.sent_s <= self._late_s:
                break
            del self._waiting[digest]
            self._open[digest] = ending
            ending.is_late = True
            for key in (ending.kind, _everything(ending.kind)):
                self._of_kind(key).num_late += 1
        while self._open:
            digest, ending = next(iter(self._open.items()))
            if now_s - ending.sent_s <= GIVEN_UP_S:
                break
            del self._open[digest]
            ending.is_given_up, ending.is_late = True, False
            for key in (ending.kind, _everything(ending.kind)):
                known = self._of_kind(key)
                known.num_late = max(0, known.num_late - 1)
                known.gaps.add(None)


def kind_of(prompt: Prompt, chain: Chain, num_turns: int) -> Kind:
    """What is counted together: the same tools and system text, the same kind of end, as many turns."""
    beginning = b""
    for place, index in enumerate(chain.indices):
        if prompt.blocks[index].level == "messages":
            break
        beginning = chain.digests[place]
    return beginning, prompt.blocks[chain.indices[-1]].kind, min(num_turns, 3)


def fresh_places(prompt: Prompt, chain: Chain, known: int | None) -> list[tuple[int, Kind]]:
    """The first beginnings behind what was sent before, without the prompt's own end.

    Documents before a question stand there: whether such beginnings come back is counted by how they begin
    and how deep they are.
    """
    first = 0 if known is None else known + 1
    beginning = kind_of(prompt, chain, 1)[0]
    found: list[tuple[int, Kind]] = []
    for place in range(first, min(first + _MOST_FRESH, len(chain) - 1)):
        block = prompt.blocks[chain.indices[place]]
        if block.level != "messages":
            continue
        found.append((place, (beginning, f"fresh {block.kind}", place)))
    return found


def _everything(kind: Kind) -> Kind:
    return b"*", kind[1], kind[2]
