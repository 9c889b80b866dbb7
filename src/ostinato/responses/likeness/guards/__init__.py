"""Guards: each looks for one way in which two similar questions have different answers, and says what it saw.

A guard that *refuses* is never overruled, however similar the questions are. What one only *doubts* goes into
the learned decision. Guards see words, not vectors, so what they say can be read and argued with.
"""

from __future__ import annotations

from typing import Final

from ..compare import Comparison
from .asking import LanguageGuard, QuestionGuard
from .base import Guard, Verdict
from .figures import CodeGuard, LetterGuard, NumberGuard, QuoteGuard, UnitGuard
from .moments import DateGuard, FreshnessGuard, TenseGuard
from .names import NameGuard, PersonGuard, SiblingGuard
from .order import DirectionGuard, ParticleGuard
from .polarity import AntonymGuard, PolarityGuard
from .scope import DegreeGuard, ScopeGuard

GUARDS: Final[tuple[Guard, ...]] = (
    PolarityGuard(),
    AntonymGuard(),
    NumberGuard(),
    UnitGuard(),
    CodeGuard(),
    DateGuard(),
    FreshnessGuard(),
    TenseGuard(),
    NameGuard(),
    SiblingGuard(),
    ScopeGuard(),
    DegreeGuard(),
    DirectionGuard(),
    ParticleGuard(),
    QuestionGuard(),
    PersonGuard(),
    QuoteGuard(),
    LetterGuard(),
    LanguageGuard(),
)


def judge_all(pair: Comparison) -> tuple[Verdict, ...]:
    """Every guard's verdict, in the order of :data:`GUARDS`."""
    return tuple(guard.judge(pair) for guard in GUARDS)
