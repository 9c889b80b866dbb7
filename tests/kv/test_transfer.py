"""Write-back and promotion, with a codec that is an array and the real shared tier."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from ostinato.kv.hashing import BlockKey, Namespace, block_keys
from ostinato.kv.lease import Lease
from ostinato.kv.manager import KVManager
from ostinato.kv.tiers.base import Found, Outcome, Status
from ostinato.kv.tiers.shared import SharedTier
from ostinato.kv.transfer import Chain, Rates, TierLink, WriteBack
from ostinato.ports import SystemClock
from ostinato.types import TokenArray

BLOCK = 4
NAMESPACE = Namespace("w", "t", "c", "l", "d", "r")
TOKENS = np.arange(100, 140, dtype=np.int32)
KEYS = block_keys(NAMESPACE, TOKENS, BLOCK)


class ArrayCodec:
    """An arena whose KV of a token is one int64."""

    name = "array"
    is_exact = True
    window_tokens = 0
    payload_bytes = 8 * BLOCK

    def __init__(self, num_slots: int) -> None:
        self.slots = np.zeros(num_slots, np.int64)

    def encode(self, slot: int, into: memoryview) -> bool:
        into[:] = self.slots[slot : slot + BLOCK].tobytes()
        return bool(self.slots[slot] != -1)

    def decode(self, payload: memoryview, slot: int) -> None:
        self.slots[slot : slot + BLOCK] = np.frombuffer(payload, np.int64)


class SlowTier(SharedTier):
    """Stores only when it may."""

    gate: threading.Event

    def store_all(self, blocks: Sequence[tuple[BlockKey, Sequence[memoryview]]]) -> list[Outcome]:
        assert self.gate.wait(10)
        return super().store_all(blocks)


def promote(link: TierLink, lease: Lease, tokens: TokenArray) -> int:
    """Loads what can be loaded, waiting for it."""
    done = threading.Event()
    chain = Chain()
    load = link.begin(lease, tokens, chain, done.set)
    if load is None:
        return lease.prefix_len
    assert done.wait(10)
    return link.finish(load, lease, tokens, chain)


@pytest.fixture
def tier(tmp_path: Path) -> Iterator[SlowTier]:
    store = SlowTier.open(tmp_path, slot_bytes=8 * BLOCK, capacity_bytes=8 * BLOCK * 30)
    store.gate = threading.Event()
    store.gate.set()
    yield store
    store.close()


def test_what_has_no_buffer_is_dropped_and_the_bound_holds(tier: SlowTier) -> None:
    codec = ArrayCodec(64)
    codec.slots[:] = np.arange(64)
    writer = WriteBack(tier, codec, max_buffered_bytes=3 * codec.payload_bytes + 5)
    tier.gate.clear()
    accepted = [writer.offer(KEYS, place, place * BLOCK) for place in range(6)]
    assert accepted == [True] * 3 + [False] * 3
    assert not writer.flush(0.05)
    codec.slots[:] = 0  # the blocks were copied out: what the arena does now is its own business
    tier.gate.set()
    assert writer.flush(10)
    assert writer.offer(KEYS, 3, 0)
    writer.close()
    assert (writer.counters.stored, writer.counters.dropped) == (4, 3)
    assert writer.counters.peak_buffered_bytes == 3 * codec.payload_bytes
    into = memoryview(bytearray(codec.payload_bytes))
    for place in range(4):
        assert tier.load(KEYS[place], into)
        expected = np.zeros(BLOCK, np.int64) if place == 3 else np.arange(place * BLOCK, (place + 1) * BLOCK)
        assert np.array_equal(np.frombuffer(into, np.int64), expected)
    assert not writer.offer(KEYS, 4, 0), "it was closed"


def test_what_a_codec_refuses_is_not_stored_and_gives_its_buffer_back(tier: SlowTier) -> None:
    codec = ArrayCodec(8)
    codec.slots[:] = -1
    writer = WriteBack(tier, codec, max_buffered_bytes=codec.payload_bytes)
    assert not writer.offer(KEYS, 0, 0)
    assert not writer.offer(KEYS, 0, 0)
    assert (writer.counters.unfit, writer.counters.dropped) == (2, 0)
    writer.close()
    assert tier.lookup(KEYS) == Found(0, Status.MISS)


def test_entries_of_lower_versions_go_in_the_background(tmp_path: Path) -> None:
    sizes = {"slot_bytes": 8 * BLOCK, "capacity_bytes": 8 * BLOCK * 300}
    old = SharedTier.open(tmp_path, version=1, **sizes)
    for key in block_keys(NAMESPACE, np.arange(800, dtype=np.int32), BLOCK):
        assert old.store(key, [memoryview(bytes(8 * BLOCK))]) is Outcome.STORED
    old.close()
    new = SharedTier.open(tmp_path, version=2, **sizes)
    assert new.use().num_blocks == 200
    writer = WriteBack(new, ArrayCodec(8), max_buffered_bytes=1000)
    for _ in range(500):
        if new.use().num_blocks == 0:
            break
        threading.Event().wait(0.01)
    writer.close()
    assert new.use().num_blocks == 0
    assert new.counters.dropped_stale == 200
    new.close()


def test_a_lease_is_filled_from_below_and_only_with_whole_blocks(tier: SlowTier) -> None:
    codec = ArrayCodec(64)
    link = TierLink(tier, codec, BLOCK, SystemClock(), max_buffered_bytes=1000)
    first = KVManager(16, BLOCK)
    with first.acquire(NAMESPACE, TOKENS[:23]) as lease:
        assert lease.reserve(23)
        assert promote(link, lease, TOKENS[:23]) == 0
        codec.slots[lease.slots(0, 23)] = TOKENS[:23]
        lease.commit(TOKENS[:23])
        chain = Chain()
        link.offer(lease, TOKENS[:10], chain)
        assert chain.num_below == 2
        link.offer(lease, TOKENS[:23], chain)
        assert chain.num_below == 5
        assert link.write_back.flush(10)
    codec.slots[:] = 0
    second = KVManager(16, BLOCK)
    with second.acquire(NAMESPACE, TOKENS) as lease:
        assert lease.reserve(len(TOKENS))
        assert promote(link, lease, TOKENS) == 20
        assert np.array_equal(codec.slots[lease.slots(0, 20)], TOKENS[:20])
        assert not codec.slots[lease.slots(20, 40)].any()
    assert second.peek(NAMESPACE, TOKENS) == 20
    # The last token's logits are wanted: of a prompt that is here as a whole, it alone is computed again.
    third = KVManager(16, BLOCK)
    with third.acquire(NAMESPACE, TOKENS[:20]) as lease:
        assert lease.reserve(20)
        assert promote(link, lease, TOKENS[:20]) == 19
        assert np.array_equal(codec.slots[lease.slots(0, 20)], TOKENS[:20])
    # What the arena has is longer than what is below: nothing to gain.
    with first.acquire(NAMESPACE, TOKENS[:24]) as lease:
        assert lease.prefix_len == 23
        assert lease.reserve(24)
        lease.take_copies()
        assert promote(link, lease, TOKENS[:24]) == 23
    for manager in (first, second, third):
        manager.check_integrity()
    assert link.counters.loaded_tokens == 39
    link.close()


def test_the_faster_way_is_taken() -> None:
    rates = Rates()
    assert rates.is_loading_faster(16, 16)
    rates.note_load(10, 1.0)
    assert rates.is_loading_faster(16, 16)
    rates.note_compute(10, 0.5)
    assert not rates.is_loading_faster(16, 16)
    for _ in range(20):
        rates.note_compute(10, 5.0)
    assert rates.is_loading_faster(16, 16)
    assert not rates.is_loading_faster(16, 1), "a whole block is read for one token"


def test_a_tier_that_was_slow_once_is_tried_again_some_day() -> None:
    rates = Rates()
    rates.note_load(1, 10.0)
    rates.note_compute(1, 1.0)
    refusals = 0
    while not rates.is_loading_faster(1, 1):
        refusals += 1
        assert refusals < 1000
    assert refusals > 10
