"""Who and what: names, things of one kind, mine and theirs."""

from __future__ import annotations

from ..compare import Comparison
from ..lexicon import words_in
from ..words import THIRD, Sentence, num_of
from .base import Named, Verdict, listed


class NameGuard(Named):
    """Names: of people, places, products, acronyms."""

    name = "name"

    def judge(self, pair: Comparison) -> Verdict:
        one, other = pair.one.sentence, pair.other.sentence
        odd_left, odd_right = (
            _odd_names(one, pair.unexplained_left),
            _odd_names(other, pair.unexplained_right),
        )
        if bool(odd_left) != bool(odd_right) and _are_parts_of_names(pair, odd_left or odd_right):
            return self.doubts(f"{listed(odd_left or odd_right)} left out")
        if odd_left or odd_right:
            return self.refuses(f"{listed(odd_left) or 'no name'} / {listed(odd_right) or 'no name'}")
        return self.passes()


def _are_parts_of_names(pair: Comparison, texts: list[str]) -> bool:
    """Whether these are ordinary words beside a name that both have: Mount, Lake, City."""
    named = {
        pair.one.sentence.content[at].text for at, _ in pair.links if pair.one.sentence.content[at].is_capital
    }
    return bool(named) and set(texts) <= {
        "mount",
        "mountain",
        "lake",
        "city",
        "river",
        "sir",
        "doctor",
        "island",
    }


def _odd_names(sentence: Sentence, unexplained: tuple[int, ...]) -> list[str]:
    if sum(word.is_capital for word in sentence.words) > 0.7 * len(sentence.words):
        return []  # all in capitals, or a title: then they mark no names
    words = [sentence.content[at] for at in unexplained]
    return [word.text for word in words if word.is_capital and not word.is_first]


class SiblingGuard(Named):
    """Another thing of the same kind: another day, animal, product, relative."""

    name = "sibling"

    def judge(self, pair: Comparison) -> Verdict:
        left = {pair.one.sentence.content[at].text for at in pair.unexplained_left}
        right = {pair.other.sentence.content[at].text for at in pair.unexplained_right}
        found = [(a, b) for a, b in pair.siblings() if a in left and b in right]
        return self.doubts(f"{found[0][0]} / {found[0][1]}") if found else self.passes()


class PersonGuard(Named):
    """Mine or theirs: third persons are others than those who speak."""

    name = "person"

    def judge(self, pair: Comparison) -> Verdict:
        one, other = (set(num_of(sentence, THIRD)) for sentence in (pair.one.sentence, pair.other.sentence))
        mine = words_in("i me my mine we us our ours")
        first, second = (
            bool(num_of(sentence, mine)) for sentence in (pair.one.sentence, pair.other.sentence)
        )
        if bool(one) != bool(other) and first != second:
            return self.refuses(f"{listed(one | other)} / mine")
        return self.doubts(listed(one ^ other)) if bool(one) != bool(other) else self.passes()
