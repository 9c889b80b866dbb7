"""What must stay, and what had better: flags over a prompt's tokens, from spans of its text.

Entity-like are names, numbers, codes, dates, quoted strings and identifiers, found by rules of form. They
are what cannot be guessed from the text around them, and so what answers are most often asked for.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

import numpy as np

from .choice import Flags

Span = tuple[int, int]

_ENTITY = re.compile(
    r"""
    (?P<quoted> "[^"\n]{1,80}" | “[^”\n]{1,80}” | `[^`\n]{1,80}` | «[^»\n]{1,80}» )
    | (?P<address> \b[\w.+-]{1,64}@[\w-]{1,64}(?:\.[\w-]{1,64})+ | \bhttps?://[^\s<>"']{1,200} )
    | (?P<code> \b(?=[\w./:-]{0,60}\d)\w+(?:[./:,-]\w+)*\b )  # numbers, dates, times, versions, too
    | (?P<identifier> \b[a-zA-Z]\w*_\w+\b | \b[a-z]+(?:[A-Z][a-z0-9]+)+\b | \b[A-Z]{2,}\b
        | \b[A-Z][a-z0-9]+(?:[A-Z][a-z0-9]+)+\b )
    | (?P<name> \b[A-ZÀ-ÖØ-Þ][a-zß-öø-ÿ'’]+(?:[ -][A-ZÀ-ÖØ-Þ][a-zß-öø-ÿ'’]+)* )
    """,
    re.VERBOSE,
)
_SENTENCE_START = re.compile(r"(?:^|[.!?:;>\n]['\"”’)]*|[-*•])\s*$")


def entity_spans(text: str) -> list[Span]:
    """Character ranges of what looks like an entity, in order. A single capitalised word that begins a
    sentence is none: it may be any word."""
    spans = []
    for match in _ENTITY.finditer(text):
        start, end = match.span()
        if match.lastgroup == "name" and _SENTENCE_START.search(text, max(0, start - 8), start):
            first_word = re.match(r"[^\s-]+[\s-]?", match[0])
            assert first_word is not None, "a name has a first word"
            start += first_word.end()
        if start < end:
            spans.append((start, end))
    return spans


def occurrences(text: str, wanted: str) -> list[Span]:
    """Where ``wanted`` stands in ``text``, without overlaps."""
    return [match.span() for match in re.finditer(re.escape(wanted), text)] if wanted else []


def flags_of(token_bytes: Sequence[bytes], text: str, spans: Iterable[Span]) -> Flags:
    """Which tokens have a part in one of ``spans``: characters of ``text``, which the tokens spell."""
    ends = np.cumsum([len(piece) for piece in token_bytes], dtype=np.int64)
    flags = np.zeros(len(token_bytes), np.bool_)
    offsets = None if text.isascii() else _byte_offsets(text)
    for start, end in spans:
        if offsets is not None:
            start, end = int(offsets[start]), int(offsets[end])
        flags[np.searchsorted(ends, start, side="right") : np.searchsorted(ends, end, side="left") + 1] = True
    return flags


def _byte_offsets(text: str) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
    lengths = [len(char.encode("utf-8", "surrogatepass")) for char in text]
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
