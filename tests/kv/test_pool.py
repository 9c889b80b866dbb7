"""Counts of blocks, contiguity of what is allocated, and tables read as runs."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from ostinato.kv.pool import BlockPool, BlockTable


def ids(*block_ids):
    return np.array(block_ids, dtype=np.intp)


def num_runs(block_ids):
    return 1 + int(np.count_nonzero(np.diff(block_ids) != 1)) if len(block_ids) else 0


# ---------------------------------------------------------------- allocation


def test_allocation_continues_behind_a_block():
    pool = BlockPool(10)
    first = pool.allocate(3)
    assert pool.allocate(2, after=int(first[-1])).tolist() == [3, 4]
    assert pool.allocate(2, after=4).tolist() == [5, 6]


def test_allocation_takes_the_best_fit_when_it_cannot_continue():
    pool = BlockPool(20)
    pool.allocate(20)
    for start, length in ((0, 5), (6, 2), (9, 3), (13, 6)):
        pool.release(np.arange(start, start + length))
    assert pool.allocate(3).tolist() == [9, 10, 11]
    assert pool.allocate(2, after=19).tolist() == [6, 7]
    assert pool.allocate(4).tolist() == [0, 1, 2, 3]


def test_allocation_over_one_extent_takes_the_longest_first():
    pool = BlockPool(12)
    pool.allocate(12)
    for start, length in ((0, 2), (3, 5), (9, 3)):
        pool.release(np.arange(start, start + length))
    assert pool.allocate(7).tolist() == [3, 4, 5, 6, 7, 0, 1]


def test_spare_blocks_come_only_in_continuation():
    pool = BlockPool(12)
    pool.allocate(12)
    pool.release(ids(0, 1, 2))
    pool.release(ids(5, 6, 7, 8))
    assert pool.allocate(2, num_spare=2).tolist() == [5, 6, 7, 8], "the extent with room to grow"
    assert pool.allocate(1, num_spare=9).tolist() == [0, 1, 2]
    assert pool.num_free == 0


def test_freed_neighbours_merge():
    pool = BlockPool(6)
    pool.allocate(6)
    for block in (0, 2, 4, 1, 3, 5):
        pool.release(ids(block))
    assert pool.allocate(6).tolist() == [0, 1, 2, 3, 4, 5]


# ---------------------------------------------------------------- counts


def test_a_block_is_free_when_neither_held_nor_owned():
    pool = BlockPool(3)
    block = pool.allocate(1)
    assert pool.own(block) == 1
    assert pool.own(block) == 0
    assert pool.release(block).tolist() == block.tolist(), "it became evictable"
    assert (pool.num_free, pool.num_held, pool.num_evictable) == (2, 0, 1)
    pool.hold(block)
    assert (pool.num_held, pool.num_evictable) == (1, 0)
    assert pool.disown(block) == 0
    assert pool.disown(block) == 0, "still held"
    assert pool.release(block).tolist() == [], "it became free"
    assert pool.num_free == 3


@pytest.mark.parametrize(
    ("misuse", "message"),
    [
        (lambda pool: pool.release(ids(0, 2)), "nobody holds"),
        (lambda pool: pool.disown(ids(0)), "nobody owns"),
        (lambda pool: pool.hold(ids(2)), "held a free block"),
        (lambda pool: pool.own(ids(2)), "owned a free block"),
        (lambda pool: pool.allocate(3), "allocated 3 of 2 free"),
        (lambda pool: pool.allocate(0), "allocated 0"),
    ],
)
def test_misuse_is_an_assertion(misuse, message):
    pool = BlockPool(4)
    pool.allocate(2)
    with pytest.raises(AssertionError, match=message):
        misuse(pool)


# ---------------------------------------------------------------- tables


@settings(max_examples=200, deadline=None)
@given(st.data(), st.integers(1, 4))
def test_slots_and_runs_say_the_same_at_every_growth(data, block_size):
    pieces = data.draw(st.lists(st.lists(st.integers(0, 8), max_size=5), min_size=1, max_size=4))
    table = BlockTable(ids(*pieces[0]), block_size)
    expected = list(pieces[0])
    for piece in [[], *pieces[1:]]:
        table.append(ids(*piece))
        expected += piece
        if expected and data.draw(st.booleans()):
            table.drop_last()
            expected.pop()
        assert table.ids.tolist() == expected
        capacity = len(expected) * block_size
        start = data.draw(st.integers(0, capacity))
        end = data.draw(st.integers(start, capacity))
        want = [expected[i // block_size] * block_size + i % block_size for i in range(start, end)]
        slots = table.slots(start, end)
        assert slots.dtype == np.int32
        assert slots.tolist() == want


def test_a_table_never_writes_into_the_array_it_was_given():
    shared = ids(3, 4, 5)
    table = BlockTable(shared[:2], 2)
    table.append(ids(9))
    table.drop_last()
    table.append(ids(7, 8))
    assert shared.tolist() == [3, 4, 5]
    assert table.ids.tolist() == [3, 4, 7, 8]
    assert table.slots(1, 7).tolist() == [7, 8, 9, 14, 15, 16]


# ---------------------------------------------------------------- machine


class PoolMachine(RuleBasedStateMachine):
    """Any sequence of legal calls against two plain lists of counts."""

    @initialize(num_blocks=st.integers(1, 24))
    def start(self, num_blocks):
        self.pool = BlockPool(num_blocks)
        self.holds = [0] * num_blocks
        self.owners = [0] * num_blocks

    def free(self):
        return {b for b in range(len(self.holds)) if not self.holds[b] and not self.owners[b]}

    def extents(self):
        free, found = self.free(), []
        for block in sorted(free):
            if block - 1 in free:
                found[-1] += 1
            else:
                found.append(1)
        return found

    def some(self, data, among):
        return ids(*data.draw(st.lists(st.sampled_from(sorted(among)), unique=True, min_size=1)))

    @precondition(lambda self: self.free())
    @rule(data=st.data(), num_spare=st.integers(0, 4))
    def allocate(self, data, num_spare):
        free, longest_first = self.free(), sorted(self.extents(), reverse=True)
        wanted = data.draw(st.integers(1, len(free)))
        taken = sorted(set(range(len(self.holds))) - free)
        after = data.draw(st.sampled_from([None, *taken]))
        got = self.pool.allocate(wanted, after=after, num_spare=num_spare).tolist()
        assert set(got) <= free
        assert len(set(got)) == len(got)
        assert wanted <= len(got) <= wanted + num_spare
        assert np.diff(got[wanted - 1 :]).tolist() == [1] * (len(got) - wanted), "spare continues the last"
        if after is not None and after + 1 in free:
            assert got[0] == after + 1
        else:
            fewest = next(i for i in range(len(free) + 1) if sum(longest_first[:i]) >= wanted)
            assert num_runs(got[:wanted]) == fewest, "in as few runs as can be"
        for block in got:
            self.holds[block] = 1

    @precondition(lambda self: len(self.free()) < len(self.holds))
    @rule(data=st.data())
    def hold(self, data):
        blocks = self.some(data, set(range(len(self.holds))) - self.free())
        self.pool.hold(blocks)
        for block in blocks:
            self.holds[block] += 1

    @precondition(lambda self: any(self.holds))
    @rule(data=st.data())
    def release(self, data):
        blocks = self.some(data, {b for b, count in enumerate(self.holds) if count})
        evictable = self.pool.release(blocks)
        for block in blocks:
            self.holds[block] -= 1
        assert set(evictable) == {b for b in blocks if self.owners[b] and not self.holds[b]}

    @precondition(lambda self: len(self.free()) < len(self.holds))
    @rule(data=st.data())
    def own(self, data):
        blocks = self.some(data, set(range(len(self.holds))) - self.free())
        assert self.pool.own(blocks) == sum(self.owners[b] == 0 for b in blocks)
        for block in blocks:
            self.owners[block] += 1

    @precondition(lambda self: any(self.owners))
    @rule(data=st.data())
    def disown(self, data):
        blocks = self.some(data, {b for b, count in enumerate(self.owners) if count})
        free = self.free()
        num_freed = self.pool.disown(blocks)
        for block in blocks:
            self.owners[block] -= 1
        assert num_freed == len(self.free() - free)

    @invariant()
    def counts_agree(self):
        if hasattr(self, "pool"):
            self.pool.check_integrity(np.array(self.holds, np.int32), np.array(self.owners, np.int32))
            among = ids(*range(len(self.holds)))
            assert self.pool.count_held(among) == sum(count > 0 for count in self.holds)


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
