"""What the pages need of a runtime beside what every backend has."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from ...diagnose.writing import Words
from ...events import reuse_of
from ...kv.keeper import CacheSummary
from ...kv.pins import Pin
from ...kv.survey import Surveyor
from ...kv.terms import Selection
from ...prompt.registry import PromptRegistry
from ...types import GenerationRequest, TokenArray, Usage


class Inside(Protocol):
    """A runtime that lets itself be looked into: :class:`ostinato.runtime.Runtime` is one."""

    @property
    def block_tokens(self) -> int: ...

    @property
    def surveyor(self) -> Surveyor: ...

    @property
    def words(self) -> Words: ...

    @property
    def prompts(self) -> PromptRegistry: ...

    @property
    def on_purge(self) -> list[Callable[[Selection], None]]: ...

    def cache_summary(self) -> CacheSummary: ...

    def ttl_s(self, request: GenerationRequest, /) -> float: ...

    def pin(self, request: GenerationRequest, ttl_s: float, /) -> Pin: ...

    def warm(self, request: GenerationRequest, /) -> Usage: ...

    def origins(self, request: GenerationRequest, /) -> TokenArray | None: ...


SOURCE_NAMES: Mapping[str, str] = {
    "arena": "memory",
    "shared": "shared tier",
    "recalled": "recalled within a budget",
    "non_prefix": "moved from elsewhere",
    "exact": "kept answer",
    "semantic": "answer to a like question",
    "provider": "vendor’s cache",
    "computed": "computed",
}


@dataclass(frozen=True, slots=True)
class Span:
    """Tokens ``[start, end)`` of a prompt, all from one source."""

    source: str
    start: int
    end: int

    @property
    def num_tokens(self) -> int:
        return self.end - self.start


def spans_of(usage: Usage, num_tokens: int) -> tuple[Span, ...]:
    """A prompt by where its tokens came from, in order.

    Memory and then the shared tier have the beginning; what was recalled or moved follows, by its number:
    which tokens it was is not recorded.
    """
    spans: list[Span] = []
    at = 0
    for layer, count in reuse_of(usage).items():
        end = min(num_tokens, at + count)
        if end > at:
            spans.append(Span(layer, at, end))
        at = end
    if at < num_tokens:
        spans.append(Span("computed", at, num_tokens))
    return tuple(spans)
