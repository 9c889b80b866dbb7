"""Which moved tokens are computed again: against plain Python, and for any deviations."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ostinato.errors import ParameterError
from ostinato.reuse.blend import (
    MOST_REPAIRED,
    Repair,
    choose_repairs,
    parse_repair,
    relative_deviations,
)

RUNS = st.lists(st.tuples(st.integers(1, 5), st.integers(1, 30)), min_size=1, max_size=4)


def spans_of(drawn: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """``[start, end)`` from gaps and lengths."""
    spans, at = [], 0
    for gap, length in drawn:
        spans.append((at + gap, at + gap + length))
        at += gap + length
    return spans


@given(
    RUNS,
    st.one_of(st.none(), st.floats(0, 1)),
    st.integers(0, 8),
    st.floats(0, 2),
    st.integers(0, 2**32 - 1),
)
def test_what_is_left_is_what_is_told(
    drawn: list[tuple[int, int]], share: float | None, first: int, bound: float, seed: int
) -> None:
    spans = spans_of(drawn)
    moved = [position for start, end in spans for position in range(start, end)]
    deviations = np.random.default_rng(seed).exponential(0.1, len(moved)).astype(np.float32)
    chosen = choose_repairs(spans, deviations, Repair(share, first, bound))
    again = set(chosen.positions.tolist())
    assert chosen.positions.tolist() == sorted(again)
    assert again <= set(moved)
    assert {start + i for start, end in spans for i in range(min(first, end - start))} <= again
    left = sum(float(d) for position, d in zip(moved, deviations, strict=True) if position not in again)
    assert chosen.deviation == pytest.approx(math.sqrt(left / len(moved)), rel=1e-3, abs=1e-3)
    others = [p for p in moved if p not in again]
    worth = dict(zip(moved, deviations.tolist(), strict=True))
    free = [p for p in again if not any(start <= p < start + first for start, _ in spans)]
    if free and others:
        assert min(worth[p] for p in free) >= max(worth[p] for p in others), "not the worst ones"
    if share is not None:
        assert len(again) >= round(share * len(moved))
    elif len(again) < int(MOST_REPAIRED * len(moved)):
        assert chosen.deviation <= bound * (1 + 1e-3) + 1e-6
        # And with one fewer it would not be: nothing is repaired that need not be.
        if free:
            assert math.sqrt((left + min(worth[p] for p in free)) / len(moved)) >= bound * (1 - 1e-3) - 1e-6


def test_ends_of_the_scale() -> None:
    spans = [(3, 10), (20, 22)]
    assert choose_repairs(spans, None, Repair(0.0, 0, math.inf)).positions.tolist() == []
    assert choose_repairs(spans, None, Repair(0.0, 2, math.inf)).positions.tolist() == [3, 4, 20, 21]
    assert choose_repairs(spans, None, Repair(0.0, 0, math.inf, 1)).positions.tolist() == [21]
    assert choose_repairs(spans, None, Repair(0.0, 0, math.inf, 5)).positions.tolist() == [20, 21]
    whole = choose_repairs(spans, None, Repair(1.0, 0, math.inf))
    assert whole.positions.tolist() == [*range(3, 10), 20, 21]
    assert whole.deviation == 0.0
    nothing = choose_repairs(spans, np.zeros(9, np.float32), Repair())
    assert (nothing.positions.tolist(), nothing.deviation) == ([], 0.0)


def test_deviations_are_relative_to_a_mean_row() -> None:
    ones = np.ones(3, np.float32)
    told = relative_deviations(np.array([0, 2, 8], np.float32), 4 * ones, 2 * ones, 4 * ones)
    assert told.tolist() == [0.5, 1.0, 2.5]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("adaptive", Repair(None, 0, Repair().max_deviation, 32)),
        ("none", Repair(0.0, 0, math.inf)),
        ("15%", Repair(0.15, 0, math.inf)),
        ("first:16", Repair(0.0, 16, math.inf)),
        ("7.5%+first:8", Repair(0.075, 8, math.inf)),
        ("none+last:3", Repair(0.0, 0, math.inf, 3)),
        ("adaptive+first:4+last:0", Repair(None, 4, Repair().max_deviation, 0)),
    ],
)
def test_repairs_are_read(text: str, expected: Repair) -> None:
    assert parse_repair(text) == expected
    assert parse_repair(text, 0.5).max_deviation == 0.5


@pytest.mark.parametrize("text", ["", "15", "101%", "first", "first:", "all", "-5%", "15%+", "15%;none"])
def test_others_are_refused(text: str) -> None:
    with pytest.raises(ParameterError):
        parse_repair(text)
