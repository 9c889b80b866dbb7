"""What is asked for, and in which language."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from ..compare import Comparison
from ..lexicon import words_in
from ..words import Sentence
from .base import Named, Verdict


class QuestionGuard(Named):
    """What is asked for: how, why, when, who, how many, or a text to be written."""

    name = "question"

    def judge(self, pair: Comparison) -> Verdict:
        one, other = pair.one.sentence.frame, pair.other.sentence.frame
        if one.is_at_odds(other):
            return self.refuses(f"{one.asks} {one.of}".strip() + f" / {other.asks} {other.of}".rstrip())
        return self.passes() if one.asks == other.asks else self.doubts(f"{one.asks} / {other.asks}")


class LanguageGuard(Named):
    """The same language: an answer comes in that of its question."""

    name = "language"

    _SMALL: Final[Mapping[str, frozenset[str]]] = {
        "en": words_in("the is are what how do does can i my to of in and a for with"),
        "de": words_in("der die das ist sind wie was ich mein zu und ein eine für mit wo kann nicht"),
        "fr": words_in("le la les est sont comment que je mon de et un une pour avec où puis pas du des"),
        "es": words_in("el la los es son cómo como qué que mi de y un una para con dónde puedo no"),
        "it": words_in("il la gli è sono come che mio di e un una per con dove posso non"),
        "pt": words_in("o a os é são como que meu de e um uma para com onde posso não"),
        "nl": words_in("de het is zijn hoe wat ik mijn te en een voor met waar kan niet"),
    }

    def judge(self, pair: Comparison) -> Verdict:
        one, other = self.language_of(pair.one.sentence), self.language_of(pair.other.sentence)
        return self.refuses(f"{one} / {other}") if one and other and one != other else self.passes()

    def language_of(self, sentence: Sentence) -> str:
        """A guess; empty where there is too little to go by."""
        letters = [] if sentence.raw.isascii() else [c for c in sentence.raw if c.isalpha()]
        for name, pattern in _SCRIPTS.items() if letters else ():
            if sum(bool(pattern.match(c)) for c in letters) * 2 > len(letters) > 0:
                return name
        texts = {word.text for word in sentence.words}
        scores = {name: len(texts & words) for name, words in self._SMALL.items()}
        best = max(scores, key=lambda name: (scores[name], name == "en"))
        return best if scores[best] > max(1, *(n for name, n in scores.items() if name != best)) else ""


_SCRIPTS: Final = {
    "han": re.compile(r"[\u4e00-\u9fff]"),
    "kana": re.compile(r"[\u3040-\u30ff]"),
    "hangul": re.compile(r"[\uac00-\ud7af]"),
    "cyrillic": re.compile(r"[\u0400-\u04ff]"),
    "arabic": re.compile(r"[\u0600-\u06ff]"),
    "greek": re.compile(r"[\u0370-\u03ff]"),
    "devanagari": re.compile(r"[\u0900-\u097f]"),
    "hebrew": re.compile(r"[\u0590-\u05ff]"),
    "thai": re.compile(r"[\u0e00-\u0e7f]"),
}
