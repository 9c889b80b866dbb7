from __future__ import annotations

from itertools import combinations, pairwise

from hypothesis import given
from hypothesis import strategies as st

from ostinato.reuse.choose import Part, choose

intervals = st.lists(
    st.tuples(st.integers(0, 30), st.integers(1, 15)).map(lambda pair: (pair[0], sum(pair))), max_size=7
)


@given(intervals, st.integers(0, 6))
def test_nothing_covers_more_with_as_few_parts(given_intervals: list[tuple[int, int]], seam: int) -> None:
    parts = choose(given_intervals, seam)
    for part, behind in pairwise(parts):
        assert part.end <= behind.start
    for part in parts:
        start, end = given_intervals[part.index]
        assert start <= part.start < part.end <= end
        assert part.end == end, "only beginnings are cut"
    worth = sum(part.end - part.start for part in parts) - seam * len(parts)
    options = [
        (len(set().union(*(range(*one) for one in chosen))) - seam * len(chosen), -len(chosen))
        for num in range(len(given_intervals) + 1)
        for chosen in combinations(given_intervals, num)
    ]
    assert (worth, -len(parts)) == max(options)


def test_a_gap_is_not_bridged_and_a_bridge_not_taken_twice() -> None:
    assert choose([(0, 50), (60, 90)], 8) == [Part(0, 0, 50), Part(1, 60, 90)]
    assert choose([(0, 50), (40, 90), (45, 55)], 8) == [Part(0, 0, 50), Part(1, 50, 90)]
    assert choose([(0, 50), (50, 100), (0, 99)], 8) == [Part(2, 0, 99)], "a seam for one token"
    assert choose([(0, 8)], 8) == []
    assert choose([], 0) == []
