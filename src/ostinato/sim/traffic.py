"""Made traffic of several kinds at once, for as long as is wanted, in memory that does not grow.

Chats take their time between turns, agents go on at once with what their tools said, questions about
documents share some of them in some order, and the rest is asked once. A unit is a block of tokens; what is
new has numbers that were not used for a long time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from heapq import heappop, heappush
from math import log
from typing import Final, Protocol

import numpy as np

from .traces import TraceRequest

_MAX_OPEN: Final = 400
_MAX_UNITS: Final = 120
_NUM_SYSTEMS: Final = 12
_NUM_DOCUMENTS: Final = 200
_DOCUMENT_UNITS: Final = 8
_FIRST_FRESH: Final = 1 << 20
_NUM_FRESH: Final = 1 << 30
_UNIT_TOKENS: Final = 16


class Chance(Protocol):
    """What the traffic is drawn from; ``random.Random(seed)`` is one."""

    def random(self) -> float: ...

    def randrange(self, stop: int, /) -> int: ...


@dataclass(slots=True)
class _Talk:
    units: list[int]
    turns_left: int
    pause_s: float
    most_new: int
    session: str


def mixed_traffic(chance: Chance, *, duration_s: float, begun_per_s: float) -> Iterator[TraceRequest]:
    """Requests in order of time. ``begun_per_s`` conversations begin each second, in the mean."""
    traffic = _Traffic(chance)
    time_s = 0.0
    waiting: list[tuple[float, int, _Talk]] = []
    number = 0
    while True:
        time_s += -log(1.0 - chance.random()) / begun_per_s
        while waiting and waiting[0][0] < min(time_s, duration_s):
            turn_s, _, talk = heappop(waiting)
            yield traffic.turn(turn_s, talk)
            if talk.turns_left and len(talk.units) < _MAX_UNITS:
                number += 1
                heappush(waiting, (turn_s + talk.pause_s * (0.5 + chance.random()), number, talk))
        if time_s >= duration_s:
            return
        if len(waiting) < _MAX_OPEN:
            number += 1
            heappush(waiting, (time_s, number, traffic.begin(number)))


class _Traffic:
    def __init__(self, chance: Chance) -> None:
        self._chance = chance
        self._next_fresh = 0

    def begin(self, number: int) -> _Talk:
        """A chat, an agent, questions about documents, or something asked once."""
        kind = self._chance.random()
        system = self._system()
        if kind < 0.45:
            return _Talk(system, 1 + self._chance.randrange(10), 60.0, 3, f"chat {number}")
        if kind < 0.6:
            return _Talk(system, 5 + self._chance.randrange(25), 3.0, 5, f"agent {number}")
        if kind < 0.8:
            documents = [self._document() for _ in range(1 + self._chance.randrange(3))]
            units = system + [unit for document in documents for unit in document]
            return _Talk(units, 1 + self._chance.randrange(2), 20.0, 2, f"documents {number}")
        return _Talk(self._fresh(4 + self._chance.randrange(30)), 1, 1.0, 2, f"once {number}")

    def turn(self, time_s: float, talk: _Talk) -> TraceRequest:
        """The next request of a conversation; its answer belongs to the one after."""
        talk.turns_left -= 1
        talk.units = talk.units + self._fresh(1 + self._chance.randrange(talk.most_new))
        units = np.array(talk.units, np.int32)
        num_answer = 1 + self._chance.randrange(talk.most_new)
        talk.units = talk.units + self._fresh(num_answer)
        num_tokens = len(units) * _UNIT_TOKENS
        return TraceRequest(time_s, units, num_tokens, num_answer * _UNIT_TOKENS, session=talk.session)

    def _system(self) -> list[int]:
        """One of a few, the first ones most often."""
        which = int(_NUM_SYSTEMS * self._chance.random() ** 2)
        return [which * 100 + unit for unit in range(3 + which)]

    def _document(self) -> list[int]:
        which = int(_NUM_DOCUMENTS * self._chance.random() ** 3)
        return [10_000 + which * 100 + unit for unit in range(_DOCUMENT_UNITS)]

    def _fresh(self, num_units: int) -> list[int]:
        start = self._next_fresh
        self._next_fresh += num_units
        return [_FIRST_FRESH + (start + unit) % _NUM_FRESH for unit in range(num_units)]
