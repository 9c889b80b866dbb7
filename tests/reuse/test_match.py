"""Runs that are found, against every common run that there is."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from ostinato.reuse.match import GUARANTEED_TOKENS, SHORT_GRAM, Found, RunIndex
from ostinato.types import TokenArray

SPACE, OTHER = "b3:one", "b3:two"


def draw(seed: int, num_tokens: int, most: int = 40_000) -> TokenArray:
    return np.random.default_rng(seed).integers(0, most, num_tokens, dtype=np.int32)


def join(*parts: TokenArray) -> TokenArray:
    return np.concatenate(parts)


def filled(*sequences: TokenArray, max_tokens: int = 100_000) -> RunIndex:
    index = RunIndex(max_tokens)
    for sequence in sequences:
        index.add(SPACE, sequence)
    index.check_integrity()
    return index


def spans(found: tuple[Found, ...]) -> list[tuple[int, int, int]]:
    return [(run.source_start, run.target_start, run.length) for run in found]


A, B, C, D = draw(1, 200), draw(2, 120), draw(3, 90), draw(4, 31)


# ---------------------------------------------------------------- where runs stand


def test_a_run_at_the_start_in_the_middle_and_at_the_end() -> None:
    index = filled(join(A, B, C))
    assert spans(index.find(SPACE, join(B, C))) == [(200, 0, 210)]
    assert spans(index.find(SPACE, join(draw(9, 20), B, draw(8, 7)))) == [(200, 20, 120)]
    assert spans(index.find(SPACE, join(draw(9, 20), C))) == [(320, 20, 90)]
    assert spans(index.find(SPACE, join(draw(9, 20), A))) == [(0, 20, 200)]
    (run,) = index.find(SPACE, join(draw(9, 20), B))
    assert np.array_equal(run.source, join(A, B))
    assert (run.source_end, run.target_end, run.distance) == (320, 140, -180)


def test_several_runs_of_several_sequences_in_any_order_and_again() -> None:
    index = filled(join(draw(5, 30), A), join(draw(6, 50), B), join(draw(7, 11), C, draw(8, 40)))
    assert spans(index.find(SPACE, join(C, A, draw(9, 3), B, C))) == [
        (11, 0, 90),
        (30, 90, 200),
        (50, 293, 120),
        (11, 413, 90),
    ]


def test_an_edit_in_the_middle_leaves_a_run_on_both_sides() -> None:
    index = filled(join(A, B, C))
    longer, as_long = draw(9, 130), draw(9, 120)
    assert spans(index.find(SPACE, join(A, longer, C), start=200)) == [(320, 330, 90)]
    assert spans(index.find(SPACE, join(A, as_long, C), start=0)) == [(0, 0, 200), (320, 320, 90)]
    assert spans(index.find(SPACE, join(A[:199], C), start=199)) == [(320, 199, 90)]


def test_a_run_goes_on_over_the_turns_in_which_it_was_stored_and_along_one_branch() -> None:
    index = filled(A, join(A, B), join(A, B, C), join(A, B, draw(5, 90)), join(A, draw(6, 90)))
    assert index.num_tokens == 590
    assert spans(index.find(SPACE, join(draw(9, 40), A, B, C))) == [(0, 40, 410)]
    assert spans(index.find(SPACE, join(draw(9, 40), A[100:], draw(6, 90)))) == [(100, 40, 190)]


def test_only_the_part_that_is_asked_for() -> None:
    index = filled(join(A, B))
    prompt = join(draw(9, 10), A, B)
    assert spans(index.find(SPACE, prompt, start=50, end=329)) == [(40, 50, 279)]
    assert spans(index.find(SPACE, prompt, start=299)) == [(289, 299, 31)]
    assert index.find(SPACE, prompt, start=300) == ()
    assert index.find(SPACE, prompt, min_tokens=321) == ()
    assert index.find(SPACE, prompt[:0]) == index.find(OTHER, prompt) == ()


def test_what_is_inside_a_longer_run_is_not_used() -> None:
    """Of two that overlap, the parts that cover the most; of equal ones, few."""
    index = filled(join(draw(5, 9), A, B), join(draw(6, 9), B, C), join(draw(7, 9), A, B, C[:50]), B)
    assert spans(index.find(SPACE, join(draw(9, 5), A, B, C))) == [(9, 5, 370), (179, 375, 40)]
    assert spans(index.find(SPACE, join(draw(9, 5), A, B, C), seam_tokens=60)) == [(9, 5, 370)]


@pytest.mark.parametrize("length", range(SHORT_GRAM, GUARANTEED_TOKENS))
@pytest.mark.parametrize("start", [5, 16, 21])
def test_a_short_unit_is_found(length: int, start: int) -> None:
    unit = draw(9, length)
    for sequence, span in (
        (unit, (0, length)),
        (join(draw(5, start), unit), (start, start + length)),
        (join(draw(5, start), unit, draw(6, 50)), (start, start + length)),
    ):
        index = RunIndex(1_000)
        index.add(SPACE, sequence, [span, span])
        index.check_integrity()
        prompt = join(draw(7, 33), unit, draw(8, 20))
        assert spans(index.find(SPACE, prompt, min_tokens=length, seam_tokens=0)) == [(span[0], 33, length)]
        index.clear(SPACE)
        index.check_integrity()
        assert index._table.count() == 0


def test_namespaces_do_not_know_each_other() -> None:
    index = filled(join(A, B))
    assert index.find(OTHER, join(draw(9, 5), B)) == ()
    index.add(OTHER, join(C, A))
    assert spans(index.find(OTHER, join(A, B))) == [(90, 0, 200)]
    index.clear(SPACE)
    assert index.find(SPACE, join(draw(9, 5), B)) == ()
    assert spans(index.find(OTHER, join(A, B))) == [(90, 0, 200)]


# ---------------------------------------------------------------- what goes


def test_what_is_forgotten_is_not_found_and_what_stands_before_it_is() -> None:
    index = filled(join(A, B, C), join(A, B, D))
    assert index.forget(SPACE, join(A, B, C), 250) == 70 + 90 + 31
    index.check_integrity()
    assert spans(index.find(SPACE, join(draw(9, 5), A, B, C))) == [(0, 5, 250)]
    assert index.forget(SPACE, join(A, B), 250) == 0, "it is not here"
    assert index.forget(SPACE, A, 200) == 0, "all of it is kept"
    assert index.forget(SPACE, join(A, B), 0) == 250
    assert index.num_tokens == index.num_pieces == index._table.count() == 0
    assert index._trees == {}


def test_one_offs_go_before_what_came_back() -> None:
    index = RunIndex(1_000)
    hot = draw(5, 300)
    index.add(SPACE, hot)
    (run,) = index.find(SPACE, join(draw(9, 5), hot))
    index.note_use(SPACE, run)
    for seed in range(20):
        index.add(SPACE, draw(100 + seed, 300))
        index.check_integrity()
    assert spans(index.find(SPACE, join(draw(9, 5), hot))) == [(0, 5, 300)]
    assert index.find(SPACE, draw(117, 300)) == ()
    assert spans(index.find(SPACE, draw(119, 300))) == [(0, 0, 300)]
    for seed in range(20):  # and what came back since goes before what never did no more
        for _ in range(2):
            index.add(SPACE, draw(200 + seed, 300))
            index.check_integrity()
    assert index.find(SPACE, join(draw(9, 5), hot)) == ()


def test_what_is_larger_than_all_there_is_room_for_is_stored_in_part() -> None:
    index = filled(A, draw(5, 5_000), max_tokens=1_000)
    assert index.num_tokens == 1_000
    assert spans(index.find(SPACE, draw(5, 5_000)[7:])) == [(7, 0, 993)]
    assert index.add(SPACE, B) == 120
    assert spans(index.find(SPACE, B)) == [(0, 0, 120)]


def test_very_many_short_texts_take_bounded_room() -> None:
    """A piece is dear beside a token: of such texts fewer are kept than there is room for tokens."""
    index = RunIndex(10_000)
    for token in range(3_000):
        index.add(f"b3:{token % 7}", _array([token, *([1] * (token % 3))]))
    index.check_integrity()
    assert index.num_pieces <= 10_000 // 64 + 64
    assert len(index._pieces) <= index.num_pieces + 2
    for length in range(1, 2_000):  # and of one text that is cut everywhere
        index.add(OTHER, np.arange(2_000, dtype=np.int32)[: 2_000 - length])
    index.check_integrity()
    assert index.num_pieces <= 10_000 // 64 + 64
    with pytest.raises(AssertionError, match="int32"):
        index.add(SPACE, A.astype(np.int64))


def test_a_use_of_what_has_gone_is_nothing() -> None:
    index = filled(join(A, B))
    (run,) = index.find(SPACE, join(draw(9, 5), B))
    index.forget(SPACE, join(A, B), 210)
    index.note_use(SPACE, run)
    index.check_integrity()
    index.clear(SPACE)
    index.note_use(SPACE, run)
    assert np.array_equal(run.source, join(A, B)), "what was found stays what it was"


# ---------------------------------------------------------------- hostile texts


@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=4),
    st.lists(st.integers(1, 9), min_size=1, max_size=4),
    st.integers(1, 900),
    st.integers(1, 900),
)
@settings(max_examples=60, deadline=None)
def test_periodic_texts_are_found_and_nothing_unequal(
    stored: list[int], asked: list[int], num_stored: int, num_asked: int
) -> None:
    text = np.resize(np.array(stored, np.int32), num_stored)
    prompt = np.resize(np.array(asked, np.int32), num_asked)
    index = filled(join(draw(5, 20), text), text)
    check_equal_and_apart(prompt, index.find(SPACE, prompt))
    if stored == asked and min(num_stored, num_asked) >= GUARANTEED_TOKENS:
        longest = max((run.length for run in index.find(SPACE, prompt)), default=0)
        assert longest > min(num_stored, num_asked) - GUARANTEED_TOKENS


def test_a_token_again_and_again_takes_no_more_room_than_any_text() -> None:
    index = RunIndex(1_000_000)
    for token in range(20):
        index.add(SPACE, np.full(40_000, token, np.int32))
    index.check_integrity()
    assert index._table.count() <= 20 * 8
    prompt = np.full(8_000, 3, np.int32)
    assert spans(index.find(SPACE, prompt))[0][1:] == (0, 8_000)


def test_a_text_with_very_many_copies_does_not_keep_out_the_others() -> None:
    """Of each way in which 16 places fall on it there are eight copies: 128 proposals, all for the same."""
    text, index = draw(5, 1_000), RunIndex(500_000)
    for seed in range(300):
        index.add(SPACE, join(draw(1_000 + seed, 20 + seed % 16), text, draw(2_000 + seed, 5)))
    documents = [draw(60 + i, 100) for i in range(30)]
    for i, document in enumerate(documents):
        index.add(SPACE, join(draw(3_000 + i, 50), document))
    found = index.find(SPACE, join(draw(9, 7), text, *documents[::-1]))
    assert [(run.target_start, run.length) for run in found] == [
        (7, 1_000),
        *((1_007 + 100 * i, 100) for i in range(30)),
    ]


def test_texts_that_differ_at_every_thirtieth_token_give_nothing() -> None:
    text = draw(5, 6_000)
    other = text.copy()
    other[::30] += 1
    index = filled(text)
    assert index.find(SPACE, other) == ()
    check_equal_and_apart(other, index.find(SPACE, other, min_tokens=16, seam_tokens=0))


# ---------------------------------------------------------------- against all there is


def check_equal_and_apart(prompt: TokenArray, found: tuple[Found, ...]) -> None:
    behind = 0
    for run in found:
        assert run.length > 0
        assert run.target_start >= behind
        behind = run.target_end
        assert len(run.source) == run.source_end
        assert np.array_equal(run.source[run.source_start :], prompt[run.target_start : behind])
    assert behind <= len(prompt)


def covered(prompt: list[int], sequences: list[list[int]], min_tokens: int) -> set[int]:
    """Tokens of the prompt that are in a run of so many that some sequence has, by brute force."""
    known = {tuple(s[at : at + min_tokens]) for s in sequences for at in range(len(s) - min_tokens + 1)}
    return {
        token
        for at in range(len(prompt) - min_tokens + 1)
        if tuple(prompt[at : at + min_tokens]) in known
        for token in range(at, at + min_tokens)
    }


@dataclass
class Naive:
    """Stored sequences as they are; nothing is ever given up."""

    sequences: list[list[int]] = field(default_factory=list)

    def forget(self, tokens: list[int], keep: int) -> None:
        gone = tokens[: keep + 1]
        self.sequences = [s[:keep] if s[: keep + 1] == gone else s for s in self.sequences]

    def has_prefix(self, tokens: list[int]) -> bool:
        return any(s[: len(tokens)] == tokens for s in self.sequences)


Text = tuple[list[int], list[list[int]], list[int]]  # a head, paragraphs, a tail
PARAGRAPHS = [draw(50 + i, length).tolist() for i, length in enumerate((12, 20, 31, 33, 40, 64, 90))]
texts = st.lists(st.sampled_from(PARAGRAPHS), max_size=4, unique_by=id).flatmap(
    lambda parts: st.tuples(
        st.lists(st.integers(0, 3), max_size=5), st.just(parts), st.lists(st.integers(0, 3), max_size=5)
    )
)


class MatchMachine(RuleBasedStateMachine):
    """Texts of a few paragraphs behind each other: too few copies of any for a bound to matter."""

    @initialize()
    def start(self) -> None:
        self.index = RunIndex(20_000, seed=3)
        self.naive = {SPACE: Naive(), OTHER: Naive()}
        self.num_stored = 0

    @precondition(lambda self: self.num_stored < 7)
    @rule(space=st.sampled_from([SPACE, OTHER]), text=texts, data=st.data())
    def add(
        self, space: str, text: tuple[list[int], list[list[int]], list[int]], data: st.DataObject
    ) -> None:
        tokens = _flat(text)
        cuts = sorted(data.draw(st.sets(st.integers(0, len(tokens)), max_size=3)) | {len(tokens)})
        self.num_stored += 1
        for cut in cuts:  # as a sequence grows
            before = self.index.num_tokens
            num_new = self.index.add(space, _array(tokens[:cut]))
            assert self.index.num_tokens == before + num_new
            assert self.index.add(space, _array(tokens[:cut])) == 0
        self.naive[space].sequences.append(tokens)

    @rule(space=st.sampled_from([SPACE, OTHER]), data=st.data())
    def forget(self, space: str, data: st.DataObject) -> None:
        naive = self.naive[space]
        if naive.sequences:
            tokens = data.draw(st.sampled_from(naive.sequences))
            keep = data.draw(st.integers(0, len(tokens)))
            self.index.forget(space, _array(tokens), keep)
            naive.forget(tokens, keep)

    @rule(space=st.sampled_from([SPACE, OTHER]), text=texts, is_used=st.booleans(), seam=st.integers(0, 9))
    def find(self, space: str, text: Text, is_used: bool, seam: int) -> None:
        tokens, naive = _flat(text), self.naive[space]
        prompt = _array(tokens)
        for run in self.index.find(space, prompt, seam_tokens=seam):
            if is_used:
                self.index.note_use(space, run)
        found = self.index.find(space, prompt, seam_tokens=0)
        check_equal_and_apart(prompt, found)
        for before, run in zip((None, *found), found, strict=False):
            source = run.source.tolist()
            assert naive.has_prefix(source), "it is not stored"
            if run.target_end < len(tokens):
                assert not naive.has_prefix([*source, tokens[run.target_end]]), "it goes on"
            if (
                run.source_start
                and run.target_start
                and (before is None or before.target_end < run.target_start)
            ):
                assert source[run.source_start - 1] != tokens[run.target_start - 1], "it begins before"
        tokens_found = {token for run in found for token in range(run.target_start, run.target_end)}
        assert tokens_found >= covered(tokens, naive.sequences, GUARANTEED_TOKENS)

    @invariant()
    def all_is_well(self) -> None:
        if hasattr(self, "index"):
            self.index.check_integrity()


def _flat(text: Text) -> list[int]:
    head, parts, tail = text
    return [*head, *(token for part in parts for token in part), *tail]


def _array(tokens: list[int]) -> TokenArray:
    return np.array(tokens, np.int32)


TestMatchMachine = MatchMachine.TestCase
TestMatchMachine.settings = settings(max_examples=80, stateful_step_count=25, deadline=None)


class FullMachine(RuleBasedStateMachine):
    """A small index over few kinds of tokens, where everything is repeated and all have to give way."""

    def __init__(self) -> None:
        super().__init__()
        self.index = RunIndex(160)
        self.stored: list[tuple[str, list[int]]] = []

    @rule(
        space=st.sampled_from([SPACE, OTHER]),
        tokens=st.lists(st.integers(0, 1), max_size=90),
        units=st.lists(st.tuples(st.integers(0, 90), st.integers(0, 90)), max_size=12),
    )
    def add(self, space: str, tokens: list[int], units: list[tuple[int, int]]) -> None:
        inside = [(a, b) for a, b in units if a <= b <= len(tokens)]
        self.index.add(space, _array(tokens), inside)
        self.stored.append((space, tokens))

    @rule(space=st.sampled_from([SPACE, OTHER]), tokens=st.lists(st.integers(0, 1), min_size=8, max_size=90))
    def find(self, space: str, tokens: list[int]) -> None:
        found = self.index.find(space, _array(tokens), min_tokens=8, seam_tokens=0)
        check_equal_and_apart(_array(tokens), found)
        for run in found:
            source = run.source.tolist()
            assert any(name == space and s[: len(source)] == source for name, s in self.stored)
            self.index.note_use(space, run)

    @rule(data=st.data())
    def forget(self, data: st.DataObject) -> None:
        if self.stored:
            space, tokens = data.draw(st.sampled_from(self.stored))
            self.index.forget(space, _array(tokens), data.draw(st.integers(0, len(tokens))))

    @invariant()
    def all_is_well(self) -> None:
        self.index.check_integrity()


TestFullMachine = FullMachine.TestCase
TestFullMachine.settings = settings(max_examples=80, stateful_step_count=30, deadline=None)
