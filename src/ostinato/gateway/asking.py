"""What a router wants to know of a request: how its prompt begins, block by block, and whose turn it is."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

import orjson
from xxhash import xxh3_64_digest, xxh3_64_intdigest

from ..routing import Ask
from .relay import CREDENTIALS

BYTES_PER_TOKEN: Final = 4
"""Of JSON, roughly, in most languages. Only sizes are compared with it, none is billed by it."""

# In the order in which templates write them, so that what a longer prompt goes on from stands first.
_FIELDS: Final = ("tools", "functions", "system", "instructions")
_TURNS: Final = ("messages", "input", "prompt")


def ask_of(body: bytes, headers: Mapping[str, str], *, block_bytes: int) -> Ask:
    """A request to place. Names are chained hashes of ``block_bytes`` of its prompt's JSON each.

    Two prompts have a name in common only if they begin alike up to there, for the same model, salt and key.
    A body that is no object has no names.
    """
    try:
        parsed = orjson.loads(body)
    except orjson.JSONDecodeError:
        parsed = None
    if not isinstance(parsed, dict):
        return Ask((), max(len(body) // BYTES_PER_TOKEN, 1))
    root = [parsed.get("model"), parsed.get("cache_salt")]
    keys = [headers.get(name) for name in CREDENTIALS]
    chain = xxh3_64_digest(orjson.dumps([root, keys]))
    text = b"".join(_pieces(parsed))
    names = []
    for start in range(0, len(text) - block_bytes + 1, block_bytes):
        chain = xxh3_64_digest(chain + text[start : start + block_bytes])
        names.append(int.from_bytes(chain, "big"))
    if not names:  # too short for a block; equal ones still go to one place
        names.append(xxh3_64_intdigest(chain + text))
    return Ask(names, max(len(text) // BYTES_PER_TOKEN, 1), _session(parsed, headers))


def _pieces(parsed: Mapping[str, Any]) -> Iterator[bytes]:
    for name in _FIELDS:
        if parsed.get(name):
            yield orjson.dumps(parsed[name], option=orjson.OPT_SORT_KEYS) + b"\n"
    for name in _TURNS:
        turns = parsed.get(name)
        if isinstance(turns, list):
            for turn in turns:
                yield orjson.dumps(turn, option=orjson.OPT_SORT_KEYS) + b"\n"
        elif turns:
            # A string goes on inside its quotes: the closing one would differ from what a longer one has.
            yield orjson.dumps(turns)[:-1]


def _session(parsed: Mapping[str, Any], headers: Mapping[str, str]) -> str:
    given = parsed.get("session")
    if isinstance(given, dict):
        given = given.get("id")
    given = given or headers.get("x-ostinato-session") or parsed.get("prompt_cache_key")
    return given if isinstance(given, str) else ""


def tells_nothing(item: Mapping[str, Any]) -> bool:
    """Whether an event of a stream comes before the first token: it can be taken back and said by another."""
    kind = item.get("type")
    if isinstance(kind, str):
        return kind in _OPENINGS
    choices = item.get("choices")
    if not isinstance(choices, list) or item.get("usage") or "error" in item:
        return False
    for choice in choices:
        if not isinstance(choice, dict) or choice.get("finish_reason") or choice.get("text"):
            return False
        delta = choice.get("delta") or {}
        if not isinstance(delta, dict) or any(value for name, value in delta.items() if name != "role"):
            return False
    return True


_OPENINGS: Final = frozenset(
    {
        *("message_start", "content_block_start", "ping"),
        *("response.created", "response.queued", "response.in_progress"),
        *("response.output_item.added", "response.content_part.added"),
    }
)
