"""A pair of questions as numbers, for the learned decision."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from ..embed.base import FloatMatrix, normalized
from .compare import Comparison
from .guards import GUARDS
from .guards.base import Verdict
from .words import Sentence

_SIMILAR: Final = (
    *("cosine", "bare_cosine", "inner_min", "inner_mean", "bare_min", "bare_mean"),
    *("left_inner", "left_bare", "phrase_inner", "phrase_bare", "trigrams", "tokens", "share_explained"),
)
"""More of these never speaks against a pair."""
_DIFFERENT: Final = (
    *("num_left", "num_right", "num_unexplained_left", "num_unexplained_right", "num_unexplained", "rarity"),
    *(
        "is_swap_of_one",
        "is_insertion_of_one",
        "num_inversions",
        "num_opposites",
        "num_siblings",
        "num_refusals",
    ),
)
_NEUTRAL: Final = (
    *("num_words_min", "num_words_max", "length_ratio", "num_links", "num_synonyms", "num_doubts"),
    *("asks_same", "asks_yes_no", "asks_none", "verb_left", "last_left", "num_edits", "is_all_linked"),
    *("rarity_linked", "num_small_odd", "name_share"),
)
_GUARDS: Final = tuple(f"guard_{guard.name}" for guard in GUARDS)
NAMES: Final = (*_SIMILAR, *_DIFFERENT, *_NEUTRAL, *_GUARDS)

MONOTONE: Final = (
    *(1 for _ in _SIMILAR),
    *(-1 for _ in _DIFFERENT),
    *(0 for _ in _NEUTRAL),
    *(-1 for _ in _GUARDS),
)
"""For each feature: 1 where more of it may only raise the score, -1 where it may only lower it."""

_OPINION: Final = {"passes": 0.0, "doubts": 1.0, "refuses": 2.0}


def features_of(pair: Comparison, verdicts: Sequence[Verdict]) -> npt.NDArray[np.float32]:
    """One number for each of :data:`NAMES`, the same whichever question comes first."""
    one, other = pair.one.sentence, pair.other.sentence
    odd = len(pair.left), len(pair.right)
    unexplained = len(pair.unexplained_left), len(pair.unexplained_right)
    rarities = [
        *(pair.one.rarities[at] for at in pair.unexplained_left),
        *(pair.other.rarities[at] for at in pair.unexplained_right),
    ]
    opinions = [_OPINION[verdict.opinion] for verdict in verdicts]
    values = {
        **_similarities(pair),
        "num_left": min(odd),
        "num_right": max(odd),
        "num_unexplained_left": min(unexplained),
        "num_unexplained_right": max(unexplained),
        "num_unexplained": sum(unexplained),
        "rarity": max(rarities, default=0.0) / 30_000,
        "is_swap_of_one": odd == (1, 1) and max(unexplained) > 0,
        "is_insertion_of_one": sorted(odd) == [0, 1] and sum(unexplained) > 0,
        "num_inversions": _share_inverted(pair),
        "num_opposites": len(pair.opposites()),
        "num_siblings": len(pair.siblings()),
        "num_refusals": opinions.count(2.0),
        "num_words_min": min(len(one.content), len(other.content)),
        "num_words_max": max(len(one.content), len(other.content)),
        "length_ratio": min(len(one.raw), len(other.raw)) / max(1, len(one.raw), len(other.raw)),
        "num_links": len(pair.links),
        "num_synonyms": sum(odd) - sum(unexplained),
        "num_doubts": opinions.count(1.0),
        "asks_same": one.frame.asks == other.frame.asks,
        "asks_yes_no": (one.frame.asks == "yes_no") + (other.frame.asks == "yes_no"),
        "asks_none": (one.frame.asks in ("none", "command")) + (other.frame.asks in ("none", "command")),
        "verb_left": (0 in pair.unexplained_left) + (0 in pair.unexplained_right),
        "last_left": _is_last(pair.unexplained_left, one) + _is_last(pair.unexplained_right, other),
        "num_edits": max(odd) + min(odd) / 2,
        "is_all_linked": sum(odd) == 0,
        "rarity_linked": max((pair.one.rarities[at] for at, _ in pair.links), default=0.0) / 30_000,
        "num_small_odd": len(one.texts ^ other.texts) - sum(odd),
        "name_share": _share_names(one, other),
        **{f"guard_{verdict.guard}": opinion for verdict, opinion in zip(verdicts, opinions, strict=True)},
    }
    return np.array([float(values[name]) for name in NAMES], np.float32)


def _similarities(pair: Comparison) -> dict[str, float]:
    one, other = pair.one.sentence, pair.other.sentence
    left, right = list(pair.left), list(pair.right)
    left_only, right_only = list(pair.unexplained_left), list(pair.unexplained_right)
    return {
        "cosine": pair.cosine,
        "bare_cosine": _cosine(pair.one.bare, pair.other.bare),
        "inner_min": min(_best(pair.inner).min(initial=1), _best(pair.inner.T).min(initial=1)),
        "inner_mean": min(_mean(_best(pair.inner)), _mean(_best(pair.inner.T))),
        "bare_min": min(_best(pair.bare).min(initial=1), _best(pair.bare.T).min(initial=1)),
        "bare_mean": min(_mean(_best(pair.bare)), _mean(_best(pair.bare.T))),
        "left_inner": _worst_of(pair.inner, left_only, right_only),
        "left_bare": _worst_of(pair.bare, left_only, right_only),
        "phrase_inner": _phrases(pair.one.inner, left, pair.other.inner, right),
        "phrase_bare": _phrases(pair.one.bare, left, pair.other.bare, right),
        "trigrams": _jaccard(_trigrams(one.raw), _trigrams(other.raw)),
        "tokens": _jaccard(set(one.stems), set(other.stems)),
        "share_explained": 1
        - (len(left_only) + len(right_only)) / max(1, len(one.content) + len(other.content)),
    }


def _best(matrix: FloatMatrix) -> npt.NDArray[np.float32]:
    return matrix.max(axis=1) if matrix.size else np.zeros(matrix.shape[0], np.float32)


def _mean(values: npt.NDArray[np.float32]) -> float:
    return float(values.mean()) if len(values) else 1.0


def _worst_of(matrix: FloatMatrix, rows: list[int], columns: list[int]) -> float:
    """How near the least explained word comes to anything on the other side; 1 where all are explained."""
    found = [float(matrix[row].max(initial=0)) for row in rows]
    found += [float(matrix[:, column].max(initial=0)) for column in columns]
    return min(found, default=1.0)


def _phrases(one: FloatMatrix, left: list[int], other: FloatMatrix, right: list[int]) -> float:
    """Cosine of what is left over here with what is left over there."""
    if not left and not right:
        return 1.0
    if not left or not right:
        return 0.0
    return _cosine(one[left], other[right])


def _cosine(one: FloatMatrix, other: FloatMatrix) -> float:
    if not len(one) or not len(other):
        return 0.0
    return float(normalized(one.mean(axis=0)) @ normalized(other.mean(axis=0)))


def _trigrams(text: str) -> set[str]:
    plain = f" {' '.join(text.lower().split())} "
    return {plain[at : at + 3] for at in range(len(plain) - 2)}


def _jaccard(one: set[str], other: set[str]) -> float:
    return len(one & other) / max(1, len(one | other))


def _share_inverted(pair: Comparison) -> float:
    places = [to for _, to in pair.links]
    num = len(places)
    pairs = num * (num - 1) / 2
    return sum(a > b for at, a in enumerate(places) for b in places[at + 1 :]) / max(1.0, pairs)


def _is_last(places: Sequence[int], sentence: Sentence) -> bool:
    return len(sentence.content) - 1 in places


def _share_names(one: Sentence, other: Sentence) -> float:
    words = [*one.content, *other.content]
    return sum(word.is_capital and not word.is_first for word in words) / max(1, len(words))
