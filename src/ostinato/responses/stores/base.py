"""What every store of answers does, and the values that go in and out.

An entry is found by its ``kind`` and ``key``. Whoever files it decides what ``value`` and ``meta`` mean; a
store never reads them. ``value`` is written once; ``meta`` is small and may change (:meth:`Store.update`),
for what is learned about an entry; ``vector`` is for what is found by likeness. ``space`` is what entries
must have in common to be compared at all: a digest of 32 bytes.

Times are milliseconds since the Unix epoch and come in by argument. An entry is valid from when it was stored
until it expires. One that seems to come from the future was stored before a clock was put back: it is a miss.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, Literal, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from ...kv.terms import Selection

Kind: TypeAlias = Literal["exact", "semantic", "state", "embedding", "rerank"]
"""``state``: what is known of a space as a whole. It takes no part in limits and eviction."""

MissReason: TypeAlias = Literal["absent", "expired", "future", "corrupt"]
Vector: TypeAlias = npt.NDArray[np.float32]

KEY_BYTES: Final = 32
MAX_PURGES: Final = 1000
"""So many purges are remembered. What was begun before them is not stored."""

ROW_BYTES: Final = 256
"""What an entry takes beside its contents, about."""

CLOCK_SLACK_MS: Final = 60_000
"""By how much the clocks of two machines may differ."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One thing that is kept. ``tenant``, ``model`` and ``prompt`` are ids (:mod:`ostinato.kv.terms`).

    ``expires_ms`` ``None``: never by itself. ``seq`` is the store's: later entries of a store have higher
    ones.
    """

    kind: Kind
    key: bytes
    space: bytes
    value: bytes
    stored_ms: int
    expires_ms: int | None = None
    tenant: str = ""
    model: str = ""
    prompt: str = ""
    meta: bytes = b""
    vector: Vector | None = field(default=None, compare=False)
    seq: int = field(default=0, compare=False)

    def __post_init__(self) -> None:
        assert len(self.key) == len(self.space) == KEY_BYTES, "keys and spaces are digests of 32 bytes"
        assert self.expires_ms is None or self.expires_ms > self.stored_ms, "an entry that was never valid"

    @property
    def size_bytes(self) -> int:
        """What limits and quotas count."""
        num_floats = 0 if self.vector is None else len(self.vector)
        return ROW_BYTES + len(self.value) + len(self.meta) + 4 * num_floats

    def with_meta(self, meta: bytes) -> Entry:
        """The same with other ``meta``."""
        return replace(self, meta=meta)

    def absence(self, now_ms: int) -> Absent | None:
        """Why it is no use at this time, where it is none."""
        if self.stored_ms > now_ms + CLOCK_SLACK_MS:
            return Absent("future", self.seq)
        if self.expires_ms is not None and self.expires_ms <= now_ms:
            return Absent("expired", self.seq)
        return None


@dataclass(frozen=True, slots=True)
class Absent:
    """Nothing to be had, and why. ``seq``: of the row that is there and is no use (:meth:`Store.drop`)."""

    reason: MissReason
    seq: int | None = None


@dataclass(frozen=True, slots=True)
class Near:
    """An entry and its cosine similarity to what was asked for."""

    entry: Entry
    similarity: float


@dataclass(frozen=True, slots=True)
class Limits:
    """How much may be kept: of everything, of each tenant, of some tenants by their ids. ``None``: any
    amount.

    What was used longest ago goes first. An entry that is larger than a limit is not stored.
    """

    max_bytes: int | None = None
    tenant_bytes: int | None = None
    by_tenant: Mapping[str, int] = field(default_factory=dict)

    def of(self, tenant: str) -> int | None:
        return self.by_tenant.get(tenant, self.tenant_bytes)

    def allow(self, entry: Entry) -> bool:
        """Whether there can ever be room for it."""
        limits = (self.max_bytes, self.of(entry.tenant))
        return entry.kind == "state" or all(m is None or entry.size_bytes <= m for m in limits)


@dataclass(frozen=True, slots=True)
class Use:
    """What is kept of one tenant, model and kind."""

    tenant: str
    model: str
    kind: Kind
    num_entries: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Removed:
    """What a purge took away."""

    num_entries: int = 0
    num_bytes: int = 0


class Store(Protocol):
    """Thread-safe, and safe to be used by several processes at once.

    Every method raises :class:`~ostinato.errors.StoreError` where the store cannot be reached or is damaged
    as a whole. A damaged entry is absent, by name of ``corrupt``.
    """

    def get(self, kind: Kind, key: bytes, now_ms: int) -> Entry | Absent: ...

    def get_many(self, kind: Kind, keys: Collection[bytes], now_ms: int) -> dict[bytes, Entry]:
        """Those that are there and valid, by key."""

    def epoch(self) -> int:
        """How many purges there have been. What is computed now and stored later may be meant by the next."""

    def put(self, entries: Sequence[Entry], now_ms: int, epoch: int | None = None) -> int:
        """Stores entries, each in place of an earlier one of the same kind and key; all of them or none.

        Makes room for them, and drops what has expired. Returns how many were stored: not those that are
        larger than the limits allow, nor, with the ``epoch`` in which they were begun, those that a purge has
        meant since.
        """

    def update(self, kind: Kind, key: bytes, change: Callable[[bytes], bytes], now_ms: int) -> bytes | None:
        """Changes an entry's ``meta``, whatever others do at the same time; the new one.

        ``change`` may be called more than once. ``None``: there is no such entry, or no valid one.
        """

    def touch(self, seqs: Collection[int]) -> None:
        """These were of use: they are the last to go."""

    def drop(self, seqs: Collection[int]) -> None:
        """Removes these rows, if they are still there."""

    def forget(self, key: bytes) -> Removed:
        """Removes every entry of this key, of whatever kind."""

    def purge(self, selection: Selection, now_ms: int) -> Removed:
        """Removes what is selected; when it returns nobody finds any of it."""

    def scan(self, kind: Kind, space: bytes, after_seq: int, max_entries: int, now_ms: int) -> list[Entry]:
        """Valid entries that were stored later than ``after_seq``, in that order: to follow what others file.

        Fewer than ``max_entries``: there are no more at present.
        """

    def nearest(self, kind: Kind, space: bytes, vector: Vector, num: int, now_ms: int) -> list[Near] | None:
        """The valid entries of the space with the most similar vectors, best first.

        ``None``: this store cannot search, keep an index of your own.
        """

    def uses(self) -> list[Use]:
        """What is kept, and for whom. Of everything, so not for every request."""

    def close(self) -> None: ...
