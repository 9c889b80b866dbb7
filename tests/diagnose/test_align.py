"""Runs of equal tokens: against the longest common subsequence, and on prompts of real size."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from ostinato.diagnose.align import Run, align, elsewhere
from ostinato.types import TokenArray

tokens = st.lists(st.integers(0, 5), max_size=60).map(lambda items: np.array(items, np.int32))


def lcs(a: TokenArray, b: TokenArray) -> int:
    """How many tokens both have in order at most."""
    row = [0] * (len(b) + 1)
    for x in a:
        above = row[:]
        for place, y in enumerate(b, 1):
            row[place] = above[place - 1] + 1 if x == y else max(above[place], row[place - 1])
    return row[-1]


@given(tokens, tokens)
def test_runs_are_equal_ascend_and_begin_with_all_that_is_common(a: TokenArray, b: TokenArray) -> None:
    runs = align(a, b)
    done_a = done_b = 0
    for run in runs:
        assert run.length > 0
        assert run.a >= done_a
        assert run.b >= done_b
        assert np.array_equal(a[run.a : run.a_end], b[run.b : run.b_end])
        done_a, done_b = run.a_end, run.b_end
    common = next((n for n, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    assert (runs[0].length if runs and runs[0].a == runs[0].b == 0 else 0) >= common
    assert sum(run.length for run in runs) <= lcs(a, b)


@given(st.lists(st.integers(0, 3), min_size=20, max_size=80), st.integers(0, 60), st.integers(0, 8))
def test_what_was_put_in_is_all_that_is_missing(items: list[int], place: int, count: int) -> None:
    a = np.array(items, np.int32)
    at = min(place, len(a))
    b = np.concatenate([a[:at], np.full(count, 9, np.int32), a[at:]])
    assert sum(run.length for run in align(a, b)) == len(a)
    assert sum(run.length for run in align(b, a)) == len(a)


def test_every_later_resynchronisation_is_found_in_long_prompts() -> None:
    rng = np.random.default_rng(7)
    parts = [rng.integers(0, 40_000, 5_000).astype(np.int32) for _ in range(6)]
    changed = [rng.integers(0, 40_000, 9).astype(np.int32) for _ in range(10)]
    a = np.concatenate([x for n in range(5) for x in (parts[n], changed[n])] + [parts[5]])
    b = np.concatenate([x for n in range(5) for x in (parts[n], changed[n + 5])] + [parts[5]])
    runs = align(a, b)
    assert [run.length for run in runs] == [5_000] * 6
    assert runs[3] == Run(3 * 5_009, 3 * 5_009, 5_000)


def test_what_moved_is_found_elsewhere() -> None:
    rng = np.random.default_rng(3)
    one, two, three = (rng.integers(0, 40_000, 300).astype(np.int32) for _ in range(3))
    a, b = np.concatenate([one, two, three]), np.concatenate([three, one, two])
    runs = align(a, b)
    assert sum(run.length for run in runs) == 600
    assert elsewhere(a, b, runs, min_tokens=16) == (Run(600, 0, 300),)
    assert elsewhere(a[:5], b, (), min_tokens=16) == ()


def test_a_prompt_that_repeats_itself_is_compared_in_reasonable_work() -> None:
    a = np.zeros(60_000, np.int32)
    b = np.concatenate([np.ones(3, np.int32), a, np.ones(3, np.int32), a])
    assert sum(run.length for run in align(a, b)) >= 60_000
