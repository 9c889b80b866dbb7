"""A request's prompt, cut up for its page: whose each part is, where its tokens came from, and its text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from ...types import Conversation, GenerationRequest, TokenArray
from . import formats
from .recent import RecentRequest
from .sources import Span, spans_of

MAX_PARTS: Final = 300
MAX_PART_CHARS: Final = 6_000


@dataclass(frozen=True, slots=True)
class Piece:
    """Tokens of a part that came from one source, and their text where it may be seen.

    ``num_hidden_chars`` of it are not shown.
    """

    source: str
    num_tokens: int
    text: str = ""
    num_hidden_chars: int = 0


@dataclass(frozen=True, slots=True)
class Part:
    """Tokens ``[start, end)`` of a prompt: a message's, the template's own, or one from marker to marker."""

    title: str
    start: int
    end: int
    pieces: tuple[Piece, ...]

    @property
    def num_tokens(self) -> int:
        return self.end - self.start


def parts_by_length(seen: RecentRequest) -> list[Part]:
    """Of a request whose text is not known or may not be seen."""
    lengths = seen.part_tokens or (seen.usage.prompt_tokens,)
    spans = spans_of(seen.usage, sum(lengths))
    parts: list[Part] = []
    at = 0
    for number, length in enumerate(lengths, 1):
        pieces = tuple(Piece(s.source, s.num_tokens) for s in _within(spans, at, at + length))
        parts.append(Part(f"Part {number}", at, at + length, pieces))
        at += length
    return _bounded(parts)


def parts_with_text(
    seen: RecentRequest,
    request: GenerationRequest,
    tokens: TokenArray,
    owners: TokenArray | None,
    text_of: Callable[[Sequence[int]], str],
) -> list[Part]:
    """Of a request whose text may be seen. ``owners``: the message of each token, where that can be told."""
    spans = spans_of(seen.usage, len(tokens))
    parts: list[Part] = []
    for start, end, title in _titles(request, tokens, owners):
        pieces: list[Piece] = []
        for span in _within(spans, start, end):
            text = text_of(tokens[span.start : span.end].tolist())
            hidden = max(0, len(text) - MAX_PART_CHARS)
            pieces.append(Piece(span.source, span.num_tokens, text[:MAX_PART_CHARS], hidden))
        parts.append(Part(title, start, end, tuple(pieces)))
    return _bounded(parts)


def _titles(
    request: GenerationRequest, tokens: TokenArray, owners: TokenArray | None
) -> list[tuple[int, int, str]]:
    prompt = request.prompt
    if owners is None or not isinstance(prompt, Conversation):
        return [(0, len(tokens), "Prompt")]
    borders = (np.flatnonzero(np.diff(owners)) + 1).tolist()
    found: list[tuple[int, int, str]] = []
    for start, end in zip([0, *borders], [*borders, len(tokens)], strict=True):
        owner = int(owners[start])
        known = 0 <= owner < len(prompt.messages)
        found.append((start, end, prompt.messages[owner].role if known else "template"))
    return found


def _within(spans: Sequence[Span], start: int, end: int) -> list[Span]:
    return [
        Span(span.source, max(start, span.start), min(end, span.end))
        for span in spans
        if span.start < end and span.end > start
    ]


def _bounded(parts: list[Part]) -> list[Part]:
    """At most so many; the middle ones of more are one."""
    if len(parts) <= MAX_PARTS:
        return parts
    head, tail = parts[: MAX_PARTS // 2], parts[-MAX_PARTS // 2 :]
    middle = parts[MAX_PARTS // 2 : -MAX_PARTS // 2]
    counts: dict[str, int] = {}
    for part in middle:
        for piece in part.pieces:
            counts[piece.source] = counts.get(piece.source, 0) + piece.num_tokens
    title = f"{len(middle)} parts between"
    pieces = tuple(Piece(source, count) for source, count in counts.items())
    return [*head, Part(title, middle[0].start, middle[-1].end, pieces), *tail]


def stop_text(seen: RecentRequest) -> str:
    """Where the look-up stopped and why, in a sentence."""
    stop, usage = seen.stop, seen.usage
    if usage.served is not None:
        return "The whole answer was there: its prompt was not looked up."
    known, since = f"{stop.num_known_tokens:,}", formats.seconds(abs(stop.age_s))
    found = f"The first {stop.num_tokens:,} tokens were found."
    return {
        "whole": "All of it was found; only the last token is always computed.",
        "end": f"{found} Nobody had asked for more: the prompt goes on from there.",
        "parts": f"{found} Earlier prompts begin so, too, and go on otherwise.",
        "unseen": "No earlier prompt began like this one.",
        "gone": f"{found} {known} had been computed {since} before, and were given up since.",
        "pending": f"{found} {known} were being computed for another request just then.",
        "unknown": f"{found} What was asked before is not remembered.",
    }[stop.reason]
