"""Whether two conversations may have one answer: turn by turn, never by the last message alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from .compare import compare
from .guards import judge_all
from .judge import Judge, Judgement
from .lexicon import words_in

_ANSWER_GUARDS: Final = words_in(
    "polarity antonym number unit code date name quote letter language direction"
)
"""Guards that also hold for what the assistant said: the last question may be about any of it."""
_ANSWER_SIMILARITY: Final = 0.7


def judge_chats(
    judge: Judge, ours: Sequence[str], theirs: Sequence[str], *, stricter: float = 0.0
) -> Judgement:
    """Whether the answer to one conversation serves the other.

    Turns are of user and assistant in turn, counted from the last one, which is the user's. Equal turns pass.
    Turns of the user pass as single questions do; what the assistant said may be worded otherwise, but by the
    same names, numbers and opposites. The judgement is that of the turn that is most in doubt.
    """
    assert min(len(ours), len(theirs)) > 0, "a conversation without a question"
    worst: Judgement | None = None
    if len(ours) != len(theirs):
        return Judgement(False, 0.0, 0.0, 0.0, (), "another number of turns")
    for back, (one, other) in enumerate(zip(reversed(ours), reversed(theirs), strict=True)):
        if one == other:
            continue
        if back % 2 == 0:
            found = judge.judge(one, other, stricter=stricter)
        else:
            found = judge_answers(judge, one, other)
        if not found.is_same:
            where = "" if back == 0 else f"turn {back} before it: "
            return replace(found, refused_by=where + found.refused_by)
        if worst is None or found.margin < worst.margin:
            worst = found
    return worst or Judgement(True, 1.0, 1.0, float("inf"), ())


def judge_answers(
    judge: Judge, one: str, other: str, *, min_similarity: float = _ANSWER_SIMILARITY
) -> Judgement:
    """Whether two answers of the assistant say the same, as far as words and vectors can tell."""
    if one.split() == other.split():
        return Judgement(True, 1.0, 1.0, float("inf"), ())
    pair = compare(*judge.see([one, other]))
    verdicts = [verdict for verdict in judge_all(pair) if verdict.guard in _ANSWER_GUARDS]
    told = tuple(verdict for verdict in verdicts if verdict.opinion != "passes")
    refusal = next((verdict for verdict in told if verdict.opinion == "refuses"), None)
    refused_by = "" if refusal is None else f"{refusal.guard}: {refusal.reason}"
    if not refused_by and pair.cosine < min_similarity:
        refused_by = f"similarity {pair.cosine:.2f}"
    margin = 10 * (pair.cosine - min_similarity)
    return Judgement(not refused_by, pair.cosine, pair.cosine, margin, told, refused_by)
