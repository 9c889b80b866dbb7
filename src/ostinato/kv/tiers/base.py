"""What every tier is to the rest of the house: a place that may have a block's bytes, and never lies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

from ..hashing import BlockKey


class Status(Enum):
    """What a look-up found."""

    HIT = "hit"
    MISS = "miss"
    PENDING = "pending"  # somebody writes it right now


class Outcome(Enum):
    """What became of a block that was to be stored. All but ``STORED`` changed nothing that can be found."""

    STORED = "stored"
    KNOWN = "known"  # it is here already
    PENDING = "pending"  # somebody else writes it right now
    FULL = "full"  # no slot can be had: no room on the disk, or every slot is being written
    REFUSED = "refused"  # its tenant may keep no more, or it was purged on its way


class Miss(Enum):
    """Why a load brought nothing; each is counted."""

    ABSENT = "absent"
    PENDING = "pending"
    MISMATCH = "mismatch"  # the record is of other tokens, parent, namespace, length or version
    OVERTAKEN = "overtaken"  # the slot was given to another block while it was copied
    CORRUPT = "corrupt"  # record or payload fail their checksum
    IO_ERROR = "io_error"


@dataclass(frozen=True, slots=True)
class Found:
    """The first ``num_hits`` blocks of a chain are here; ``next`` says what holds of the one after them."""

    num_hits: int
    next: Status


@dataclass(slots=True)
class TierCounters:
    """What this process did with a tier, since it opened it. Written by any thread without a lock: a count
    may lose an increment under contention, never anything else."""

    hits: int = 0
    misses: dict[Miss, int] = field(default_factory=lambda: dict.fromkeys(Miss, 0))
    outcomes: dict[Outcome, int] = field(default_factory=lambda: dict.fromkeys(Outcome, 0))
    evicted: int = 0
    given_up: int = 0  # by their own tenant, which was at its quota
    expired: int = 0
    purged: int = 0
    reclaimed: int = 0
    dropped_stale: int = 0

    def evictions(self) -> dict[str, int]:
        """Blocks that went, by reason."""
        return {
            "capacity": self.evicted,
            "quota": self.given_up,
            "expired": self.expired,
            "purged": self.purged,
            "abandoned": self.reclaimed,
            "stale": self.dropped_stale,
            "corrupt": self.misses[Miss.CORRUPT],
        }


@dataclass(frozen=True, slots=True)
class TierUse:
    """What is in a tier. Slots that nobody uses are ``num_slots - num_blocks``."""

    num_slots: int
    slot_bytes: int
    num_blocks: int
    index_bytes: int


@dataclass(frozen=True, slots=True)
class Content:
    """What one tenant has of one model under one prompt's name (all ids): ``num_blocks`` blocks.

    The first and the last of them were stored at these milliseconds since the Unix epoch.
    """

    tenant: str
    model: str
    prompt: str
    num_blocks: int
    first_stored_ms: int
    last_stored_ms: int


class Tier(Protocol):
    """Any thread may call anything."""

    counters: TierCounters

    def lookup(self, keys: Sequence[BlockKey]) -> Found:
        """How much of a chain (first block first) is here. A use of what it finds."""

    def expect(self, keys: Sequence[BlockKey]) -> None:
        """A hint: these will be loaded soon."""

    def load(self, key: BlockKey, into: memoryview) -> bool:
        """Copies a block's payload, all of ``into``; after ``False`` the content of ``into`` is undefined."""

    def store(self, key: BlockKey, parts: Sequence[memoryview]) -> Outcome:
        """Stores a payload given in pieces; findable only once it is complete."""

    def store_all(self, blocks: Sequence[tuple[BlockKey, Sequence[memoryview]]]) -> list[Outcome]:
        """Stores several blocks, in order; what becomes of one does not depend on the others."""

    def touch(self, keys: Sequence[BlockKey]) -> None:
        """Marks a chain as used, its last block least, so that leaves go before roots."""

    def drop_stale(self, limit: int) -> int:
        """Forgets up to ``limit`` blocks that a lower version made; returns how many."""

    def drop_expired(self, limit: int) -> int:
        """Forgets up to ``limit`` blocks whose time is up; returns how many."""

    @property
    def epoch(self) -> int:
        """The number of the last purge that was heard of here."""

    def use(self) -> TierUse:
        """What is in it now."""

    def close(self) -> None: ...
