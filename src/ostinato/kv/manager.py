"""Look-up and hold in one step: the only door to the pool and the index."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import inf
from threading import Lock

import numpy as np

from ostinato.errors import PinRefusedError
from ostinato.events import BlocksEvicted, BlocksStored, Event, EvictionReason, Observer, PrefixLookedUp
from ostinato.ports import Clock
from ostinato.types import BlockIds, SlotCopy, TokenArray

from .hashing import Namespace
from .index import PrefixIndex
from .lease import Lease, as_block_ids
from .nodes import NOTHING_NEW, TOKEN_BYTES, Match, Moment, Node
from .pins import Pin, Pins
from .policy import LRU, NO_HINTS, EvictionPolicy, HistoryPolicy, Outlook, RequestHints
from .pool import BlockPool, BlockTable
from .survey import Surveyor
from .tenants import TenantBooks
from .terms import FREE_FOR_ALL, NO_TERMS, Allowances, Purged, Selection, TenantUse, Terms, model_id

PINNED_SHARE = 0.25
"""Of all blocks: what may be pinned unless it is said otherwise."""


class KVManager:
    """Bookkeeping of a paged KV arena of ``num_blocks`` blocks of ``block_size`` tokens.

    One lock guards all books, so any thread may call anything; it is held for microseconds, never while an
    observer runs. A single lease belongs to one thread at a time, except that anyone may ``release`` it.

    Recency is a counter of look-ups and commits. A clock is read only where something has a time to live.

    *Quotas.* A tenant's blocks are those its leases hold and those kept for it. A lease that needs more than
    its tenant may have takes the tenant's own least valuable blocks first; what is over when a lease is
    released is given up at once. A quota never keeps a request from running: it bounds what stays.
    *Time to live* counts from the last use. What has expired is not found, and goes before anything else.
    *Pins* are never victims. *Purged* entries cannot be found from then on; blocks in use are freed later.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        policy: EvictionPolicy | HistoryPolicy | None = None,
        observer: Observer | None = None,
        clock: Clock | None = None,
        allowances: Allowances = FREE_FOR_ALL,
        pinned_share: float = PINNED_SHARE,
    ) -> None:
        """``clock`` is needed where anything has a time to live; ``pinned_share`` bounds what pins hold."""
        assert block_size >= 1, f"block size {block_size}"
        assert 1 <= num_blocks * block_size < 2**31, f"{num_blocks} blocks of {block_size}: slots are int32"
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._observer = observer
        self._lock = Lock()
        self._clock = clock
        self._allowances = allowances
        self._books = TenantBooks(num_blocks)
        self._pool = BlockPool(num_blocks, self._books.freed)
        self._index = PrefixIndex(block_size, self._pool, policy or LRU())
        self._pins = Pins(self._index, self._pool, self._release_blocks)
        self._max_pinned_blocks = int(pinned_share * num_blocks)
        self._rank = 0
        self._leases: set[Lease] = set()
        self._news_lock = Lock()  # before the other one
        self.news: Callable[[], Iterable[Selection]] | None = None
        """What others have purged since this was asked last; asked before anything is looked up or kept."""
        self.on_purge: list[Callable[[Selection], None]] = []
        """Called when something is purged, before that returns: for what is kept elsewhere."""

    # ------------------------------------------------------------ what there is

    @property
    def obeys_hints(self) -> bool:
        """Whether the policy does as it is told; else it weighs what is said itself."""
        return self._index.obeys_hints

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
    def num_pinned_blocks(self) -> int:
        """Blocks that pins hold; they count as held, too."""
        return self._pins.num_blocks

    @property
    def num_pins(self) -> int:
        return len(self._pins)

    @property
    def max_pinned_blocks(self) -> int:
        """How many blocks may be pinned."""
        return self._max_pinned_blocks

    @property
    def num_usable_tokens(self) -> int:
        """The longest sequence there can be room for, whatever is pinned now."""
        return (self.num_blocks - self._pins.num_blocks) * self.block_size

    @property
    def num_leases(self) -> int:
        """Leases not yet released, also those that hold nothing."""
        return len(self._leases)

    @property
    def num_cached_tokens(self) -> int:
        """Tokens findable in all namespaces."""
        return self._index.num_tokens

    @property
    def surveyor(self) -> Surveyor:
        """Looks at what is findable, for people."""

        def moment() -> tuple[int, float]:
            return self._rank, self._now_s()

        return Surveyor(self._index, self._pool, self._lock, self._books.spaces, moment)

    def ttl_s(self, namespace: Namespace, terms: Terms) -> float:
        """For how long after its last use what is kept on these terms may be found; infinite: no limit."""
        return self._allowances.ttl_s(namespace.tenant, terms)

    # ------------------------------------------------------------ the flow

    def acquire(
        self,
        namespace: Namespace,
        tokens: TokenArray,
        *,
        hints: RequestHints = NO_HINTS,
        terms: Terms = NO_TERMS,
        is_counted: bool = True,
    ) -> Lease:
        """Finds the longest cached prefix of ``tokens`` and holds it: one step, which cannot fail.

        The hit is exact to the token (stored tokens are compared) and at most ``len(tokens) - 1`` long,
        because the last token's logits are wanted. ``hints`` are for the policy, ``terms`` say for how long
        and under which name this request's tokens are kept. Emits ``PrefixLookedUp``, unless this is no
        request's own prefix (``is_counted``).
        """
        data = _as_bytes(tokens)
        self._hear_news()
        with self._lock:
            self._rank += 1
            moment = self._moment(namespace.tenant, terms)
            expired = self._expire(moment.now_s)
            match = self._index.match(namespace.digest, data, max(0, len(tokens) - 1), moment)
            self._pool.hold(match.blocks)
            if match.overridden:
                self._pool.hold(as_block_ids(match.overridden))
            lease = Lease(self, namespace, match, data[: match.num_tokens * TOKEN_BYTES], hints, terms)
            self._leases.add(lease)
        self._emit_evicted(*expired, "expired")
        if is_counted:
            self._emit(PrefixLookedUp(len(tokens), match.num_tokens))
        return lease

    def peek(self, namespace: Namespace, tokens: TokenArray) -> int:
        """How long a hit ``acquire`` would find now. Holds nothing, and is no use of what it finds."""
        data = _as_bytes(tokens)
        self._hear_news()
        with self._lock:
            found = self._index.peek(namespace.digest, data, self._now_s())
            return min(found, max(0, len(tokens) - 1))

    def hint(self, namespace: Namespace, tokens: TokenArray, outlook: Outlook) -> int:
        """Says what will become of this sequence, as far as only it ran through what is cached of it.

        A use makes that void. Rules by rank give up first what is abandoned or over, and take no notice of
        the rest; to ``workload`` it is evidence. Held blocks stay. Returns of how many tokens it is said.
        """
        with self._lock:
            return self._index.hint(namespace.digest, _as_bytes(tokens), outlook)

    def tend(self) -> bool:
        """Does one bounded slice of what the policy has put off: counting, learning, ordering its victims.

        True while more is left. For a moment when nobody waits; the policy does not depend on it.
        """
        with self._lock:
            return self._index.tend()

    def clear(self, namespace: Namespace | None = None) -> int:
        """Drops everything evictable, of one namespace or of all; returns how many blocks became free."""
        with self._lock:
            if namespace is None:
                num_blocks, num_tokens = self._index.evict(self._pool.num_evictable)
            else:
                num_blocks, num_tokens = self._index.clear(namespace.digest)
        self._emit_evicted(num_blocks, num_tokens)
        return num_blocks

    # ------------------------------------------------------------ operators

    def pin(
        self, namespace: Namespace, tokens: TokenArray, *, ttl_s: float = inf, terms: Terms = NO_TERMS
    ) -> Pin | None:
        """Keeps the whole blocks of ``tokens`` that are cached, for ``ttl_s`` seconds or until ``unpin``.

        ``None``: not one is. The same again moves the end of the same pin.

        Raises:
            PinRefusedError: more blocks than may be pinned, or than the tenant may keep.
        """
        assert ttl_s > 0, f"pinned for {ttl_s} seconds"
        size, data = self.block_size, _as_bytes(tokens)
        self._hear_news()
        with self._lock:
            self._rank += 1
            moment = self._moment(namespace.tenant, terms)
            expires_s = moment.now_s + ttl_s
            assert expires_s == inf or self._clock is not None, "a TTL needs a clock"
            expired = self._expire(moment.now_s)
            whole = self._index.peek(namespace.digest, data, moment.now_s) // size * size
            pin = None
            if whole:
                match = self._index.match(namespace.digest, data[: whole * TOKEN_BYTES], whole, moment)
                self._check_pin(namespace.tenant, self._pins.num_new(match))
                pin = self._pins.put(namespace, data[: whole * TOKEN_BYTES], moment, expires_s)
        self._emit_evicted(*expired, "expired")
        return pin

    def unpin(self, pin_id: str) -> bool:
        """Lets go of a pin; false when there is none of this name (any more)."""
        with self._lock:
            self._pins.expire(self._now_s())
            tenants = {pin.id: pin.tenant for pin in self._pins.view(0.0)}
            found = self._pins.drop(pin_id)
            given_up = self._give_up_excess(tenants[pin_id]) if found else (0, 0)
        self._emit_evicted(*given_up, "quota")
        return found

    def pins(self) -> list[Pin]:
        """All pins there are, oldest first."""
        with self._lock:
            now_s = self._now_s()
            self._pins.expire(now_s)
            return self._pins.view(now_s)

    def tenants(self) -> list[TenantUse]:
        """Every tenant that has blocks."""
        with self._lock:
            uses = sorted(self._books.tenants(), key=lambda use: -use[1])
        return [TenantUse(tenant, num, self._allowances.of(tenant).max_blocks) for tenant, num in uses]

    def purge(self, selection: Selection) -> Purged:
        """Drops what is selected: when this returns none of it can be found, nor kept by whoever uses it.

        Blocks in use are freed when they are released.
        """
        with self._lock:
            now_s, num_free = self._now_s(), self._pool.num_free

            def is_meant(node: Node) -> bool:
                return selection.takes_entry(node.terms.prompt, now_s - node.stored_s)

            spaces = [s for s in self._books.spaces() if selection.takes_space(s.tenant, model_id(s.weights))]
            num_pins = self._pins.drop_meant(spaces, is_meant)
            num_tokens = 0
            lost: set[int] = set()
            for space in spaces:
                num_lost, block_ids = self._index.purge(space.digest, is_meant)
                num_tokens += num_lost
                lost.update(block_ids.tolist())
            for lease in self._leases:
                lease._is_purged |= self._is_of(lease, selection, lost)
            num_held = self._pool.count_held(as_block_ids(lost))
            num_freed = self._pool.num_free - num_free
        for forget in self.on_purge:
            forget(selection)
        self._emit_evicted(num_freed, num_tokens, "purged")
        return Purged(num_tokens, num_freed, num_held, num_pins)

    def hear_news(self, announce: Callable[[], None] | None = None) -> Purged:
        """Does here what was purged elsewhere, and after ``announce`` what that told of; returns the sum.

        One at a time: nobody may look before it is done.
        """
        total = Purged()
        with self._news_lock:
            if announce is not None:
                announce()
            for selection in self.news() if self.news is not None else ():
                total += self.purge(selection)
        return total

    def _is_of(self, lease: Lease, selection: Selection, lost: set[int]) -> bool:
        """Whether what a lease goes on to write is purged, too: it is of the selection, or continues it."""
        if not selection.takes_space(lease.namespace.tenant, model_id(lease.namespace.weights)):
            return False
        return selection.takes_entry(lease._terms.prompt, 0.0) or not lost.isdisjoint(lease._held_blocks())

    def _check_pin(self, tenant: str, num_new: int) -> None:
        num_pinned, most = self._pins.num_blocks, self._max_pinned_blocks
        if num_pinned + num_new > most:
            raise PinRefusedError(
                f"{num_new} blocks more cannot be pinned: {num_pinned} are, and at most {most} of "
                f"{self.num_blocks} may be; unpin something or raise the share",
                num_blocks=num_pinned + num_new,
                max_blocks=most,
            )
        quota = self._allowances.of(tenant).max_blocks
        if quota is not None and self._pins.num_blocks_of(tenant) + num_new > quota:
            raise PinRefusedError(
                f"{num_new} blocks more cannot be pinned: this tenant has pinned "
                f"{self._pins.num_blocks_of(tenant)} of the {quota} it may keep",
                num_blocks=self._pins.num_blocks_of(tenant) + num_new,
                max_blocks=quota,
            )

    def check_integrity(self) -> None:
        """Asserts every invariant of pool, index and leases. For tests: it looks at everything."""
        with self._lock:
            holds = np.zeros(self.num_blocks, np.int32)
            for lease in self._leases:
                lease._tally(holds)
            for block_ids in self._pins.tally():
                holds[block_ids] += 1
            self._pins.check_integrity()
            owners = self._index.check_integrity(holds)
            self._pool.check_integrity(holds, owners)
            self._books.check_integrity(np.flatnonzero(holds + owners))

    # ------------------------------------------------------------ what leases ask for

    def _reserve(self, lease: Lease, num_tokens: int, spare_tokens: int) -> bool:
        size, pool, table = self.block_size, self._pool, lease._table
        num_needed = -(-num_tokens // size)
        tenant = lease.namespace.tenant
        given_up = evicted = (0, 0)
        with self._lock:
            assert not lease._is_released, "reserved on a released lease"
            num_missing = num_needed - table.num_blocks + lease._needs_copy
            if num_missing > pool.num_free + pool.num_evictable:
                if not self._can_take_over(lease, num_needed):
                    return False
                evicted = self._take_over(lease)
                num_missing = num_needed - table.num_blocks + lease._needs_copy
            else:
                given_up = self._give_up_excess(tenant, num_missing)
                if num_missing > pool.num_free:
                    evicted = self._index.evict(num_missing - pool.num_free)
            if num_missing:
                num_spare = -(-(num_tokens + spare_tokens) // size) - num_needed
                self._grow(lease, num_missing, min(num_spare, pool.num_free - num_missing))
        self._emit_evicted(*given_up, "quota")
        self._emit_evicted(*evicted)
        return True

    def _give_up_excess(self, tenant: str, num_more: int = 0) -> tuple[int, int]:
        """Gives up a tenant's least valuable blocks until it has room for ``num_more`` within its quota.

        What its leases hold stays. Returns blocks freed and tokens no longer findable.
        """
        quota = self._allowances.of(tenant).max_blocks
        if quota is None:
            return 0, 0
        num_over = self._books.num_blocks(tenant) + num_more - quota
        if num_over <= 0:
            return 0, 0
        num_before = self._index.num_tokens
        num_freed = self._index.evict_from(self._books.spaces_of(tenant), num_over)
        return num_freed, num_before - self._index.num_tokens

    def _grow(self, lease: Lease, num_blocks: int, num_spare: int) -> None:
        """Appends free blocks to a lease's table, the first of them its copy of a shared last block."""
        table = lease._table
        shared = int(table.ids[-1]) if lease._needs_copy else None
        if shared is not None:
            table.drop_last()
        after = int(table.ids[-1]) if table.num_blocks else None
        fresh = self._pool.allocate(num_blocks, after=after, num_spare=num_spare)
        self._books.took(lease.namespace.tenant, fresh)
        table.append(fresh)
        if shared is not None:
            source, target = shared * self.block_size, int(fresh[0]) * self.block_size
            lease._copies += (SlotCopy(source, target, lease.prefix_len % self.block_size),)
            lease._source = shared  # its hold passes from the table to here
            lease._needs_copy = False

    def _recast(self, lease: Lease, num_blocks: int, num_tokens: int) -> int | None:
        size, table = self.block_size, lease._table
        assert not lease._is_released, "recast a released lease"
        assert not lease._needs_copy, "recast before it had grown"
        assert not lease._copies, "recast before its copies were taken"
        assert num_blocks * size <= num_tokens <= self.num_blocks * size, (
            f"{num_blocks} blocks stay of {num_tokens}"
        )
        evicted = (0, 0)
        with self._lock:
            if lease._also_held:
                num_blocks = 0  # those may stand before, between or behind what would stay
            ids = table.ids
            num_needed = -(-num_tokens // size) - num_blocks
            own = ids[max(num_blocks, lease._num_shared_blocks) :]
            available = self._pool.num_free + self._pool.num_evictable
            if num_needed - len(own) > available:
                own = np.array([i for i in ids[num_blocks:] if not self._pins.holds(int(i))], np.intp)
                if len(self._leases) > 1 or num_needed - len(own) > available:
                    return None
                evicted = self._take_over(lease)
            fresh = np.empty(0, np.intp)
            if (num_missing := num_needed - len(own)) > 0:
                if num_missing > self._pool.num_free:
                    evicted = self._index.evict(num_missing - self._pool.num_free)
                fresh = self._pool.allocate(num_missing)
                self._books.took(lease.namespace.tenant, fresh)
            staying = np.concatenate([ids[:num_blocks], own[:num_needed], fresh])
            also_held = lease._also_held if lease._source is None else lease._also_held | {lease._source}
            self._release_blocks(np.concatenate([np.setdiff1d(ids, staying), as_block_ids(also_held)]))
            lease._also_held, lease._source = set(), None
            lease._table = BlockTable(staying, size)
            lease.prefix_len = min(lease.prefix_len, num_blocks * size)
            lease._tokens = lease._tokens[: num_blocks * size * TOKEN_BYTES]
            lease._is_recast = True
            given_up = self._give_up_excess(lease.namespace.tenant)
        self._emit_evicted(*given_up, "quota")
        self._emit_evicted(*evicted)
        return num_blocks

    def _can_take_over(self, lease: Lease, num_needed: int) -> bool:
        """Whether the only lease there is has room for so many blocks when all but the pinned are its own."""
        if len(self._leases) > 1:
            return False
        table = lease._table.ids
        num_others = self._pins.num_blocks_outside(table)
        if lease._needs_copy and self._pins.holds(int(table[-1])):
            num_others += 1
        if lease._source is not None and not self._pins.holds(lease._source):
            num_others += 1
        return num_needed + num_others <= self.num_blocks

    def _take_over(self, lease: Lease) -> tuple[int, int]:
        """Makes everything the only lease covers its own, so that it can have every block there is.

        Without this a prompt that fills the arena could not run when it hits its own shorter version: the
        shared last block and its copy would have to exist at once. Nothing worth keeping is lost: all else
        has to be evicted anyway, and the next commit makes this lease's tokens findable again.
        """
        num_free, num_tokens = self._pool.num_free, self._index.num_tokens
        self._index.forget()
        self._pins.restore(self._rank, self._now_s(), Moment)
        self._release_blocks(as_block_ids(lease._also_held))
        lease._also_held.clear()
        lease._needs_copy = lease._needs_copy and self._pins.holds(int(lease._table.ids[-1]))
        return self._pool.num_free - num_free, num_tokens - self._index.num_tokens

    def _commit(self, lease: Lease, tokens: TokenArray) -> int:
        data = _as_bytes(tokens)
        self._hear_news()
        with self._lock:
            assert not lease._is_released, "committed on a released lease"
            assert not lease._copies, "committed before the copies were taken"
            assert not lease._is_recast, "what was thinned out is no prefix"
            assert len(tokens) <= lease.num_tokens_reserved, (
                f"committed {len(tokens)} tokens, reserved {lease.num_tokens_reserved}"
            )
            assert data.startswith(lease._tokens), "committed tokens do not continue those before"
            if len(tokens) <= lease.prefix_len:
                return 0  # this lease has written nothing yet, and its copy may not have run
            lease._tokens = data
            self._rank += 1
            inserted = NOTHING_NEW
            if not lease._is_purged:
                table, space = lease._table.ids, lease.namespace
                moment = self._moment(space.tenant, lease._terms)
                inserted = self._index.insert(space.digest, data, table, moment, lease._use)
                self._books.note(space, self._index.has)
            if inserted.path is not None:
                self._hold_path(lease, inserted.path)
            if lease._source is not None:
                self._release_blocks(as_block_ids((lease._source,)))
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
            self._pool.hold(as_block_ids(fresh))
            lease._also_held |= fresh

    def _release(self, lease: Lease) -> None:
        given_up = (0, 0)
        with self._lock:
            if lease._is_released:
                return
            lease._is_released = True
            self._leases.remove(lease)
            self._release_blocks(lease._table.ids)
            if lease._also_held:
                self._release_blocks(as_block_ids(lease._also_held))
            if lease._source is not None:
                self._release_blocks(as_block_ids((lease._source,)))
            given_up = self._give_up_excess(lease.namespace.tenant)
        self._emit_evicted(*given_up, "quota")

    def _release_blocks(self, block_ids: BlockIds) -> None:
        self._index.wake(self._pool.release(block_ids))

    # ------------------------------------------------------------ inside

    def _emit(self, event: Event) -> None:
        if self._observer is not None:
            self._observer(event)

    def _emit_evicted(self, num_blocks: int, num_tokens: int, reason: EvictionReason = "capacity") -> None:
        if num_blocks or num_tokens:
            self._emit(BlocksEvicted(num_tokens, num_blocks, reason))

    def _hear_news(self) -> None:
        if self.news is not None:
            self.hear_news()

    def _now_s(self) -> float:
        return 0.0 if self._clock is None else self._clock.monotonic()

    def _moment(self, tenant: str, terms: Terms) -> Moment:
        ttl_s = self._allowances.ttl_s(tenant, terms)
        assert ttl_s == inf or self._clock is not None, "a TTL needs a clock"
        return Moment(self._rank, self._now_s(), ttl_s, terms)

    def _expire(self, now_s: float) -> tuple[int, int]:
        if len(self._pins):
            self._pins.expire(now_s)
        return self._index.expire(now_s)


@dataclass(frozen=True, slots=True)
class CacheView:
    """A manager as one namespace sees it: what users pass as ``cache``."""

    manager: KVManager
    namespace: Namespace
    terms: Terms = NO_TERMS

    def acquire(self, tokens: TokenArray) -> Lease:
        """``KVManager.acquire`` in this namespace, on these terms."""
        return self.manager.acquire(self.namespace, tokens, terms=self.terms)


def _as_bytes(tokens: TokenArray) -> bytes:
    assert tokens.dtype == np.int32, f"tokens are {tokens.dtype}, not int32"
    assert tokens.ndim == 1, f"tokens have shape {tokens.shape}"
    return tokens.tobytes()
