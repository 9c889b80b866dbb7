"""Leases: what is found, what is held, what a reservation may do, and what nobody may see."""

import numpy as np
import pytest
from naive_kv import as_array

from ostinato.events import BlocksEvicted, BlocksStored, PrefixLookedUp
from ostinato.kv.hashing import Namespace
from ostinato.kv.manager import CacheView, KVManager
from ostinato.types import SlotCopy

NAMESPACE = Namespace("w", "t", "c", "l", "d", "r")


def make(num_blocks, block_size=4):
    return KVManager(num_blocks, block_size)


def store(manager, tokens, namespace=NAMESPACE):
    """A whole request: look up, write, commit, release. Returns how many tokens were found."""
    with manager.acquire(namespace, as_array(tokens)) as lease:
        assert lease.reserve(len(tokens))
        lease.take_copies()
        lease.commit(as_array(tokens))
        manager.check_integrity()
    manager.check_integrity()
    return lease.prefix_len


def found(manager, tokens, namespace=NAMESPACE):
    """Tokens of a prompt found, if there were one more token."""
    return manager.peek(namespace, as_array([*tokens, -1]))


def counts(manager):
    return manager.num_free_blocks, manager.num_evictable_blocks, manager.num_held_blocks


# ---------------------------------------------------------------- look up and hold


def test_a_conversation_pays_for_new_tokens_only():
    manager = make(16)
    assert store(manager, range(10)) == 0
    assert store(manager, range(20)) == 10
    assert store(manager, range(40)) == 20
    assert manager.num_cached_tokens == 40
    assert counts(manager) == (6, 10, 0)


def test_the_last_prompt_token_is_never_found():
    manager = make(8)
    store(manager, range(8))
    with manager.acquire(NAMESPACE, as_array(range(8))) as lease:
        assert lease.prefix_len == 7
    assert manager.peek(NAMESPACE, as_array(range(8))) == 7
    assert store(manager, [0]) == 0
    for nothing in ([], [0]):
        with manager.acquire(NAMESPACE, as_array(nothing)) as lease:
            assert lease.prefix_len == 0
            assert lease.num_tokens_reserved == 0
            assert lease.block_ids.tolist() == []
            assert lease.slots(0, 0).tolist() == []


def test_nothing_is_found_before_it_is_committed():
    manager = make(8)
    with manager.acquire(NAMESPACE, as_array(range(8))) as lease:
        assert lease.reserve(8)
        assert found(manager, range(8)) == 0
        assert lease.commit(as_array(range(5))) == 5
        assert found(manager, range(8)) == 5
        assert lease.commit(as_array(range(8))) == 3
        assert lease.commit(as_array(range(8))) == 0
    assert found(manager, range(8)) == 8


def test_an_abandoned_request_is_as_if_it_never_was():
    manager = make(8)
    with pytest.raises(KeyboardInterrupt), manager.acquire(NAMESPACE, as_array(range(9))) as lease:
        assert lease.reserve(9)
        raise KeyboardInterrupt
    assert counts(manager) == (8, 0, 0)
    assert manager.num_cached_tokens == 0
    manager.check_integrity()


def test_namespaces_and_salts_share_nothing():
    manager = make(16)
    store(manager, range(8))
    salted = NAMESPACE.with_salt("tenant")
    assert found(manager, range(8), salted) == 0
    assert store(manager, range(8), salted) == 0
    assert CacheView(manager, salted).acquire(as_array(range(9))).prefix_len == 8
    assert manager.num_cached_tokens == 16


def test_a_peek_is_no_use():
    manager = make(2, block_size=1)
    store(manager, [1])
    store(manager, [2])
    assert found(manager, [1]) == 1
    store(manager, [3])
    assert (found(manager, [1]), found(manager, [2])) == (0, 1)


# ---------------------------------------------------------------- copy on write


