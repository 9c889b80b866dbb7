"""The shared tier's tenants: quotas, times to live, purges that hold at once and for all, who may read."""

from __future__ import annotations

import stat
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tier_cases import BLOCK, NAMESPACE, payload

from ostinato.errors import TierError
from ostinato.kv.hashing import BlockKey, Namespace, block_keys
from ostinato.kv.terms import Allowance, Allowances, Origin, Selection, model_id, prompt_id, tenant_id
from ostinato.kv.tiers.base import Content, Found, Outcome, Status
from ostinato.kv.tiers.shared import SharedTier

SLOT = 4096
SLOTS = 20
ANNA, BEN = NAMESPACE.with_salt("anna"), NAMESPACE.with_salt("ben")


class Hand:
    """A clock that is moved by hand."""

    def __init__(self) -> None:
        self.now_s = 1_700_000_000.0

    def now(self) -> float:
        return self.now_s

    def monotonic(self) -> float:
        return self.now_s


def open_store(folder: Path, clock: Hand | None = None, **quotas: int) -> SharedTier:
    limits = Allowances(by_tenant={tenant_id(name): Allowance(most) for name, most in quotas.items()})
    return SharedTier.open(
        folder, slot_bytes=SLOT, capacity_bytes=SLOT * SLOTS, clock=clock, allowances=limits
    )


def chain(namespace: Namespace, seed: int, num_blocks: int, **origin: object) -> list[BlockKey]:
    tokens = np.arange(10_000 * seed, 10_000 * seed + num_blocks * BLOCK, dtype=np.int32)
    whole = Origin(namespace.tenant, model_id(namespace.weights))
    return block_keys(namespace, tokens, BLOCK, origin=replace(whole, **origin))  # type: ignore[arg-type]


def put(store: SharedTier, keys: Sequence[BlockKey]) -> list[Outcome]:
    outcomes = store.store_all([(key, [memoryview(payload(key, SLOT))]) for key in keys])
    store.touch(keys)
    store.check_integrity()
    return outcomes


def hits(store: SharedTier, keys: Sequence[BlockKey]) -> int:
    """How many are found, each by loading it as well."""
    found = store.lookup(keys).num_hits
    into = memoryview(bytearray(SLOT))
    for key in keys[:found]:
        assert store.load(key, into)
        assert bytes(into) == payload(key, SLOT)
    for key in keys[found:]:
        if store.lookup([key]) == Found(0, Status.MISS):
            assert not store.load(key, into)
    return found


# ---------------------------------------------------------------- quotas


def test_a_tenant_at_its_quota_gives_up_its_own_blocks(tmp_path: Path) -> None:
    store = open_store(tmp_path, anna=6)
    theirs = chain(BEN, 1, 10)
    put(store, theirs)
    for seed in range(4):
        assert put(store, chain(ANNA, seed, 3)) == [Outcome.STORED] * 3
    assert [hits(store, chain(ANNA, seed, 3)) for seed in range(4)] == [0, 0, 3, 3]
    assert hits(store, theirs) == 10
    assert store.counters.given_up == 6
    store.close()


def test_at_its_quota_it_gives_up_its_own_though_the_store_is_full_of_older_ones(tmp_path: Path) -> None:
    store = open_store(tmp_path, anna=4)
    theirs = chain(BEN, 1, 16)
    put(store, theirs)
    for seed in range(6):
        put(store, chain(ANNA, seed, 2))
    assert store.use().num_blocks == SLOTS
    assert hits(store, theirs) == 16
    assert hits(store, chain(ANNA, 5, 2)) == hits(store, chain(ANNA, 4, 2)) == 2
    store.close()


def test_of_a_prompt_larger_than_the_quota_the_beginning_stays(tmp_path: Path) -> None:
    store = open_store(tmp_path, anna=5)
    put(store, chain(ANNA, 1, 3))
    keys = chain(ANNA, 2, 12)
    outcomes = put(store, keys)
    assert outcomes == [Outcome.STORED] * 5 + [Outcome.REFUSED] * 7
    assert hits(store, keys) == 5
    # One by one, too, and by a process that has not seen the first ones being stored.
    store.close()
    store = open_store(tmp_path, anna=5)
    assert [put(store, [key]) for key in keys[5:]] == [[Outcome.REFUSED]] * 7
    assert hits(store, keys) == 5
    store.close()


def test_a_quota_of_nothing_stores_nothing(tmp_path: Path) -> None:
    store = open_store(tmp_path, anna=0)
    assert put(store, chain(ANNA, 1, 2)) == [Outcome.REFUSED] * 2
    assert store.use().num_blocks == 0
    store.close()


def test_tenants_counts_survive_a_restart_and_damage_to_them(tmp_path: Path) -> None:
    store = open_store(tmp_path, anna=4)
    put(store, chain(ANNA, 1, 4))
    put(store, chain(BEN, 1, 4))
    with store._env.begin(write=True) as txn:
        store._books.ledger.clear(txn)
    store.close()
    store = open_store(tmp_path, anna=4)
    store.check_integrity()
    put(store, chain(ANNA, 2, 4))
    assert (hits(store, chain(ANNA, 1, 4)), hits(store, chain(BEN, 1, 4))) == (0, 4)
    store.close()


