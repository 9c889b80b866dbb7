"""Names of requests: versioned digests of everything that can change an answer.

The rule is the same everywhere: all there is goes in, but for a list of what cannot matter. So a field that
nobody thought of makes two names, never one name for two answers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any, Final

import orjson
from blake3 import blake3

from ..types import GenerationRequest

VERSION: Final = 1
"""Goes up whenever equal requests come to be named otherwise, or stored answers to mean something else."""

REQUEST_NO_INFLUENCE: Final = frozenset(
    {"request_id", "is_warming", "session", "cache_ttl_s", "deadline_s", "cache_control"}
)
"""Fields of a :class:`GenerationRequest` that say nothing of the answer: whose it is, how long to wait for it
and how long to keep what. (An answer that a deadline cut short is not kept.)"""

BODY_NO_INFLUENCE: Final = frozenset(
    {
        *("stream", "stream_options"),  # how it is sent
        *("user", "metadata", "safety_identifier"),  # who asks
        *("prompt_cache_key", "prompt_cache_options", "prompt_cache_retention", "cache_control"),
        *("cache_ttl", "cache_answer", "session", "deadline"),  # ours: what to keep, how long to wait
        "service_tier",  # how fast
    }
)
"""Top-level fields of a request's body that vendors document to have no part in the answer."""

_MARK: Final = "cache_control"
_CONTEXT: Final = f"ostinato answer key v{VERSION}"


def request_key(identity: Mapping[str, Any], request: GenerationRequest, *more: bytes) -> bytes:
    """The key of a request to the embedded engine, 32 bytes.

    ``identity`` is what answers there beside the request: the model's content, its template, versions,
    settings. ``more``: what else the answer depends on.

    Raises:
        ValueError: the request has no form as JSON (half a character), so no name.
    """
    named = {
        item.name: _plain(getattr(request, item.name), item.type)
        for item in fields(request)
        if item.name not in REQUEST_NO_INFLUENCE
    }
    return _key(b"request", _json(dict(identity), sort=True), _json(named), *more)


def body_key(identity: Mapping[str, Any], endpoint: str, body: Mapping[str, Any], *more: bytes) -> bytes:
    """The key of a body to be sent to ``endpoint`` of an upstream, 32 bytes; unknown fields are part of it.

    Key order matters only where it cannot show in a prompt: of the body itself and of messages. Markers of
    vendors' prompt caches do not matter.

    Raises:
        ValueError: the body has no form as JSON, so no name.
    """
    return _key(b"body", _json(dict(identity), sort=True), endpoint.encode(), canonical_body(body), *more)


def canonical_body(body: Mapping[str, Any]) -> bytes:
    """A body in the one form that equal bodies share.

    Raises:
        ValueError: it has no form as JSON.
    """
    kept: dict[str, Any] = {name: body[name] for name in sorted(body) if name not in BODY_NO_INFLUENCE}
    for name in ("system", "tools"):
        if isinstance(kept.get(name), list):
            kept[name] = [_unmarked(item) for item in kept[name]]
    for name in ("messages", "input"):
        if isinstance(kept.get(name), list):
            kept[name] = [_message(item) for item in kept[name]]
    return _json(kept)


def _message(message: Any) -> Any:
    if not isinstance(message, Mapping):
        return message
    message = {name: message[name] for name in sorted(message)}
    if isinstance(message.get("content"), list):
        message["content"] = [_unmarked(part) for part in message["content"]]
    return message


def _unmarked(part: Any) -> Any:
    """A block without a marker of a prompt cache. Deeper down the name may be anyone's."""
    if not isinstance(part, Mapping):
        return part
    return {name: value for name, value in part.items() if name != _MARK}


def _plain(value: Any, kind: object = "") -> Any:
    """A value as JSON has it. Numbers that are floats by their kind are floats: 0 is 0.0 there."""
    if is_dataclass(value):
        return {item.name: _plain(getattr(value, item.name), item.type) for item in fields(value)}
    if isinstance(value, Mapping):
        return [[name, _plain(item)] for name, item in value.items()]
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if kind == "float" and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    return value


def _json(value: Any, *, sort: bool = False) -> bytes:
    try:
        return orjson.dumps(value, option=orjson.OPT_SORT_KEYS if sort else 0)
    except orjson.JSONEncodeError as error:
        raise ValueError(f"not JSON: {error}") from None


def _key(*parts: bytes) -> bytes:
    hasher = blake3(derive_key_context=_CONTEXT)
    for part in parts:
        hasher.update(len(part).to_bytes(8, "little"))
        hasher.update(part)
    return hasher.digest()
