"""Quotas, times to live, pins and purges: what stays, for whom, and for how long."""

from math import inf

import numpy as np
import pytest

from ostinato.errors import PinRefusedError
from ostinato.events import BlocksEvicted
from ostinato.kv.hashing import Namespace
from ostinato.kv.manager import KVManager
from ostinato.kv.terms import (
    NO_TERMS,
    Allowance,
    Allowances,
    Purged,
    Selection,
    TenantUse,
    Terms,
    model_id,
    prompt_id,
    tenant_id,
    tenant_salt,
)

ANNA, BEN = (Namespace("w", "t", "c", "l", "d", "r", salt=salt) for salt in ("anna", "ben"))
SIZE = 4


class Hand:
    """A clock that is moved by hand."""

    def __init__(self):
        self.now_s = 100.0

    def now(self):
        return self.now_s

    def monotonic(self):
        return self.now_s


def tokens_of(seed, num_blocks):
    return np.arange(1000 * seed, 1000 * seed + num_blocks * SIZE, dtype=np.int32)


def run(manager, namespace, tokens, terms=NO_TERMS):
    """A whole request; returns its hit."""
    with manager.acquire(namespace, tokens, terms=terms) as lease:
        assert lease.reserve(len(tokens))
        lease.take_copies()
        lease.commit(tokens)
        hit = lease.prefix_len
    manager.check_integrity()
    return hit


def num_blocks_of(manager, namespace):
    return {use.tenant: use.num_blocks for use in manager.tenants()}.get(namespace.tenant, 0)


def found(manager, namespace, tokens):
    """Tokens findable, the last one included."""
    return manager.peek(namespace, np.append(tokens, np.int32(-1)))


def quota(**blocks):
    return Allowances(by_tenant={tenant_id(salt): Allowance(most) for salt, most in blocks.items()})


# ---------------------------------------------------------------- quotas


def test_a_tenant_over_its_quota_gives_up_its_own_oldest_blocks():
    events = []
    manager = KVManager(100, SIZE, allowances=quota(anna=5), observer=events.append)
    for seed in range(4):
        run(manager, BEN, tokens_of(seed, 3))
    for seed in range(4):
        run(manager, ANNA, tokens_of(seed, 2))
    assert num_blocks_of(manager, ANNA) == 5
    assert [found(manager, ANNA, tokens_of(seed, 2)) for seed in range(4)] == [0, SIZE, 2 * SIZE, 2 * SIZE]
    assert [found(manager, BEN, tokens_of(seed, 3)) for seed in range(4)] == [3 * SIZE] * 4
    evicted = [event for event in events if isinstance(event, BlocksEvicted)]
    assert {event.reason for event in evicted} == {"quota"}
    assert sum(event.num_blocks for event in evicted) == 3
    assert manager.tenants() == [
        TenantUse(BEN.tenant, 12, None),
        TenantUse(ANNA.tenant, 5, 5),
    ]


def test_at_its_quota_a_tenant_makes_room_for_itself_though_others_are_older():
    manager = KVManager(16, SIZE, allowances=quota(anna=8))
    run(manager, BEN, tokens_of(0, 8))
    for seed in range(1, 9):
        run(manager, ANNA, tokens_of(seed, 2))
    assert manager.num_free_blocks == 0
    assert found(manager, BEN, tokens_of(0, 8)) == 8 * SIZE


def test_a_request_larger_than_its_quota_runs_and_its_beginning_stays():
    manager = KVManager(16, SIZE, allowances=quota(anna=3))
    prompt = tokens_of(1, 10)
    with manager.acquire(ANNA, prompt) as lease:
        assert lease.reserve(len(prompt))
        lease.commit(prompt)
        assert num_blocks_of(manager, ANNA) == 10
        assert found(manager, ANNA, prompt) == 40
    assert num_blocks_of(manager, ANNA) == 3
    assert found(manager, ANNA, prompt) == 3 * SIZE
    assert manager.num_free_blocks == 13


def test_a_quota_of_nothing_keeps_nothing():
    manager = KVManager(16, SIZE, allowances=quota(anna=0))
    assert run(manager, ANNA, tokens_of(1, 4)) == 0
    assert run(manager, ANNA, tokens_of(1, 4)) == 0
    assert manager.num_free_blocks == 16


