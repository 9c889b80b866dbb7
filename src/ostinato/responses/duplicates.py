"""How many requests of a log came twice: before anyone turns a cache on.

Three degrees. *Identical*: the body as it was written. *Canonical*: equal in the form that the exact cache
names by (:func:`~ostinato.responses.digest.canonical_body`). *Near*: all the same but for the last text of
the user, and that nearly the same by its words. Near is what a semantic cache would have to judge, and no
promise that it may answer: "enable" and "disable" are near.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import orjson
import xxhash
from blake3 import blake3

from .digest import canonical_body

_LOG_FIELDS: Final = frozenset(
    {
        *("v", "id", "key", "timestamp", "created", "created_at", "duration", "latency"),
        *("session_id", "request_id", "trace_id", "output", "response", "usage", "status", "headers"),
    }
)
"""What logs write beside a body that stands bare in its line."""

_WORD: Final = re.compile(r"\w+")
_SHINGLE_WORDS: Final = 3
_NUM_HASHES: Final = 128
_BAND: Final = 4
_MAX_CANDIDATES: Final = 200

Signature = npt.NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class Group:
    """A request that came ``count`` times; first in line ``line`` of the log."""

    line: int
    count: int


@dataclass(frozen=True, slots=True)
class Duplicates:
    """What is in a log. Repeats are requests after the first of their kind.

    ``canonical`` contains ``identical``; ``near`` are others. ``greedy`` are the canonical repeats at
    temperature 0, which the exact cache serves without being asked. Tokens are of answers, of those lines
    that tell them. ``median_gap_s``: between a canonical repeat and the last one before it, where times are
    told.
    """

    requests: int = 0
    unusable: int = 0
    identical: int = 0
    canonical: int = 0
    greedy: int = 0
    near: int = 0
    output_tokens: int = 0
    repeated_tokens: int = 0
    median_gap_s: float | None = None
    groups: tuple[Group, ...] = ()
    digests_only: int = 0
    """Lines without a body, of which only the prompt's digests could be compared."""


@dataclass(slots=True)
class _Seen:
    count: int = 0
    line: int = 0
    time_s: float | None = None


@dataclass(slots=True)
class _Texts:
    """Distinct texts that differ in nothing else, and where to look for near ones."""

    signatures: list[Signature] = field(default_factory=list)
    names: list[tuple[int, bytes]] = field(default_factory=list)
    """Length and digest."""
    bands: defaultdict[tuple[int, bytes], list[int]] = field(default_factory=lambda: defaultdict(list))


def find_duplicates(lines: Iterable[bytes], *, near: float = 0.8, num_groups: int = 10) -> Duplicates:
    """Counts the repeats among a log's lines: bodies of requests, bare or under ``body`` or ``request``,
    recorded sessions (``input``), or our own request log, also without content.

    ``near``: the share of three-word phrases that two texts have to have in common.
    """
    assert 0 < near <= 1, f"a likeness of {near}"
    written, named, texts = Counter[bytes](), dict[bytes, _Seen](), dict[bytes, _Texts]()
    totals, gaps = Counter[str](), list[float]()
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        row = _row(line)
        body = None if row is None else _body(row)
        if row is None or body is None:
            totals["unusable"] += 1
            continue
        try:
            canonical = canonical_body(body)
        except ValueError:
            totals["unusable"] += 1
            continue
        totals["requests"] += 1
        totals["digests_only"] += "hash_ids" in body
        tokens = _output_tokens(row)
        totals["output_tokens"] += tokens
        owner = orjson.dumps([row.get("salt"), row.get("tenant"), row.get("api_key")])
        written_as = blake3(owner + orjson.dumps(body)).digest()
        totals["identical"] += written[written_as] > 0
        written[written_as] += 1
        key = blake3(owner + canonical).digest()
        seen = named.setdefault(key, _Seen(line=number))
        time_s = _time_s(row)
        if seen.count:
            totals["canonical"] += 1
            totals["greedy"] += body.get("temperature") == 0
            totals["repeated_tokens"] += tokens
            if time_s is not None and seen.time_s is not None:
                gaps.append(abs(time_s - seen.time_s))
        elif (split := _last_text(body)) is not None:
            rest, text = split
            scope = blake3(owner + canonical_body(rest)).digest()
            totals["near"] += _is_near(texts.setdefault(scope, _Texts()), text, near)
        seen.count += 1
        seen.time_s = time_s
    largest = sorted((seen for seen in named.values() if seen.count > 1), key=lambda seen: -seen.count)
    return Duplicates(
        **totals,
        median_gap_s=float(np.median(gaps)) if gaps else None,
        groups=tuple(Group(seen.line, seen.count) for seen in largest[:num_groups]),
    )