def test_a_hit_inside_a_block_gets_its_own_copy():
    manager = make(8)
    store(manager, range(6))
    with manager.acquire(NAMESPACE, as_array([0, 1, 2, 3, 4, 9, 9])) as lease:
        shared = lease.block_ids.tolist()
        assert (lease.prefix_len, lease.num_tokens_reserved) == (5, 5)
        assert lease.take_copies() == ()
        assert lease.reserve(5), "nothing to do yet"
        assert lease.block_ids.tolist() == shared
        assert lease.reserve(7)
        assert lease.block_ids[0] == shared[0]
        assert lease.block_ids[1] != shared[1]
        assert lease.take_copies() == (SlotCopy(shared[1] * 4, int(lease.block_ids[1]) * 4, 1),)
        assert lease.take_copies() == ()
        manager.check_integrity()
        assert manager.num_held_blocks == 3, "the source stays until the copy has run"
        assert lease.commit(as_array([0, 1, 2, 3, 4, 9, 9])) == 2
        manager.check_integrity()
    assert found(manager, range(6)) == 6
    assert found(manager, [0, 1, 2, 3, 4, 9, 9]) == 7


def test_a_commit_before_its_copy_was_taken_is_a_bug():
    manager = make(8)
    store(manager, range(6))
    with manager.acquire(NAMESPACE, as_array(range(8))) as lease:
        assert lease.reserve(8)
        with pytest.raises(AssertionError, match="copies"):
            lease.commit(as_array(range(8)))


def test_a_commit_of_the_hit_alone_says_nothing_about_its_copy():
    """A request that is preempted between its reservation and its first step commits what it found."""
    manager = make(4)
    store(manager, range(6))
    with manager.acquire(NAMESPACE, as_array([*range(6), 9])) as lease:
        assert lease.reserve(7)
        lease.take_copies()
        assert lease.commit(as_array(range(6))) == 0
        assert manager.num_held_blocks == 3, "the source still stays"
        assert lease.commit(as_array([*range(6), 9])) == 1
        assert manager.num_held_blocks == 2


def test_the_source_of_a_copy_outlives_its_replacement_until_commit():
    """Somebody else extends the leaf that the copy is made from; its old last block must not be reused."""
    manager = make(4)
    store(manager, range(6))  # two blocks
    reader = manager.acquire(NAMESPACE, as_array([0, 1, 2, 3, 4, 5, 9]))
    assert reader.reserve(7)
    writer = manager.acquire(NAMESPACE, as_array(range(8)))
    assert writer.reserve(8)
    writer.take_copies()
    writer.commit(as_array(range(8)))
    writer.release()
    (copy,) = reader.take_copies()
    assert manager.num_free_blocks == 0
    with manager.acquire(NAMESPACE.with_salt("x"), as_array([5])) as other:
        assert other.reserve(1)
        assert other.block_ids[0] != copy.source // 4
    reader.commit(as_array([0, 1, 2, 3, 4, 5, 9]))
    manager.check_integrity()
    reader.release()
    manager.check_integrity()


def test_two_leases_may_continue_the_same_partial_block():
    manager = make(8)
    store(manager, range(5))
    leases = [manager.acquire(NAMESPACE, as_array([*range(5), 7 + i])) for i in range(2)]
    for i, lease in enumerate(leases):
        assert lease.reserve(6)
        assert len(lease.take_copies()) == 1
        assert lease.commit(as_array([*range(5), 7 + i])) == 1
        manager.check_integrity()
    assert leases[0].block_ids[1] != leases[1].block_ids[1]
    for lease in leases:
        lease.release()
    assert found(manager, [*range(5), 7]) == found(manager, [*range(5), 8]) == 6


# ---------------------------------------------------------------- reservations


def test_a_refused_reservation_changes_nothing():
    manager = make(4)
    store(manager, range(8))
    holder = manager.acquire(NAMESPACE, as_array([0, 1, 2, 3, 9]))
    lease = manager.acquire(NAMESPACE.with_salt("x"), as_array(range(20)))
    before = counts(manager), manager.num_cached_tokens, found(manager, range(8))
    assert not lease.reserve(16), "one block is held, three can be had"
    assert (counts(manager), manager.num_cached_tokens, found(manager, range(8))) == before
    assert lease.block_ids.tolist() == []
    assert lease.reserve(12)
    assert counts(manager) == (0, 0, 4)
    assert not lease.reserve(13)
    holder.release()
    assert lease.reserve(16)
    assert not lease.reserve(17)
    manager.check_integrity()


