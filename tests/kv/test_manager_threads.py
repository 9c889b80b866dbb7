"""Many threads on one manager: nothing is lost, nothing is served twice, nothing stays held."""

import random
import sys
import threading

import numpy as np
import pytest

from ostinato.kv.hashing import Namespace
from ostinato.kv.manager import KVManager

NAMESPACES = [Namespace("w", "t", "c", "l", "d", "r", salt=str(i)) for i in range(2)]
NUM_THREADS, NUM_REQUESTS, NUM_BLOCKS, BLOCK_SIZE = 6, 250, 40, 4


@pytest.fixture
def eager_switching():
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


class Arena:
    """Slot contents: a number that names the salt and the whole prefix. Written outside of any lock."""

    def __init__(self):
        self.slots = np.zeros(NUM_BLOCKS * BLOCK_SIZE, np.int64)

    def meaning(self, which, tokens):
        numbers, number = [], which + 1
        for token in tokens.tolist():
            number = (number * 1_000_003 + token + 1) % (2**61 - 1)
            numbers.append(number)
        return np.array(numbers, np.int64)


def run_requests(manager, arena, seed, wrong, released):
    chance = random.Random(seed)
    for _ in range(NUM_REQUESTS):
        which = chance.randrange(2)
        tokens = np.array([chance.randrange(2) for _ in range(chance.randrange(1, 30))], np.int32)
        meaning = arena.meaning(which, tokens)
        lease = manager.acquire(NAMESPACES[which], tokens)
        with lease:
            end = lease.prefix_len
            if (arena.slots[lease.slots(0, end)] != meaning[:end]).any():
                wrong.append("a hit reads somebody else's tokens")
            for goal in sorted({chance.randint(end, len(tokens)), len(tokens)}):
                if not lease.reserve(goal, spare_tokens=chance.choice((0, 5))):
                    break
                for copy in lease.take_copies():
                    source = arena.slots[copy.source : copy.source + copy.length]
                    arena.slots[copy.target : copy.target + copy.length] = source
                arena.slots[lease.slots(end, goal)] = meaning[end:goal]
                end = goal
                if chance.random() < 0.8:
                    lease.commit(tokens[:end])
                if (arena.slots[lease.slots(0, end)] != meaning[:end]).any():
                    wrong.append("a lease reads somebody else's tokens")
            if chance.random() < 0.2:
                released.append(lease)  # someone else lets it go as well
        if released and chance.random() < 0.5:
            released.pop().release()
        if chance.random() < 0.02:
            manager.clear(chance.choice([None, *NAMESPACES]))


def test_threads_leave_the_books_right_and_nothing_held(eager_switching):
    events = []
    manager = KVManager(NUM_BLOCKS, BLOCK_SIZE, observer=events.append)
    arena, wrong, released, failed = Arena(), [], [], []

    def work(seed):
        try:
            run_requests(manager, arena, seed, wrong, released)
        except BaseException as error:
            failed.append(error)
            raise

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(NUM_THREADS)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        manager.check_integrity()
        for thread in threads:
            thread.join(timeout=0.02)
    assert not failed
    assert not wrong
    manager.check_integrity()
    assert manager.num_held_blocks == 0
    assert manager.num_free_blocks + manager.num_evictable_blocks == NUM_BLOCKS
    names = [type(event).__name__ for event in events]
    assert names.count("PrefixLookedUp") == NUM_THREADS * NUM_REQUESTS
    assert names.count("BlocksEvicted") > 100
    stored = sum(event.num_tokens for event in events if type(event).__name__ == "BlocksStored")
    evicted = sum(event.num_tokens for event in events if type(event).__name__ == "BlocksEvicted")
    assert stored - evicted == manager.num_cached_tokens
    manager.clear()
    assert manager.num_free_blocks == NUM_BLOCKS


def test_anyone_may_release_a_lease_while_its_owner_works(eager_switching):
    """Cancellation from another thread: the owner sees an assertion or nothing, the books stay right."""
    manager = KVManager(16, 4)
    tokens = np.arange(40, dtype=np.int32)
    for _ in range(200):
        lease = manager.acquire(NAMESPACES[0], tokens)
        canceller = threading.Thread(target=lease.release)
        canceller.start()
        refusal = None
        try:
            if lease.reserve(40):
                lease.take_copies()
                lease.commit(tokens)
        except AssertionError as error:
            refusal = error
        assert refusal is None or "released lease" in str(refusal)
        lease.release()
        canceller.join()
        manager.check_integrity()
        assert manager.num_held_blocks == 0
