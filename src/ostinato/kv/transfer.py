"""Blocks on their way between the arena and a lower tier.

Up: *promotion*. What a prompt does not find in the arena, and a tier has, is read into the blocks its lease
has reserved, by a thread of its own while the request waits and others' tokens are computed; as long as that
was measured to be faster than computing it. What cannot be read after all is computed.

Down: *write-back*. Committed blocks are copied out as they are committed, into buffers that are bounded in
bytes, and a thread writes them. Where it cannot keep up blocks are dropped: a block not stored is computed
again some day, but memory that is promised is memory that others do not have.
"""

from __future__ import annotations

import mmap
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from ostinato.events import Observer, TierLoaded
from ostinato.ports import Clock
from ostinato.types import Plan, SlotCopy, TokenArray

from .approximate import ApproximateSlots
from .hashing import NO_PARENT, BlockKey, Namespace, block_keys
from .lease import Lease
from .loading import BlockCodec, Load, Loader
from .terms import NO_TERMS, Origin, Terms, model_id
from .tiers.base import Outcome, Tier

_SMOOTHING = 0.2
_FORGIVENESS = 0.02
_STALE_BATCH = 64
_SWEEP_INTERVAL_S = 10.0
STORE_BATCH = 32
"""Blocks stored in two transactions: what storing costs beside copying is mostly had once for all of them."""


class Rates:
    """How fast loading and computing were of late; exponential means. Says yes until both are known."""

    def __init__(self) -> None:
        self._load_s_per_token: float | None = None
        self._compute_s_per_token: float | None = None

    def note_load(self, num_tokens: int, duration_s: float) -> None:
        self._load_s_per_token = _mean(self._load_s_per_token, duration_s / num_tokens)

    def note_compute(self, num_tokens: int, duration_s: float) -> None:
        self._compute_s_per_token = _mean(self._compute_s_per_token, duration_s / num_tokens)

    def is_loading_faster(self, num_loaded: int, num_gained: int) -> bool:
        """Whether to load so many tokens rather than compute so many of them.

        A no makes loading look a little better: a tier that was slow once is tried again some day.
        """
        if self._load_s_per_token is None or self._compute_s_per_token is None:
            return True
        is_faster = self._load_s_per_token * num_loaded < self._compute_s_per_token * num_gained
        if not is_faster:
            self._load_s_per_token *= 1 - _FORGIVENESS
        return is_faster


@dataclass(slots=True)
class LoadCounters:
    """What promotion did. Written by the engine's thread.

    ``hit_tokens`` of the ``looked_up_tokens`` that the arena had not were in the tier; ``refused_tokens``
    of them were quicker computed, and ``loaded_tokens`` were read. ``failed_blocks`` were there when they
    were looked up and could not be read after all: they were computed.
    """

    looked_up_tokens: int = 0
    hit_tokens: int = 0
    refused_tokens: int = 0
    loaded_tokens: int = 0
    loaded_bytes: int = 0
    failed_blocks: int = 0


@dataclass(slots=True)
class WriteBackCounters:
    """Blocks. ``dropped``: there was no buffer; ``unfit``: the codec refused; the rest as the tier said."""

    offered: int = 0
    stored: int = 0
    not_stored: int = 0
    dropped: int = 0
    unfit: int = 0
    stored_bytes: int = 0
    peak_buffered_bytes: int = 0


