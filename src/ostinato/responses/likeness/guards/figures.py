"""What has to be the same to the letter: numbers, units, codes, single letters, quotations."""

from __future__ import annotations

from collections import Counter
from typing import Final

from ..compare import Comparison
from ..lexicon import words_in
from .base import Named, Verdict, listed


class NumberGuard(Named):
    """Numbers, money, percentages, times of day, versions: all the same ones."""

    name = "number"

    def judge(self, pair: Comparison) -> Verdict:
        one, other = Counter(pair.one.sentence.numbers), Counter(pair.other.sentence.numbers)
        if one == other:
            return self.passes()
        if set(one) == set(other) or _says_two(pair, (one - other) + (other - one)):
            return self.doubts("numbers said otherwise")
        return self.refuses(f"{listed(one - other) or 'no number'} / {listed(other - one) or 'no number'}")


def _says_two(pair: Comparison, odd: Counter[str]) -> bool:
    """Whether the odd number is a two that the other side calls a pair."""
    pairs = {"pair", "couple", "both", "double", "twice"}
    return set(odd) == {"2"} and bool(pairs & (pair.one.sentence.texts | pair.other.sentence.texts))


class UnitGuard(Named):
    """Units and currencies of the numbers."""

    name = "unit"

    _UNITS: Final = words_in(
        "am pm kg mg g gram kilogram ounc oz pound lb km m meter kilomet mile foot inch cm mm ml l "
        "liter gallon gb mb kb tb px % percent $ € £ dollar euro yen celsius fahrenheit minut hour "
        "day week month year"
    )

    def judge(self, pair: Comparison) -> Verdict:
        if not (pair.one.sentence.numbers and pair.other.sentence.numbers):
            return self.passes()
        left = [word.text for word in pair.left_words() if word.stem in self._UNITS]
        right = [word.text for word in pair.right_words() if word.stem in self._UNITS]
        unexplained = {
            *(pair.one.sentence.content[at].text for at in pair.unexplained_left),
            *(pair.other.sentence.content[at].text for at in pair.unexplained_right),
        }
        if left and right and unexplained & {*left, *right}:
            return self.refuses(f"{left[0]} / {right[0]}")
        return self.passes()


class CodeGuard(Named):
    """Order numbers, flight numbers, addresses of mail and pages, versions with letters."""

    name = "code"

    def judge(self, pair: Comparison) -> Verdict:
        one, other = set(pair.one.sentence.codes), set(pair.other.sentence.codes)
        if one == other:
            return self.passes()
        odd = {*(one - pair.other.sentence.texts), *(other - pair.one.sentence.texts)}
        return self.refuses(" / ".join(sorted(odd)[:3])) if odd else self.passes()


class LetterGuard(Named):
    """Single letters that are names: vitamin D, plan B."""

    name = "letter"

    def judge(self, pair: Comparison) -> Verdict:
        one, other = (
            Counter(
                w.text
                for w in sentence.words
                if len(w.text) == 1 and w.text.isalpha() and w.text not in "aisux"
            )
            for sentence in (pair.one.sentence, pair.other.sentence)
        )
        return (
            self.passes() if set(one) == set(other) else self.refuses(listed((one - other) + (other - one)))
        )


def _is_single(text: str) -> bool:
    return len(text) == 1 and text.isalpha() and text not in "aisux"


class QuoteGuard(Named):
    """What stands in quotation marks or code is the same to the letter."""

    name = "quote"

    def judge(self, pair: Comparison) -> Verdict:
        one, other = pair.one.sentence, pair.other.sentence
        if len(one.quoted) > 1 and sorted(one.quoted) == sorted(other.quoted) and one.quoted != other.quoted:
            return self.refuses("quotations in another order")
        for sentence, there in ((one, other), (other, one)):
            for text in sentence.quoted:
                if text.casefold() not in there.raw.casefold():
                    return self.refuses(f"“{text[:40]}”")
        return self.passes()
