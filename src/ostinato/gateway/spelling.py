"""Bodies of others: read as leniently as JSON is written, changed only where something is added.

What a gateway does not know it must not touch. Written anew by any library a body loses what JSON allows and
Python's numbers, texts and dictionaries do not keep: integers of more than 64 bits, digits behind the
seventeenth, keys that are said twice, spaces, spellings of a text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

import orjson

_SPACE: Final = re.compile(r"[ \t\n\r]*")
_DECODER: Final = json.JSONDecoder()
# What is written by some, and refused by the faster reader: halves of surrogate pairs, infinity, NaN.
_LENIENT: Final = re.compile(rb"\\u[dD][89a-fA-F]|\d[eE]\+?\d{2}|\d{300}|NaN|Infinity")


def loads(data: bytes) -> Any:
    """What it says. Raises :class:`ValueError` where it is no JSON by anybody's reading."""
    try:
        return orjson.loads(data)
    except orjson.JSONDecodeError:
        if _LENIENT.search(data) is None:
            raise
    try:
        return json.loads(data)
    except RecursionError:
        raise ValueError("too deep") from None


def rewritten(body: bytes, before: Any, after: Any) -> bytes:
    """``body``, which says ``before``, so that it says ``after``: the same bytes but where they differ.

    Values that differ are written anew, new keys and items stand behind those that are there. No key may be
    missing in ``after``. Raises :class:`ValueError` or :class:`TypeError` where it cannot be written.
    """
    text = body.decode()
    pieces: list[str] = []
    at = 0
    for start, end, new in _edits(text, _skip(text, 0), before, after):
        pieces += (text[at:start], new)
        at = end
    return "".join((*pieces, text[at:])).encode()


def _skip(text: str, at: int) -> int:
    found = _SPACE.match(text, at)
    assert found is not None, "no space is space, too"
    return found.end()


def _end(text: str, at: int) -> int:
    """Where the value that begins there ends."""
    return _DECODER.raw_decode(text, at)[1]


def _edits(text: str, at: int, before: Any, after: Any) -> Iterator[tuple[int, int, str]]:
    """What has to stand where instead, in order. ``at`` is where the value begins."""
    if isinstance(before, dict) and isinstance(after, Mapping):
        yield from _object_edits(text, at, before, after)
    elif isinstance(before, list) and isinstance(after, list) and len(after) >= len(before):
        yield from _array_edits(text, at, before, after)
    elif _differ(before, after):
        yield at, _end(text, at), _dumped(after)


def _object_edits(
    text: str, at: int, before: Mapping[str, Any], after: Mapping[str, Any]
) -> Iterator[tuple[int, int, str]]:
    places: dict[str, int] = {}  # of keys that are said twice the last counts, as for most readers
    end = at + 1
    at = _skip(text, end)
    while text[at] != "}":
        name, at = _DECODER.raw_decode(text, at)
        value_at = _skip(text, _skip(text, at) + 1)
        places.pop(name, None)
        places[name] = value_at
        end = _end(text, value_at)
        at = _skip(text, end)
        if text[at] == ",":
            at = _skip(text, at + 1)
    if missing := places.keys() - after.keys():
        raise ValueError(f"a key is to go: {min(missing)[:40]}")
    for name, value_at in places.items():
        if _differ(before[name], after[name]):
            yield from _edits(text, value_at, before[name], after[name])
    added = [f"{_dumped(name)}:{_dumped(after[name])}" for name in after if name not in places]
    if added:
        yield end, end, ("," if places else "") + ",".join(added)


def _array_edits(text: str, at: int, before: list[Any], after: list[Any]) -> Iterator[tuple[int, int, str]]:
    end = at + 1
    at = _skip(text, end)
    for one, other in zip(before, after, strict=False):
        if _differ(one, other):
            yield from _edits(text, at, one, other)
        end = _end(text, at)
        at = _skip(text, end)
        if text[at] == ",":
            at = _skip(text, at + 1)
    added = [_dumped(item) for item in after[len(before) :]]
    if added:
        yield end, end, ("," if before else "") + ",".join(added)


def _differ(one: Any, other: Any) -> bool:
    return one is not other and one != other  # NaN is read as one object, and unequal to itself


def _dumped(value: Any) -> str:
    return orjson.dumps(value).decode()
