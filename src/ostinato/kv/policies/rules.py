"""Rules that need nothing but what the index knows of a node: one line each.

Ranks count look-ups and commits. A node is inserted when its tokens become findable; what was evicted and
comes back is inserted anew, with no memory of before.
"""

from __future__ import annotations

from math import log2

from ..policy import NodeStats


class FIFO:
    """First in, first out: use changes nothing."""

    def priority(self, stats: NodeStats) -> int:
        return stats.inserted


class LFU:
    """Least often looked up since it was inserted; among equals the least recently used."""

    def priority(self, stats: NodeStats) -> tuple[int, int]:
        return stats.num_uses, stats.last_used


class TTL:
    """A lifetime of ``ranks`` from every use; whose ends first goes first. By rank that is LRU's order."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks

    def priority(self, stats: NodeStats) -> int:
        return stats.last_used + self._ranks


class SizeTTL:
    """A lifetime from every use, the shorter the longer the prompt up to here is."""

    def __init__(self, ranks: int, unit_tokens: int) -> None:
        self._ranks, self._unit_tokens = ranks, unit_tokens

    def priority(self, stats: NodeStats) -> float:
        end = stats.depth_tokens + stats.num_tokens
        return stats.last_used + self._ranks / (1 + end / self._unit_tokens)


class CostAware:
    """Least recently used, with ``ranks`` more for each doubling of uses times the cost to recompute a byte.

    A token's prefill costs in proportion to its layers' weights plus the tokens it attends to;
    ``even_tokens`` is the depth at which the two are equal. Bytes a token are the same everywhere.
    """

    def __init__(self, ranks: int, even_tokens: int) -> None:
        self._ranks, self._even_tokens = ranks, even_tokens

    def priority(self, stats: NodeStats) -> float:
        cost = 1 + (stats.depth_tokens + stats.num_tokens / 2) / self._even_tokens
        return stats.last_used + self._ranks * log2((1 + stats.num_uses) * cost)