def test_what_is_held_counts_and_is_given_up_when_it_is_let_go():
    manager = KVManager(32, SIZE, allowances=quota(anna=4))
    first, second = tokens_of(1, 4), tokens_of(2, 4)
    one, two = manager.acquire(ANNA, first), manager.acquire(ANNA, second)
    for lease, prompt in ((one, first), (two, second)):
        assert lease.reserve(len(prompt))
        lease.commit(prompt)
    assert num_blocks_of(manager, ANNA) == 8
    one.release()
    assert num_blocks_of(manager, ANNA) == 4, "the one still running has all of the quota"
    assert found(manager, ANNA, first) == 0
    two.release()
    assert found(manager, ANNA, second) == 16
    manager.check_integrity()


def test_a_quota_is_for_all_salts_of_a_tenant():
    manager = KVManager(32, SIZE, allowances=quota(anna=4))
    spaces = [ANNA.with_salt(tenant_salt(ANNA.tenant, str(i))) for i in range(3)]
    for space in spaces:
        run(manager, space, tokens_of(1, 2))
    assert [found(manager, space, tokens_of(1, 2)) for space in spaces] == [0, 8, 8]
    assert num_blocks_of(manager, ANNA) == 4


def test_many_tenants_come_and_go_without_leaving_traces():
    manager = KVManager(8, SIZE, allowances=Allowances(Allowance(4)))
    for i in range(1000):
        run(manager, ANNA.with_salt(f"tenant {i}"), tokens_of(1, 2))
    assert len(manager.tenants()) == 4
    assert len(manager._books._accounts) <= 256
    assert len(manager._books._spaces) <= 256


# ---------------------------------------------------------------- time to live


def ttl_manager(clock, **settings):
    return KVManager(32, SIZE, clock=clock, **settings)


def test_what_has_expired_is_not_found_and_is_gone():
    clock, events = Hand(), []
    manager = ttl_manager(clock, observer=events.append)
    run(manager, ANNA, tokens_of(1, 3), Terms(ttl_s=10))
    run(manager, ANNA, tokens_of(2, 3))
    clock.now_s += 9.5
    assert found(manager, ANNA, tokens_of(1, 3)) == 12
    clock.now_s += 0.5
    assert found(manager, ANNA, tokens_of(1, 3)) == 0
    assert run(manager, ANNA, tokens_of(3, 1)) == 0
    assert manager.num_free_blocks == 32 - 4
    assert [e.reason for e in events if isinstance(e, BlocksEvicted)] == ["expired"]


def test_a_use_starts_the_time_anew_for_what_was_used():
    clock = Hand()
    manager = ttl_manager(clock, allowances=Allowances(Allowance(ttl_s=10)))
    trunk = tokens_of(1, 2)
    run(manager, ANNA, np.concatenate((trunk, tokens_of(2, 2))))
    clock.now_s += 6
    run(manager, ANNA, np.concatenate((trunk, tokens_of(3, 2))))
    clock.now_s += 6
    assert found(manager, ANNA, np.concatenate((trunk, tokens_of(3, 2)))) == 16
    assert found(manager, ANNA, np.concatenate((trunk, tokens_of(2, 2)))) == 8


def test_the_shortest_of_server_tenant_and_request_counts():
    limits = Allowances(Allowance(ttl_s=30), {tenant_id("anna"): Allowance(ttl_s=20)})
    for terms, space, lives_s in (
        (NO_TERMS, BEN, 30),
        (NO_TERMS, ANNA, 20),
        (Terms(ttl_s=5), ANNA, 5),
        (Terms(ttl_s=500), ANNA, 20),
    ):
        clock = Hand()
        manager = ttl_manager(clock, allowances=limits)
        run(manager, space, tokens_of(1, 1), terms)
        clock.now_s += lives_s - 0.01
        assert manager.peek(space, np.append(tokens_of(1, 1), np.int32(7))) == 4
        clock.now_s += 0.02
        assert manager.peek(space, np.append(tokens_of(1, 1), np.int32(7))) == 0