def test_what_is_held_is_never_evicted():
    manager = make(3)
    store(manager, range(8))
    with manager.acquire(NAMESPACE, as_array(range(9))) as holder:
        assert holder.prefix_len == 8
        with manager.acquire(NAMESPACE.with_salt("x"), as_array(range(4))) as other:
            assert other.reserve(4)
            assert not other.reserve(5)
        assert found(manager, range(8)) == 8


def test_the_only_lease_can_have_the_whole_arena():
    """Even where its hit ends inside a block and the copy would not fit beside its source."""
    manager = make(4)
    store(manager, range(14))
    tokens = as_array([*range(13), 50, 51, 52])
    with manager.acquire(NAMESPACE, tokens) as lease:
        assert lease.prefix_len == 13
        table = lease.block_ids.tolist()
        assert lease.reserve(16)
        assert lease.take_copies() == (), "the block became its own"
        assert lease.block_ids.tolist() == table
        manager.check_integrity()
        assert not lease.reserve(17)
        assert lease.commit(tokens) == 16
    assert found(manager, tokens) == 16
    manager.check_integrity()


def test_a_pool_of_one_block_serves_one_request_after_the_other():
    manager = make(1)
    for tokens in ([1, 2], [1, 2, 3], [1, 2, 3, 4], [1, 9], [5]):
        store(manager, tokens)
        assert found(manager, tokens) == len(tokens)
    assert not manager.acquire(NAMESPACE, as_array([5])).reserve(5)


def test_blocks_of_one_token():
    manager = make(8, block_size=1)
    store(manager, [1, 2, 3, 4])
    with manager.acquire(NAMESPACE, as_array([1, 2, 9, 9])) as lease:
        assert lease.prefix_len == 2
        assert lease.reserve(4)
        assert lease.take_copies() == ()
        assert lease.commit(as_array([1, 2, 9, 9])) == 2
    assert manager.num_cached_tokens == 6
    manager.check_integrity()


def test_a_growing_sequence_stays_in_one_run():
    manager = make(64)
    leases = [manager.acquire(NAMESPACE.with_salt(str(i)), as_array([])) for i in range(2)]
    for num_tokens in range(1, 49):
        for lease in leases:
            assert lease.reserve(num_tokens, spare_tokens=48 - num_tokens)
    for lease in leases:
        assert lease.num_tokens_reserved == 48, "spare was taken once"
        slots = lease.slots(0, 48).tolist()
        assert slots == list(range(slots[0], slots[0] + 48))
        assert lease.slots(10, 20).tolist() == slots[10:20]


def test_spare_is_never_evicted_for():
    manager = make(4)
    store(manager, range(8))
    with manager.acquire(NAMESPACE.with_salt("x"), as_array([])) as lease:
        assert lease.reserve(4, spare_tokens=12)
        assert lease.num_tokens_reserved == 8
        assert manager.num_evictable_blocks == 2
        assert lease.reserve(9, spare_tokens=12)
        assert (lease.num_tokens_reserved, manager.num_evictable_blocks) == (12, 1)


def test_a_copy_continues_the_prefix_where_it_can():
    manager = make(8)
    store(manager, range(4))  # block 0
    with manager.acquire(NAMESPACE, as_array([*range(3), 9, 9, 9, 9, 9])) as lease:
        assert lease.reserve(8)
        assert lease.slots(0, 8).tolist() == list(range(4, 12))


# ---------------------------------------------------------------- eviction through the manager


def test_least_recently_used_goes_first_and_use_is_look_up_or_commit():
    manager = make(6, block_size=1)
    for first in (1, 2, 3):
        store(manager, [first, 0])
    manager.acquire(NAMESPACE, as_array([1, 0])).release()
    order = []
    with manager.acquire(NAMESPACE.with_salt("x"), as_array([])) as lease:
        for num_tokens in range(1, 7):
            assert lease.reserve(num_tokens)
            order.append(tuple(found(manager, [first, 0]) for first in (1, 2, 3)))
    assert order == [(2, 1, 2), (2, 0, 2), (2, 0, 1), (2, 0, 0), (1, 0, 0), (0, 0, 0)]


