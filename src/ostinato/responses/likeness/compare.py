"""Two questions laid side by side: which words have a partner, which are left over, what explains those."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Final

import numpy as np
import numpy.typing as npt

from ..embed.base import FloatMatrix, TokenVectors, normalized
from .lexicon import Lexicon, the_lexicon
from .words import Sentence, Word

_TYPO_CHARS: Final = 5
_UNKNOWN_RARITY: Final = 30_000.0


@dataclass(frozen=True, slots=True)
class Seen:
    """A text, its words and its vectors; the rows of ``inner`` and ``bare`` are its content words."""

    sentence: Sentence
    vector: npt.NDArray[np.float32]
    inner: FloatMatrix
    bare: FloatMatrix
    rarities: tuple[float, ...]
    """How rare each content word is: the place of its rarest piece in a vocabulary sorted by frequency."""


def see(sentence: Sentence, vectors: TokenVectors) -> Seen:
    """Content words get the mean of their pieces' vectors."""
    dims = vectors.vector.shape[0]
    inner = np.zeros((len(sentence.content), dims), np.float32)
    bare = np.zeros_like(inner)
    rarities = []
    for row, word in enumerate(sentence.content):
        at = [
            i for i, piece in enumerate(vectors.pieces) if piece.start < word.end and piece.end > word.start
        ]
        if at:
            inner[row], bare[row] = vectors.inner[at].mean(axis=0), vectors.bare[at].mean(axis=0)
        rarities.append(max((vectors.pieces[i].token_id for i in at), default=_UNKNOWN_RARITY))
    return Seen(sentence, vectors.vector, normalized(inner), normalized(bare), tuple(map(float, rarities)))


@dataclass(frozen=True)
class Comparison:
    """``one`` and ``other``, with content words matched by stem, spelling, family or synonym.

    ``links`` are pairs of places among the content words; ``left`` and ``right`` the places that no stem
    matches; ``unexplained_left`` and ``_right`` those of them that no synonym explains either.
    """

    one: Seen
    other: Seen
    links: tuple[tuple[int, int], ...]
    left: tuple[int, ...]
    right: tuple[int, ...]
    unexplained_left: tuple[int, ...]
    unexplained_right: tuple[int, ...]
    lexicon: Lexicon = field(repr=False, default_factory=the_lexicon)

    @cached_property
    def cosine(self) -> float:
        return float(self.one.vector @ self.other.vector)

    @cached_property
    def inner(self) -> FloatMatrix:
        """Similarities of all content words in context, ``(one, other)``."""
        return self.one.inner @ self.other.inner.T

    @cached_property
    def bare(self) -> FloatMatrix:
        """The same without context."""
        return self.one.bare @ self.other.bare.T

    def left_words(self) -> list[Word]:
        return [self.one.sentence.content[at] for at in self.left]

    def right_words(self) -> list[Word]:
        return [self.other.sentence.content[at] for at in self.right]

    def opposites(self) -> list[tuple[str, str]]:
        """Left-over words that are opposites of one another."""
        return [
            (one.text, other.text)
            for one in self.left_words()
            for other in self.right_words()
            if self.lexicon.are_opposite(one.stem, other.stem)
            and not self.lexicon.are_alike(one.stem, other.stem)
        ]

    def siblings(self) -> list[tuple[str, str]]:
        """Left-over words that are different things of one kind."""
        return [
            (one.text, other.text)
            for one in self.left_words()
            for other in self.right_words()
            if self.lexicon.are_siblings(one.stem, other.stem)
            and not self.lexicon.are_alike(one.stem, other.stem)
        ]


def compare(one: Seen, other: Seen) -> Comparison:
    """Matches words greedily: equal stems first (in order), then misspellings."""
    lexicon = the_lexicon()
    ours, theirs = one.sentence.content, other.sentence.content
    free = list(range(len(theirs)))
    links: list[tuple[int, int]] = []
    left: list[int] = []
    for at, word in enumerate(ours):
        hits = [to for to in free if theirs[to].stem == word.stem]
        if hits:
            to = min(hits, key=lambda hit: abs(hit / max(1, len(theirs)) - at / max(1, len(ours))))
            free.remove(to)
            links.append((at, to))
        else:
            left.append(at)
    for at in list(left):
        hit = next((to for to in free if _is_typo(ours[at], theirs[to], lexicon)), None)
        if hit is None:
            hit = next((to for to in free if _is_same_name(ours[at].text, theirs[to].text)), None)
        if hit is not None:
            free.remove(hit)
            left.remove(at)
            links.append((at, hit))
    their_stems, our_stems = _all_stems(other.sentence), _all_stems(one.sentence)
    return Comparison(
        one,
        other,
        tuple(sorted(links)),
        tuple(left),
        tuple(free),
        _unexplained(ours, left, their_stems, other.sentence, lexicon),
        _unexplained(theirs, free, our_stems, one.sentence, lexicon),
        lexicon,
    )


def _all_stems(sentence: Sentence) -> frozenset[str]:
    return frozenset(word.stem for word in sentence.words)


def _unexplained(
    words: Sequence[Word], places: Sequence[int], stems: frozenset[str], there: Sentence, lexicon: Lexicon
) -> tuple[int, ...]:
    """Places of words that nothing on the other side stands for: no stem, no synonym, no initials."""
    found = []
    for at in places:
        word = words[at]
        if word.stem in stems or any(lexicon.are_alike(word.stem, stem) for stem in stems):
            continue
        if _is_initials(word.text, there) or _joins(word.text, there):
            continue
        found.append(at)
    return tuple(found)


def _is_initials(text: str, there: Sentence) -> bool:
    """An acronym of words on the other side."""
    if not 2 <= len(text) <= 5 or not text.isalpha():
        return False
    return text in "".join(word.text[0] for word in there.words)


def _joins(text: str, there: Sentence) -> bool:
    """Two words on the other side, written as one."""
    texts = [word.text for word in there.words]
    return any(a + b == text for a, b in pairwise(texts))


def _is_same_name(one: str, other: str) -> bool:
    """ "mt" and "mount", "corp" and "corporation": one begins the other, and is no word itself."""
    short, long = sorted((one, other), key=len)
    return len(short) >= 4 and long.startswith(short) and len(long) - len(short) <= 2


def _is_typo(one: Word, other: Word, lexicon: Lexicon) -> bool:
    """One slip of the fingers in a word that is long enough, unless both are ordinary words."""
    a, b = one.text, other.text
    if min(len(a), len(b)) < _TYPO_CHARS or abs(len(a) - len(b)) > 1 or not (a.isalpha() and b.isalpha()):
        return False
    if lexicon.knows(one.stem) and lexicon.knows(other.stem):
        return False
    if one.is_capital and other.is_capital and not (lexicon.knows(one.stem) or lexicon.knows(other.stem)):
        return False  # two names
    return a[0] == b[0] and _distance_is_one(a, b)


def _distance_is_one(a: str, b: str) -> bool:
    """One letter put in, left out, changed, or two neighbours swapped."""
    if len(a) > len(b):
        a, b = b, a
    at = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), len(a))
    if len(a) == len(b):
        swapped = a[at + 1 : at + 2] + a[at : at + 1] == b[at : at + 2] and a[at + 2 :] == b[at + 2 :]
        return a[at + 1 :] == b[at + 1 :] or swapped
    return a[at:] == b[at + 1 :]
