"""Which way round: from and to, more than, who does what to whom, and the small words that turn a verb."""

from __future__ import annotations

from itertools import pairwise
from typing import Final

from ..compare import Comparison
from ..lexicon import words_in
from ..words import PARTICLES, Sentence, num_of
from .base import Named, Verdict, listed


class DirectionGuard(Named):
    """From A to B, A over B, who does what to whom."""

    name = "direction"

    _OPPOSED: Final = frozenset(
        map(frozenset, (("from", "to"), ("from", "into"), ("into", "out"), ("to", "by")))
    )

    def judge(self, pair: Comparison) -> Verdict:
        one, other = _roles(pair.one.sentence), _roles(pair.other.sentence)
        for stem, role in one.items():
            theirs = other.get(stem)
            if theirs is not None and frozenset((role, theirs)) in self._OPPOSED:
                return self.refuses(f"{role} {stem} / {theirs} {stem}")
        if swap := _swapped(pair):
            return self.refuses(f"{swap[0]} and {swap[1]} have changed places")
        inverted = _inverted_names(pair)
        both_compare = is_comparison(pair.one.sentence) and is_comparison(pair.other.sentence)
        if inverted and both_compare and not pair.opposites():
            return self.refuses(f"{inverted[0]} and {inverted[1]} have changed places")
        if num_inversions(pair):
            return self.doubts("another order")
        return self.passes()


def _roles(sentence: Sentence) -> dict[str, str]:
    """The preposition before each content word or person, looking past small words."""
    found: dict[str, str] = {}
    role = ""
    for word in sentence.words:
        if word.text in ("from", "to", "into", "onto", "out", "by"):
            role = "to" if word.text == "onto" else word.text
        elif word.is_content or word.text in _PERSONS:
            if role:
                found[word.stem] = role
            role = ""
    return found


def _swapped(pair: Comparison) -> tuple[str, str] | None:
    """Two words that have changed places, where all else stands as it stood."""
    one, other = pair.one.sentence, pair.other.sentence
    if len(one.content) != len(other.content) or len(one.content) < 3 or one.frame.asks != other.frame.asks:
        return None
    odd = [at for at, (a, b) in enumerate(zip(one.stems, other.stems, strict=True)) if a != b]
    if len(odd) != 2:
        return None
    first, second = odd
    if one.stems[first] != other.stems[second] or one.stems[second] != other.stems[first]:
        return None
    if any(stem[0].isdigit() or stem in ("first", "last") for stem in (one.stems[first], one.stems[second])):
        return None
    if _is_compound(one, other, first, second) or _is_compound(other, one, first, second):
        return None
    for word in ("by", "of"):  # is killed by, the rate of: the same the other way round
        if (word in one.texts) != (word in other.texts):
            return None
    if _is_list(one, first, second) or _has_topic(one) or _has_topic(other):
        return None
    return one.content[first].text, one.content[second].text


def _between(sentence: Sentence, first: int, second: int) -> list[str]:
    a, b = sentence.content[first], sentence.content[second]
    return [word.text for word in sentence.words if a.end <= word.start and word.end <= b.start]


def _is_compound(one: Sentence, other: Sentence, first: int, second: int) -> bool:
    """Kitchen lights, and lights in the kitchen."""
    return not _between(one, first, second) and bool(
        {"in", "on", "of", "for", "at"} & set(_between(other, first, second))
    )


def _has_topic(sentence: Sentence) -> bool:
    """Whether it begins as in "Python: sort a list"."""
    head, colon, _ = sentence.raw.partition(":")
    return bool(colon) and len(head.split()) <= 3


def _is_list(sentence: Sentence, first: int, second: int) -> bool:
    """Whether the two are joined by "and" or "or", where order means nothing, or compared by "versus"."""
    between = set(_between(sentence, first, second))
    return bool(between & _JOINING) and between <= _JOINING | {"a", "an", "the", "with", "between"}


_JOINING: Final = frozenset({"and", "or", "vs", "versus", "/"})
_AROUND: Final = frozenset({"than", "over", "compare", "versus", "instead"})
_PERSONS: Final = words_in("me him her us them you")


def is_comparison(sentence: Sentence) -> bool:
    return any(word.text in _AROUND for word in sentence.words)


def num_inversions(pair: Comparison) -> int:
    places = [to for _, to in pair.links]
    return sum(a > b for at, a in enumerate(places) for b in places[at + 1 :])


def _inverted_names(pair: Comparison) -> tuple[str, str] | None:
    """Two words around "than" that stand the other way round there."""
    one = pair.one.sentence
    than = next((word.start for word in one.words if word.text in _AROUND), None)
    if than is None:
        return None
    for at, to in pair.links:
        for at_2, to_2 in pair.links:
            if at < at_2 and to > to_2 and one.content[at].end <= than <= one.content[at_2].start:
                return one.content[at].text, one.content[at_2].text
    return None


class ParticleGuard(Named):
    """Small words that change the whole: on / off, in / out, before / after, with / without."""

    name = "particle"

    _OPPOSED: Final = tuple(
        map(frozenset, (("on", "off"), ("in", "out"), ("up", "down"), ("before", "after"),
                        ("before", "during"),
                        ("after", "during"), ("above", "below"), ("inside", "outside"), ("over", "under"),
                        ("with", "without"), ("for", "against"), ("since", "until"), ("into", "out")))
    )  # fmt: skip

    def judge(self, pair: Comparison) -> Verdict:
        one, other = (num_of(sentence, PARTICLES) for sentence in (pair.one.sentence, pair.other.sentence))
        left, right = set(one - other), set(other - one)
        for a in left:
            for b in right:
                if frozenset((a, b)) not in self._OPPOSED:
                    continue
                if {a, b} != {"in", "out"} or _stems_before(pair.one.sentence, a) & _stems_before(
                    pair.other.sentence, b
                ):
                    return self.refuses(f"{a} / {b}")
        strong = {
            "off",
            "out",
            "up",
            "down",
            "before",
            "after",
            "during",
            "without",
            "against",
            "outside",
            "until",
        }
        odd = (left | right) & strong
        return self.doubts(listed(odd)) if odd else self.passes()


def _stems_before(sentence: Sentence, text: str) -> set[str]:
    """What stands right before a small word: check in, move out."""
    words = sentence.words
    return {one.stem for one, other in pairwise(words) if other.text == text}
