"""The choice of what stays: never more than the budget, protected never dropped, order kept."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ostinato.errors import BudgetTooSmallError, ParameterError
from ostinato.retention.budgets import KVBudget, parse_budget
from ostinato.retention.choice import choose, highest_of, smooth
from ostinato.retention.evidence import Evidence
from ostinato.retention.keeping import Keep, Keeping, first_moved
from ostinato.retention.methods import METHOD_NAMES, Summaries, method_by_name

LAYERS, HEADS = 2, 3


def test_the_best_stay_with_the_protected_among_them() -> None:
    scores = np.array([[[5, 1, 4, 2, 3]]], np.float32)
    protected = np.array([[[False, True, False, False, False]]])
    assert choose(scores, protected, 3).tolist() == [[[0, 1, 2]]]
    assert choose(scores, protected, 1).tolist() == [[[1]]]
    assert choose(scores, protected, 5).tolist() == [[[0, 1, 2, 3, 4]]]


def test_of_equal_scores_the_later_place_stays() -> None:
    assert choose(np.zeros((1, 1, 4), np.float32), np.zeros((1, 1, 4), np.bool_), 2).tolist() == [[[2, 3]]]


def test_preferred_places_get_half_of_what_the_protected_leave() -> None:
    scores = np.arange(10, dtype=np.float32)[None, None]
    protected = np.zeros((1, 1, 10), np.bool_)
    protected[..., 9] = True
    preferred = np.zeros((1, 1, 10), np.bool_)
    preferred[..., :5] = True
    # Of four free places two go to the best of the preferred, two to the best of all others.
    assert choose(scores, protected, 5, preferred).tolist() == [[[3, 4, 7, 8, 9]]]


@given(st.integers(1, 40), st.data())
def test_choose_keeps_its_promises(num_places: int, data: st.DataObject) -> None:
    chance = np.random.default_rng(data.draw(st.integers(0, 10_000)))
    scores = chance.integers(0, 5, (LAYERS, HEADS, num_places)).astype(np.float32)
    num_kept = data.draw(st.integers(0, num_places))
    num_protected = data.draw(st.integers(0, num_kept))
    protected = np.zeros(scores.shape, np.bool_)
    for row in protected.reshape(-1, num_places):
        row[chance.permutation(num_places)[:num_protected]] = True
    preferred = chance.random(scores.shape) < 0.3
    kept = choose(scores, protected, num_kept, preferred if data.draw(st.booleans()) else None)
    assert kept.shape == (LAYERS, HEADS, num_kept)
    assert (np.diff(kept, axis=2) > 0).all()
    is_kept = np.zeros(scores.shape, np.bool_)
    np.put_along_axis(is_kept, kept, True, axis=2)
    assert is_kept[protected].all()


@given(st.lists(st.floats(0, 1, width=32), min_size=1, max_size=30), st.sampled_from([1, 3, 7, 23]))
def test_neighbourhoods_are_what_they_say(values: list[float], width: int) -> None:
    scores, half = np.array(values, np.float32), width // 2
    around = [values[max(0, i - half) : i + half + 1] for i in range(len(values))]
    np.testing.assert_allclose(smooth(scores, width), [np.mean(part) for part in around], atol=1e-6)
    np.testing.assert_array_equal(highest_of(scores, width), np.float32([max(part) for part in around]))


def test_evidence_follows_its_tokens() -> None:
    evidence = Evidence(1, 1, 6)
    evidence.grow(np.arange(4, dtype=np.int32))
    evidence.note(np.array([[[1, 2, 3, 4]]], np.float32), 2)
    evidence.summarise()
    evidence.keep(np.array([[[0, 2, 3]]]))
    evidence.grow(np.array([4, 5], np.int32))
    evidence.note(np.array([[[1, 1, 1, 1, 1]]], np.float32), 1)
    assert evidence.positions.tolist() == [[[0, 2, 3, 4, 5]]]
    assert evidence.total.tolist() == [[[2, 4, 5, 1, 1]]]
    assert evidence.latest.tolist() == [[[1, 1, 1, 1, 1]]]
    np.testing.assert_array_equal(evidence.summaries[0], [[[0.5, 1.5, 2, np.nan, np.nan]]])


def test_faded_neighbourhoods_go_first_and_what_was_read_lately_last() -> None:
    method = replace(Summaries(), width=1, safe_share=0.1)
    evidence = Evidence(1, 1, 10)
    evidence.grow(np.arange(10, dtype=np.int32))
    first = np.ones(10, np.float32)
    first[2] = 100.0  # the top of a stretch; later it is not read at all
    evidence.note(first[None, None], 1)
    evidence.summarise()
    second = np.ones(10, np.float32)
    second[[2, 5]] = 0.0, 0.1  # both have faded
    evidence.note(second[None, None], 1)
    evidence.summarise()
    order = np.argsort(method.scores(evidence)[0, 0], kind="stable").tolist()
    assert order[0] == 5
    assert order[-1] == 2


# ---------------------------------------------------------------- one sequence


def _keep(budget: int, method: str, num_prompt: int, protected: list[int]) -> Keep:
    flags = np.zeros(num_prompt, np.bool_)
    flags[protected] = True
    return Keep(budget, method_by_name(method), flags, np.arange(num_prompt) % 5 == 0)


@settings(deadline=None, max_examples=60)
@given(
    st.sampled_from(METHOD_NAMES), st.integers(24, 200), st.integers(1, 400), st.integers(1, 150), st.data()
)
def test_a_sequence_stays_within_its_budget(
    method: str, budget: int, num_prompt: int, num_new: int, data: st.DataObject
) -> None:
    chance = np.random.default_rng(data.draw(st.integers(0, 10_000)))
    protected = chance.permutation(num_prompt)[: data.draw(st.integers(0, min(num_prompt, budget // 3)))]
    keep = _keep(budget, method, num_prompt, protected.tolist())
    keeping = Keeping(keep, LAYERS, HEADS)
    computed = data.draw(st.integers(0, min(num_prompt - 1, keep.num_usable_hit)))
    keeping.start(computed)
    num_tokens = num_prompt
    while num_tokens < num_prompt + num_new:
        rows = keeping.next_rows(computed, num_tokens, data.draw(st.integers(1, 64)))
        if (room := keeping.room_for(rows)) is not None:
            kept = keeping.choose(room)
            assert first_moved(kept) == next((i for i in range(room) if (kept[:, :, i] != i).any()), room)
            keeping.apply(kept)
        assert keeping.room_for(rows) is None
        assert keeping.num_places + rows.num_rows + len(rows.probe) <= budget
        assert (rows.probe < num_prompt).all()
        assert not len(rows.probe) or rows.probe[0] >= computed + rows.num_rows
        places = keeping.num_places + rows.num_rows + len(rows.probe)
        mass = tuple(chance.random((HEADS, places)).astype(np.float32) for _ in range(LAYERS))
        keeping.note_rows(computed, rows, mass if rows.num_watched else None)
        computed += rows.num_rows
        num_tokens += computed == num_tokens
        positions = keeping.positions
        assert (np.diff(positions, axis=2) > 0).all()
        assert keeping.num_dropped == computed - keeping.num_places
        for row in positions.reshape(-1, keeping.num_places):
            assert set(protected[protected < computed].tolist()) <= set(row.tolist())
            assert row[-1] == computed - 1


def test_protecting_more_than_the_budget_is_an_error_with_both_numbers() -> None:
    with pytest.raises(BudgetTooSmallError, match=r"90 tokens are protected.*budget is 100") as caught:
        _keep(100, "summary", 300, list(range(90)))
    assert (caught.value.num_protected, caught.value.budget_tokens) == (90, 100)


# ---------------------------------------------------------------- budgets


def test_budgets_in_tokens_parts_and_bytes() -> None:
    assert parse_budget(2048) == parse_budget(" 2048 ") == KVBudget(tokens=2048)
    assert parse_budget("50%").in_tokens(3001, 46_080) == 1500
    assert parse_budget("90 MiB").in_tokens(10_000, 46_080) == 2048
    assert parse_budget("50%").in_tokens(10, 46_080) == 128
    assert parse_budget("1.5k").in_tokens(10, 512) == 3


@pytest.mark.parametrize("value", [0, -1, True, 1.5, "0%", "101%", "-5", "", "half", None, "5X", "1e3"])
def test_what_is_no_budget_is_refused(value: object) -> None:
    with pytest.raises(ParameterError) as caught:
        parse_budget(value)
    assert caught.value.param == "kv_budget"


def test_a_method_that_is_not_there_is_named() -> None:
    with pytest.raises(ParameterError, match="no retention method 'lru'; there are window, sinks"):
        method_by_name("lru")
