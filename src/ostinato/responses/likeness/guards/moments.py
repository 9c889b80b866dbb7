"""When: dates, tenses, and words that tie an answer to the moment it is given at."""

from __future__ import annotations

from typing import Final

from ..compare import Comparison
from ..lexicon import words_in
from ..words import FRESH, TIMES, Sentence, Word, num_of
from .base import Named, Verdict, listed


class DateGuard(Named):
    """Days of the week, months, seasons, parts of the day, today and yesterday."""

    name = "date"

    _DATES: Final = words_in(
        "monday tuesday wednesday thursday friday saturday sunday january february march april may "
        "june july august september october november december spring summer autumn winter morning "
        "noon afternoon evening midnight mondays tuesdays wednesdays thursdays fridays saturdays "
        "sundays weekday weekdays weekend weekends yesterday tomorrow today tonight christmas easter "
        "jan feb mar apr jun jul aug sep oct nov dec"
    )

    def judge(self, pair: Comparison) -> Verdict:
        one, other = (
            {word.stem for word in sentence.words if word.text in self._DATES and not _is_modal_may(word)}
            for sentence in (pair.one.sentence, pair.other.sentence)
        )
        if one == other:
            return self.passes()
        return self.refuses(f"{listed(one - other) or 'no date'} / {listed(other - one) or 'no date'}")


def _is_modal_may(word: Word) -> bool:
    return word.text in ("may", "march") and (not word.is_capital or word.is_first)


class FreshnessGuard(Named):
    """Words that tie the answer to a moment: latest, now, last, next, ago."""

    name = "freshness"

    def judge(self, pair: Comparison) -> Verdict:
        one, other = (num_of(sentence, TIMES) for sentence in (pair.one.sentence, pair.other.sentence))
        odd = (set(one) | set(other)) - (set(one) & set(other))
        if not odd or {"currently", "current", "latest", "recent", "now", "still", "already"} >= odd:
            return self.passes() if not odd else self.doubts(listed(odd))
        return (
            self.refuses(listed(odd))
            if odd & {"yesterday", "tomorrow", "ago", "upcoming"}
            else self.doubts(listed(odd))
        )


class TenseGuard(Named):
    """What was, is, will be."""

    name = "tense"

    def judge(self, pair: Comparison) -> Verdict:
        one, other = _tense(pair.one.sentence), _tense(pair.other.sentence)
        return self.doubts(f"{one} / {other}") if one != other else self.passes()


def _tense(sentence: Sentence) -> str:
    texts = [word.text for word in sentence.words]
    if {"was", "were", "did", "had"} & set(texts):
        return "past"
    return "future" if "will" in texts else "present"


def is_fresh(sentence: Sentence) -> bool:
    """Whether the answer depends on the moment it is given at."""
    return any(word.text in FRESH for word in sentence.words)
