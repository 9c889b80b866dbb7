"""Not, and the opposite."""

from __future__ import annotations

from typing import Final

from ..compare import Comparison
from ..lexicon import words_in
from ..words import Sentence, Word
from .base import Named, Verdict
from .order import is_comparison, num_inversions

_NEGATIVE_VERBS: Final = words_in(
    "stop avoid prevent quit refuse lack fail miss forbid ban prohibit block unabl imposs illeg "
    "without unless forget forgot lose less unsaf cannot deni reject remov rid free"
)


_BANS: Final = words_in("banned forbidden prohibited illegal disallowed unlawful impossible")


class PolarityGuard(Named):
    """Negation: one says "not" where the other does not, and no opposite word makes up for it."""

    name = "polarity"

    def judge(self, pair: Comparison) -> Verdict:
        one, other = pair.one.sentence, pair.other.sentence
        nots = one.num_negations + _num_bans(one), other.num_negations + _num_bans(other)
        flips = len(pair.opposites()) + sum(word.stem in _NEGATIVE_VERBS for word in _unpaired(pair))
        if nots[0] % 2 != nots[1] % 2:
            if not flips:
                return self.refuses(f"negated {nots[0]} and {nots[1]} times")
            return self.doubts("negated once, and an opposite word")
        if nots[0] != nots[1]:
            return self.doubts(f"negated {nots[0]} and {nots[1]} times")
        return self.passes()


def _num_bans(sentence: Sentence) -> int:
    return sum(word.text in _BANS for word in sentence.words)


def _unpaired(pair: Comparison) -> list[Word]:
    return [*pair.left_words(), *pair.right_words()]


LESS: Final = words_in("less least fewer fewest")


class AntonymGuard(Named):
    """Opposites: enable and disable, safe and unsafe, buy and sell."""

    name = "antonym"

    def judge(self, pair: Comparison) -> Verdict:
        found = pair.opposites()
        if not found:
            return self.passes()
        reason = ", ".join(f"{one} / {other}" for one, other in found[:3])
        one, other = pair.one.sentence, pair.other.sentence
        if one.num_negations % 2 != other.num_negations % 2:
            return self.doubts(f"{reason}, one of them negated")
        if bool(LESS & one.texts) != bool(LESS & other.texts):
            return self.doubts(f"{reason}, one of them less")
        swapped = is_comparison(one) and is_comparison(other) and num_inversions(pair) > 0
        return self.doubts(f"{reason}, compared the other way round") if swapped else self.refuses(reason)
