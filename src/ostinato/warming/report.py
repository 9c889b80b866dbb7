"""What warming is expected to bring: the log, replayed through the real books, without and with it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

import numpy as np

from ostinato.kv.hashing import Namespace
from ostinato.kv.manager import KVManager
from ostinato.kv.policies import make_policy
from ostinato.sim.replay import ReplayClock

from .logs import LoggedPrompt
from .plan import Prefix
from .run import Had, Warmed, warm


@dataclass(frozen=True, slots=True)
class Cache:
    """The cache to be warmed. ``share`` of its blocks at most may be used for it.

    ``tier_blocks``: they are those of a tier instead, below an arena that is cold; it has whole blocks only.
    """

    num_blocks: int
    block_size: int
    policy: str
    share: float = 0.5
    tier_blocks: int = 0


@dataclass(frozen=True, slots=True)
class Expected:
    """Tokens of the log's prompts, and how many would be found: cold, and after warming.

    ``first_hits`` are of the first request, which is exact where nothing else is in the cache: what later
    ones find depends on answers too, which a log does not tell.
    """

    prompt_tokens: int
    cold_hits: int
    warm_hits: int
    first_hits: int
    warmed: Warmed

    @property
    def cold_rate(self) -> float:
        return self.cold_hits / self.prompt_tokens

    @property
    def warm_rate(self) -> float:
        return self.warm_hits / self.prompt_tokens


def expect(prompts: Sequence[LoggedPrompt], prefixes: Sequence[Prefix], cache: Cache) -> Expected:
    """Replays ``prompts`` through an empty cache, and through one warmed with ``prefixes``."""
    cold, _ = _replayed(prompts, (), cache)
    hits, warmed = _replayed(prompts, prefixes, cache)
    num_tokens = sum(len(each.tokens) for each in prompts)
    return Expected(num_tokens, sum(cold), sum(hits), hits[0], warmed)


def _replayed(
    prompts: Sequence[LoggedPrompt], prefixes: Sequence[Prefix], cache: Cache
) -> tuple[list[int], Warmed]:
    clock = ReplayClock()
    policy = make_policy(
        cache.policy, num_blocks=cache.num_blocks, block_tokens=cache.block_size, clock=clock
    )
    manager = KVManager(cache.num_blocks, cache.block_size, policy=policy)
    below = KVManager(cache.tier_blocks, cache.block_size) if cache.tier_blocks else None
    warmed = warm(prefixes, Books(below or manager, cache.share))
    hits: list[int] = []
    for prompt in prompts:
        clock.time_s = max(clock.time_s, prompt.time_s)
        with manager.acquire(_namespace(prompt.salt), prompt.tokens) as lease:
            from_tier = 0 if below is None else _in_tier(below, prompt, cache.block_size)
            hits.append(max(lease.prefix_len, from_tier))
            if lease.reserve(len(prompt.tokens)):
                lease.take_copies()
                lease.commit(prompt.tokens)
        while manager.tend():
            pass
    return hits, warmed


def _in_tier(below: KVManager, prompt: LoggedPrompt, block_size: int) -> int:
    """Whole blocks; the last token is computed even where its block is there."""
    longer = np.append(prompt.tokens, np.int32(-1))
    found = below.peek(_namespace(prompt.salt), longer)
    return min(found - found % block_size, len(prompt.tokens) - 1)


def _namespace(salt: str) -> Namespace:
    return Namespace("log", "", "", "", "", "", salt=salt)


class Books:
    """A target with no model: the books of a cache alone."""

    piece_tokens = 1 << 30

    def __init__(self, manager: KVManager, share: float) -> None:
        self._manager = manager
        self._room = Room(int(manager.num_blocks * share), manager.block_size)
        self.max_tokens = manager.num_blocks * manager.block_size

    def wait_for_idle(self) -> bool:
        return True

    def num_cached(self, prefix: Prefix) -> int:
        return self._manager.peek(_namespace(prefix.salt), prefix.tokens)

    def room_until(self, start: int) -> int:
        return self._room.until(start, self._manager.num_free_blocks)

    def have(self, prefix: Prefix, num_tokens: int) -> Had:
        tokens = prefix.tokens[:num_tokens]
        with self._manager.acquire(_namespace(prefix.salt), tokens) as lease:
            found = lease.prefix_len
            is_room = lease.reserve(num_tokens)
            assert is_room, "there is free room, and no room"
            lease.take_copies()
            lease.commit(tokens)
            self._room.take(found, num_tokens)
        return Had(found, 0, num_tokens - found)


class Room:
    """How much of a share of a cache is left, when only free blocks may be taken.

    Of a prefix that goes on amid a block, that block is counted again: it may have to be copied.
    """

    def __init__(self, max_blocks: float, block_size: int) -> None:
        self._left_blocks = max_blocks
        self._block_size = block_size

    def until(self, start: int, num_free_blocks: float) -> int:
        """How far tokens from ``start`` on may reach."""
        blocks = start // self._block_size + max(0, min(self._left_blocks, num_free_blocks))
        return 1 << 40 if blocks == inf else int(blocks) * self._block_size

    def take(self, start: int, end: int) -> None:
        """Tokens ``[start, end)`` were put there."""
        if end > start:
            self._left_blocks -= -(-end // self._block_size) - start // self._block_size