def test_clear_drops_what_nobody_holds():
    manager = make(8)
    store(manager, range(8))
    store(manager, range(8), NAMESPACE.with_salt("x"))
    with manager.acquire(NAMESPACE, as_array([0, 1, 2, 3, 9])) as lease:
        assert manager.clear(NAMESPACE) == 1
        assert lease.prefix_len == 4
        assert found(manager, range(8)) == 4
        assert manager.clear() == 2
        assert counts(manager) == (7, 0, 1)
    assert manager.clear() == 1
    assert counts(manager) == (8, 0, 0)


def test_a_duplicate_that_descendants_stand_on_is_held():
    """Two requests compute one prefix at once; the first one's blocks carry the second one's branch."""
    manager = make(8)
    first = manager.acquire(NAMESPACE, as_array(range(8)))
    second = manager.acquire(NAMESPACE, as_array(range(8)))
    assert first.reserve(8)
    assert second.reserve(12)
    first.commit(as_array(range(8)))
    assert second.commit(as_array(range(8))) == 0
    first.release()
    assert counts(manager) == (3, 2, 3)
    assert second.commit(as_array(range(12))) == 4, "now its last block stands on the first one's"
    manager.check_integrity()
    assert counts(manager) == (3, 0, 5)
    second.release()
    assert counts(manager) == (5, 3, 0)


# ---------------------------------------------------------------- events and misuse


def test_events_tell_exactly_what_happened():
    said = []
    manager = KVManager(3, 4, observer=said.append)
    store(manager, range(6))
    store(manager, range(7))
    store(manager, range(50, 58))
    assert said == [
        PrefixLookedUp(6, 0),
        BlocksStored(6, 2),
        PrefixLookedUp(7, 6),
        BlocksStored(1, 1),
        PrefixLookedUp(8, 0),
        BlocksEvicted(3, 1),
        BlocksStored(8, 2),
    ]


def test_an_observer_may_call_back():
    """Observers run outside the lock."""
    seen = []
    manager = KVManager(4, 4, observer=lambda event: seen.append((event, manager.num_held_blocks)))
    with manager.acquire(NAMESPACE, as_array([1, 2])) as lease:
        assert lease.reserve(2)
        lease.commit(as_array([1, 2]))
    assert [held for _, held in seen] == [0, 1]


def test_releasing_twice_is_releasing_once():
    manager = make(4)
    store(manager, range(4))
    first = manager.acquire(NAMESPACE, as_array(range(5)))
    second = manager.acquire(NAMESPACE, as_array(range(5)))
    first.release()
    first.release()
    assert manager.num_held_blocks == 1
    second.release()
    manager.check_integrity()


@pytest.mark.parametrize(
    ("misuse", "message"),
    [
        (lambda lease: lease.commit(as_array(range(9))), "committed 9 tokens, reserved 8"),
        (lambda lease: lease.commit(as_array([1, 2, 3])), "do not continue"),
        (lambda lease: lease.commit(np.arange(3)), "not int32"),
        (lambda lease: lease.commit(as_array(range(4)).reshape(2, 2)), "shape"),
        (lambda lease: lease.slots(0, 9), r"\[0, 9\) of 8"),
        (lambda lease: lease.slots(3, 2), r"\[3, 2\)"),
        (lambda lease: (lease.release(), lease.reserve(1)), "released"),
        (lambda lease: (lease.release(), lease.commit(as_array(range(4)))), "released"),
        (lambda lease: (lease.release(), lease.slots(0, 1)), "released"),
    ],
)
def test_misuse_is_an_assertion(misuse, message):
    manager = make(4)
    lease = manager.acquire(NAMESPACE, as_array(range(8)))
    assert lease.reserve(8)
    assert lease.commit(as_array(range(3))) == 3
    with pytest.raises(AssertionError, match=message):
        misuse(lease)
    manager.check_integrity()


def test_impossible_arenas_are_refused():
    for num_blocks, block_size in ((0, 4), (4, 0), (2**30, 2)):
        with pytest.raises(AssertionError):
            KVManager(num_blocks, block_size)
