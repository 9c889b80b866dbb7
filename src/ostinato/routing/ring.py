"""Consistent hashing: a key has the same worker everywhere, and most keep theirs when workers come and go.

Karger et al., "Consistent Hashing and Random Trees" (STOC 1997); that whoever has too much is passed over is
from Mirrokni, Thorup and Zadimoghaddam, "Consistent Hashing with Bounded Loads" (2016).
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Iterator
from typing import Final

from xxhash import xxh3_64_intdigest

NUM_POINTS: Final = 64
"""Places of each worker on the ring: their shares differ by about a tenth then."""


class Ring:
    """Names of workers, each at many places of a circle of 64 bits."""

    def __init__(self, num_points: int = NUM_POINTS) -> None:
        assert num_points >= 1, f"{num_points} points"
        self._num_points = num_points
        self._points: list[tuple[int, str]] = []

    def add(self, name: str) -> None:
        for point in self._points_of(name):
            insort(self._points, point)

    def remove(self, name: str) -> None:
        gone = set(self._points_of(name))
        self._points = [point for point in self._points if point not in gone]

    def walk(self, key: int) -> Iterator[str]:
        """All workers, each once, the key's own first."""
        if not self._points:
            return
        # Keys may be small numbers: they are spread as names are.
        place = xxh3_64_intdigest(key.to_bytes(8, "little", signed=False))
        start = bisect_right(self._points, (place, ""))
        seen: set[str] = set()
        for step in range(len(self._points)):
            name = self._points[(start + step) % len(self._points)][1]
            if name not in seen:
                seen.add(name)
                yield name

    def _points_of(self, name: str) -> list[tuple[int, str]]:
        return [
            (xxh3_64_intdigest(f"{name}\0{i}".encode("utf-8", "surrogatepass")), name)
            for i in range(self._num_points)
        ]