def test_who_goes_on_for_a_shorter_time_shortens_nobody_elses():
    clock = Hand()
    manager = ttl_manager(clock)
    trunk = tokens_of(1, 2)[:-1]  # ends inside a block
    longer = np.append(trunk, np.arange(500, 503, dtype=np.int32))
    run(manager, ANNA, trunk, Terms(ttl_s=100))
    run(manager, ANNA, longer, Terms(ttl_s=10))
    clock.now_s += 11
    assert found(manager, ANNA, longer) == len(trunk)
    clock.now_s += 100
    assert found(manager, ANNA, longer) == 0


def test_what_expires_while_it_is_held_is_a_miss_and_goes_when_it_is_let_go():
    clock = Hand()
    manager = ttl_manager(clock)
    prompt = tokens_of(1, 3)
    lease = manager.acquire(ANNA, prompt, terms=Terms(ttl_s=10))
    assert lease.reserve(len(prompt))
    lease.commit(prompt)
    clock.now_s += 11
    assert manager.acquire(ANNA, prompt).prefix_len == 0
    assert manager.num_cached_tokens == 12
    lease.release()
    manager.acquire(ANNA, prompt).release()
    assert manager.num_cached_tokens == 0
    manager.check_integrity()


def test_a_time_to_live_needs_a_clock():
    manager = KVManager(8, SIZE)
    with pytest.raises(AssertionError, match="needs a clock"):
        manager.acquire(ANNA, tokens_of(1, 1), terms=Terms(ttl_s=1))


# ---------------------------------------------------------------- pins


def test_pinned_blocks_are_never_victims_until_they_are_unpinned():
    manager = KVManager(16, SIZE)
    kept = tokens_of(1, 3)
    run(manager, ANNA, kept)
    pin = manager.pin(ANNA, np.append(kept, np.int32(9)))
    assert pin is not None
    assert (pin.num_tokens, pin.num_blocks, pin.tenant, pin.expires_in_s) == (12, 3, ANNA.tenant, inf)
    assert manager.num_pinned_blocks == manager.num_held_blocks == 3
    for seed in range(2, 9):
        run(manager, BEN, tokens_of(seed, 13))
    assert found(manager, ANNA, kept) == 12
    assert manager.pins() == [pin]
    assert manager.unpin(pin.id)
    assert not manager.unpin(pin.id)
    assert manager.num_pinned_blocks == manager.num_held_blocks == 0
    run(manager, BEN, tokens_of(9, 16))
    assert found(manager, ANNA, kept) == 0


def test_only_whole_blocks_that_are_cached_are_pinned():
    manager = KVManager(16, SIZE)
    assert manager.pin(ANNA, tokens_of(1, 2)) is None
    run(manager, ANNA, tokens_of(1, 2)[:7])
    pin = manager.pin(ANNA, tokens_of(1, 2))
    assert pin is not None
    assert pin.num_tokens == 4
    assert manager.pin(ANNA, tokens_of(1, 2)[:3]) is None
    manager.check_integrity()


def test_more_than_the_share_is_refused_with_both_numbers():
    manager = KVManager(16, SIZE, pinned_share=0.25)
    run(manager, ANNA, tokens_of(1, 3))
    run(manager, ANNA, tokens_of(2, 3))
    assert manager.max_pinned_blocks == 4
    assert manager.pin(ANNA, tokens_of(1, 3)) is not None
    with pytest.raises(PinRefusedError, match=r"3 are, and at most 4 of 16") as caught:
        manager.pin(ANNA, tokens_of(2, 3))
    assert (caught.value.num_blocks, caught.value.max_blocks) == (6, 4)
    assert manager.num_pinned_blocks == 3
    assert manager.pin(ANNA, tokens_of(1, 3)) is not None, "the same again takes no more room"


def test_a_tenant_cannot_pin_more_than_it_may_keep():
    manager = KVManager(64, SIZE, allowances=quota(anna=2))
    with manager.acquire(ANNA, tokens_of(1, 3)) as lease:
        assert lease.reserve(12)
        lease.commit(tokens_of(1, 3))
        with pytest.raises(PinRefusedError, match="0 of the 2"):
            manager.pin(ANNA, tokens_of(1, 3))