# ---------------------------------------------------------------- time to live


def test_a_clock_that_stands_before_1970_is_no_fault(tmp_path: Path) -> None:
    clock = Hand()
    clock.now_s = -3600.0
    store = open_store(tmp_path, clock)
    keys = chain(ANNA, 1, 2, ttl_s=60.0)
    assert put(store, keys) == [Outcome.STORED] * 2
    assert hits(store, keys) == 2
    clock.now_s = 1_700_000_000.0
    assert hits(store, keys) == 0, "its time is up"
    store.close()


def test_what_has_expired_is_a_miss_and_its_slot_is_the_first_to_go(tmp_path: Path) -> None:
    clock = Hand()
    store = open_store(tmp_path, clock)
    mortal, lasting = chain(ANNA, 1, 5, ttl_s=60.0), chain(BEN, 1, 15)
    put(store, lasting)
    put(store, mortal)  # used last
    clock.now_s += 59
    assert hits(store, mortal) == 5
    clock.now_s += 1.5
    assert hits(store, mortal) == 0
    fresh = chain(BEN, 2, 5)
    assert put(store, fresh) == [Outcome.STORED] * 5
    assert hits(store, lasting) == 15
    assert store.counters.expired == 5
    store.close()


def test_what_has_expired_can_be_stored_anew(tmp_path: Path) -> None:
    clock = Hand()
    store = open_store(tmp_path, clock)
    keys = chain(ANNA, 1, 3, ttl_s=60.0)
    put(store, keys)
    clock.now_s += 30
    assert put(store, keys) == [Outcome.KNOWN] * 3
    clock.now_s += 31
    assert put(store, keys) == [Outcome.STORED] * 3
    clock.now_s += 59
    assert hits(store, keys) == 3
    store.close()


def test_the_background_drops_what_has_expired(tmp_path: Path) -> None:
    clock = Hand()
    store = open_store(tmp_path, clock)
    put(store, chain(ANNA, 1, 5, ttl_s=10.0))
    put(store, chain(ANNA, 2, 5, ttl_s=100.0))
    assert store.drop_expired() == 0
    clock.now_s += 11
    assert store.drop_expired(3) == 3
    assert store.drop_expired(3) == 2
    assert store.use().num_blocks == 5
    store.check_integrity()
    store.close()
    store = open_store(tmp_path)
    assert hits(store, chain(ANNA, 2, 5)) == 0, "without a clock what has a deadline is in doubt"
    store.close()


def test_a_tenants_own_limit_shortens_what_is_asked(tmp_path: Path) -> None:
    clock = Hand()
    limits = Allowances(Allowance(ttl_s=50.0), {ANNA.tenant: Allowance(ttl_s=5.0)})
    sizes = {"slot_bytes": SLOT, "capacity_bytes": SLOT * SLOTS}
    store = SharedTier.open(tmp_path, clock=clock, allowances=limits, **sizes)  # type: ignore[arg-type]
    put(store, chain(ANNA, 1, 2))
    put(store, chain(BEN, 1, 2, ttl_s=500.0))
    clock.now_s += 6
    assert (hits(store, chain(ANNA, 1, 2)), hits(store, chain(BEN, 1, 2))) == (0, 2)
    clock.now_s += 50
    assert hits(store, chain(BEN, 1, 2)) == 0
    store.close()


# ---------------------------------------------------------------- purges


@pytest.mark.parametrize(
    ("selection", "left"),
    [
        (Selection(), (0, 0, 0, 0)),
        (Selection(tenant=ANNA.tenant), (0, 0, 0, 3)),
        (Selection(tenant=""), (4, 3, 2, 3)),
        (Selection(model=model_id("other weights")), (4, 3, 0, 3)),
        (Selection(prompt=prompt_id("menu")), (4, 0, 2, 3)),
        (Selection(prompt=""), (0, 3, 0, 0)),
        (Selection(min_age_s=30.0), (0, 0, 2, 3)),
        (Selection(tenant=ANNA.tenant, min_age_s=30.0), (0, 0, 2, 3)),
        (Selection(tenant=BEN.tenant, min_age_s=30.0), (4, 3, 2, 3)),
    ],
)
def test_a_purge_takes_what_it_says_and_overwrites_it(
    tmp_path: Path, selection: Selection, left: tuple[int, ...]
) -> None:
    clock = Hand()
    store = open_store(tmp_path, clock)
    other = Namespace("other weights", "t", "c", "l", "d", "r", salt="anna")
    chains = [chain(ANNA, 1, 4), chain(ANNA, 2, 3, prompt=prompt_id("menu"))]
    for keys in chains:
        put(store, keys)
    clock.now_s += 60
    chains += [chain(other, 1, 2), chain(BEN, 1, 3)]
    for keys in chains[2:]:
        put(store, keys)
    assert store.purge(selection) == 12 - sum(left)
    assert tuple(hits(store, keys) for keys in chains) == left
    store.check_integrity()
    slab = (tmp_path / "slab").read_bytes()
    for keys, num in zip(chains, left, strict=True):
        for place, key in enumerate(keys):
            assert (payload(key, SLOT) in slab) == (place < num)
    assert put(store, chains[0]) in ([Outcome.STORED] * 4, [Outcome.KNOWN] * 4), "and it may come again"
    assert hits(store, chains[0]) == 4
    store.close()


