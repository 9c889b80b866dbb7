"""Which of two shadows serves more, lately."""

from __future__ import annotations


class Guard:
    """Falls back to least recently used while that leads by more than 1 % of what was asked for.

    Hits are counted with a half-life of twice the cache, in blocks asked for. Returns when ours leads by half
    a percent.
    """

    def __init__(self, num_blocks: int) -> None:
        self.is_fallen_back = False
        self.num_switches = 0
        self._half_life = 2 * num_blocks
        self._lead = 0.0
        self._refs = 0.0

    def count(self, lru_hits: int, our_hits: int, num_refs: int) -> None:
        keep = 0.5 ** (num_refs / self._half_life)
        self._lead = self._lead * keep + our_hits - lru_hits
        self._refs = self._refs * keep + num_refs
        lead = self._lead / self._refs
        if (lead > 0.005) if self.is_fallen_back else (lead < -0.01):
            self.is_fallen_back = not self.is_fallen_back
            self.num_switches += 1