def test_a_pin_outlasts_the_time_to_live_and_ends_with_its_own():
    clock = Hand()
    manager = ttl_manager(clock)
    run(manager, ANNA, tokens_of(1, 3), Terms(ttl_s=10))
    pin = manager.pin(ANNA, tokens_of(1, 2), ttl_s=50, terms=Terms(ttl_s=10))
    clock.now_s += 20
    assert found(manager, ANNA, tokens_of(1, 3)) == 8
    assert manager.pins()[0].expires_in_s == 30
    again = manager.pin(ANNA, tokens_of(1, 2), ttl_s=100, terms=Terms(ttl_s=10))
    assert again.id == pin.id
    clock.now_s += 99
    assert found(manager, ANNA, tokens_of(1, 3)) == 8
    clock.now_s += 1
    assert manager.pins() == []
    assert found(manager, ANNA, tokens_of(1, 3)) == 0
    manager.acquire(ANNA, tokens_of(1, 3)).release()
    assert manager.num_free_blocks == 32


def test_a_request_can_have_all_that_is_not_pinned():
    manager = KVManager(16, SIZE)
    run(manager, ANNA, tokens_of(1, 2))
    assert manager.pin(ANNA, tokens_of(1, 2)) is not None
    assert manager.num_usable_tokens == 14 * SIZE
    for namespace in (ANNA, BEN):
        # Its own beginning, up to the middle of a block, is in the way: shared block and copy at once.
        run(manager, namespace, tokens_of(2, 14)[:50])
        with manager.acquire(namespace, tokens_of(2, 14)) as lease:
            assert lease.prefix_len == 50
            assert not lease.reserve(15 * SIZE)
            assert lease.reserve(14 * SIZE)
            manager.check_integrity()
            lease.take_copies()
            lease.commit(tokens_of(2, 14))
        assert found(manager, ANNA, tokens_of(1, 2)) == 8
        assert found(manager, namespace, tokens_of(2, 14)) == 56
    assert manager.num_pinned_blocks == 2
    manager.check_integrity()


def test_a_request_that_parts_inside_a_pinned_block_copies_it_even_with_all_the_room_taken():
    manager = KVManager(8, SIZE)
    run(manager, ANNA, tokens_of(1, 2))
    pin = manager.pin(ANNA, tokens_of(1, 2))
    prompt = np.append(
        tokens_of(1, 2)[:6], np.arange(500, 500 + 22, dtype=np.int32)
    )  # 7 blocks, and the pin's
    with manager.acquire(ANNA, prompt) as lease:
        assert lease.prefix_len == 6
        assert lease.reserve(len(prompt))
        (copy,) = lease.take_copies()
        assert copy.length == 2
        lease.commit(prompt)
        manager.check_integrity()
    assert found(manager, ANNA, tokens_of(1, 2)) == 8
    assert manager.unpin(pin.id)
    manager.check_integrity()


# ---------------------------------------------------------------- purges


