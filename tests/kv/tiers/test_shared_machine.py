"""Random calls against a store that does what the shared tier says, in the plainest way."""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import replace
from pathlib import Path

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from tier_cases import NAMESPACE, chain, payload, pieces

from ostinato.kv.hashing import BlockKey
from ostinato.kv.terms import Selection
from ostinato.kv.tiers.base import Found, Miss, Outcome, Status
from ostinato.kv.tiers.shared import SharedTier

SLOT = 600
CHAINS = [chain(seed, 5) for seed in range(4)] + [
    chain(seed, 5, NAMESPACE.with_salt("other")) for seed in (0, 1)
]


class NaiveTier:
    """Exact LRU over whole payloads. Free slots come first, then the lowest rank."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self.ranks: dict[BlockKey, int] = {}
        self.damaged: set[BlockKey] = set()
        self.now = 0

    def touch(self, keys: list[BlockKey]) -> None:
        here = [key for key in keys if key in self.ranks]
        self.now += len(here)
        for place, key in enumerate(here):
            self.ranks[key] = self.now - place

    def lookup(self, keys: list[BlockKey]) -> Found:
        num_hits = next((i for i, key in enumerate(keys) if key not in self.ranks), len(keys))
        self.touch(keys[:num_hits])
        return Found(num_hits, Status.HIT if num_hits == len(keys) else Status.MISS)

    def load(self, key: BlockKey) -> bool:
        if key in self.damaged:
            self.damaged.discard(key)
            del self.ranks[key]
            return False
        return key in self.ranks

    def store(self, key: BlockKey) -> Outcome:
        if key in self.ranks:
            return Outcome.KNOWN
        if len(self.ranks) == self.num_slots:
            victim = min(self.ranks, key=self.ranks.__getitem__)
            del self.ranks[victim]
            self.damaged.discard(victim)
        self.now += 1
        self.ranks[key] = self.now
        return Outcome.STORED

    def purge(self, namespace: bytes) -> int:
        gone = [key for key in self.ranks if key.namespace == namespace]
        for key in gone:
            del self.ranks[key]
            self.damaged.discard(key)
        return len(gone)


class SharedTierMachine(RuleBasedStateMachine):
    @initialize(num_slots=st.integers(1, 12))
    def start(self, num_slots: int) -> None:
        shm = Path("/dev/shm")
        self.folder = Path(tempfile.mkdtemp(dir=shm if shm.is_dir() else None))
        self.num_slots = num_slots
        self.naive = NaiveTier(num_slots)
        self.open()

    def open(self) -> None:
        self.store = SharedTier.open(self.folder, slot_bytes=SLOT, capacity_bytes=SLOT * self.num_slots + 7)
        assert self.store.rebuilt is None

    @rule()
    def reopen(self) -> None:
        self.store.close()
        self.open()

    @rule(keys=st.sampled_from(CHAINS), data=st.data())
    def store_some(self, keys: list[BlockKey], data: st.DataObject) -> None:
        start = data.draw(st.integers(0, 4))
        for key in keys[start : data.draw(st.integers(start, 5))]:
            content = payload(key, SLOT - key.hash[0])
            assert self.store.store(key, pieces(content)) is self.naive.store(key)
        self.store.touch(keys)
        self.naive.touch(keys)

    @rule(keys=st.sampled_from(CHAINS), length=st.integers(0, 5))
    def lookup(self, keys: list[BlockKey], length: int) -> None:
        assert self.store.lookup(keys[:length]) == self.naive.lookup(keys[:length])

    @rule(keys=st.sampled_from(CHAINS), at=st.integers(0, 4))
    def load(self, keys: list[BlockKey], at: int) -> None:
        key = keys[at]
        into = memoryview(bytearray(SLOT - key.hash[0]))
        was_damaged = key in self.naive.damaged
        corrupt = self.store.counters.misses[Miss.CORRUPT]
        expected = self.naive.load(key)
        assert self.store.load(key, into) is expected
        assert self.store.counters.misses[Miss.CORRUPT] == corrupt + was_damaged
        if expected:
            assert bytes(into) == payload(key, len(into))

    @rule(keys=st.sampled_from(CHAINS), at=st.integers(0, 4), field=st.sampled_from(["tokens", "parent"]))
    def load_another_block_of_that_name(self, keys: list[BlockKey], at: int, field: str) -> None:
        wrong = replace(keys[at], **{field: bytes(len(getattr(keys[at], field)))})
        if wrong != keys[at]:
            assert not self.store.load(wrong, memoryview(bytearray(SLOT - wrong.hash[0])))
            assert self.store.lookup([wrong]) == Found(0, Status.MISS)

    @rule(keys=st.sampled_from(CHAINS))
    def purge(self, keys: list[BlockKey]) -> None:
        assert self.store.purge(Selection(tenant=keys[0].origin.tenant)) == self.naive.purge(
            keys[0].namespace
        )

    @rule(keys=st.sampled_from(CHAINS), at=st.integers(0, 4), byte=st.integers(0, 343), bit=st.integers(0, 7))
    def flip_a_bit(self, keys: list[BlockKey], at: int, byte: int, bit: int) -> None:
        key = keys[at]
        if key in self.naive.ranks and key not in self.naive.damaged:
            slab = self.folder / "slab"
            content = payload(key, SLOT - key.hash[0])
            place = slab.read_bytes().index(content) + byte
            with slab.open("r+b") as file:
                file.seek(place)
                file.write(bytes([content[byte] ^ (1 << bit)]))
            self.naive.damaged.add(key)

    @invariant()
    def books_are_right(self) -> None:
        found = self.store.check_integrity()
        assert found.num_ready == len(self.naive.ranks) <= self.num_slots
        assert found.num_writing == 0
        assert found.num_bad_records == 0
        assert found.num_bad_payloads == len(self.naive.damaged)
        assert self.store.use().num_blocks == found.num_ready

    def teardown(self) -> None:
        if hasattr(self, "store"):
            self.store.close()
            shutil.rmtree(self.folder)


TestSharedTier = SharedTierMachine.TestCase
TestSharedTier.settings = settings(
    max_examples=60, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
)
