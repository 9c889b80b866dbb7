"""Rules of eviction beyond least recently used. Each says what it remembers, and how much of it."""

from __future__ import annotations

from collections.abc import Callable

from ostinato.ports import Clock

from ..policy import LRU, EvictionPolicy, HistoryPolicy
from ..policy_names import POLICY_NAMES
from .remember import ARC, LRU2, S3FIFO, LIRSLike
from .rules import FIFO, LFU, TTL, CostAware, SizeTTL
from .workload import Workload

__all__ = ["POLICY_NAMES", "make_policy"]


def make_policy(
    name: str, *, num_blocks: int, block_tokens: int, clock: Clock
) -> EvictionPolicy | HistoryPolicy:
    """The policy of this name for a cache of ``num_blocks`` blocks. ``KeyError`` for any other name.

    A memory of what was evicted spans eight times the cache and never less than 64 Ki blocks, except
    where a rule's own definition says otherwise.
    """
    max_blocks = 8 * num_blocks + 65_536
    makers: dict[str, Callable[[], EvictionPolicy | HistoryPolicy]] = {
        "lru": LRU,
        "fifo": FIFO,
        "lfu": LFU,
        "lru-2": lambda: LRU2(block_tokens, max_blocks),
        "ttl": lambda: TTL(1000),
        "size-ttl": lambda: SizeTTL(1000, 16 * block_tokens),
        "s3-fifo": lambda: S3FIFO(num_blocks, block_tokens, max_blocks),
        "arc": lambda: ARC(num_blocks, block_tokens, max_blocks),
        "lirs": lambda: LIRSLike(block_tokens, max_blocks),
        "cost": lambda: CostAware(200, 16 * block_tokens),
        "workload": lambda: Workload(num_blocks, block_tokens, clock),
    }
    return makers[name]()