def test_a_purge_holds_once_it_is_announced_and_whoever_comes_next_finishes_it(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    keys, others = chain(ANNA, 1, 5), chain(BEN, 1, 5)
    put(store, keys)
    put(store, others)
    store.announce(Selection(tenant=ANNA.tenant))
    assert store.use().num_blocks == 10
    assert (hits(store, keys), hits(store, others)) == (0, 5)
    assert [content.tenant for content in store.contents()] == [BEN.tenant]
    assert put(store, keys[:2]) == [Outcome.STORED] * 2, "what comes afterwards is not meant"
    assert hits(store, keys) == 2
    store.close()
    store = open_store(tmp_path)
    assert store.use().num_blocks == 7
    assert (hits(store, keys), hits(store, others)) == (2, 5)
    assert payload(keys[3], SLOT) not in (tmp_path / "slab").read_bytes()
    assert store.finish_purges() == 0
    store.close()


def test_what_was_on_its_way_when_it_was_purged_does_not_arrive(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    sent = chain(ANNA, 1, 3, epoch=store.epoch)
    theirs = chain(BEN, 1, 3, epoch=store.epoch)
    store.purge(Selection(tenant=ANNA.tenant))
    assert put(store, sent) == [Outcome.REFUSED] * 3
    assert put(store, theirs) == [Outcome.STORED] * 3
    assert list(store.news()) == [Selection(tenant=ANNA.tenant)]
    assert list(store.news()) == []
    assert put(store, chain(ANNA, 1, 3, epoch=store.epoch)) == [Outcome.STORED] * 3
    store.close()


@pytest.mark.parametrize("epoch", [None, 0])
@pytest.mark.parametrize("how", ["purge", "announce"])
def test_a_purge_amid_a_write_is_not_undone_by_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, epoch: int | None, how: str
) -> None:
    store = open_store(tmp_path)
    keys = chain(ANNA, 1, 2, epoch=epoch)
    write, still_to_come = store._slab.write, [Selection(tenant=ANNA.tenant)]

    def write_and_be_purged(at: int, parts: Sequence[memoryview]) -> bytes:
        checksum = write(at, parts)
        if still_to_come:
            getattr(store, how)(still_to_come.pop())
        return checksum

    monkeypatch.setattr(store._slab, "write", write_and_be_purged)
    store.store_all([(key, [memoryview(payload(key, SLOT))]) for key in keys])
    assert hits(store, keys) == 0
    store.finish_purges()
    found = store.check_integrity()
    assert (found.num_ready, found.num_writing) == (0, 0)
    assert payload(keys[0], SLOT) not in (tmp_path / "slab").read_bytes()
    store.close()


def test_who_has_missed_too_many_purges_forgets_everything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ostinato.kv.tiers.ledger._MAX_PURGES", 4)
    store = open_store(tmp_path)
    late = chain(BEN, 1, 1, epoch=store.epoch)
    for number in range(6):
        store.purge(Selection(tenant=tenant_id(str(number))))
    assert put(store, late) == [Outcome.REFUSED]
    heard = list(store.news())
    assert heard[0] == Selection()
    assert len(heard) == 5
    assert put(store, chain(BEN, 1, 1, epoch=store.epoch)) == [Outcome.STORED]
    store.close()


# ---------------------------------------------------------------- looking at it


def test_contents_and_opening_what_is_there(tmp_path: Path) -> None:
    clock = Hand()
    store = open_store(tmp_path, clock)
    put(store, chain(ANNA, 1, 3))
    clock.now_s += 2
    put(store, chain(ANNA, 2, 2))
    put(store, chain(BEN, 1, 2, prompt=prompt_id("menu"), ttl_s=5.0))
    store.close()
    store = SharedTier.open_found(tmp_path, clock=clock)
    model, start_ms = model_id("weights"), 1_700_000_000_000
    assert store.contents() == [
        Content(ANNA.tenant, model, "", 5, start_ms, start_ms + 2000),
        Content(BEN.tenant, model, prompt_id("menu"), 2, start_ms + 2000, start_ms + 2000),
    ]
    clock.now_s += 6
    assert [content.tenant for content in store.contents()] == [ANNA.tenant]
    assert store.purge(Selection()) == 7
    store.close()
    with pytest.raises(TierError, match="not a KV tier"):
        SharedTier.open_found(tmp_path / "nothing", clock=clock)


def test_nobody_else_may_read_any_of_it(tmp_path: Path) -> None:
    store = open_store(tmp_path / "new" / "tier")
    put(store, chain(ANNA, 1, 3))
    paths = [tmp_path / "new", *(tmp_path / "new").rglob("*")]
    assert len(paths) > 8
    for path in paths:
        mode = stat.S_IMODE(path.stat().st_mode)
        assert mode == (0o700 if path.is_dir() else 0o600), f"{path} has mode {mode:o}"
    store.close()
