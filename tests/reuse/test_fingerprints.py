from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from ostinato.reuse.fingerprints import MAX_ALIKE, FingerprintTable, gram_hashes


@given(st.lists(st.integers(0, 2), max_size=40), st.sampled_from([1, 2, 4, 8, 16]), st.integers(0, 2**70))
def test_equal_grams_and_only_those_have_equal_fingerprints(tokens: list[int], size: int, seed: int) -> None:
    hashes = gram_hashes(np.array(tokens, np.int32), size, seed).tolist()
    grams = [tuple(tokens[at : at + size]) for at in range(len(tokens) - size + 1)]
    assert len(hashes) == len(grams)
    assert len(set(zip(grams, hashes, strict=True))) == len(set(grams)) == len(set(hashes))
    assert 0 not in hashes


def test_fingerprints_differ_by_seed_and_by_size() -> None:
    tokens = np.arange(2_000, dtype=np.int32)
    kinds = [set(gram_hashes(tokens, size, seed).tolist()) for size in (8, 16) for seed in (0, 1, -1)]
    for i, kind in enumerate(kinds):
        assert len(kind) == len(tokens) - (7 if i < 3 else 15)
        assert all(kind.isdisjoint(other) for other in kinds[:i])


def test_a_table_keeps_all_that_it_is_made_for() -> None:
    chance = np.random.default_rng(0)
    hashes = chance.integers(1, 2**64, 100_000, dtype=np.uint64)
    places = np.arange(len(hashes), dtype=np.uint64)
    table = FingerprintTable(len(hashes))
    for start in range(0, len(hashes), 500):
        table.insert(hashes[start : start + 500], places[start : start + 500])
    assert table.count() == len(hashes)
    index, found = table.look_up(hashes)
    assert np.array_equal(np.sort(index), np.sort(found.astype(np.intp)))
    assert np.array_equal(hashes[found.astype(np.intp)], hashes[index])
    table.remove(hashes[::2], places[::2])
    assert table.count() == len(hashes) // 2
    assert len(table.look_up(hashes[::2])[0]) == 0
    assert len(table.look_up(hashes[1::2])[0]) == len(hashes) // 2
    assert table.size_bytes <= 27 * len(hashes)


@pytest.mark.parametrize("at_once", [True, False])
def test_many_of_one_fingerprint_take_a_bounded_place(at_once: bool) -> None:
    table = FingerprintTable(1_000)
    others = np.arange(1, 500, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    table.insert(others, others)
    same = np.full(10_000, 0x9216D5D98979FB1B, np.uint64)
    places = np.arange(len(same), dtype=np.uint64)
    if at_once:
        table.insert(same, places)
    else:
        for at in range(len(same)):
            table.insert(same[at : at + 1], places[at : at + 1])
    found = table.look_up(same[:1])[1]
    assert len(found) == len(set(found.tolist())) == MAX_ALIKE
    assert found.min() >= len(same) - MAX_ALIKE, "old ones stayed, of all the same"
    assert len(table.look_up(others)[0]) == len(others)


class TableMachine(RuleBasedStateMachine):
    """Few fingerprints, never more of one than may be: then the table is a set of pairs."""

    def __init__(self) -> None:
        super().__init__()
        self.table = FingerprintTable(200)
        self.pairs: set[tuple[int, int]] = set()

    @rule(entries=st.sets(st.tuples(st.integers(1, 12), st.integers(0, MAX_ALIKE - 1)), max_size=20))
    def insert(self, entries: set[tuple[int, int]]) -> None:
        fresh = sorted(entries - self.pairs)
        self.table.insert(_hashes(fresh), np.array([place for _, place in fresh], np.uint64))
        self.pairs.update(fresh)

    @rule(entries=st.sets(st.tuples(st.integers(1, 12), st.integers(0, MAX_ALIKE - 1)), max_size=20))
    def remove(self, entries: set[tuple[int, int]]) -> None:
        gone = sorted(entries)
        self.table.remove(_hashes(gone), np.array([place for _, place in gone], np.uint64))
        self.pairs -= entries

    @invariant()
    def it_is_a_set(self) -> None:
        names = list(range(1, 13))
        index, places = self.table.look_up(_hashes([(name, 0) for name in names]))
        assert len(index) == len(self.pairs) == self.table.count()
        assert {(names[i], int(p)) for i, p in zip(index, places, strict=True)} == self.pairs


def _hashes(pairs: list[tuple[int, int]]) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
    return np.array([name * 0xD6E8FEB86659FD93 % 2**64 for name, _ in pairs], np.uint64)


TestTableMachine = TableMachine.TestCase
TestTableMachine.settings = settings(max_examples=50, stateful_step_count=30, deadline=None)
