"""Bodies on their way to an upstream as questions for the semantic cache."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import orjson

from ..responses.control import SemanticFor
from ..responses.exact import Asked
from ..responses.semantic import Match, Question, Semantic, Sought
from ..responses.semantic_chats import space_of, wants
from ..types import CacheControl

_ROUTES: Final = frozenset({"/v1/chat/completions", "/v1/messages"})
_TURN_FIELDS: Final = frozenset({"role", "content", "cache_control"})


class SemanticBodies:
    """What knows answers of upstreams by the meaning of the last message.

    Args:
        semantic: decides; closed by whoever made it.
        whose: requests of whom.
        is_guarded: whether earlier turns are judged instead of having to be equal.
    """

    def __init__(
        self, semantic: Semantic[bytes], *, whose: SemanticFor = "asked", is_guarded: bool = False
    ) -> None:
        self.semantic = semantic
        self._whose = whose
        self._is_guarded = is_guarded

    def find(
        self,
        path: str,
        body: Mapping[str, Any],
        control: CacheControl,
        asked: Asked,
        name: Callable[[Mapping[str, Any]], bytes],
    ) -> Match[bytes] | Sought[bytes] | None:
        """An answer that serves, or a place to file one; ``None``: no part in it.

        ``name`` gives the exact cache's key of another body that all else is equal for.
        """
        messages = body.get("messages")
        if path not in _ROUTES or not wants(control.semantic, self._whose) or not isinstance(messages, list):
            return None
        texts = [_text_of(message) for message in messages]
        if not texts or texts[-1] is None or messages[-1].get("role") != "user":
            return None
        first = _first_of_turns(messages, texts) if self._is_guarded else len(messages) - 1
        blanks = [{**message, "content": ""} for message in messages[first:]]
        try:
            named = name({**body, "messages": [*messages[:first], *blanks]})
        except ValueError:
            return None
        question = Question(
            asked.key,
            space_of(named, self.semantic.identity, control.namespace),
            texts[-1],
            tuple(text or "" for text in texts[first:-1]),
            asked.tenant,
            asked.model,
            asked.prompt,
            control,
            asked.ttl_s,
        )
        return self.semantic.find(question)


def _text_of(message: Any) -> str | None:
    """The text of a plain message of user or assistant; ``None`` where there is more in it than text."""
    if not isinstance(message, Mapping) or not set(message) <= _TURN_FIELDS:
        return None
    content = message.get("content")
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        return None
    parts = []
    for part in content:
        if (
            not isinstance(part, Mapping)
            or part.get("type") != "text"
            or not isinstance(part.get("text"), str)
        ):
            return None
        parts.append(part["text"])
    return "\n".join(parts)


def _first_of_turns(messages: Sequence[Any], texts: Sequence[str | None]) -> int:
    """Where the plain turns of user and assistant begin that lead to the last message."""
    first = len(messages) - 1
    while (
        first >= 2
        and texts[first - 1] is not None
        and texts[first - 2] is not None
        and messages[first - 1].get("role") == "assistant"
        and messages[first - 2].get("role") == "user"
    ):
        first -= 2
    return first


def answer_text(pieces: Sequence[bytes]) -> str:
    """The text of an upstream's answer, to compare answers by; of streams put together."""
    _, body = pieces
    try:
        items = [orjson.loads(body)]
    except orjson.JSONDecodeError:
        items = []
        for line in body.split(b"\n"):
            data = line.removeprefix(b"data:").strip()
            if line.startswith(b"data:") and data != b"[DONE]":
                try:
                    items.append(orjson.loads(data))
                except orjson.JSONDecodeError:
                    continue
    return "".join(text for item in items if isinstance(item, dict) for text in _texts(item))


def _texts(item: Mapping[str, Any]) -> list[str]:
    """Text in an answer, or in an event of one, of either vendor's form."""
    found = []
    choices = item.get("choices")
    for choice in choices[:1] if isinstance(choices, list) else ():
        for holder in (choice.get("message"), choice.get("delta")):
            if isinstance(holder, dict) and isinstance(holder.get("content"), str):
                found.append(holder["content"])
    content = item.get("content")
    for part in content if isinstance(content, list) else ():
        if isinstance(part, dict) and isinstance(part.get("text"), str):
            found.append(part["text"])
    delta = item.get("delta")
    if isinstance(delta, dict) and isinstance(delta.get("text"), str):
        found.append(delta["text"])
    return found
