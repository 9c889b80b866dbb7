"""What a rule of canonical form must not touch: code, indentation, quoted strings.

One pass over the text. What a quote or a run of backticks is looking for is found once and remembered, so
that of a megabyte of opening quotes that nothing closes each costs what the first does.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterator

# Lines may end in any of three ways, so a line begins where no other character than these stands before.
_AT_LINE = re.compile(
    r"""
    [ \t]*(?P<fence>```+|~~~+)[^\r\n]*(?:(?:\r\n?|\n)(?![ \t]*(?P=fence))[^\r\n]*)*
        (?:(?:\r\n?|\n)[ \t]*(?P=fence)[`~]*[ \t]*(?![^\r\n]))?     # fenced code, to its end or the text's
    | (?:[ ]{4}|[ ]{0,3}\t)[ \t]*[^\s][^\r\n]*                      # indented code
    | [ \t]+(?=[^\s])                                               # indentation
    """,
    re.VERBOSE,
)
_OPENING = re.compile(r"""(?<![^\r\n])[ \t`~]|[`"“„«‘]|(?<!\w)'""")
_TICKS = re.compile("`+")
_LINE_END = re.compile(r"[\r\n]|\Z")
# What closes a quote, and whether a word may follow at once.
_CLOSING = {"“": "”", "„": "“”", "«": "»", "‘": "’", '"': '"', "'": "'"}
_NO_WORD_AFTER = frozenset("'’")
_WORD = re.compile(r"\w")


def protected_spans(text: str) -> Iterator[tuple[int, int]]:
    """The spans that must stay as they are, in order."""
    line = _Line(text)
    place = 0
    while (match := _OPENING.search(text, place)) is not None:
        start = match.start()
        if (start == 0 or text[start - 1] in "\r\n") and (whole := _AT_LINE.match(text, start)) is not None:
            place = whole.end()
            yield start, place
            continue
        line.move(start)
        if match[0] == "`":
            span, place = line.ticks(start)
        else:
            span = line.quote(start) if match[0] in _CLOSING else None
            place = start + 1 if span is None else span[1]
        if span is not None:
            yield span


class _Line:
    """What is known of the line one stands in."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._end = -1
        self._next: dict[str, int] = {}
        self._runs: dict[int, list[int]] | None = None

    def move(self, place: int) -> None:
        """Stand at ``place``; forget what was known of another line."""
        if place >= self._end:
            match = _LINE_END.search(self._text, place)
            assert match is not None, "a text has an end"
            self._end = match.start()
            self._next.clear()
            self._runs = None

    def quote(self, start: int) -> tuple[int, int] | None:
        """The quoted string that begins at ``start``."""
        end = min(self._find(char, start + 1) for char in _CLOSING[self._text[start]])
        if end == self._end:
            return None
        if self._text[end] in _NO_WORD_AFTER and _WORD.match(self._text, end + 1):
            return None
        return start, end + 1

    def _find(self, char: str, start: int) -> int:
        """Where ``char`` stands next in this line; the line's end if it does not."""
        known = self._next.get(char, -1)
        if known < start:
            found = self._text.find(char, start, self._end)
            known = self._next[char] = self._end if found < 0 else found
        return known

    def ticks(self, start: int) -> tuple[tuple[int, int] | None, int]:
        """The code that the run of backticks at ``start`` opens, or the last so many of them; and where to
        go on."""
        if self._runs is None:
            self._runs = {}
            for run in _TICKS.finditer(self._text, start, self._end):
                self._runs.setdefault(run.end() - run.start(), []).append(run.start())
        match = _TICKS.match(self._text, start, self._end)
        assert match is not None, "there is no backtick"
        after = match.end()
        for length in range(after - start, 0, -1):
            places = self._runs.get(length, ())
            at = bisect_left(places, after)
            if at < len(places):
                end = places[at] + length
                return (after - length, end), end
        return None, after
