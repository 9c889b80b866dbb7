"""The seam for response caches: what stands in front of the upstreams may know an answer already."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class PassedRequest:
    """A request as it will be passed on. ``salt`` keeps tenants apart; ``path`` is its route."""

    path: str
    upstream: str
    model: str
    salt: str
    body: bytes
    is_stream: bool


@dataclass(frozen=True, slots=True)
class PassedAnswer:
    """A whole answer of an upstream: status 200, complete, well-formed. A stream's body is all its events."""

    content_type: bytes
    body: bytes


class AnswerCache(Protocol):
    """What may answer in an upstream's place. Both are called in a thread, never on the event loop."""

    def find(self, request: PassedRequest, /) -> PassedAnswer | None:
        """The answer to an equal request, if there is one."""

    def keep(self, request: PassedRequest, answer: PassedAnswer, /) -> None:
        """Told of every whole answer, and of nothing that failed or broke off."""
