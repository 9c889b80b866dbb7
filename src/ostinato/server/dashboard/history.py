"""What happened lately, in five-second pieces for an hour, and in all: the figures that the pages show."""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

from ...events import RequestRecord
from ...ports import Clock
from .tally import Tally

PIECE_S: Final = 5
_NUM_PIECES: Final = 720
_GROUP_PIECE_S: Final = 60
_NUM_GROUP_PIECES: Final = 60
MAX_GROUPS: Final = 300  # named prompts are a limited number already

Kind: TypeAlias = Literal["pattern", "prompt"]


@dataclass(frozen=True, slots=True)
class Piece:
    """A stretch of time that began ``start_s`` seconds after the Unix epoch."""

    start_s: int
    tally: Tally


class _Ring:
    """Tallies of consecutive stretches, the last so many that anything happened in, and of everything."""

    def __init__(self, piece_s: int, num_pieces: int) -> None:
        self.total = Tally()
        self._piece_s = piece_s
        self._span_s = piece_s * num_pieces
        self._pieces: deque[Piece] = deque()

    def add(self, record: RequestRecord, now_s: float) -> None:
        start_s = int(now_s) // self._piece_s * self._piece_s
        while self._pieces and self._pieces[0].start_s <= start_s - self._span_s:
            self._pieces.popleft()
        if not self._pieces or self._pieces[-1].start_s < start_s:  # a clock that goes back: the last one
            self._pieces.append(Piece(start_s, Tally()))
        self._pieces[-1].tally.add(record)
        self.total.add(record)

    def since(self, start_s: float) -> list[Piece]:
        """Stretches that ended after ``start_s``."""
        return [piece for piece in self._pieces if piece.start_s + self._piece_s > start_s]

    def sum_of(self, last_s: float | None, now_s: float) -> Tally:
        made = Tally()
        if last_s is None:
            made.merge(self.total)
        else:
            for piece in self.since(now_s - last_s):
                made.merge(piece.tally)
        return made


class History:
    """Adds records up. Any thread; memory is bounded."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._all = _Ring(PIECE_S, _NUM_PIECES)
        self._groups: dict[Kind, dict[str, _Ring]] = {"pattern": {}, "prompt": {}}
        self.started_s = clock.now()

    def add(self, record: RequestRecord) -> None:
        now_s = record.arrived_s + record.usage.total_s
        names: list[tuple[Kind, str]] = [("pattern", record.pattern)]
        if record.usage.prompt_name:
            names.append(("prompt", record.usage.prompt_name))
        with self._lock:
            self._all.add(record, now_s)
            for kind, name in names:
                groups = self._groups[kind]
                if name not in groups and len(groups) >= MAX_GROUPS:
                    continue
                groups.setdefault(name, _Ring(_GROUP_PIECE_S, _NUM_GROUP_PIECES)).add(record, now_s)

    # ------------------------------------------------------------ what it came to

    def total(self, last_s: float | None = None) -> Tally:
        """Of the last so many seconds, up to an hour; ``None``: since the start."""
        with self._lock:
            return self._all.sum_of(last_s, self._clock.now())

    def groups(self, kind: Kind, last_s: float | None = None) -> dict[str, Tally]:
        """The same by pattern or by named prompt, those that had requests; most tokens first."""
        with self._lock:
            now_s = self._clock.now()
            sums = [(name, ring.sum_of(last_s, now_s)) for name, ring in self._groups[kind].items()]
        sums.sort(key=lambda each: -each[1].prompt_tokens)
        return {name: tally for name, tally in sums if tally.num_requests}

    def pieces(self, last_s: int, step_s: int) -> list[Piece]:
        """The last so many seconds in steps, those without anything included, oldest first."""
        assert step_s % PIECE_S == 0, f"steps of {step_s} seconds"
        with self._lock:
            end_s = int(self._clock.now()) // step_s * step_s + step_s
            found = {at: Tally() for at in range(end_s - last_s, end_s, step_s)}
            for piece in self._all.since(end_s - last_s):
                if (sum_of := found.get(piece.start_s // step_s * step_s)) is not None:
                    sum_of.merge(piece.tally)
        return [Piece(start_s, tally) for start_s, tally in found.items()]
