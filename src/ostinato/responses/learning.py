"""What a semantic cache learns where it runs: of each space, and of each entry.

A *check* calls the model where the cache would have served, and compares. From checks and from feedback:

- **each entry** has a bound on how often it is wrong, in the manner of vCache (Schroeder et al., arXiv
  2502.03771): the entry is served with a chance that keeps the expected share of wrong answers within the
  budget even if it is as bad as its record allows; else the model is asked, which adds to the record. A new
  entry is believed to be as good as the decision was on the pairs it was measured on.
- **each space** asks for a higher score once its checks are wrong more often than the budget, and is switched
  off once that cannot be chance.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import sqrt
from typing import Final

import orjson

_PRIOR: Final = 20.0
"""A new entry counts as so many checks that went as the budget says."""
_MIN_CHECKS: Final = 20
_STRICTER: Final = 0.5
_MAX_STRICTER: Final = 5.0
_Z: Final = 1.645  # one-sided, 95 %


@dataclass(frozen=True, slots=True)
class EntryRecord:
    """Of one entry: how often it was right and wrong when that was checked.

    ``stricter``: what its score must exceed the budget's threshold by (log-odds).
    """

    num_hits: int = 0
    num_right: int = 0
    num_wrong: int = 0
    stricter: float = 0.0

    def error_bound(self, budget: float) -> float:
        """How often it may be wrong at most, with what is known of it and what was believed before."""
        return upper_bound(self.num_wrong + _PRIOR * budget, self.num_right + self.num_wrong + _PRIOR)

    def chance_to_ask(self, budget: float) -> float:
        """How often the model is to be asked instead, so that the share of wrong answers keeps to the budget.

        Without a record that is never; with one that is worse than the budget, as often as it takes.
        """
        if self.num_wrong == 0:
            return 0.0
        return max(0.0, 1.0 - budget / max(budget, self.error_bound(budget)))

    def told(self, is_right: bool, margin: float) -> EntryRecord:
        """The record with one more check. After a wrong one nothing is served by it that is not surer."""
        if is_right:
            return replace(self, num_right=self.num_right + 1)
        stricter = min(_MAX_STRICTER, self.stricter + max(0.0, margin) + _STRICTER)
        return replace(self, num_wrong=self.num_wrong + 1, stricter=stricter)


@dataclass(frozen=True, slots=True)
class SpaceRecord:
    """Of a whole space. ``is_off``: its error passed the budget; it serves nothing until it is reset."""

    num_checks: int = 0
    num_wrong: int = 0
    stricter: float = 0.0
    is_off: bool = False

    def told(self, is_right: bool, budget: float) -> SpaceRecord:
        """The record with one more check."""
        num_checks, num_wrong = self.num_checks + 1, self.num_wrong + (not is_right)
        stricter, is_off = self.stricter, self.is_off
        if not is_right and num_wrong > budget * num_checks:
            stricter = min(_MAX_STRICTER, stricter + _STRICTER)
        if num_checks >= _MIN_CHECKS and lower_bound(num_wrong, num_checks) > budget:
            is_off = True
        return SpaceRecord(num_checks, num_wrong, stricter, is_off)


def upper_bound(num_wrong: float, num: float) -> float:
    """The upper end of Wilson's interval for a share (one-sided, 95 %)."""
    return _wilson(num_wrong, num, 1) if num else 1.0


def lower_bound(num_wrong: float, num: float) -> float:
    """The lower end."""
    return _wilson(num_wrong, num, -1) if num else 0.0


def _wilson(part: float, num: float, side: int) -> float:
    share = part / num
    middle = share + _Z * _Z / (2 * num)
    spread = _Z * sqrt(share * (1 - share) / num + _Z * _Z / (4 * num * num))
    return (middle + side * spread) / (1 + _Z * _Z / num)


def read_entry(meta: bytes) -> EntryRecord:
    """An entry's record; a fresh one where there is none that can be read."""
    found = _read(meta)
    if found is None or len(found) != 4:
        return EntryRecord()
    num_hits, num_right, num_wrong, stricter = found
    return EntryRecord(int(num_hits), int(num_right), int(num_wrong), float(stricter))


def read_space(meta: bytes) -> SpaceRecord:
    """A space's record; a fresh one where there is none that can be read."""
    found = _read(meta)
    if found is None or len(found) != 4:
        return SpaceRecord()
    num_checks, num_wrong, stricter, is_off = found
    return SpaceRecord(int(num_checks), int(num_wrong), float(stricter), bool(is_off))


def write(record: EntryRecord | SpaceRecord) -> bytes:
    """A record as it is stored."""
    if isinstance(record, EntryRecord):
        return orjson.dumps([record.num_hits, record.num_right, record.num_wrong, record.stricter])
    return orjson.dumps([record.num_checks, record.num_wrong, record.stricter, record.is_off])


def _read(meta: bytes) -> list[float] | None:
    try:
        found = orjson.loads(meta)
    except orjson.JSONDecodeError:
        return None
    return found if isinstance(found, list) and all(isinstance(n, int | float) for n in found) else None
