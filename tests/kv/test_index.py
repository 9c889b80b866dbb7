"""The radix tree: what is found, where trees part, and in which order things go."""

from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from naive_kv import POLICIES, NaiveIndex, as_array

from ostinato.kv.index import PrefixIndex
from ostinato.kv.nodes import Moment
from ostinato.kv.policy import LRU


class NaiveCounts:
    """Whoever counts blocks, as two dicts."""

    def __init__(self):
        self.holds: dict[int, int] = {}
        self.owners: dict[int, int] = {}

    def own(self, block_ids):
        fresh = sum(self.owners.get(b, 0) == 0 for b in block_ids.tolist())
        for block in block_ids.tolist():
            self.owners[block] = self.owners.get(block, 0) + 1
        return fresh

    def disown(self, block_ids):
        num_freed = 0
        for block in block_ids.tolist():
            self.owners[block] -= 1
            num_freed += self.owners[block] == 0 and not self.holds.get(block)
        return num_freed

    def count_held(self, block_ids):
        return sum(self.holds.get(b, 0) > 0 for b in block_ids.tolist())

    def held(self):
        return {block for block, count in self.holds.items() if count}

    def owned(self):
        return {block for block, count in self.owners.items() if count}


class Books:
    """An index and a tick; every commit brings fresh blocks, and takes what it found as a lease would."""

    def __init__(self, block_size, policy=None):
        self.block_size = block_size
        self.counts = NaiveCounts()
        self.index = PrefixIndex(block_size, self.counts, policy or LRU())
        self.rank = 0
        self.next_block = 0

    def look_up(self, tokens, namespace="n"):
        self.rank += 1
        return self.index.match(namespace, as_array(tokens).tobytes(), len(tokens), Moment(self.rank))

    def table_for(self, tokens, match):
        """Whole blocks that were found, fresh ones behind."""
        table = match.blocks[: match.num_tokens // self.block_size].tolist()
        while len(table) * self.block_size < len(tokens):
            table.append(self.next_block)
            self.next_block += 1
        return table

    def commit(self, tokens, namespace="n"):
        table = self.table_for(tokens, self.look_up(tokens, namespace))
        return self.insert(tokens, table, namespace)

    def insert(self, tokens, table, namespace="n"):
        self.rank += 1
        return self.index.insert(
            namespace, as_array(tokens).tobytes(), np.array(table, np.intp), Moment(self.rank)
        )

    def found(self, tokens, namespace="n"):
        return self.index.peek(namespace, as_array(tokens).tobytes())

    def check(self):
        top = 1 + max([self.next_block, *self.counts.holds, *self.counts.owners])
        holds, owners = np.zeros(top, np.int32), np.zeros(top, np.int32)
        for tally, counts in ((holds, self.counts.holds), (owners, self.counts.owners)):
            for block, count in counts.items():
                tally[block] = count
        assert self.index.check_integrity(holds).tolist() == owners.tolist()


# ---------------------------------------------------------------- look up


def test_the_longest_prefix_is_found_to_the_token():
    books = Books(4)
    books.commit([1, 2, 3, 4, 5, 6])
    assert books.found([1, 2, 3, 4, 5, 6]) == 6
    assert books.found([1, 2, 3, 4, 5, 6, 7]) == 6
    assert books.found([1, 2, 3, 9, 5, 6]) == 3
    assert books.found([1, 2]) == 2
    assert books.found([9]) == 0
    assert books.found([]) == 0
    assert books.found([1, 2], namespace="other") == 0


def test_a_match_is_cut_where_it_is_told():
    books = Books(4)
    books.commit([1, 2, 3, 4, 5, 6])
    match = books.index.match("n", as_array([1, 2, 3, 4, 5, 6]).tobytes(), 4, Moment(9))
    assert (match.num_tokens, match.blocks.tolist()) == (4, [0])


def test_first_tokens_are_whole_numbers_not_bytes():
    """Tokens that share bytes at unaligned places are no match."""
    books = Books(2)
    books.commit([0x01020304, 0x05060708])
    assert books.found([0x01020304, 0x05060709]) == 1
    assert books.found([0x02030405]) == 0


def test_a_childs_block_overrides_its_parents_partial_one():
    books = Books(4)
    books.commit([1, 2, 3, 4, 5, 6, 7, 8])  # blocks 0 1
    books.insert([1, 2, 3, 4, 5, 6, 9], [0, 7])  # 7 has 5 6 9
    match = books.look_up([1, 2, 3, 4, 5, 6, 9])
    assert match.blocks.tolist() == [0, 7]
    assert match.overridden == {1}
    assert books.look_up([1, 2, 3, 4, 5, 6, 7]).blocks.tolist() == [0, 1]
    assert books.look_up([1, 2, 3, 4, 5, 6]).blocks.tolist() == [0, 1]
    assert books.counts.owners == {0: 1, 1: 2, 7: 1}
    books.check()


def test_a_leaf_is_extended_in_place_and_its_partial_block_replaced():
    books = Books(4)
    books.commit([1, 2, 3, 4, 5])
    new = books.insert([1, 2, 3, 4, 5, 6, 7, 8, 9], [0, 5, 6])
    assert (new.num_tokens, new.num_blocks) == (4, 2)
    assert books.index.num_nodes == 1
    assert books.look_up(range(1, 10)).blocks.tolist() == [0, 5, 6]
    assert books.counts.owned() == {0, 5, 6}, "block 1 is free"
    books.check()


def test_tokens_that_are_here_keep_their_blocks():
    books = Books(2)
    books.commit([1, 2, 3, 4])
    again = books.insert([1, 2, 3, 4], [8, 9])
    assert (again.num_tokens, again.num_blocks, again.path) == (0, 0, None)
    assert books.look_up([1, 2, 3, 4]).blocks.tolist() == [0, 1]


def test_the_writer_of_a_block_may_part_after_somebody_elses_continuation():
    """A's block 0 reaches into B's tokens and beyond: its entries must stay together on the path."""
    books = Books(8)
    books.insert([1, 2], [0])  # A goes on writing 0
    books.insert([1, 9], [1])  # splits [1 | 2]: 0 in both
    books.insert([1, 2, 3, 4], [2])  # B copied 1 2 from 0, went on: the lower entry of 0 gave way to 2
    books.insert([1, 2, 3, 5], [0])  # A went through 3 as well
    books.check()
    assert books.look_up([1, 2, 3, 5]).overridden == frozenset()
    assert books.look_up([1, 2, 3, 4]).blocks.tolist() == [2]


# ---------------------------------------------------------------- evict


def evict(books, num_blocks=1):
    return books.index.evict(num_blocks)[0]


def test_leaves_go_before_roots_and_tails_before_heads():
    books = Books(2)
    books.commit([1, 2, 3, 4, 5, 6])
    books.commit([1, 2, 7, 8])
    books.look_up([1, 2, 3, 4, 5, 6])  # so [7 8] is the oldest leaf
    sizes = []
    while books.index.num_tokens:
        assert evict(books) == 1
        books.check()
        sizes.append((books.found([1, 2, 3, 4, 5, 6]), books.found([1, 2, 7, 8])))
    assert sizes == [(6, 2), (4, 2), (2, 2), (0, 0)]


def test_only_as_much_goes_as_is_needed():
    books = Books(2)
    books.commit(range(10))
    assert books.index.evict(3) == (3, 6)
    assert books.found(range(10)) == 4


def test_a_partial_last_block_counts_its_tokens():
    books = Books(4)
    books.commit(range(6))
    assert books.index.evict(1) == (1, 2)
    assert books.index.evict(1) == (1, 4)
    assert books.index.num_nodes == 0


def test_a_held_leaf_is_passed_over_until_it_is_let_go():
    books = Books(1)
    books.commit([1])
    books.commit([2])
    books.counts.holds[0] = 1
    assert evict(books) == 1
    assert (books.found([1]), books.found([2])) == (1, 0)
    books.commit([3])
    assert evict(books) == 1
    assert (books.found([1]), books.found([3])) == (1, 0)
    with pytest.raises(AssertionError, match="evictable"):
        evict(books)
    books.check()
    books.counts.holds[0] = 0
    books.index.wake(np.array([0], np.intp))
    assert evict(books) == 1
    assert books.index.num_tokens == 0


def test_an_overridden_block_is_freed_when_only_its_override_is_left():
    books = Books(4)
    books.commit([1, 2, 3])
    books.commit([1, 2, 9])  # splits: block 0 in [1 2] and [3]
    assert books.counts.owners == {0: 2, 1: 1}
    assert books.index.evict(1) == (1, 1), "[3] shares its block, but then [1 2] and [9] were joined"
    assert books.found([1, 2, 9]) == 3
    assert books.counts.owned() == {1}
    books.check()


def test_the_survivor_of_a_fork_is_joined_with_its_parent():
    books = Books(2)
    books.commit([1, 2, 3, 4])
    books.commit([1, 2, 5, 6])
    assert books.index.num_nodes == 3
    evict(books)
    assert books.index.num_nodes == 1
    assert books.look_up([1, 2, 5, 6]).blocks.tolist() == [0, 2]
    books.check()


@pytest.mark.parametrize(("num_shared", "num_own", "survives"), [(8, 1, True), (1, 8, False)])
def test_the_longer_of_two_joined_nodes_keeps_its_rank(num_shared, num_own, survives):
    """A fork's older branch is held while the younger one goes; the trunk was used later than it."""
    books = Books(4)
    trunk, own = [1] * num_shared, [2] * num_own
    books.commit([*trunk, *own])
    books.commit([7] * 4)
    books.commit([*trunk, 3])
    books.counts.holds = dict.fromkeys(books.look_up([7] * 4).blocks.tolist(), 1)
    for block in books.index.match("n", as_array([*trunk, *own]).tobytes(), 99, Moment(1)).blocks.tolist():
        books.counts.holds[block] = 1  # a rank in the past: only to learn the blocks
    books.index.match("n", as_array(trunk).tobytes(), 99, Moment(books.rank))
    evict(books)
    assert books.index.num_nodes == 2, "the fork is one node again"
    books.counts.holds.clear()
    books.index.wake(np.arange(books.next_block))
    evict(books)
    assert (books.found([7] * 4) == 0) == survives


def test_node_count_stays_bounded_by_blocks():
    """Prompts that part from one long prompt at every token, each evicted again, leave no chain of shards."""
    books = Books(16)
    books.commit(range(1000, 2000))
    for at in range(1, 1000):
        tokens = [*range(1000, 1000 + at), 7]
        books.commit(tokens)
        books.look_up(range(1000, 2000))
        evict(books)
        assert books.index.num_nodes <= 4
    books.check()
    assert books.found(range(1000, 2000)) == 1000


def test_clearing_one_namespace_leaves_the_others():
    books = Books(2)
    for namespace in "ab":
        books.commit([1, 2, 3, 4], namespace)
        books.commit([1, 2, 5], namespace)
    assert books.index.clear("a") == (3, 5)
    assert books.found([1, 2, 3], "a") == 0
    assert books.found([1, 2, 3, 4], "b") == 4
    assert books.index.num_tokens_in("a") == 0
    assert books.index.num_tokens_in("b") == books.index.num_tokens == 5
    assert books.index.clear("never seen") == (0, 0)
    books.check()


def test_a_tree_deeper_than_the_recursion_limit():
    """Every prefix of one sequence is a branching point."""
    books = Books(1)
    tokens = list(range(1500))
    table = list(range(1500))
    for end in range(1, 1500):
        books.insert([*tokens[:end], 10**6], [*table[:end], 5000 + end])
    assert books.index.num_nodes > 1500
    books.check()
    assert books.found(tokens) == 1499
    assert books.index.clear("n")[1] == 2 * 1499
    assert books.index.num_nodes == 0


# ---------------------------------------------------------------- machine


@dataclass(eq=False)
class Holder:
    """What the machine needs of a lease. Without a table it only holds."""

    namespace: str
    tokens: tuple[int, ...]
    table: list[int]
    held: set[int] = field(default_factory=set)


class IndexMachine(RuleBasedStateMachine):
    """Commits, look-ups, holds and evictions under every policy, against the naive index, order and all."""

    @initialize(block_size=st.sampled_from([1, 2, 4, 8]), policy=st.sampled_from(POLICIES))
    def start(self, block_size, policy):
        self.books = Books(block_size, policy())
        self.naive = NaiveIndex(block_size, policy())
        self.known = [()]
        self.leases = []

    def draw_tokens(self, data):
        base = data.draw(st.sampled_from(self.known[-8:]))
        cut = data.draw(st.integers(0, len(base)))
        tokens = base[:cut] + tuple(data.draw(st.lists(st.integers(0, 1), max_size=9)))
        self.known.append(tokens)
        return tokens

    def hold(self, blocks):
        for block in blocks:
            self.books.counts.holds[block] = self.books.counts.holds.get(block, 0) + 1

    @rule(data=st.data(), namespace=st.sampled_from("aaab"), keep=st.booleans())
    def commit(self, data, namespace, keep):
        books, tokens = self.books, self.draw_tokens(data)
        match = books.look_up(tokens, namespace)
        hit = self.naive.match(namespace, tokens, len(tokens), books.rank)
        assert (match.num_tokens, match.blocks.tolist(), set(match.overridden)) == hit
        lease = Holder(namespace, (), books.table_for(tokens, match))
        lease.held = {*lease.table, *match.overridden}
        self.hold(lease.held)
        self.leases.append(lease)
        self.insert(lease, tokens)
        if not keep:
            self.release(data, lease)

    @precondition(lambda self: any(lease.table for lease in self.leases))
    @rule(data=st.data())
    def go_on(self, data):
        """A lease commits more from the table it has, writing on in its last block."""
        lease = data.draw(st.sampled_from([lease for lease in self.leases if lease.table]))
        start = len(lease.tokens)
        longer = [known for known in self.known if known[:start] == lease.tokens]
        base = data.draw(st.sampled_from(longer))
        tokens = base[: data.draw(st.integers(start, len(base)))]
        tokens += tuple(data.draw(st.lists(st.integers(0, 1), max_size=3)))
        self.known.append(tokens)
        while len(lease.table) * self.books.block_size < len(tokens):
            lease.table.append(self.books.next_block)
            self.hold([self.books.next_block])
            lease.held.add(self.books.next_block)
            self.books.next_block += 1
        self.insert(lease, tokens)

    def insert(self, lease, tokens):
        inserted = self.books.insert(tokens, lease.table, lease.namespace)
        num_new, path = self.naive.insert(lease.namespace, tokens, lease.table, self.books.rank)
        assert inserted.num_tokens == num_new
        others = set()
        if inserted.path is not None:
            others = (set(inserted.path.blocks.tolist()) | inserted.path.overridden) - lease.held
            assert others == path - lease.held
        self.hold(others)
        lease.held |= others
        lease.tokens = tokens

    @rule(data=st.data(), namespace=st.sampled_from("ab"), limit=st.integers(0, 9), keep=st.booleans())
    def look_up(self, data, namespace, limit, keep):
        books, tokens = self.books, self.draw_tokens(data)
        found = books.found(tokens, namespace)
        books.rank += 1
        match = books.index.match(namespace, as_array(tokens).tobytes(), limit, Moment(books.rank))
        hit = self.naive.match(namespace, tokens, limit, books.rank)
        assert (match.num_tokens, match.blocks.tolist(), set(match.overridden)) == hit
        assert match.num_tokens == min(found, limit)
        if keep:
            lease = Holder(namespace, (), [])
            lease.held = {*match.blocks.tolist(), *match.overridden}
            self.leases.append(lease)
            self.hold(lease.held)

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def release(self, data, lease=None):
        lease = lease or data.draw(st.sampled_from(self.leases))
        self.leases.remove(lease)
        for block in lease.held:
            self.books.counts.holds[block] -= 1
        freed = [b for b in lease.held if not self.books.counts.holds[b] and self.books.counts.owners.get(b)]
        self.books.index.wake(np.array(freed, np.intp))

    @precondition(lambda self: self.books.counts.owned() - self.books.counts.held())
    @rule(data=st.data())
    def evict(self, data):
        held = self.books.counts.held()
        num_blocks = data.draw(st.integers(1, len(self.books.counts.owned() - held)))
        tokens = self.books.index.num_tokens
        num_freed, num_lost = self.books.index.evict(num_blocks)
        assert num_freed == self.naive.evict(num_blocks, held)
        assert num_freed >= num_blocks
        assert num_lost == tokens - self.books.index.num_tokens

    @precondition(lambda self: self.books.index.num_tokens > 40)
    @rule(namespace=st.sampled_from("ab"))
    def clear(self, namespace):
        held = self.books.counts.held()
        assert self.books.index.clear(namespace)[0] == self.naive.clear(namespace, held)
        assert not {b for node in self.naive.nodes(namespace) for b in node.entries.values()} - held

    @invariant()
    def agrees(self):
        if not hasattr(self, "books"):
            return
        self.books.check()
        assert self.books.counts.owned() == self.naive.owned()
        assert self.books.index.num_tokens == self.naive.num_tokens()
        for namespace in "ab":
            assert self.books.index.num_tokens_in(namespace) == self.naive.num_tokens(namespace)
        assert self.books.index.num_nodes == len(self.naive.nodes())
        num_leaves = sum(not node.children for node in self.naive.nodes())
        bound = 4 * num_leaves + self.books.index.num_tokens // self.books.block_size
        assert self.books.index.num_nodes <= bound


TestIndexMachine = IndexMachine.TestCase
TestIndexMachine.settings = settings(max_examples=200, stateful_step_count=40, deadline=None)
