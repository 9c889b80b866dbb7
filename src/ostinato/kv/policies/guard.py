"""Which of two shadows serves more, lately."""

from __future__ import annotations

_HALF_LIFE_CACHES = 4
_FALLS_BACK_AT = 0.003
_RETURNS_AT = 0.01


class Guard:
    """Falls back to least recently used while that leads by more than 0.3 % of what was asked for.

    Hits are counted with a half-life of four times the cache, in blocks asked for. Returns when ours leads by
    one percent.
    """

    def __init__(self, num_blocks: int) -> None:
        self.is_fallen_back = False
        self.num_switches = 0
        self._half_life = _HALF_LIFE_CACHES * num_blocks
        self._lead = 0.0
        self._refs = 0.0

    def count(self, lru_hits: int, our_hits: int, num_refs: int) -> None:
        keep = 0.5 ** (num_refs / self._half_life)
        self._lead = self._lead * keep + our_hits - lru_hits
        self._refs = self._refs * keep + num_refs
        lead = self._lead / self._refs
        if (lead > _RETURNS_AT) if self.is_fallen_back else (lead < -_FALLS_BACK_AT):
            self.is_fallen_back = not self.is_fallen_back
            self.num_switches += 1
