"""What operators asked to keep: whole blocks of prefixes, held as a lease holds them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from math import inf
from typing import TYPE_CHECKING

import numpy as np

from ostinato.types import BlockIds

from .hashing import Namespace, digest_bytes
from .terms import Terms

if TYPE_CHECKING:
    from .index import PrefixIndex
    from .nodes import Match, Moment, Node
    from .pool import BlockPool

_ID_CONTEXT = "ostinato pin v1"
_ID_CHARS = 16
_TOKEN_BYTES = 4


@dataclass(frozen=True, slots=True)
class Pin:
    """A prefix that is never a victim. ``id`` names it to unpin it; ``expires_in_s`` is ``inf`` for never."""

    id: str
    tenant: str
    num_tokens: int
    num_blocks: int
    expires_in_s: float


@dataclass(frozen=True, slots=True)
class _Entry:
    namespace: Namespace
    tokens: bytes
    block_ids: BlockIds
    terms: Terms
    ttl_s: float
    expires_s: float


class Pins:
    """The pins of one manager. Nothing here locks."""

    def __init__(self, index: PrefixIndex, pool: BlockPool, release: Callable[[BlockIds], None]) -> None:
        """``release`` lets go of blocks and wakes whatever waits for them."""
        self._index = index
        self._pool = pool
        self._release = release
        self._entries: dict[str, _Entry] = {}
        self._num_pins_of: dict[int, int] = {}  # block -> pins that hold it

    @property
    def num_blocks(self) -> int:
        """Blocks that pins hold."""
        return len(self._num_pins_of)

    def __len__(self) -> int:
        return len(self._entries)

    def holds(self, block_id: int) -> bool:
        return block_id in self._num_pins_of

    def num_blocks_outside(self, block_ids: BlockIds) -> int:
        """Pinned blocks that are not among these."""
        return self.num_blocks - sum(block in self._num_pins_of for block in block_ids.tolist())

    def num_blocks_of(self, tenant: str) -> int:
        """Pinned blocks of one tenant."""
        blocks = [entry.block_ids for entry in self._entries.values() if entry.namespace.tenant == tenant]
        return len(np.unique(np.concatenate(blocks))) if blocks else 0

    def num_new(self, match: Match) -> int:
        """How many more blocks would be pinned."""
        return sum(block not in self._num_pins_of for block in _path_blocks(match).tolist())

    def view(self, now_s: float) -> list[Pin]:
        return [self._pin(name, entry, now_s) for name, entry in self._entries.items()]

    def put(self, namespace: Namespace, tokens: bytes, moment: Moment, expires_s: float) -> Pin:
        """Pins ``tokens``, whole blocks that are in the index. The same again only moves its end."""
        name = pin_id(namespace, tokens)
        known = self._entries.get(name)
        if known is None:
            path = _path_blocks(self._index.pin(namespace.digest, tokens))
            self._hold(path)
            entry = _Entry(namespace, tokens, path, moment.terms, moment.ttl_s, expires_s)
        else:
            entry = replace(known, expires_s=expires_s)
        self._entries[name] = entry
        return self._pin(name, entry, moment.now_s)

    def drop(self, name: str) -> bool:
        """Unpins; false when there is no such pin."""
        entry = self._entries.pop(name, None)
        if entry is None:
            return False
        self._index.unpin(entry.namespace.digest, entry.tokens)
        self._let_go(entry.block_ids)
        return True

    def expire(self, now_s: float) -> None:
        """Unpins what was pinned until now."""
        for name in [name for name, entry in self._entries.items() if entry.expires_s <= now_s]:
            self.drop(name)

    def drop_meant(self, spaces: list[Namespace], is_meant: Callable[[Node], bool]) -> int:
        """Unpins whatever of these namespaces runs through a node that is meant; returns how many."""
        digests = {space.digest for space in spaces}
        meant = [
            name
            for name, entry in self._entries.items()
            if entry.namespace.digest in digests
            and self._index.meets(entry.namespace.digest, entry.tokens, is_meant)
        ]
        for name in meant:
            self.drop(name)
        return len(meant)

    def restore(self, rank: int, now_s: float, moment: Callable[[int, float, float, Terms], Moment]) -> None:
        """Makes all of it findable again after the index has forgotten everything."""
        for name, entry in self._entries.items():
            digest = entry.namespace.digest
            table = entry.block_ids[: self._num_table_blocks(entry)]
            self._index.insert(digest, entry.tokens, table, moment(rank, now_s, entry.ttl_s, entry.terms))
            path = _path_blocks(self._index.pin(digest, entry.tokens))
            self._hold(path)
            self._let_go(entry.block_ids)
            self._entries[name] = replace(entry, block_ids=path)

    def tally(self) -> Iterator[BlockIds]:
        """What every pin holds."""
        return (entry.block_ids for entry in self._entries.values())

    def check_integrity(self) -> None:
        counts: dict[int, int] = {}
        for block_ids in self.tally():
            for block in block_ids.tolist():
                counts[block] = counts.get(block, 0) + 1
        assert counts == self._num_pins_of, "pinned blocks are miscounted"

    def _num_table_blocks(self, entry: _Entry) -> int:
        return len(entry.tokens) // _TOKEN_BYTES // self._index.block_size

    def _hold(self, block_ids: BlockIds) -> None:
        self._pool.hold(block_ids)
        for block in block_ids.tolist():
            self._num_pins_of[block] = self._num_pins_of.get(block, 0) + 1

    def _let_go(self, block_ids: BlockIds) -> None:
        for block in block_ids.tolist():
            self._num_pins_of[block] -= 1
            if not self._num_pins_of[block]:
                del self._num_pins_of[block]
        self._release(block_ids)

    def _pin(self, name: str, entry: _Entry, now_s: float) -> Pin:
        return Pin(
            id=name,
            tenant=entry.namespace.tenant,
            num_tokens=len(entry.tokens) // _TOKEN_BYTES,
            num_blocks=self._num_table_blocks(entry),
            expires_in_s=inf if entry.expires_s == inf else max(0.0, entry.expires_s - now_s),
        )


def pin_id(namespace: Namespace, tokens: bytes) -> str:
    """Names a pin: a digest of what is pinned."""
    digest = digest_bytes(namespace.digest.encode(), tokens, context=_ID_CONTEXT)
    return f"pin-{digest.removeprefix('b3:')[:_ID_CHARS]}"


def _path_blocks(match: Match) -> BlockIds:
    """The table first, then what stands on its path and is not in it: all distinct."""
    others = np.fromiter(match.overridden, np.intp, len(match.overridden))
    return np.concatenate((match.blocks, others))
