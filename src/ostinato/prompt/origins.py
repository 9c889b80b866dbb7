"""Which message each part of a rendered Jinja template is of.

A template returns one string that does not say. Two things tell. Where the loop over the messages can be
watched (:mod:`ostinato.prompt.watched`), marks between its turns say in which message's turn a text was
written. And where messages are written elsewhere, as a system message often is, a second rendering with a
mark inside every content shows where that content went. It is believed only if without the marks it is the
first one, to the character; a template that looks at contents too closely for that leaves such text without
an origin.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from ..types import Segment
from .trust import Disguise

Origins: TypeAlias = npt.NDArray[np.int64]

UNKNOWN = -1


class Turn(NamedTuple):
    """The characters ``start`` to ``end`` were written in the turn of this message."""

    start: int
    end: int
    message_index: int


class _Mark(NamedTuple):
    text: str
    content: str
    cut: int


def origins_of(
    raw: str,
    turns: Sequence[Turn],
    messages: list[dict[str, Any]],
    render: Callable[[list[dict[str, Any]]], str],
    disguise: Disguise,
) -> Origins:
    """The message of every character of ``raw``, ``UNKNOWN`` where there is none.

    Args:
        raw: the rendering of ``messages``, both in light disguise.
        turns: what is known of it from its loop.
        messages: as the template sees them.
        render: renders others.
        disguise: what makes marks.
    """
    origins = np.full(len(raw), UNKNOWN, dtype=np.int64)
    for turn in turns:
        origins[turn.start : turn.end] = turn.message_index
    marks = dict(_marks(messages, disguise))
    marked = [
        {**message, "content": _with_mark(marks[index])} if index in marks else message
        for index, message in enumerate(messages)
    ]
    by_text = {mark.text: index for index, mark in marks.items()}
    pattern = re.compile("|".join(map(re.escape, by_text)) or "(?!)")
    pieces, found, place, end = [], [], 0, 0
    text = render(marked)
    for match in pattern.finditer(text):
        pieces.append(text[end : match.start()])
        place += match.start() - end
        found.append((by_text[match[0]], place))
        end = match.end()
    if "".join([*pieces, text[end:]]) != raw:
        return origins
    for index, place in found:
        _, content, cut = marks[index]
        start = place - _common_end(raw[max(0, place - cut) : place], content[:cut])
        stop = place + _common_start(raw[place : place + len(content) - cut], content[cut:])
        origins[start:stop] = index
    return origins


def split_by_origin(raw: str, escape: str, origins: Origins, disguise: Disguise) -> tuple[Segment, ...]:
    """The rendering as text and markers, without the escapes, cut where the origin changes."""
    borders = (np.flatnonzero(np.diff(origins)) + 1).tolist()
    segments: list[Segment] = []
    number = 0
    for start, end, is_marker in disguise.pieces(raw):
        place = start
        while number < len(borders) and borders[number] < end:
            if borders[number] > place and not is_marker:
                _add(segments, raw[place : borders[number]].replace(escape, ""), False, origins[place])
                place = borders[number]
            number += 1
        text = raw[place:end] if is_marker else raw[place:end].replace(escape, "")
        _add(segments, text, is_marker, origins[place])
    return tuple(segments)


def _add(segments: list[Segment], text: str, is_marker: bool, origin: np.int64) -> None:
    if text:
        segments.append(Segment(text, is_marker, None if origin == UNKNOWN else int(origin)))


def is_same_prompt(first: Sequence[Segment], second: Sequence[Segment]) -> bool:
    """Whether two prompts are the same but for where their text is cut."""
    return list(_joined(first)) == list(_joined(second))


def _joined(segments: Sequence[Segment]) -> Iterator[tuple[bool, str]]:
    texts: list[str] = []
    for segment in segments:
        if segment.is_marker:
            yield False, "".join(texts)
            yield True, segment.text
            texts = []
        else:
            texts.append(segment.text)
    yield False, "".join(texts)


def _marks(messages: list[dict[str, Any]], disguise: Disguise) -> Iterator[tuple[int, _Mark]]:
    """A mark for every content that has room for one."""
    escape = disguise.escape_for(())
    for index, message in enumerate(messages):
        content = message["content"]
        if isinstance(content, str) and (cut := _place_for_mark(content, escape)) is not None:
            yield index, _Mark(disguise.mark(index + 1), content, cut)


def _place_for_mark(content: str, escape: str) -> int | None:
    """A place inside ``content`` where no trimming reaches, near its middle, and not inside an escape."""
    middle = len(content) // 2
    for cut in sorted(range(max(1, middle - 100), min(len(content), middle + 100)), key=_far_from(middle)):
        if content[cut - 1].isspace() or content[cut].isspace():
            continue
        if escape not in content[max(0, cut - len(escape) + 1) : cut + len(escape) - 1]:
            return cut
    return None


def _far_from(middle: int) -> Callable[[int], int]:
    return lambda place: abs(place - middle)


def _with_mark(mark: _Mark) -> str:
    return mark.content[: mark.cut] + mark.text + mark.content[mark.cut :]


def _common_start(first: str, second: str) -> int:
    if first == second:
        return len(first)
    count = 0
    for one, other in zip(first, second, strict=False):
        if one != other:
            break
        count += 1
    return count


def _common_end(first: str, second: str) -> int:
    return len(first) if first == second else _common_start(first[::-1], second[::-1])
