"""Rules of eviction: what each remembers, that memory is bounded, and that ours counts and learns rightly."""

import random
import tracemalloc

import numpy as np
import pytest

from ostinato.kv.hashing import Namespace
from ostinato.kv.manager import KVManager
from ostinato.kv.policies import POLICY_NAMES, make_policy
from ostinato.kv.policies.guard import Guard
from ostinato.kv.policies.hazard import HazardRegression, HazardTables, gittins
from ostinato.kv.policies.workload import Workload
from ostinato.kv.policy import LRU, Outlook, RequestHints

SPACE = Namespace("w", "", "", "", "", "")


class Hands:
    """A clock that the test sets."""

    time_s = 0.0

    def now(self):
        return self.time_s

    def monotonic(self):
        return self.time_s


def serve(manager, *tokens, hints=None):
    array = np.array(tokens, np.int32)
    with manager.acquire(SPACE, array, hints=hints or RequestHints()) as lease:
        hit = lease.prefix_len
        assert lease.reserve(len(array))
        lease.take_copies()
        lease.commit(array)
    return hit


def cached(manager, *tokens):
    return manager.peek(SPACE, np.array([*tokens, 2**30], np.int32))


def manager_with(name, num_blocks, block_size=1, clock=None):
    policy = make_policy(name, num_blocks=num_blocks, block_tokens=block_size, clock=clock or Hands())
    return KVManager(num_blocks, block_size, policy=policy)


# ---------------------------------------------------------------- the rules


def victims(name, uses, num_blocks=5, fresh=(50, 51, 52)):
    """Serves one-block prompts in this order, then new ones; which of those before are gone.

    One block is spare: a prompt that is here all but its last token needs one to compute that in.
    """
    manager = manager_with(name, num_blocks)
    for token in uses:
        serve(manager, token)
    for token in fresh:
        serve(manager, token)
    return {token for token in uses if not cached(manager, token)}


def test_lru_and_fifo_differ_in_what_use_means():
    uses = [1, 2, 3, 4, 1, 1]
    assert victims("lru", uses) == {2, 3}
    assert victims("fifo", uses) == {1, 2}


def test_lfu_keeps_what_is_used_often():
    assert victims("lfu", [1, 1, 2, 2, 2, 3, 4]) == {3, 4}


def test_lru_2_gives_up_what_was_used_once_before_anything_used_twice():
    assert victims("lru-2", [1, 1, 2, 2, 3, 4]) == {3, 4}


def test_history_outlives_residence():
    """The second use comes after the block was evicted, and still counts as the second."""
    manager = manager_with("lru-2", 3)
    for token in (1, 2, 3, 4, 1):
        serve(manager, token)
    for token in (5, 6, 7):
        serve(manager, token)
    assert cached(manager, 1)


def test_a_long_prompt_has_a_shorter_life_under_size_aware_ttl():
    manager = manager_with("size-ttl", 40)
    serve(manager, *range(100, 130))
    serve(manager, 1)
    serve(manager, *range(200, 215))
    assert cached(manager, 1)
    assert cached(manager, *range(100, 130)) == 24


def test_s3_fifo_lets_a_scan_pass_by():
    manager = manager_with("s3-fifo", 20)
    for _ in range(4):
        for token in range(10):
            serve(manager, token)
    for token in range(100, 160):
        serve(manager, token)
    assert sum(cached(manager, token) for token in range(10)) == 10


def test_arc_lets_a_scan_pass_by():
    manager = manager_with("arc", 20)
    for _ in range(2):
        for token in range(10):
            serve(manager, token)
    for token in range(100, 160):
        serve(manager, token)
    assert sum(cached(manager, token) for token in range(10)) == 10


