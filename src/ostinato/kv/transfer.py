"""Blocks on their way between the arena and a lower tier.

Up: *promotion*. What a prompt does not find in the arena, and a tier has, is read into the blocks its lease
has reserved, before anything is computed; as long as that was measured to be faster than computing it.

Down: *write-back*. Committed blocks are copied out as they are committed, into buffers that are bounded in
bytes, and a thread writes them. Where it cannot keep up blocks are dropped: a block not stored is computed
again some day, but memory that is promised is memory that others do not have.
"""

from __future__ import annotations

import mmap
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from ostinato.ports import Clock
from ostinato.types import Plan, TokenArray

from .hashing import BlockKey, Namespace, block_keys
from .manager import Lease
from .tiers.base import Outcome, Tier

_SMOOTHING = 0.2
_STALE_BATCH = 64
STORE_BATCH = 8


class BlockCodec(Protocol):
    """Turns the block at a slot of the arena into ``payload_bytes`` bytes and back."""

    @property
    def name(self) -> str:
        """Says how; goes into the namespace of what is stored."""

    @property
    def payload_bytes(self) -> int: ...

    def encode(self, slot: int, into: memoryview) -> bool:
        """``False``: this block cannot be stored that way."""

    def decode(self, payload: memoryview, slot: int) -> None: ...


class Rates:
    """How fast loading and computing were of late; exponential means. Says yes until both are known."""

    def __init__(self) -> None:
        self._load_s_per_token: float | None = None
        self._compute_s_per_token: float | None = None

    def note_load(self, num_tokens: int, duration_s: float) -> None:
        self._load_s_per_token = _mean(self._load_s_per_token, duration_s / num_tokens)

    def note_compute(self, num_tokens: int, duration_s: float) -> None:
        self._compute_s_per_token = _mean(self._compute_s_per_token, duration_s / num_tokens)

    def is_loading_faster(self) -> bool:
        """Of one token more."""
        if self._load_s_per_token is None or self._compute_s_per_token is None:
            return True
        return self._load_s_per_token < self._compute_s_per_token


@dataclass(slots=True)
class WriteBackCounters:
    """Blocks. ``dropped``: there was no buffer; ``unfit``: the codec refused; the rest as the tier said."""

    offered: int = 0
    stored: int = 0
    not_stored: int = 0
    dropped: int = 0
    unfit: int = 0
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
                self._changed.wait_for(lambda: self._queue or self._is_closing)
                batch = [self._queue.popleft() for _ in range(min(len(self._queue), STORE_BATCH))]
                following = self._queue[0] if self._queue else None
            if not batch:
                return
            outcomes = self._tier.store_all([(chain[place], [buffer]) for chain, place, buffer in batch])
            for (chain, place, _), after in zip(batch, [*batch[1:], following], strict=True):
                if after is None or after[1] != place + 1:
                    # The end of what came in one piece: leaves must not outrank their roots for long.
                    self._tier.touch(chain[: place + 1])
            with self._changed:
                for outcome, (_, _, buffer) in zip(outcomes, batch, strict=True):
                    if outcome in (Outcome.STORED, Outcome.KNOWN):
                        self.counters.stored += 1
                    else:
                        self.counters.not_stored += 1
                    self._give_back(buffer)

    def _give_back(self, buffer: memoryview) -> None:
        self._spare.append(buffer)
        self._num_taken -= 1
        self._changed.notify_all()


class TierLink:
    """Connects one arena to one tier. Used by the engine's thread."""

    def __init__(
        self, tier: Tier, codec: BlockCodec, block_size: int, clock: Clock, *, max_buffered_bytes: int
    ) -> None:
        self.tier = tier
        self.rates = Rates()
        self.write_back = WriteBack(tier, codec, max_buffered_bytes=max_buffered_bytes)
        self.num_promoted_tokens = 0
        self._codec = codec
        self._block_size = block_size
        self._clock = clock
        self._staging = _buffer(codec.payload_bytes)

    def promote(self, lease: Lease, tokens: TokenArray) -> int:
        """Fills blocks of a lease that has room for ``tokens`` from the tier; never the last token's.

        Returns how many leading tokens are computed now: the hit itself if nothing was gained, else a whole
        number of blocks, and they are committed. A copy that the lease asked for must not run then: the
        block it was for has been filled as a whole.
        """
        size = self._block_size
        first = lease.prefix_len // size
        usable = (len(tokens) - 1) // size
        if usable <= first or not self.rates.is_loading_faster():
            return lease.prefix_len
        keys = self._keys(lease.namespace, tokens[: usable * size])
        num_found = self.tier.lookup(keys).num_hits
        started_s = self._clock.monotonic()
        place = first
        while place < num_found and self.tier.load(keys[place], self._staging):
            self._codec.decode(self._staging, int(lease.block_ids[place]) * size)
            place += 1
        num_loaded = (place - first) * size
        if num_loaded:
            self.rates.note_load(num_loaded, self._clock.monotonic() - started_s)
            self.num_promoted_tokens += place * size - lease.prefix_len
            lease.commit(tokens[: place * size])
            return place * size
        return lease.prefix_len

    def offer(self, lease: Lease, tokens: TokenArray, num_offered: int) -> int:
        """Sends the full blocks of ``tokens``, all computed and held by ``lease``, on their way down.

        ``num_offered``: what this returned for this lease before, 0 at first. Blocks that find no buffer are
        tried again next time, as long as the lease lives; a chain is stored without gaps or not at all.
        """
        size = self._block_size
        num_full = len(tokens) // size
        if num_full <= num_offered:
            return num_offered
        keys = self._keys(lease.namespace, tokens)
        if num_offered == 0:
            num_offered = self.tier.lookup(keys).num_hits
        for place in range(num_offered, num_full):
            slot = int(lease.block_ids[place]) * size
            if not self.write_back.offer(keys, place, slot):
                return place
        return num_full

    def note_step(self, plan: Plan, duration_s: float) -> None:
        """How long an engine step took: where it ran prompts, that is what computing costs."""
        num_rows = sum(len(sequence.tokens) for sequence in plan.sequences)
        if num_rows >= len(plan.sequences) * self._block_size:
            self.rates.note_compute(num_rows, duration_s)

    def close(self) -> None:
        """Stores what is on its way and closes the tier."""
        self.write_back.close()
        self.tier.close()

    def _keys(self, namespace: Namespace, tokens: TokenArray) -> list[BlockKey]:
        stored = replace(namespace, kv_layout=f"{namespace.kv_layout} {self._codec.name}")
        return block_keys(stored, tokens, self._block_size)


def _buffer(size_bytes: int) -> memoryview:
    """Memory that begins at a page, as slots do: copies between different alignments are slower.

    Its pages are there at once: taking them one by one while a block is copied costs more than the copy.
    """
    populate = getattr(mmap, "MAP_POPULATE", 0)  # Linux has it
    return memoryview(mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | populate))


def _mean(before: float | None, now: float) -> float:
    return now if before is None else before + _SMOOTHING * (now - before)
