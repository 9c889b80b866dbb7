"""Look-up and hold in one step: the only door to the pool and the index."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from threading import Lock
from types import TracebackType

import numpy as np
import numpy.typing as npt

from ostinato.events import BlocksEvicted, BlocksStored, Event, Observer, PrefixLookedUp
from ostinato.types import BlockIds, Run, SlotCopy, TokenArray

from .hashing import Namespace
from .index import TOKEN_BYTES, Match, PrefixIndex
from .policy import LRU, NO_HINTS, EvictionPolicy, HistoryPolicy, RequestHints, Use
from .pool import BlockPool, BlockTable


class KVManager:
    """Bookkeeping of a paged KV arena of ``num_blocks`` blocks of ``block_size`` tokens.

    One lock guards all books, so any thread may call anything; it is held for microseconds, never while an
    observer runs. A single lease belongs to one thread at a time, except that anyone may ``release`` it.

    Recency is a counter of look-ups and commits: no clock.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        policy: EvictionPolicy | HistoryPolicy | None = None,
        observer: Observer | None = None,
    ) -> None:
        assert block_size >= 1, f"block size {block_size}"
        assert 1 <= num_blocks * block_size < 2**31, f"{num_blocks} blocks of {block_size}: slots are int32"
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._observer = observer
        self._lock = Lock()
        self._pool = BlockPool(num_blocks)
        self._index = PrefixIndex(block_size, self._pool, policy or LRU())
        self._rank = 0
        self._leases: set[Lease] = set()

    # ------------------------------------------------------------ what there is

    @property
    def num_free_blocks(self) -> int:
        """Blocks with nothing in them."""
        return self._pool.num_free

    @property
    def num_evictable_blocks(self) -> int:
        """Blocks that only the cache has: all of them can be had."""
        return self._pool.num_evictable

    @property
    def num_held_blocks(self) -> int:
        """Blocks that some lease holds."""
        return self._pool.num_held

    @property
    def num_leases(self) -> int:
        """Leases not yet released, also those that hold nothing."""
        return len(self._leases)

    @property
    def num_cached_tokens(self) -> int:
        """Tokens findable in all namespaces."""
        return self._index.num_tokens

    # ------------------------------------------------------------ the flow

    def acquire(self, namespace: Namespace, tokens: TokenArray, *, hints: RequestHints = NO_HINTS) -> Lease:
        """Finds the longest cached prefix of ``tokens`` and holds it: one step, which cannot fail.

        The hit is exact to the token (stored tokens are compared) and at most ``len(tokens) - 1`` long,
        because the last token's logits are wanted. ``hints`` are for the policy. Emits ``PrefixLookedUp``.
        """
        data = _as_bytes(tokens)
        with self._lock:
            self._rank += 1
            match = self._index.match(namespace.digest, data, max(0, len(tokens) - 1), self._rank)
            self._pool.hold(match.blocks)
            if match.overridden:
                self._pool.hold(_as_block_ids(match.overridden))
            lease = Lease(self, namespace, match, data[: match.num_tokens * TOKEN_BYTES], hints)
            self._leases.add(lease)
        self._emit(PrefixLookedUp(len(tokens), match.num_tokens))
        return lease

    def peek(self, namespace: Namespace, tokens: TokenArray) -> int:
        """How long a hit ``acquire`` would find now. Holds nothing, and is no use of what it finds."""
        data = _as_bytes(tokens)
        with self._lock:
            return min(self._index.peek(namespace.digest, data), max(0, len(tokens) - 1))

    def demote(self, namespace: Namespace, tokens: TokenArray) -> int:
        """A hint: this sequence will not go on (its session was closed, its branch lost, its user left).

        What only it ran through is evicted before all else, unless it is used again: a wrong hint costs at
        most its own entries. Held blocks stay. Returns how many tokens it moved.
        """
        with self._lock:
            return self._index.demote(namespace.digest, _as_bytes(tokens))

    def clear(self, namespace: Namespace | None = None) -> int:
        """Drops everything evictable, of one namespace or of all; returns how many blocks became free."""
        with self._lock:
            if namespace is None:
                num_blocks, num_tokens = self._index.evict(self._pool.num_evictable)
            else:
                num_blocks, num_tokens = self._index.clear(namespace.digest)
        self._emit_evicted(num_blocks, num_tokens)
        return num_blocks

    def check_integrity(self) -> None:
        """Asserts every invariant of pool, index and leases. For tests: it looks at everything."""
        with self._lock:
            holds = np.zeros(self.num_blocks, np.int32)
            for lease in self._leases:
                lease._tally(holds)
            owners = self._index.check_integrity(holds)
            self._pool.check_integrity(holds, owners)

    # ------------------------------------------------------------ what leases ask for

    def _reserve(self, lease: Lease, num_tokens: int, spare_tokens: int) -> bool:
        size, pool, table = self.block_size, self._pool, lease._table
        num_needed = -(-num_tokens // size)
        num_evicted = num_lost = 0
        with self._lock:
            assert not lease._is_released, "reserved on a released lease"
            num_missing = num_needed - table.num_blocks + lease._needs_copy
            if num_missing > pool.num_free + pool.num_evictable:
                num_pinned = 0 if lease._source is None else 1
                if len(self._leases) > 1 or num_needed + num_pinned > self.num_blocks:
                    return False
                num_evicted, num_lost = self._take_over(lease)
                num_missing = num_needed - table.num_blocks
            elif num_missing > pool.num_free:
                num_evicted, num_lost = self._index.evict(num_missing - pool.num_free)
            if num_missing:
                num_spare = -(-(num_tokens + spare_tokens) // size) - num_needed
                self._grow(lease, num_missing, min(num_spare, pool.num_free - num_missing))
        self._emit_evicted(num_evicted, num_lost)
        return True

    def _grow(self, lease: Lease, num_blocks: int, num_spare: int) -> None:
        """Appends free blocks to a lease's table, the first of them its copy of a shared last block."""
        table = lease._table
        shared = int(table.ids[-1]) if lease._needs_copy else None
        if shared is not None:
            table.drop_last()
        after = int(table.ids[-1]) if table.num_blocks else None
        fresh = self._pool.allocate(num_blocks, after=after, num_spare=num_spare)
        table.append(fresh)
        if shared is not None:
            source, target = shared * self.block_size, int(fresh[0]) * self.block_size
            lease._copies += (SlotCopy(source, target, lease.prefix_len % self.block_size),)
            lease._source = shared  # its hold passes from the table to here
            lease._needs_copy = False

    def _take_over(self, lease: Lease) -> tuple[int, int]:
        """Makes everything the only lease covers its own, so that it can have every block there is.

        Without this a prompt that fills the arena could not run when it hits its own shorter version: the
        shared last block and its copy would have to exist at once. Nothing worth keeping is lost: all else
        has to be evicted anyway, and the next commit makes this lease's tokens findable again.
        """
        num_blocks, num_tokens = self._index.forget()
        num_before = self._pool.num_free
        self._release_blocks(_as_block_ids(lease._also_held))
        lease._also_held.clear()
        lease._needs_copy = False
        return num_blocks + self._pool.num_free - num_before, num_tokens

    def _commit(self, lease: Lease, tokens: TokenArray) -> int:
        data = _as_bytes(tokens)
        with self._lock:
            assert not lease._is_released, "committed on a released lease"
            assert not lease._copies, "committed before the copies were taken"
            assert len(tokens) <= lease.num_tokens_reserved, (
                f"committed {len(tokens)} tokens, reserved {lease.num_tokens_reserved}"
            )
            assert data.startswith(lease._tokens), "committed tokens do not continue those before"
            if len(tokens) <= lease.prefix_len:
                return 0  # this lease has written nothing yet, and its copy may not have run
            lease._tokens = data
            self._rank += 1
            table = lease._table.ids
            inserted = self._index.insert(lease.namespace.digest, data, table, self._rank, lease._use)
            if inserted.path is not None:
                self._hold_path(lease, inserted.path)
            if lease._source is not None:
                self._release_blocks(_as_block_ids((lease._source,)))
                lease._source = None
        if inserted.num_tokens:
            self._emit(BlocksStored(inserted.num_tokens, inserted.num_blocks))
        return inserted.num_tokens

    def _hold_path(self, lease: Lease, path: Match) -> None:
        """Holds what stands on the path of a lease's own new entries and is not in its table.

        Somebody else may have committed the same tokens first, in other blocks. As long as entries below are
        held those must stay, or they would count as evictable and not be.
        """
        strangers = path.blocks[path.blocks != lease._table.ids[: len(path.blocks)]]
        if len(strangers) or path.overridden:
            fresh = path.overridden.union(strangers.tolist()) - lease._also_held
            self._pool.hold(_as_block_ids(fresh))
            lease._also_held |= fresh

    def _release(self, lease: Lease) -> None:
        with self._lock:
            if lease._is_released:
                return
            lease._is_released = True
            self._leases.remove(lease)
            self._release_blocks(lease._table.ids)
            if lease._also_held:
                self._release_blocks(_as_block_ids(lease._also_held))
            if lease._source is not None:
                self._release_blocks(_as_block_ids((lease._source,)))

    def _release_blocks(self, block_ids: BlockIds) -> None:
        self._index.wake(self._pool.release(block_ids))

    # ------------------------------------------------------------ inside

    def _emit(self, event: Event) -> None:
        if self._observer is not None:
            self._observer(event)

    def _emit_evicted(self, num_blocks: int, num_tokens: int) -> None:
        if num_blocks or num_tokens:
            self._emit(BlocksEvicted(num_tokens, num_blocks))


class Lease:
    """What one request holds: a prefix that was found, and the blocks it grows into.

    Leaving the ``with`` block always releases. Token indices count from the start of the sequence, and the
    table covers ``[0, num_tokens_reserved)``. Slots before ``prefix_len`` are shared: read them, never write.
    """

    __slots__ = (
        "_also_held",
        "_copies",
        "_is_released",
        "_manager",
        "_needs_copy",
        "_source",
        "_table",
        "_tokens",
        "_use",
        "namespace",
        "prefix_len",
    )

    def __init__(
        self, manager: KVManager, namespace: Namespace, match: Match, tokens: bytes, hints: RequestHints
    ) -> None:
        self.namespace = namespace
        self.prefix_len = match.num_tokens
        self._manager = manager
        self._table = BlockTable(match.blocks, manager.block_size)
        self._needs_copy = match.num_tokens % manager.block_size != 0  # the last block is not ours to write
        self._copies: tuple[SlotCopy, ...] = ()
        self._source: int | None = None  # of a copy that may not have run yet
        self._also_held = set(match.overridden)
        self._tokens = tokens  # found or committed so far
        self._use = Use(namespace.digest, hints)
        self._is_released = False

    def __enter__(self) -> Lease:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    @property
    def num_tokens_reserved(self) -> int:
        """How many tokens the table has room for. A shared last block counts up to the hit only."""
        return self.prefix_len if self._needs_copy else self._table.num_blocks * self._manager.block_size

    @property
    def block_ids(self) -> BlockIds:
        """The block table, int. Do not write to it; it is valid until the next ``reserve``."""
        return self._table.ids

    def reserve(self, num_tokens: int, *, spare_tokens: int = 0) -> bool:
        """Makes room for the tokens ``[0, num_tokens)``, evicting what nobody holds where that is needed.

        ``False``: there is not room now, and nothing changed. The only lease there is can always have all
        of the arena. ``spare_tokens`` more are taken if they are free and continue the last block.

        The first growth after a hit that ends inside a block replaces that block by a private copy:
        ``take_copies`` afterwards.
        """
        assert not self._is_released, "reserved on a released lease"
        return num_tokens <= self.num_tokens_reserved or self._manager._reserve(
            self, num_tokens, spare_tokens
        )

    def take_copies(self) -> tuple[SlotCopy, ...]:
        """The copies to run before anything is written or read, each handed out once.

        Their sources stay as they are until the first ``commit`` of more than the hit, or ``release``.
        """
        copies, self._copies = self._copies, ()
        return copies

    def slots(self, start: int, end: int) -> TokenArray:
        """Slots of the tokens ``[start, end)``: int32, shape ``(end - start,)``."""
        self._check_range(start, end)
        return self._table.slots(start, end)

    def runs(self, start: int, end: int) -> tuple[Run, ...]:
        """The same as maximal runs of consecutive slots, in order; a token's position is its index."""
        self._check_range(start, end)
        return self._table.runs(start, end)

    def commit(self, tokens: TokenArray) -> int:
        """Makes ``tokens``, the whole sequence so far, findable: all of its KV is written.

        May be called as often as the sequence grows; the owner goes on writing behind ``tokens`` in the last
        block. A commit of no more than the hit does nothing: the lease has written nothing yet. Returns how
        many tokens became newly findable, and emits ``BlocksStored`` if any did.
        """
        return self._manager._commit(self, tokens)

    def release(self) -> None:
        """Lets go of everything; again is nothing. What was not committed is as if it never was."""
        self._manager._release(self)

    def _check_range(self, start: int, end: int) -> None:
        assert not self._is_released, "read the table of a released lease"
        assert 0 <= start <= end <= self.num_tokens_reserved, (
            f"tokens [{start}, {end}) of {self.num_tokens_reserved} reserved"
        )

    def _tally(self, holds: npt.NDArray[np.int32]) -> None:
        """Adds what this lease holds to every block's count."""
        holds[self._table.ids] += 1
        holds[_as_block_ids(self._also_held)] += 1
        if self._source is not None:
            holds[self._source] += 1
        assert len(set(self._table.ids.tolist())) == self._table.num_blocks, "a block is in a table twice"
        assert len(self._tokens) <= TOKEN_BYTES * self.num_tokens_reserved


@dataclass(frozen=True, slots=True)
class CacheView:
    """A manager as one namespace sees it: what users pass as ``cache``."""

    manager: KVManager
    namespace: Namespace

    def acquire(self, tokens: TokenArray) -> Lease:
        """``KVManager.acquire`` in this namespace."""
        return self.manager.acquire(self.namespace, tokens)


def _as_bytes(tokens: TokenArray) -> bytes:
    assert tokens.dtype == np.int32, f"tokens are {tokens.dtype}, not int32"
    assert tokens.ndim == 1, f"tokens have shape {tokens.shape}"
    return tokens.tobytes()


def _as_block_ids(block_ids: Collection[int]) -> BlockIds:
    return np.fromiter(block_ids, np.intp, len(block_ids))
