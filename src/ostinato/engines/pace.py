"""How much of prompts a step may take while others are being read to: the trade of smoothness for speed.

Everybody who is decoding waits for the whole step. So while anyone is, prompts are cut so that a step lasts
no longer than the target, by what work has been measured to cost. Work is counted in rows: one for each row,
and more for what it attends to. Nobody being read to: steps are as large as may be.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

# Of what was measured before, so much stays at each new measurement: a few steps, then it has followed.
_MEMORY = 0.7
_MARGIN = 0.77  # of the target: steps vary by a tenth, and one in a hundred by a quarter
_LEAST_ROWS = 16  # so that prompts get on even where the target cannot be kept
_MOST_BESIDE = 50  # steps with prompts in a row; then one without, to see what that takes now


@dataclass(frozen=True, slots=True)
class _Mean:
    """What steps took, and the work that was in them; newer steps count more."""

    seconds: float
    work: float


def _blend(before: _Mean | None, seconds: float, work: float) -> _Mean:
    if before is None:
        return _Mean(seconds, work)
    new = 1 - _MEMORY
    return _Mean(_MEMORY * before.seconds + new * seconds, _MEMORY * before.work + new * work)


class Room:
    """What is left of a step for prompts: so many rows at most, and so much work."""

    def __init__(self, num_rows: int, work: float, keys_a_row: float) -> None:
        self._num_rows = num_rows
        self._work = work
        self._keys_a_row = keys_a_row
        self._num_least = min(_LEAST_ROWS, num_rows)

    @property
    def is_open(self) -> bool:
        """Whether one more row fits."""
        return self._num_rows > 0 and (self._work >= 1 or self._num_least > 0)

    def take(self, start: int, wanted: int) -> int:
        """How many of the ``wanted`` rows from place ``start`` on the step takes; they are taken off."""
        num_rows = max(min(wanted, self._num_rows, max(self._fitting(start), self._num_least)), 0)
        self._num_rows -= num_rows
        self._num_least = max(self._num_least - num_rows, 0)
        self._work -= work(start, num_rows, self._keys_a_row)
        return num_rows

    def _fitting(self, start: int) -> int:
        """The most rows from ``start`` on whose work is left: ``work`` solved for them."""
        if math.isinf(self._work):
            return self._num_rows
        if self._work <= 0:
            return 0
        first = 1 + start / self._keys_a_row
        return int(2 * self._work / (first + math.sqrt(first * first + 2 * self._work / self._keys_a_row)))


def work(start: int, num_rows: int, keys_a_row: float) -> float:
    """Of rows from place ``start`` on; attending to ``keys_a_row`` keys is as much work as a row without."""
    return num_rows * (1 + (start + num_rows / 2) / keys_a_row)


class Pace:
    """Learns what steps cost; used by the engine's thread.

    Two means are kept: of steps that only decode, and of what prompts add to others. Between them lies a
    straight line: a step costs what the weights cost to read, and so much for its work. Under load every
    step has prompts in it; so that it is known what one without takes, there is one now and then.
    """

    def __init__(
        self, target_s: float | None = None, *, times: float = 4.0, keys_a_row: float = math.inf
    ) -> None:
        """``target_s``: the longest step while somebody decodes, as the operator has it; ``None``: ``times``
        as long as one that only decodes for as many, while somebody has more than a first token.
        """
        self.target_s = target_s
        self.times = times
        self._keys_a_row = keys_a_row
        self._alone: _Mean | None = None
        self._added: _Mean | None = None
        self._num_beside = 0  # steps with prompts since the last that only decoded

    def work(self, start: int, num_rows: int) -> float:
        """Of so many rows from place ``start`` of a sequence on."""
        return work(start, num_rows, self._keys_a_row)

    def note(self, decoding: float, prompts: float, duration_s: float) -> None:
        """A step took so long, with so much work for sequences that decode, and for prompts."""
        if prompts == 0:
            self._alone = _blend(self._alone, duration_s, decoding)
            self._num_beside = 0
            return
        self._num_beside += 1
        added_s = duration_s - self._alone_s(decoding)
        self._added = _blend(self._added, max(added_s, 0.0), prompts)

    def room(self, decoding: float, num_readers: int, num_rows: int) -> Room:
        """What the next step may take of prompts, up to ``num_rows``, beside so much work of decoding.

        ``num_readers`` of those who decode have more than one token. One who has just begun is held to no
        target but the operator's: who came together begins together, so a pause after the first token is
        better than others waiting for theirs.
        """
        if (num_readers if self.target_s is None else decoding) == 0:
            return Room(num_rows, math.inf, self._keys_a_row)
        if self._alone is None or self._num_beside >= _MOST_BESIDE:
            return Room(0, 0.0, self._keys_a_row)
        if self._added is None:
            return Room(num_rows, math.inf, self._keys_a_row)
        alone_s = self._alone_s(decoding)
        target_s = self.target_s if self.target_s is not None else self.times * alone_s
        left_s = target_s * _MARGIN - alone_s
        return Room(num_rows, left_s / self._row_s if self._row_s else math.inf, self._keys_a_row)

    @property
    def _row_s(self) -> float:
        """Seconds for the work of one row."""
        return self._added.seconds / self._added.work if self._added is not None else 0.0

    def _alone_s(self, decoding: float) -> float:
        """What a step takes that only decodes, with so much work; 0 where none has been seen."""
        if self._alone is None:
            return 0.0
        return max(self._alone.seconds + self._row_s * (decoding - self._alone.work), 0.0)