class WriteBack:
    """A thread that stores blocks. ``offer`` never waits; at most ``max_buffered_bytes`` are on their way."""

    def __init__(self, tier: Tier, codec: BlockCodec, *, max_buffered_bytes: int) -> None:
        self.counters = WriteBackCounters()
        self._tier = tier
        self._codec = codec
        self._num_buffers = max_buffered_bytes // codec.payload_bytes
        self._num_taken = 0
        self._spare: list[memoryview] = []
        self._queue: deque[tuple[Sequence[BlockKey], int, memoryview]] = deque()
        self._changed = threading.Condition()
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name="ostinato-write-back", daemon=True)
        self._thread.start()

    def offer(self, chain: Sequence[BlockKey], place: int, slot: int) -> bool:
        """Copies the block at ``slot`` out, to be stored as ``chain[place]``; the chain up to it is in use.

        ``False``: there is no buffer now. The block may be overwritten as soon as this returns.
        """
        self.counters.offered += 1
        with self._changed:
            if self._is_closing or self._num_taken >= self._num_buffers:
                self.counters.dropped += 1
                return False
            self._num_taken += 1
            taken_bytes = self._num_taken * self._codec.payload_bytes
            self.counters.peak_buffered_bytes = max(self.counters.peak_buffered_bytes, taken_bytes)
            buffer = self._spare.pop() if self._spare else None
        if buffer is None:
            buffer = _buffer(self._codec.payload_bytes)
        fits = self._codec.encode(slot, buffer)
        with self._changed:
            if fits:
                self._queue.append((chain, place, buffer))
                self._changed.notify_all()
            else:
                self.counters.unfit += 1
                self._give_back(buffer)
        return fits

    @property
    def buffered_bytes(self) -> int:
        """What is on its way now."""
        return self._num_taken * self._codec.payload_bytes

    def flush(self, timeout_s: float) -> bool:
        """Waits until nothing is on its way; ``False`` when the time is up first."""
        with self._changed:
            return self._changed.wait_for(lambda: self._num_taken == 0, timeout_s)

    def close(self) -> None:
        """Stores what is on its way, takes nothing more, and ends the thread."""
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()
        self._thread.join()

    def _run(self) -> None:
        while not self._queue and not self._is_closing and self._tier.drop_stale(_STALE_BATCH):
            pass
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue or self._is_closing, _SWEEP_INTERVAL_S)
                is_closing = self._is_closing
                batch = [self._queue.popleft() for _ in range(min(len(self._queue), STORE_BATCH))]
                following = self._queue[0] if self._queue else None
            if not batch:
                if is_closing:
                    return
                self._tier.drop_expired(_STALE_BATCH)
                continue
            outcomes = self._tier.store_all([(chain[place], [buffer]) for chain, place, buffer in batch])
            for (chain, place, _), after in zip(batch, [*batch[1:], following], strict=True):
                if after is None or after[1] != place + 1:
                    # The end of what came in one piece: leaves must not outrank their roots for long.
                    self._tier.touch(chain[: place + 1])
            with self._changed:
                for outcome, (_, _, buffer) in zip(outcomes, batch, strict=True):
                    if outcome is Outcome.STORED:
                        self.counters.stored_bytes += len(buffer)
                    if outcome in (Outcome.STORED, Outcome.KNOWN):
                        self.counters.stored += 1
                    else:
                        self.counters.not_stored += 1
                    self._give_back(buffer)

    def _give_back(self, buffer: memoryview) -> None:
        self._spare.append(buffer)
        self._num_taken -= 1
        self._changed.notify_all()


class Chain:
    """The blocks of one sequence as a tier knows them: their keys, each hashed once."""

    __slots__ = ("keys", "num_below", "terms")

    def __init__(self, terms: Terms = NO_TERMS) -> None:
        self.terms = terms
        self.keys: list[BlockKey] = []
        self.num_below: int | None = None
        """How many of them are in the tier or on the way there; ``None`` before anybody looked."""


@dataclass(frozen=True, slots=True)
class TierReport:
    """What a tier holds, and what this process has done with it; ``used_bytes`` are whole slots."""

    capacity_bytes: int
    used_bytes: int
    index_bytes: int
    buffered_bytes: int
    loads: LoadCounters
    write_back: WriteBackCounters
    misses: Mapping[str, int]
    outcomes: Mapping[str, int]
    evictions: Mapping[str, int]