@pytest.mark.parametrize("name", POLICY_NAMES)
@pytest.mark.parametrize("block_size", [1, 4])
def test_books_hold_under_any_rule_and_block_size(name, block_size):
    clock, chance = Hands(), random.Random(block_size)
    manager = manager_with(name, 40, block_size, clock)
    prompts = [[]]
    for _ in range(250):
        clock.time_s += chance.expovariate(0.2)
        tokens = [*chance.choice(prompts), *(chance.randrange(3) for _ in range(1 + chance.randrange(20)))]
        tokens = tokens[: 30 * block_size]
        prompts.append(tokens)
        array = np.array(tokens, np.int32)
        with manager.acquire(SPACE, array) as lease:
            for end in (max(lease.prefix_len, len(tokens) // 2), len(tokens)):
                assert lease.reserve(max(end, 1))
                lease.take_copies()
                lease.commit(array[: max(end, 1)])
                manager.check_integrity()
        manager.check_integrity()
    manager.clear()
    assert manager.num_free_blocks == 40


@pytest.mark.parametrize("name", ["lru-2", "lirs", "s3-fifo", "arc", "workload"])
def test_memory_is_bounded_however_many_prompts_come(name):
    policy = make_policy(name, num_blocks=50, block_tokens=1, clock=Hands())
    policy._history.max_blocks = 500
    manager = KVManager(50, 1, policy=policy)
    sizes = []
    for start in range(0, 60_000, 10):
        serve(manager, *range(start, start + 10))
        sizes.append(policy.size_bytes)
    assert policy._history.num_blocks <= 500
    assert max(sizes[1000:]) == max(sizes)
    assert max(sizes) < 200_000


def test_the_size_that_is_told_is_not_less_than_the_memory_taken():
    clock = Hands()
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        policy = Workload(1000, 1, clock, history_factor=8, history_floor=0)
        manager = KVManager(1000, 1, policy=policy)
        for start in range(0, 20_000, 10):
            clock.time_s += 0.3
            serve(manager, *range(start, start + 10))
        taken = tracemalloc.get_traced_memory()[0] - before
        books = KVManager(1000, 1, policy=LRU())
        at = tracemalloc.get_traced_memory()[0]
        for start in range(0, 20_000, 10):
            serve(books, *range(start, start + 10))
        taken -= tracemalloc.get_traced_memory()[0] - at
    finally:
        tracemalloc.stop()
    assert 0.4 * policy.size_bytes < taken < policy.size_bytes


@pytest.mark.parametrize("name", ["lru", "fifo", "lfu", "lru-2", "lirs"])
def test_a_chain_that_was_closed_goes_first_and_a_use_revokes_it(name):
    manager = manager_with(name, 13)
    for _ in range(2):
        for start in (100, 200, 300):
            serve(manager, 0, start, start + 1, start + 2)
    wrong, right = np.array([0, 200, 201, 202], np.int32), np.array([0, 300, 301, 302], np.int32)
    assert manager.hint(SPACE, right, Outlook.OVER) == 3  # not the token that others share
    assert manager.hint(SPACE, wrong, Outlook.ABANDONED) == 3
    serve(manager, 0, 200, 201, 202, 203)
    manager.check_integrity()
    serve(manager, 7, 8, 9, 10, 11)
    manager.check_integrity()
    assert cached(manager, 0, 300, 301, 302) == 1
    assert cached(manager, 0, 200, 201, 202) == 4
    assert cached(manager, 0, 100, 101, 102) == 4
    assert manager.hint(SPACE, np.array([99], np.int32), Outlook.OVER) == 0


# ---------------------------------------------------------------- ours


def test_the_shadow_of_lru_counts_what_lru_serves():
    clock, chance = Hands(), random.Random(3)
    policy = Workload(60, 1, clock)
    ours, lru = KVManager(60, 1, policy=policy), KVManager(60, 1, policy=LRU())
    served = [0, 0]
    count = policy.guard.count

    def spy(lru_hits, our_hits, num_refs):
        served[0] += lru_hits
        count(lru_hits, our_hits, num_refs)

    policy.guard.count = spy
    prompts, next_token = [[0]], 1
    for _ in range(600):
        clock.time_s += chance.expovariate(0.3)
        above = chance.choice(prompts[-12:])
        tokens = [*above, *range(next_token, next_token + 1 + chance.randrange(4))]
        if len(tokens) > 30:
            tokens = [0, next_token]
        next_token += 4
        prompts.append(tokens)
        served[1] += serve(lru, *tokens)
        serve(ours, *tokens)
    while ours.tend():
        pass
    assert served[0] == served[1] > 1000


def test_the_guard_falls_back_and_returns():
    guard = Guard(100)
    for _ in range(50):
        guard.count(5, 4, 10)
    assert guard.is_fallen_back
    for _ in range(200):
        guard.count(4, 5, 10)
    assert not guard.is_fallen_back
    assert guard.num_switches == 2


def test_ours_learns_what_lru_cannot_know():
    """Chats that go on after a while, each with a part-filled last block that nothing can continue."""
    served = {}
    for name in ("lru", "workload"):
        clock = Hands()
        manager = manager_with(name, 64, clock=clock)
        chance, part = random.Random(1), RequestHints(has_part_block=True)
        open_ones, next_token, served[name] = [], 1, 0
        for _ in range(2000):
            clock.time_s += 1.0
            tokens = []
            if len(open_ones) > 12:
                tokens = open_ones.pop(0)[:-1]  # the full blocks of the turn before
            tokens = [*tokens, *range(next_token, next_token + 3)]
            next_token += 3
            if len(tokens) < 9 and chance.random() < (0.9 if len(tokens) > 3 else 0.4):
                open_ones.append(tokens)
            served[name] += serve(manager, *tokens, hints=part)
    assert served["workload"] > 1.1 * served["lru"] > 0


def test_time_that_goes_back_is_borne():
    clock = Hands()
    manager = manager_with("workload", 30, clock=clock)
    for step in range(300):
        clock.time_s = 1e6 if step % 3 else -1e6 + step
        serve(manager, 1, step + 2)
        manager.check_integrity()


def test_gittins_is_the_best_ratio_over_all_ends():
    chance = np.random.default_rng(1)
    hazard, width = chance.uniform(0.01, 0.6, (3, 7)), chance.uniform(1, 9, 7)
    found = gittins(hazard, width)
    for row in range(3):
        for start in range(7):
            best, survive, reused, held = 0.0, 1.0, 0.0, 0.0
            for at in range(start, 7):
                reused += survive * hazard[row, at]
                held += survive * width[at] * (1 - hazard[row, at] / 2)
                survive *= 1 - hazard[row, at]
                best = max(best, reused / held)
            assert found[row, start] == pytest.approx(best)


def test_the_tables_find_the_class_that_comes_back():
    tables = HazardTables(2)
    ages = np.full(400, 30.0)
    tables.close(np.zeros(400, np.int64), ages, np.ones(400), is_reuse=True)
    tables.close(np.ones(400, np.int64), np.full(400, 300.0), np.ones(400), is_reuse=False)
    assert len(list(tables.learn())) == 1
    often, never = tables.worth(np.array([0, 1]), np.array([10.0, 10.0]))
    assert often > 3 * never


def test_the_regression_learns_a_feature_that_tells():
    chance = np.random.default_rng(2)
    regression = HazardRegression(2, 1)
    for _ in range(400):
        which = chance.integers(0, 2, 8)
        is_reuse = chance.uniform(size=8) < np.where(which == 1, 0.6, 0.02)
        for outcome in (True, False):
            rows = np.flatnonzero(is_reuse == outcome)
            zeros = np.zeros(len(rows), np.int64)
            regression.learn(which[rows][:, None].astype(np.int16), zeros, zeros, outcome, np.ones(len(rows)))
    assert len(list(regression.refresh())) == 1
    sums = regression.sums(np.array([[0], [1]], np.int16))
    rare, common = regression.worth(sums, np.zeros(2, np.int64), np.zeros(2))
    assert common > 3 * rare
