"""How much of it."""

from __future__ import annotations

from typing import Final

from ..compare import Comparison
from ..lexicon import words_in
from ..words import SCOPES, Sentence
from .base import Named, Verdict, listed


class ScopeGuard(Named):
    """How much of it: all or some, only, a single one; per month or per year, per user or in total."""

    name = "scope"

    def judge(self, pair: Comparison) -> Verdict:
        one, other = _scopes(pair.one.sentence), _scopes(pair.other.sentence)
        if one == other:
            return self.passes()
        if (one and other) or "only" in one ^ other:
            return self.refuses(f"{listed(one) or 'no limit'} / {listed(other) or 'no limit'}")
        return self.doubts(f"{listed(one) or 'no limit'} / {listed(other) or 'no limit'}")


def _scopes(sentence: Sentence) -> set[str]:
    found = {SCOPES[word.text] for word in sentence.words if word.text in SCOPES}
    texts = [word.text for word in sentence.words]
    for at, text in enumerate(texts[:-1]):
        # "each month" is a period, as "per month" and "monthly" are, and no scope
        if text in ("each", "every", "all", "whole", "entire") and texts[at + 1] in _PERIODS:
            found.discard("all")
    return found


_PERIODS: Final = words_in("second minute hour day week month quarter year night")


class DegreeGuard(Named):
    """More or less, most or least, better or worse: the same ones."""

    name = "degree"

    _DEGREES: Final = words_in("more most less least fewer fewest too enough better best worse worst")

    def judge(self, pair: Comparison) -> Verdict:
        one, other = (
            {word.text for word in sentence.words if word.text in self._DEGREES}
            for sentence in (pair.one.sentence, pair.other.sentence)
        )
        less = {"less", "least", "fewer", "fewest", "worse", "worst"}
        if one == other:
            return self.passes()
        if bool(one & less) != bool(other & less) and (one & less or other & less) and one and other:
            return self.refuses(f"{listed(one)} / {listed(other)}")
        return self.doubts(f"{listed(one) or 'none'} / {listed(other) or 'none'}")
