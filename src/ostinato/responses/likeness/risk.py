"""Questions that a kept answer to another question shall never serve, however alike."""

from __future__ import annotations

import re
from typing import Final

_TOPICS: Final[tuple[tuple[str, str], ...]] = (
    ("self-harm", r"suicid\w*|kill (?:my|him|her|them)self|self[- ]harm\w*|hurt myself|end my life|overdos\w*"),
    ("emergency", r"emergency|call (?:911|112|999)|chest pains?|heart attack|stroke symptoms|can(?:'t|not) breathe|"
     r"unconscious|poison(?:ed|ing)|choking|anaphyla\w*"),
    ("dosage", r"dos(?:e|es|age|ages|ing)|how (?:much|many) \w+ (?:mg|ml|pills|tablets)|\d+ ?(?:mg|mcg|µg)\b"),
    ("violence", r"weapon|explosive|bomb|abus(?:e|ed|ive)\b"),
    ("payment", r"(?:transfer|wire|send|pay) (?:\w+ ){0,3}(?:\$|€|£|\d+ ?(?:dollars|euros|pounds|usd|eur))"),
)  # fmt: skip
_COMPILED: Final = tuple((name, re.compile(rf"\b(?:{pattern})", re.IGNORECASE)) for name, pattern in _TOPICS)


def risk_of(text: str) -> str:
    """The topic by which a text is kept out, empty for most."""
    return next((name for name, pattern in _COMPILED if pattern.search(text)), "")