# ---------------------------------------------------------------- lines


def _row(line: bytes) -> dict[str, Any] | None:
    try:
        row = orjson.loads(line)
    except orjson.JSONDecodeError:
        return None
    return row if isinstance(row, dict) else None


def _body(row: Mapping[str, Any]) -> dict[str, Any] | None:
    """The request in a line; of our own log without content what it has in its place."""
    for name in ("body", "request"):
        if isinstance(row.get(name), dict):
            body: dict[str, Any] = row[name]
            return body
    if row.get("served"):
        return None  # of our own log, without content: nothing is known of what was asked
    if "hash_ids" in row:
        return {name: row.get(name) for name in ("key", "hash_ids", "input_length", "choices")}
    if not row.keys() & {"messages", "prompt", "input"}:
        return None
    return {name: value for name, value in row.items() if name not in _LOG_FIELDS}


def _output_tokens(row: Mapping[str, Any]) -> int:
    usage = row.get("usage")
    found = usage.get("completion_tokens") if isinstance(usage, dict) else row.get("output_length")
    return found if isinstance(found, int) and not isinstance(found, bool) and found > 0 else 0


def _time_s(row: Mapping[str, Any]) -> float | None:
    """Seconds out of ``timestamp`` or ``created``, in seconds, milliseconds or microseconds of our days."""
    for name in ("timestamp", "created", "created_at"):
        value = row.get(name)
        if isinstance(value, int | float) and not isinstance(value, bool):
            return value / (1e6 if value > 1e14 else 1e3 if value > 1e11 else 1)
    return None


def _last_text(body: Mapping[str, Any]) -> tuple[dict[str, Any], str] | None:
    """A body without the last text of its user, and that text."""
    for name in ("prompt", "input"):
        if isinstance(body.get(name), str):
            return {**body, name: None}, body[name]
    messages = body.get("messages")
    if not isinstance(messages, list):
        return None
    for place in reversed(range(len(messages))):
        message = messages[place]
        if isinstance(message, dict) and message.get("role") == "user":
            content = message.get("content")
            text = content if isinstance(content, str) else _text_of_parts(content)
            rest = [*messages[:place], {**message, "content": None}, *messages[place + 1 :]]
            return {**body, "messages": rest}, text
    return None


def _text_of_parts(content: Any) -> str:
    parts = content if isinstance(content, list) else []
    return "\n".join(str(part.get("text", "")) for part in parts if isinstance(part, dict))


# ---------------------------------------------------------------- likeness

_RANDOM = np.random.default_rng(20261201)  # the same for every run: signatures are compared within one only
_FACTORS = _RANDOM.integers(1, 2**63, _NUM_HASHES, dtype=np.uint64) * np.uint64(2) + np.uint64(1)
_ADDENDS = _RANDOM.integers(0, 2**63, _NUM_HASHES, dtype=np.uint64)


def _signature(text: str) -> Signature:
    """MinHash of a text's three-word phrases; case, punctuation and spacing do not count."""
    words = _WORD.findall(text.casefold())
    num_phrases = max(1, len(words) - _SHINGLE_WORDS + 1)
    phrases = {" ".join(words[at : at + _SHINGLE_WORDS]) for at in range(num_phrases)}
    hashes = np.array(
        [xxhash.xxh3_64_intdigest(phrase.encode("utf-8", "replace")) for phrase in phrases], np.uint64
    )
    smallest = np.full(_NUM_HASHES, np.iinfo(np.uint64).max)
    for at in range(0, len(hashes), 1024):  # a long text's phrases, some at a time
        mixed = hashes[at : at + 1024, None] * _FACTORS + _ADDENDS
        smallest = np.minimum(smallest, (mixed ^ (mixed >> np.uint64(29))).min(axis=0))
    return smallest


def _is_near(texts: _Texts, text: str, near: float) -> bool:
    """Whether an earlier text is near; remembers this one. One that goes on from another is no paraphrase of
    it."""
    signature = _signature(text)
    places = [(at, signature[at : at + _BAND].tobytes()) for at in range(0, _NUM_HASHES, _BAND)]
    candidates: Sequence[int] = list(
        dict.fromkeys(index for place in places for index in texts.bands.get(place, ()))
    )[:_MAX_CANDIDATES]
    found = any(
        float(np.mean(texts.signatures[index] == signature)) >= near
        and _digest(text[: texts.names[index][0]]) != texts.names[index][1]
        for index in candidates
    )
    for place in places:
        texts.bands[place].append(len(texts.signatures))
    texts.signatures.append(signature)
    texts.names.append((len(text), _digest(text)))
    return found


def _digest(text: str) -> bytes:
    return blake3(text.encode("utf-8", "replace")).digest()
