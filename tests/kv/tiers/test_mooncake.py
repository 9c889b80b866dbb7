"""The fleet's tier against real Mooncake processes: what it keeps, what it refuses, and what it survives."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from mooncake_fleet import Fleet, fleet
from tier_cases import BLOCK, NAMESPACE, chain, payload, pieces

from ostinato.errors import TierError
from ostinato.kv.hashing import BlockKey
from ostinato.kv.terms import Allowance, Allowances, Selection, tenant_id
from ostinato.kv.tiers.base import Found, Miss, Outcome, Status
from ostinato.kv.tiers.mooncake import Address, Backoff, MooncakeTier
from ostinato.ports import SystemClock

SLOT = 60_000


class SettableClock(SystemClock):
    offset_s = 0.0

    def now(self) -> float:
        return super().now() + self.offset_s


@pytest.fixture(scope="module")
def standing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """A store for tests that kill nobody."""
    with fleet(tmp_path_factory.mktemp("mooncake")) as started:
        started.start_peer()
        yield started


def open_tier(address: str, clock: SystemClock | None = None, **options: Any) -> MooncakeTier:
    return MooncakeTier.open(
        Address(address),
        **{"slot_bytes": SLOT, "tokens_per_block": BLOCK, "version": 1, "clock": clock or SystemClock()}
        | options,
    )


@pytest.fixture
def tier(standing: Fleet) -> Iterator[MooncakeTier]:
    with closing(open_tier(standing.address)) as opened:
        yield opened


def loaded(tier: MooncakeTier, key: BlockKey, size: int = SLOT) -> bytes | None:
    into = memoryview(bytearray(size))
    return bytes(into) if tier.load(key, into) else None


def store(tier: MooncakeTier, keys: list[BlockKey], size: int = SLOT) -> list[Outcome]:
    return tier.store_all([(key, pieces(payload(key, size))) for key in keys])


def within(duration_s: float, is_so: Callable[[], object]) -> None:
    end_s = time.monotonic() + duration_s
    while not is_so():
        assert time.monotonic() < end_s, f"not within {duration_s} s"
        time.sleep(0.1)


def test_what_is_stored_is_found_by_another_process_client(standing: Fleet, tier: MooncakeTier) -> None:
    keys = chain(1, 70)  # more than staging holds at once
    assert tier.lookup(keys) == Found(0, Status.MISS)
    assert store(tier, keys) == [Outcome.STORED] * len(keys)
    assert store(tier, keys[:3]) == [Outcome.KNOWN] * 3
    with closing(open_tier(standing.address)) as other:
        assert other.lookup(keys) == Found(len(keys), Status.HIT)
        assert other.lookup([*keys, *chain(2, 1)]) == Found(len(keys), Status.MISS)
        for place, key in enumerate(keys):
            if place % 16 == 0:
                other.expect(keys[place : place + 32])
            assert loaded(other, key) == payload(key, SLOT)
        assert other.counters.hits == len(keys)


def test_a_shorter_payload_is_whole_too_and_another_length_is_a_miss(tier: MooncakeTier) -> None:
    (key,) = chain(3, 1)
    assert store(tier, [key], 700) == [Outcome.STORED]
    assert loaded(tier, key, 700) == payload(key, 700)
    assert loaded(tier, key, 600) is None
    assert loaded(tier, key, 800) is None
    assert tier.counters.misses[Miss.MISMATCH] == 2


def test_a_hint_for_more_than_staging_holds_costs_no_block(tier: MooncakeTier) -> None:
    keys = chain(4, 100)
    assert set(store(tier, keys)) == {Outcome.STORED}
    tier.expect(keys)  # of which nobody asks for the first ones
    for key in reversed(keys):
        assert loaded(tier, key) == payload(key, SLOT)


def test_salts_and_namespaces_do_not_meet(tier: MooncakeTier) -> None:
    mine, theirs = chain(5, 3), chain(5, 3, NAMESPACE.with_salt("other"))
    store(tier, mine)
    assert tier.lookup(theirs).num_hits == 0
    assert all(loaded(tier, key) is None for key in theirs)
    assert tier.counters.misses[Miss.ABSENT] == 3


@pytest.mark.parametrize("what", ["tokens", "parent", "namespace"])
def test_a_block_of_that_name_which_is_another_is_a_miss(tier: MooncakeTier, what: str) -> None:
    _, key = chain(6, 2)
    store(tier, [key])
    wrong = replace(key, **{what: bytes(len(getattr(key, what)))})
    assert loaded(tier, wrong) is None
    assert tier.counters.misses[Miss.MISMATCH] == 1
    assert loaded(tier, key) == payload(key, SLOT)


@pytest.mark.parametrize("at", [0, SLOT - 1, SLOT + 5, -1])
def test_a_flipped_bit_is_a_miss_and_the_block_is_stored_anew(tier: MooncakeTier, at: int) -> None:
    (key,) = chain(7 + at % 1000, 1)
    store(tier, [key])
    raw: Any = tier._store
    name = tier._name(key)
    data = bytearray(raw.get(name))
    data[at] ^= 4
    assert raw.remove(name, True) == 0
    assert raw.put(name, bytes(data)) == 0
    assert loaded(tier, key) is None
    assert tier.counters.misses[Miss.CORRUPT] == 1
    within(5, lambda: tier.lookup([key]).num_hits == 0)
    assert store(tier, [key]) == [Outcome.STORED]
    assert loaded(tier, key) == payload(key, SLOT)


def test_a_truncated_object_is_a_miss(tier: MooncakeTier) -> None:
    (key,) = chain(2001, 1)
    store(tier, [key])
    raw: Any = tier._store
    data = raw.get(tier._name(key))
    for length in (10, SLOT - 1, SLOT, len(data) - 1):
        raw.remove(tier._name(key), True)
        assert raw.put(tier._name(key), data[:length]) == 0
        assert loaded(tier, key) is None


def test_deadlines_hold(standing: Fleet) -> None:
    clock = SettableClock()
    with closing(open_tier(standing.address, clock)) as tier:
        short, long = chain(11, 2)
        short = replace(short, origin=replace(short.origin, ttl_s=60.0))
        store(tier, [short, long])
        assert loaded(tier, short) is not None
        clock.offset_s = 61.0
        assert loaded(tier, short) is None
        assert tier.counters.misses[Miss.ABSENT] == 1
        assert loaded(tier, long) is not None
        within(5, lambda: tier.lookup([short]).num_hits == 0)


def test_a_tenant_that_may_keep_nothing_keeps_nothing(standing: Fleet) -> None:
    keys = chain(12, 2, NAMESPACE.with_salt("guest"))
    terms = Allowances(by_tenant={tenant_id("guest"): Allowance(max_blocks=0)})
    with closing(open_tier(standing.address, allowances=terms)) as tier:
        assert store(tier, keys) == [Outcome.REFUSED] * 2
        assert tier.lookup(keys).num_hits == 0


def test_a_purge_takes_one_tenants_blocks_also_those_on_their_way(tier: MooncakeTier) -> None:
    mine, theirs = chain(13, 3, NAMESPACE.with_salt("a")), chain(13, 3, NAMESPACE.with_salt("b"))
    late = [
        replace(key, origin=replace(key.origin, epoch=tier.epoch))
        for key in chain(14, 2, NAMESPACE.with_salt("a"))
    ]
    store(tier, mine + theirs)
    tier.expect(mine)  # fetched before the purge, asked for after it
    tier.announce(Selection(tenant=mine[0].origin.tenant))
    assert tier.finish_purges() == 3
    assert all(loaded(tier, key) is None for key in mine)
    assert tier.lookup(theirs).num_hits == 3
    assert store(tier, late) == [Outcome.REFUSED] * 2
    after = [replace(key, origin=replace(key.origin, epoch=tier.epoch)) for key in late]
    assert store(tier, after) == [Outcome.STORED] * 2


def test_versions_do_not_meet(standing: Fleet, tier: MooncakeTier) -> None:
    keys = chain(15, 2)
    store(tier, keys)
    with closing(open_tier(standing.address, version=2)) as newer:
        assert newer.lookup(keys).num_hits == 0


def test_many_threads_at_once_never_read_a_wrong_byte(tier: MooncakeTier) -> None:
    chains = [chain(100 + seed, 12) for seed in range(4)]

    def work(number: int) -> int:
        num_hits = 0
        for turn in range(6):
            keys = chains[(number + turn) % len(chains)]
            store(tier, keys)
            tier.expect(keys)
            for key in keys:
                data = loaded(tier, key)
                assert data in (None, payload(key, SLOT))
                num_hits += data is not None
        return num_hits

    with ThreadPoolExecutor(6) as pool:
        assert sum(pool.map(work, range(6))) > 200


def test_no_store_is_said_at_the_start(standing: Fleet) -> None:
    with pytest.raises(TierError, match="start mooncake_master"):
        open_tier("127.0.0.1:1")


def test_more_than_the_store_holds_is_mooncakes_to_evict(tmp_path: Path) -> None:
    with fleet(tmp_path) as small:
        small.start_peer(16 << 20)
        with closing(open_tier(small.address)) as tier:
            keys = [chain(seed, 1)[0] for seed in range(600)]  # 36 MB
            outcomes = [tier.store(key, pieces(payload(key, SLOT))) for key in keys]
            assert set(outcomes) <= {Outcome.STORED, Outcome.FULL}
            found = [key for key in keys if loaded(tier, key) is not None]
            assert 0 < len(found) < len(keys)
            into = memoryview(bytearray(SLOT))
            for key in found:
                if tier.load(key, into):
                    assert bytes(into) == payload(key, SLOT)


def test_a_killed_peer_is_misses_and_a_new_one_is_used(tmp_path: Path) -> None:
    with fleet(tmp_path) as started:
        peer = started.start_peer()
        with closing(open_tier(started.address)) as tier:
            keys = chain(1, 12)
            assert set(store(tier, keys)) == {Outcome.STORED}
            tier.expect(keys)
            started.kill(peer)  # while it sends
            for key in keys:
                assert loaded(tier, key) in (None, payload(key, SLOT))
            started.start_peer()
            within(20, lambda: store(tier, keys[:1]) == [Outcome.STORED])
            assert loaded(tier, keys[0]) == payload(keys[0], SLOT)


def test_without_a_master_nothing_waits_and_with_a_new_one_it_goes_on(tmp_path: Path) -> None:
    with fleet(tmp_path) as started:
        started.start_peer()
        with closing(open_tier(started.address)) as tier:
            keys = chain(1, 6)
            store(tier, keys)
            started.kill(started.master)
            started_s = time.monotonic()
            num_asked = 0
            while time.monotonic() < started_s + 3:
                asked_s = time.monotonic()
                assert tier.lookup(chain(num_asked, 2)).num_hits == 0
                assert time.monotonic() - asked_s < 1.0
                num_asked += 1
                time.sleep(0.01)
            assert num_asked > 50  # most of them did not wait at all
            with pytest.raises(TierError, match="does not answer"):
                tier.announce(Selection())
            started.start_master()
            within(40, lambda: store(tier, keys)[0] in (Outcome.STORED, Outcome.KNOWN))
            within(20, lambda: tier.lookup(keys[:1]).num_hits == 1)
            assert loaded(tier, keys[0]) == payload(keys[0], SLOT)


def test_waits_double_up_to_a_limit_and_begin_anew() -> None:
    class Hands(SystemClock):
        now_s = 0.0

        def monotonic(self) -> float:
            return self.now_s

    clock = Hands()
    backoff = Backoff(clock)
    assert backoff.is_open
    waits = []
    for _ in range(10):
        backoff.failed()
        backoff.failed()  # of a call that was under way as well: counts once
        began_s = clock.now_s
        while not backoff.is_open:
            clock.now_s += 0.05
        waits.append(clock.now_s - began_s)
    assert all(after > 1.4 * before for before, after in pairwise(waits[:7]))
    assert waits[0] == pytest.approx(Backoff.FIRST_S, abs=0.06)
    assert waits[-1] == pytest.approx(Backoff.MOST_S, abs=0.06)
    backoff.worked()
    backoff.failed()
    clock.now_s += 0.11
    assert backoff.is_open
