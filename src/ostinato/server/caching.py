"""What requests and answers say of the response caches in their headers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

from ..errors import ParameterError
from ..responses.control import read_cache_control
from ..types import CacheControl, GenerationRequest
from .backend import Handle

CACHE_HEADER: Final = "x-ostinato-cache"
ANSWER_HEADER: Final = "x-ostinato-answer"
_ASKED: Final[Mapping[str, bool]] = {"on": True, "off": False}


def with_cache_control(
    requests: Sequence[GenerationRequest], headers: Mapping[str, str], asked: bool | None
) -> list[GenerationRequest]:
    """Requests with what their headers, or the field ``cache_answer``, say of kept answers.

    Raises:
        ParameterError: the header is neither ``on`` nor ``off``.
    """
    control = cache_control(headers, asked)
    return [replace(request, cache_control=control) for request in requests]


def cache_control(headers: Mapping[str, str], asked: bool | None) -> CacheControl:
    """What headers, or the field ``cache_answer``, say of kept answers. Raises :class:`ParameterError`."""
    given = headers.get(CACHE_HEADER)
    if asked is None and given is not None:
        asked = _ASKED.get(given.strip().lower())
        if asked is None:
            raise ParameterError(f"The header {CACHE_HEADER} is 'on' or 'off'.", param=CACHE_HEADER)
    return read_cache_control(headers.get("cache-control"), asked)


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
    return headers