class TierLink:
    """Connects one arena to one tier. Used by the engine's thread, except for ``report``."""

    def __init__(
        self,
        tier: Tier,
        codec: BlockCodec,
        block_size: int,
        clock: Clock,
        *,
        max_buffered_bytes: int,
        idle: Iterator[object] | None = None,
        observer: Observer | None = None,
        approximate: ApproximateSlots | None = None,
    ) -> None:
        """``idle`` is work for times in which nothing is loaded, advanced step by step in another thread.

        ``approximate``: of the arena; where the codec is not exact.
        """
        assert codec.is_exact == (approximate is None), "what is lossy is kept account of, and only that"
        self.tier = tier
        self.rates = Rates()
        self.counters = LoadCounters()
        self.write_back = WriteBack(tier, codec, max_buffered_bytes=max_buffered_bytes)
        self._codec = codec
        self._block_size = block_size
        self._approximate = approximate
        self._observe = observer or (lambda event: None)
        self._closing = threading.Lock()
        self._is_closed = False
        self._loader = Loader(tier, codec, clock, _buffer(codec.payload_bytes), idle or iter(()))

    def num_tokens_below(self, namespace: Namespace, tokens: TokenArray, chain: Chain) -> int:
        """How many leading tokens the tier had when it was asked; it is asked once for each chain."""
        if chain.num_below is None:
            self._extend(chain, namespace, tokens)
            chain.num_below = self.tier.lookup(chain.keys).num_hits
        return min(self._num_readable(chain.num_below, tokens) * self._block_size, len(tokens) - 1)

    def _num_readable(self, num_found: int, tokens: TokenArray) -> int:
        """Of the blocks that are there, those that end before the codec's window of last tokens."""
        window = self._codec.window_tokens
        return min(num_found, max(0, len(tokens) - window) // self._block_size) if window else num_found

    def begin(
        self, lease: Lease, tokens: TokenArray, chain: Chain, on_done: Callable[[], None]
    ) -> Load | None:
        """Starts to fill blocks of a lease that has room for ``tokens`` from the tier.

        ``None``: there is nothing to gain. Otherwise the lease is not to be released, grown or committed
        until the load is done (``Load.abandon`` releases it then); a copy that it asked for must not run
        before ``finish`` has said so. ``on_done`` is called in another thread.
        """
        size = self._block_size
        first = lease.prefix_len // size
        usable = len(tokens) - 1  # the last one's logits are wanted: it is computed again
        if len(tokens) // size <= first or usable <= lease.prefix_len:
            return None
        self._extend(chain, lease.namespace, tokens)
        found = chain.num_below = self.tier.lookup(chain.keys).num_hits
        found = self._num_readable(found, tokens)
        num_hit = min(found * size, usable)
        self.counters.looked_up_tokens += usable - lease.prefix_len
        self.counters.hit_tokens += max(0, num_hit - lease.prefix_len)
        if num_hit <= lease.prefix_len:
            return None
        if not self.rates.is_loading_faster((found - first) * size, num_hit - lease.prefix_len):
            self.counters.refused_tokens += num_hit - lease.prefix_len
            return None
        slots = [int(block_id) * size for block_id in lease.block_ids[first:found]]
        load = Load(chain.keys[first:found], slots, on_done)
        self._loader.start(load)
        return load

    def finish(self, load: Load, lease: Lease, tokens: TokenArray, chain: Chain) -> int:
        """After a load is done: how many leading tokens need not be computed; they are committed.

        The hit itself if nothing was loaded: then the lease's copies are to run. Otherwise they are not: the
        block they were for has been filled as a whole.
        """
        assert load.is_done, "finished before it was done"
        if load.error is not None:
            raise load.error
        size = self._block_size
        num_failed = 0 if load.is_stopped else len(load.keys) - load.num_loaded
        num_bytes = load.num_loaded * self._codec.payload_bytes
        end = lease.prefix_len
        if num_failed:
            self.counters.failed_blocks += num_failed
            chain.num_below = None  # what was not there after all is to be stored anew
        if load.num_loaded:
            num_tokens = load.num_loaded * size
            end = min(lease.prefix_len // size * size + num_tokens, len(tokens) - 1)
            self.rates.note_load(num_tokens, load.duration_s)
            self.counters.loaded_bytes += num_bytes
            self.counters.loaded_tokens += end - lease.prefix_len
            if self._approximate is not None:
                self._approximate.mark(lease.slots(lease.prefix_len // size * size, end), 0)
            lease.commit(tokens[:end])
        self._observe(TierLoaded(end - lease.prefix_len, num_bytes, num_failed, load.duration_s))
        return end

    def offer(self, lease: Lease, tokens: TokenArray, chain: Chain) -> None:
        """Sends the full blocks of ``tokens``, all computed and held by ``lease``, on their way down.

        Blocks that find no buffer are tried again next time, as long as ``chain`` is kept; a chain is stored
        without gaps or not at all.
        """
        size = self._block_size
        num_full = len(tokens) // size
        if num_full <= (chain.num_below or 0):
            return
        self._extend(chain, lease.namespace, tokens)
        if lease.is_purged:  # seen after the keys' epoch was: what was purged since is refused by the tier
            return
        if chain.num_below is None:
            chain.num_below = self.tier.lookup(chain.keys[:num_full]).num_hits
        for place in range(chain.num_below, num_full):
            slot = int(lease.block_ids[place]) * size
            if not self.write_back.offer(chain.keys, place, slot):
                return
            chain.num_below = place + 1

    def num_exact(self, lease: Lease, num_tokens: int, copies: Sequence[SlotCopy]) -> int:
        """How many of the ``num_tokens`` leading tokens that need not be computed are exact, and so is what
        is computed after them if all are. ``copies`` will run before anything is computed.
        """
        if self._approximate is None:
            return num_tokens
        self._approximate.copy(copies)
        return self._approximate.first(lease.slots(0, num_tokens))

    def note_computed(self, lease: Lease, num_tokens: int, num_exact: int | None) -> None:
        """So many leading tokens have their KV now, of which ``num_exact`` (``None``: all) are exact.

        To be called before they are committed, so that whoever finds them knows.
        """
        if self._approximate is None or num_tokens <= lease.prefix_len:
            return
        start = lease.prefix_len // self._block_size * self._block_size  # a shared block has been copied
        exact = num_tokens if num_exact is None else max(0, num_exact - start)
        self._approximate.mark(lease.slots(start, num_tokens), exact)

    def note_step(self, plan: Plan, duration_s: float) -> None:
        """How long an engine step took: where it ran prompts, that is what computing costs."""
        num_rows = sum(len(sequence.tokens) for sequence in plan.sequences)
        if num_rows >= len(plan.sequences) * self._block_size:
            self.rates.note_compute(num_rows, duration_s)

    def close(self) -> None:
        """Stops loading, stores what is on its way and closes the tier."""
        self._loader.close()
        self.write_back.close()
        with self._closing:
            self._is_closed = True
            self.tier.close()

    def report(self) -> TierReport | None:
        """For whoever wants to know, in any thread; nothing after the end."""
        with self._closing:
            if self._is_closed:
                return None
            use, counters = self.tier.use(), self.tier.counters
        return TierReport(
            capacity_bytes=use.num_slots * use.slot_bytes,
            used_bytes=use.num_blocks * use.slot_bytes,
            index_bytes=use.index_bytes,
            buffered_bytes=self.write_back.buffered_bytes,
            loads=replace(self.counters),
            write_back=replace(self.write_back.counters),
            misses={miss.value: count for miss, count in counters.misses.items()},
            outcomes={outcome.value: count for outcome, count in counters.outcomes.items()},
            evictions=counters.evictions(),
        )

    def _extend(self, chain: Chain, namespace: Namespace, tokens: TokenArray) -> None:
        """Hashes what of ``tokens`` has not been hashed yet."""
        done = len(chain.keys) * self._block_size
        if len(tokens) - done >= self._block_size:
            stored = replace(namespace, kv_layout=f"{namespace.kv_layout} {self._codec.name}")
            parent = chain.keys[-1].hash if chain.keys else NO_PARENT
            terms, model = chain.terms, model_id(namespace.weights)
            origin = Origin(namespace.tenant, model, terms.prompt, terms.ttl_s, self.tier.epoch)
            chain.keys += block_keys(stored, tokens[done:], self._block_size, parent=parent, origin=origin)


def _buffer(size_bytes: int) -> memoryview:
    """Memory that begins at a page, as slots do: copies between different alignments are slower.

    Its pages are there at once: taking them one by one while a block is copied costs more than the copy.
    """
    populate = getattr(mmap, "MAP_POPULATE", 0)  # Linux has it
    return memoryview(mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | populate))


def _mean(before: float | None, now: float) -> float:
    return now if before is None else before + _SMOOTHING * (now - before)
