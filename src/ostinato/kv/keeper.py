"""What an operator does to everything that is kept, in the arena and below it at once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from .manager import KVManager
from .pins import Pin
from .terms import Purged, Selection, TenantUse

if TYPE_CHECKING:
    from .tiers.base import Content
    from .tiers.shared import SharedTier


@dataclass(frozen=True, slots=True)
class PurgeReport:
    """What a purge took away: of the arena of this process, and of the shared tier.

    ``num_answers``: and of whole answers, where some are kept.
    """

    arena: Purged
    num_tier_blocks: int
    freed_bytes: int
    num_answers: int = 0


@dataclass(frozen=True, slots=True)
class CacheSummary:
    """What is kept, and for whom. A block takes ``block_bytes`` in the arena, ``tier_block_bytes`` below."""

    block_bytes: int
    tier_block_bytes: int
    num_blocks: int
    num_held_blocks: int
    num_evictable_blocks: int
    num_free_blocks: int
    num_pinned_blocks: int
    max_pinned_blocks: int
    tenants: tuple[TenantUse, ...]
    pins: tuple[Pin, ...]
    tier: tuple[Content, ...] | None


class Keeper:
    """Thread-safe, as what it works on is."""

    def __init__(self, manager: KVManager, tier: SharedTier | None, block_bytes: int) -> None:
        self.manager = manager
        self._tier = tier
        self._block_bytes = block_bytes
        if tier is not None:
            manager.news = tier.news

    def purge(self, selection: Selection) -> PurgeReport:
        """When this returns nobody finds any of it: not here, nor in another process on the same tier.

        Raises:
            TierError: the shared tier could not take it down; then nothing was purged.
        """
        if self._tier is None:
            arena = self.manager.purge(selection)
            return PurgeReport(arena, 0, arena.num_freed_blocks * self._block_bytes)
        tier = self._tier
        arena = self.manager.hear_news(lambda: tier.announce(selection))
        num_tier_blocks = tier.finish_purges()
        freed = arena.num_freed_blocks * self._block_bytes + num_tier_blocks * tier.slot_bytes
        return PurgeReport(arena, num_tier_blocks, freed)

    def summary(self) -> CacheSummary:
        """Reads the whole index of the tier: for people, not for every second.

        Raises:
            TierError: the shared tier cannot be read.
        """
        manager = self.manager
        return CacheSummary(
            block_bytes=self._block_bytes,
            tier_block_bytes=0 if self._tier is None else self._tier.slot_bytes,
            num_blocks=manager.num_blocks,
            num_held_blocks=manager.num_held_blocks,
            num_evictable_blocks=manager.num_evictable_blocks,
            num_free_blocks=manager.num_free_blocks,
            num_pinned_blocks=manager.num_pinned_blocks,
            max_pinned_blocks=manager.max_pinned_blocks,
            tenants=tuple(manager.tenants()),
            pins=tuple(manager.pins()),
            tier=None if self._tier is None else tuple(self._tier.contents()),
        )
