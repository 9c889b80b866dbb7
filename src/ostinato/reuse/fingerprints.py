"""Fingerprints of short runs of tokens (n-grams), and a table from fingerprint to where it stands.

The table is two-choice: a fingerprint names two buckets of eight places, a new one goes into the emptier. At
the load it is made for both are practically never full, so nothing is ever moved, deletion leaves nothing
behind, and a look-up reads two cache lines. All of it is done in arrays, for many fingerprints at once.

A fingerprint only proposes. What the table gives back has to be compared token by token.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ostinato.types import TokenArray

Hashes = npt.NDArray[np.uint64]
Places = npt.NDArray[np.uint64]

GRAM = 16
SHORT_GRAM = 8
"""Tokens of an n-gram: of every text, and of units too short for those."""
MAX_ALIKE = 8
"""Places that are kept of one fingerprint; the next one takes the place of one of them."""
ENTRY_BYTES = 16
_WAYS = 8
_LOAD = 0.6  # both buckets of eight are full once in 10^5 times, or less
_TOKEN_FACTOR, _GRAM_FACTOR = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBF58476D1CE4E5B9)
_BASE = 0xD6E8FEB86659FD93
_LOW = np.uint64(0xFFFFFFFF)
_32, _29 = np.uint64(32), np.uint64(29)


def gram_hashes(tokens: TokenArray, size: int, seed: int) -> Hashes:
    """Fingerprints of all n-grams of ``size`` tokens (a power of two), one for each place they begin at.

    Never 0. Doubling: the hash of ``2n`` tokens is made of those of its halves, for all places at once.
    """
    assert size & (size - 1) == 0, f"{size} tokens are no power of two"
    if len(tokens) < size:
        return np.empty(0, np.uint64)
    hashes = tokens.astype(np.uint32).astype(np.uint64)
    hashes ^= np.uint64((seed + size) & 0xFFFFFFFFFFFFFFFF)
    hashes *= _TOKEN_FACTOR
    hashes ^= hashes >> _29
    span, power = 1, _BASE
    while span < size:
        hashes = hashes[:-span] * np.uint64(power) + hashes[span:]
        span, power = 2 * span, power * power & 0xFFFFFFFFFFFFFFFF
    hashes ^= hashes >> _32
    hashes *= _GRAM_FACTOR
    hashes ^= hashes >> _29
    hashes[hashes == 0] = 1
    return hashes


class FingerprintTable:
    """Where fingerprints stand. A place is any 64-bit number; the same pair may be in here once only."""

    def __init__(self, max_entries: int) -> None:
        """Room for ``max_entries`` pairs; memory is taken at once (``size_bytes``)."""
        assert max_entries > 0, f"a table for {max_entries} entries"
        self.max_entries = max_entries
        self._num_buckets = int(max_entries / (_WAYS * _LOAD)) + 1
        self._hashes = np.zeros((self._num_buckets, _WAYS), np.uint64)  # 0: empty
        self._places = np.zeros((self._num_buckets, _WAYS), np.uint64)
        self._turn = 0

    @property
    def size_bytes(self) -> int:
        return self._hashes.nbytes + self._places.nbytes

    def count(self) -> int:
        """How many pairs are in here; looks at everything."""
        return int(np.count_nonzero(self._hashes))

    def insert(self, hashes: Hashes, places: Places) -> None:
        """Adds pairs. Where there are too many of one fingerprint, or no room, another pair gives way."""
        hashes, places = _at_most(hashes, places)
        while len(hashes):
            buckets = self._buckets(hashes)
            rows = self._hashes[buckets]  # [n, 2, ways]
            is_free = rows == 0
            num_free = is_free.sum(axis=2)
            choice = num_free.argmax(axis=1)
            every = np.arange(len(hashes))
            ways = is_free[every, choice].argmax(axis=1)
            chosen = buckets[every, choice]
            is_full = num_free[every, choice] == 0
            ways[is_full] = self._turn % _WAYS
            self._give_turns(rows == hashes[:, None, None], buckets, chosen, ways)
            self._turn += 1
            now = np.unique(chosen, return_index=True)[1]  # one for each bucket, the others see it next time
            self._hashes[chosen[now], ways[now]] = hashes[now]
            self._places[chosen[now], ways[now]] = places[now]
            hashes, places = np.delete(hashes, now), np.delete(places, now)

    def _give_turns(
        self,
        is_same: npt.NDArray[np.bool_],
        buckets: npt.NDArray[np.intp],
        chosen: npt.NDArray[np.intp],
        ways: npt.NDArray[np.intp],
    ) -> None:
        """Those of which there are as many as may be take, in turn, the place of one that is here."""
        is_same[buckets[:, 0] == buckets[:, 1], 1] = False
        flat = is_same.reshape(len(is_same), 2 * _WAYS)
        capped = np.flatnonzero(flat.sum(axis=1) >= MAX_ALIKE)
        if len(capped):
            nth = np.cumsum(flat[capped], axis=1) == 1 + self._turn % MAX_ALIKE
            at = nth.argmax(axis=1)
            chosen[capped] = buckets[capped, at // _WAYS]
            ways[capped] = at % _WAYS

    def remove(self, hashes: Hashes, places: Places) -> None:
        """Removes pairs; those that had to give way before are not missed."""
        buckets = self._buckets(hashes)
        is_it = (self._hashes[buckets] == hashes[:, None, None]) & (
            self._places[buckets] == places[:, None, None]
        )
        entry, choice, way = np.nonzero(is_it)
        self._hashes[buckets[entry, choice], way] = 0

    def look_up(self, hashes: Hashes) -> tuple[npt.NDArray[np.intp], Places]:
        """All places of all ``hashes``: index into ``hashes``, and place, in no order."""
        buckets = self._buckets(hashes)
        found = []
        for choice in (0, 1):
            side = buckets[:, choice]
            entry, way = np.nonzero(self._hashes[side] == hashes[:, None])
            if choice:
                is_new = side[entry] != buckets[entry, 0]
                entry, way = entry[is_new], way[is_new]
            found.append((entry, self._places[side[entry], way]))
        (first, places), (second, more) = found
        return np.concatenate((first, second)), np.concatenate((places, more))

    def _buckets(self, hashes: Hashes) -> npt.NDArray[np.intp]:
        """The two buckets of each, ``[n, 2]``."""
        halves = np.stack((hashes >> _32, hashes & _LOW), axis=1)
        scaled: npt.NDArray[np.intp] = (halves * np.uint64(self._num_buckets) >> _32).astype(np.intp)
        return scaled


def _at_most(hashes: Hashes, places: Places) -> tuple[Hashes, Places]:
    """Of equal fingerprints the last ``MAX_ALIKE``."""
    order = np.argsort(hashes, kind="stable")
    ordered = hashes[order]
    is_more = np.zeros(len(order), np.bool_)
    is_more[:-MAX_ALIKE] = ordered[:-MAX_ALIKE] == ordered[MAX_ALIKE:]
    if not is_more.any():
        return hashes, places
    kept = order[~is_more]
    return hashes[kept], places[kept]
