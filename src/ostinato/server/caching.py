"""What requests and answers say of the response caches in their headers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from ..errors import ParameterError
from ..responses.control import read_cache_control
from ..types import CacheControl, GenerationRequest
from .backend import Handle

CACHE_HEADER: Final = "x-ostinato-cache"
ANSWER_HEADER: Final = "x-ostinato-answer"
NAMESPACE_HEADER: Final = "x-ostinato-cache-namespace"
SIMILARITY_HEADER: Final = "x-ostinato-similarity"
GUARDS_HEADER: Final = "x-ostinato-guards"
_MAX_NAMESPACE_CHARS: Final = 256
_ASKED: Final[Mapping[str, tuple[bool, bool | None]]] = {
    "on": (True, None),
    "off": (False, None),
    "exact": (True, False),
    "semantic": (True, True),
}
"""What the header may say: whether kept answers are wanted, and whether of questions that mean the same."""


def with_cache_control(
    requests: Sequence[GenerationRequest], headers: Mapping[str, str], asked: bool | None
) -> list[GenerationRequest]:
    """Requests with what their headers, or the field ``cache_answer``, say of kept answers.

    Raises:
        ParameterError: the header is none of ``on``, ``off``, ``exact`` and ``semantic``.
    """
    control = cache_control(headers, asked)
    return [replace(request, cache_control=control) for request in requests]


def cache_control(headers: Mapping[str, str], asked: bool | None) -> CacheControl:
    """What headers, or the field ``cache_answer``, say of kept answers. Raises :class:`ParameterError`."""
    given = headers.get(CACHE_HEADER)
    semantic: bool | None = None
    if given is not None:
        said = _ASKED.get(given.strip().lower())
        if said is None:
            raise ParameterError(
                f"The header {CACHE_HEADER} is 'on', 'off', 'exact' or 'semantic'.", param=CACHE_HEADER
            )
        asked = said[0] if asked is None else asked
        semantic = said[1]
    namespace = headers.get(NAMESPACE_HEADER, "")
    if len(namespace) > _MAX_NAMESPACE_CHARS:
        raise ParameterError(
            f"The header {NAMESPACE_HEADER} has at most {_MAX_NAMESPACE_CHARS} characters.",
            param=NAMESPACE_HEADER,
        )
    return read_cache_control(headers.get("cache-control"), asked, semantic=semantic, namespace=namespace)


def cache_headers(handles: Sequence[Handle]) -> list[tuple[bytes, bytes]]:
    """Who answered (of several prompts: each), and how old the oldest kept answer is."""
    outcomes = [handle.outcome for handle in handles if handle.outcome is not None]
    if not outcomes:
        return []
    said = outcomes[:1] if len(set(outcomes)) == 1 else outcomes
    headers = [(CACHE_HEADER.encode(), ", ".join(said).encode())]
    served = [handle.served for handle in handles if handle.served is not None]
    ages = [item.age_s for item in served if item.layer != "joined"]
    if ages:
        headers.append((b"age", str(int(max(ages))).encode()))
    if len(served) == 1 and served[0].entry_id:
        headers.append((ANSWER_HEADER.encode(), served[0].entry_id.encode()))
        headers += semantic_headers(served[0].details)
    return headers


def semantic_headers(details: Mapping[str, Any]) -> list[tuple[bytes, bytes]]:
    """How a semantic answer was judged: its similarity, and what the guards said that did not simply pass."""
    if "similarity" not in details:
        return []
    guards = "; ".join(f"{name} {said.partition(':')[0]}" for name, said in details["guards"].items())
    return [
        (SIMILARITY_HEADER.encode(), f"{details['similarity']:.4f}".encode()),
        (GUARDS_HEADER.encode(), (guards or "all pass").encode()),
    ]
