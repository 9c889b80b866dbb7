"""The index of near vectors against comparing all of them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ostinato.responses.embed.base import normalized
from ostinato.responses.nearby import Nearby


def vectors(num: int, seed: int = 0, dims: int = 32) -> np.ndarray:
    return normalized(np.random.default_rng(seed).normal(size=(num, dims)))


def key(seq: int) -> bytes:
    return seq.to_bytes(32, "big")


def filled(num: int, exact_up_to: int) -> tuple[Nearby, np.ndarray]:
    index, rows = Nearby(exact_up_to), vectors(num)
    for at in range(0, num, 7):  # some at a time, as they come
        seqs = range(at + 1, min(at + 7, num) + 1)
        index.add(list(seqs), [key(seq) for seq in seqs], rows[at : at + 7])
    return index, rows


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(1, 60)), max_size=80), st.integers(0, 10**6))
def test_it_finds_what_comparing_all_finds(steps: list[tuple[bool, int]], seed: int) -> None:
    rows, index, kept = vectors(100, seed, 8), Nearby(exact_up_to=1000), dict[int, np.ndarray]()
    last = 0
    for is_new, seq in steps:
        if is_new:
            last += 1
            index.add([last], [key(last)], rows[last - 1 : last])
            kept[last] = rows[last - 1]
        else:
            index.drop([seq])
            kept.pop(seq, None)
        asked = rows[-1]
        expected = sorted(kept, key=lambda at: -float(kept[at] @ asked))[:3]
        found = index.search(asked, 3)
        assert len(index) == len(kept)
        assert [at for at, _, _ in found if float(kept[at] @ asked) > 0] == [
            at for at in expected if float(kept[at] @ asked) > 0
        ]
        assert all(name == key(at) for at, name, _ in found)


def test_the_graph_finds_nearly_all_and_tells_true_similarities() -> None:
    index, rows = filled(1500, exact_up_to=500)
    hits = 0
    for vector in vectors(100, seed=1):
        found = index.search(vector, 5)
        best = int(np.argmax(rows @ vector)) + 1
        hits += found[0][0] == best
        for seq, _, similarity in found:
            assert similarity == pytest.approx(float(rows[seq - 1] @ vector), abs=1e-5)
    assert hits >= 95
    seq = index.search(rows[10], 1)[0][0]
    index.drop([seq])
    assert seq not in [found[0] for found in index.search(rows[10], 5)]


def test_a_graph_comes_back_from_its_file(tmp_path: Path) -> None:
    index, rows = filled(600, exact_up_to=100)
    index.drop([3, 4])
    path = tmp_path / "a.index"
    index.save(path)
    again = Nearby.load(path, exact_up_to=100)
    assert again is not None
    assert (len(again), again.last_seq, again.last_key) == (598, 600, key(600))
    for vector in rows[:50]:
        assert [hit[0] for hit in again.search(vector, 1)] == [hit[0] for hit in index.search(vector, 1)]
    again.add([601], [key(601)], rows[:1])
    assert again.search(rows[0], 2)[1][0] in (1, 601)


@pytest.mark.parametrize("cut", [0, 3, 10, 200, 5000, -1])
def test_a_damaged_file_is_no_file(tmp_path: Path, cut: int) -> None:
    index, _ = filled(300, exact_up_to=100)
    path = tmp_path / "a.index"
    index.save(path)
    data = path.read_bytes()
    path.write_bytes(data[:cut])
    assert Nearby.load(path) is None
    assert Nearby.load(tmp_path / "missing") is None


def test_a_small_index_is_not_written_down(tmp_path: Path) -> None:
    index, _ = filled(50, exact_up_to=100)
    index.save(tmp_path / "a.index")
    assert not (tmp_path / "a.index").exists()
