"""What is learned of entries and spaces: bounds, tightening, the switch."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ostinato.responses.learning import (
    EntryRecord,
    SpaceRecord,
    lower_bound,
    read_entry,
    read_space,
    upper_bound,
    write,
)

BUDGET = 0.01


@given(st.integers(0, 500), st.integers(1, 500))
def test_bounds_enclose_what_was_seen(num_wrong: int, num: int) -> None:
    num_wrong = min(num_wrong, num)
    low, high = lower_bound(num_wrong, num), upper_bound(num_wrong, num)
    assert -1e-9 <= low <= num_wrong / num + 1e-9
    assert num_wrong / num - 1e-9 <= high <= 1 + 1e-9


def test_a_space_that_is_bad_is_switched_off_and_a_good_one_is_not() -> None:
    chance = Random(1)
    bad, good = SpaceRecord(), SpaceRecord()
    for _ in range(400):
        bad = bad.told(chance.random() > 0.2, BUDGET)
        good = good.told(chance.random() > 0.002, BUDGET)
    assert bad.is_off
    assert not good.is_off
    assert bad.stricter > 0


def test_one_wrong_answer_does_not_switch_off_but_tightens() -> None:
    record = SpaceRecord().told(False, BUDGET)
    assert not record.is_off
    assert record.stricter > 0
    assert record.told(True, BUDGET).stricter == record.stricter  # nothing is relaxed by itself


@pytest.mark.parametrize("error", [0.0, 0.05, 0.5])
def test_an_entry_is_asked_about_as_often_as_its_record_asks_for(error: float) -> None:
    """vCache's bound: served wrongly no more often than the budget, once the record is there."""
    chance = Random(2)
    record = EntryRecord()
    wrong = served = 0
    for _ in range(4000):
        is_right = chance.random() >= error
        if chance.random() < record.chance_to_ask(BUDGET):
            record = record.told(is_right, -1.0)
        else:
            served += 1
            wrong += not is_right
            if chance.random() < 0.05:  # a check beside it
                record = record.told(is_right, -1.0)
    if error == 0:
        assert served == 4000
    else:
        assert wrong / 4000 < BUDGET * 2 + 0.02  # the first ones were not known to be wrong


def test_after_a_wrong_answer_only_what_is_surer_is_served() -> None:
    record = EntryRecord().told(False, 1.2)
    assert record.stricter > 1.2
    assert record.told(True, 3).stricter == record.stricter


def test_records_survive_being_written_and_damage_is_a_fresh_one() -> None:
    entry, space = EntryRecord(1, 2, 3, 0.5), SpaceRecord(9, 1, 1.5, True)
    assert read_entry(write(entry)) == entry
    assert read_space(write(space)) == space
    for damaged in (b"", b"{", b"[1]", b'["x",1,2,3]', b"null"):
        assert read_entry(damaged) == EntryRecord()
        assert read_space(damaged) == SpaceRecord()
