"""The queue of victims: order, changes of mind, and a heap that does not outgrow its content."""

import random

import pytest
from naive_kv import LeastUsed

from ostinato.kv.policy import LRU, Candidate, VictimQueue


def candidate(last_used, num_uses=0):
    made = Candidate(rank=last_used, depth_tokens=0, num_tokens=1)
    made.num_uses = num_uses
    return made


def drain(queue, number):
    return [queue.pop() for _ in range(number)]


def test_the_smallest_priority_goes_first_and_equals_in_order_of_arrival():
    queue = VictimQueue(LeastUsed())
    a, b, c = candidate(1, num_uses=3), candidate(2), candidate(2)
    for each in (a, b, c):
        queue.put(each)
    assert drain(queue, 3) == [b, c, a]
    with pytest.raises(AssertionError, match="evictable"):
        queue.pop()


def test_only_the_latest_priority_counts():
    queue = VictimQueue(LRU())
    a, b = candidate(1), candidate(2)
    queue.put(a)
    queue.put(b)
    a.last_used = 3
    queue.refresh(a)
    assert drain(queue, 2) == [b, a]
    queue.refresh(a)
    queue.check_integrity([])


def test_a_parked_candidate_waits_for_its_block():
    queue = VictimQueue(LRU())
    a, b = candidate(1), candidate(2)
    queue.put(a)
    queue.put(b)
    queue.park(a, 7)
    queue.refresh(a)
    queue.check_integrity([a, b])
    with pytest.raises(AssertionError, match="two candidates"):
        queue.park(b, 7)
    queue.put(b)
    queue.wake([5, 6])
    assert queue.pop() is b
    queue.wake([6, 7])
    assert queue.pop() is a
    queue.check_integrity([])


def test_a_dropped_candidate_is_gone_from_heap_and_parking():
    queue = VictimQueue(LRU())
    a, b = candidate(1), candidate(2)
    queue.put(a)
    queue.put(b)
    queue.park(b, 3)
    queue.drop(a)
    queue.drop(b)
    queue.wake([3])
    queue.check_integrity([])


def test_the_heap_stays_as_small_as_its_content():
    """Use is one push: a hundred thousand uses of fifty candidates must not be a hundred thousand entries."""
    chance = random.Random(1)
    queue = VictimQueue(LRU())
    candidates = [candidate(rank) for rank in range(50)]
    for each in candidates:
        queue.put(each)
    for rank in range(50, 20_000):
        used = chance.choice(candidates)
        used.last_used = rank
        queue.put(used)
        assert len(queue._heap) <= 64 + 2 * 50
    queue.check_integrity(candidates)
    assert drain(queue, 50) == sorted(candidates, key=lambda each: each.last_used)