def test_a_purge_takes_what_it_says_and_leaves_the_rest():
    clock = Hand()
    other_model = Namespace("w2", "t", "c", "l", "d", "r", salt="anna")
    menu, poem = Terms(prompt=prompt_id("menu")), Terms(prompt=prompt_id("poem"))

    def filled():
        manager = ttl_manager(clock)
        run(manager, ANNA, tokens_of(1, 1), menu)
        run(manager, ANNA, tokens_of(2, 2), poem)
        run(manager, BEN, tokens_of(1, 3), menu)
        run(manager, other_model, tokens_of(1, 4))
        return manager

    def left(manager):
        asked = ((ANNA, 1, 1), (ANNA, 2, 2), (BEN, 1, 3), (other_model, 1, 4))
        return [found(manager, space, tokens_of(seed, num)) // SIZE for space, seed, num in asked]

    for selection, expected, gone in (
        (Selection(), [0, 0, 0, 0], 10),
        (Selection(tenant=ANNA.tenant), [0, 0, 3, 0], 7),
        (Selection(model=model_id("w2")), [1, 2, 3, 0], 4),
        (Selection(prompt=menu.prompt), [0, 2, 0, 4], 4),
        (Selection(prompt=""), [1, 2, 3, 0], 4),
        (Selection(tenant=ANNA.tenant, model=model_id("w"), prompt=poem.prompt), [1, 0, 3, 4], 2),
        (Selection(tenant=tenant_id("nobody")), [1, 2, 3, 4], 0),
        (Selection(min_age_s=1), [1, 2, 3, 4], 0),
    ):
        manager = filled()
        assert manager.purge(selection) == Purged(gone * SIZE, gone, 0, 0)
        assert left(manager) == expected, selection
        manager.check_integrity()


def test_age_is_counted_from_when_it_was_stored():
    clock = Hand()
    manager = ttl_manager(clock)
    run(manager, ANNA, tokens_of(1, 2))
    clock.now_s += 60
    run(manager, ANNA, np.append(tokens_of(1, 2), tokens_of(2, 2)))
    run(manager, ANNA, tokens_of(3, 1))
    assert manager.purge(Selection(min_age_s=60)).num_freed_blocks == 4, "and what goes on from it"
    assert found(manager, ANNA, tokens_of(3, 1)) == 4


def test_what_is_in_use_cannot_be_found_any_more_and_is_freed_when_it_is_let_go():
    manager = KVManager(32, SIZE)
    prompt = tokens_of(1, 3)
    lease = manager.acquire(ANNA, prompt)
    assert lease.reserve(20)
    lease.commit(prompt)
    assert manager.purge(Selection(tenant=ANNA.tenant)) == Purged(12, 0, 3, 0)
    manager.check_integrity()
    assert lease.is_purged
    assert found(manager, ANNA, prompt) == 0
    grown = np.append(prompt, np.arange(8, dtype=np.int32))
    assert lease.commit(grown) == 0
    assert found(manager, ANNA, grown) == 0
    assert run(manager, ANNA, prompt) == 0, "who comes later stores their own"
    lease.release()
    manager.check_integrity()
    assert found(manager, ANNA, prompt) == 12
    assert manager.num_free_blocks == 29


def test_a_request_of_another_name_that_goes_on_from_what_is_purged_is_not_kept():
    manager = KVManager(32, SIZE)
    trunk = tokens_of(1, 2)
    run(manager, ANNA, trunk, Terms(prompt=prompt_id("menu")))
    prompt = np.append(trunk, tokens_of(2, 1))
    lease, other = manager.acquire(ANNA, prompt), manager.acquire(ANNA, tokens_of(3, 1))
    manager.purge(Selection(prompt=prompt_id("menu")))
    assert (lease.is_purged, other.is_purged) == (True, False)
    assert lease.reserve(len(prompt))
    assert lease.commit(prompt) == 0
    lease.release()
    other.release()
    assert manager.num_free_blocks == 32


def test_pins_end_with_what_they_pin():
    manager = KVManager(32, SIZE)
    run(manager, ANNA, tokens_of(1, 3), Terms(prompt=prompt_id("menu")))
    run(manager, ANNA, np.append(tokens_of(1, 3), tokens_of(2, 1)))
    run(manager, BEN, tokens_of(1, 2))
    for space, num in ((ANNA, 2), (ANNA, 3), (BEN, 2)):
        assert manager.pin(space, tokens_of(1, num)) is not None
    assert manager.num_pinned_blocks == 5
    assert manager.purge(Selection(prompt=prompt_id("menu"))) == Purged(16, 4, 0, 2)
    assert manager.num_pinned_blocks == 2
    assert [pin.tenant for pin in manager.pins()] == [BEN.tenant]
    manager.check_integrity()


def test_news_of_purges_is_heard_before_anything_is_found_or_kept():
    manager = KVManager(32, SIZE)
    told = []
    manager.news = lambda: [told.pop()] if told else []
    run(manager, ANNA, tokens_of(1, 2))
    lease = manager.acquire(ANNA, tokens_of(2, 2))
    assert lease.reserve(8)
    told.append(Selection(tenant=ANNA.tenant))
    assert lease.commit(tokens_of(2, 2)) == 0
    assert manager.num_cached_tokens == 0
    lease.release()
    run(manager, ANNA, tokens_of(1, 2))
    told.append(Selection(tenant=ANNA.tenant))
    assert manager.peek(ANNA, tokens_of(1, 2)) == 0
