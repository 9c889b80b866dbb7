"""What a look into a log says: findings with what they cost, what mends them, and what that is worth."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from .causes import FIXES as TEXT_FIXES

FIXES: Final[Mapping[str, str]] = {
    **TEXT_FIXES,
    "cache_off": "Turn the cache on: it has read nothing although prompts repeat. Of vendors"
    " with breakpoints, "
    "set cache_control.",
    "no_breakpoint": "Set cache_control at the end of what stays the same; ostinato plan says where.",
    "too_many_breakpoints": "Set four of them at most: the vendor refuses requests with more.",
    "short_prefix": "Make the part that stays the same longer than what the vendor caches at"
    " all, or let it be.",
    "capacity": "Give the cache more room, or a shared tier below it: what comes back has been evicted.",
    "quota": "Raise the tenant's quota: what comes back was given up for it.",
    "ttl_gap": "Keep it longer (a longer TTL, a keep-alive, pinning): requests come back"
    " after it has expired.",
    "purged": "Purge less: what comes back was purged.",
    "fan_out": "Send one request first and the others once it has its first token: all of"
    " them computed the same.",
    "look_back": "Set a breakpoint every 20 blocks: the vendor looks no further back for what it has.",
    "restart": "Keep KV over restarts, with a shared tier: what was computed before was lost.",
    "key_without_identity": "Make the cache key of everything that can change an answer: model,"
    " parameters, tenant.",
    "nothing_to_share": "",
    "write_back": "Let the shared tier keep up: raise its buffers, or take a faster disk.",
    "tier_failures": "Look at the shared tier's disk: blocks that are there cannot be read.",
    "preemption": "Give requests more KV, or run fewer at once: sequences are thrown out and computed again.",
    "unexplained": "The beginning was the same, and in time: look at what does not stand in the request"
    " (key, workspace, region, headers).",
}  # fmt: skip
NOTES: Final = frozenset({"nothing_to_share"})
"""What is said and is nobody's fault."""


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that breaks reuse.

    Attributes:
        kind: a key of :data:`FIXES`.
        where: the part of the prompts, where it is in one.
        lost_tokens: prompt tokens that were computed and would not have been.
        lost_dollars: what that cost, where the price is known.
        requests: some of those it is in.
        gain_tokens: how many more were found when the repaired log was replayed, with all findings before
            this one repaired, too; ``None``: it was not tried.
    """

    kind: str
    where: str
    num_requests: int
    lost_tokens: int
    requests: tuple[str, ...] = ()
    examples: tuple[str, ...] = ()
    lost_dollars: float | None = None
    gain_tokens: int | None = None

    @property
    def fix(self) -> str:
        return FIXES[self.kind]

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {"fix": self.fix}


@dataclass(frozen=True, slots=True)
class Group:
    """Requests that share something: how many, of which kind, and how much of them was found."""

    name: str
    num_requests: int
    prompt_tokens: int
    hit_tokens: int


@dataclass(frozen=True, slots=True)
class Report:
    """What there is to say of a log.

    Attributes:
        hit_tokens: of ``prompt_tokens``: as measured, where the log says (``is_measured``), or found when it
            is replayed through a cache with room for all.
        possible_tokens: found by such a cache once everything is repaired, where that was tried; else of the
            log as it is.
    """

    num_requests: int
    prompt_tokens: int
    hit_tokens: int
    possible_tokens: int
    is_measured: bool
    findings: tuple[Finding, ...]
    groups: tuple[Group, ...] = ()
    notes: tuple[Finding, ...] = ()
    extra: Mapping[str, Any] = field(default_factory=dict)

    @property
    def hit_rate(self) -> float:
        return self.hit_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    @property
    def possible_rate(self) -> float:
        return self.possible_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    def as_dict(self) -> dict[str, Any]:
        return {
            "num_requests": self.num_requests,
            "prompt_tokens": self.prompt_tokens,
            "hit_tokens": self.hit_tokens,
            "hit_rate": round(self.hit_rate, 6),
            "is_measured": self.is_measured,
            "possible_tokens": self.possible_tokens,
            "possible_rate": round(self.possible_rate, 6),
            "findings": [finding.as_dict() for finding in self.findings],
            "notes": [note.as_dict() for note in self.notes],
            "groups": [asdict(group) for group in self.groups],
            **self.extra,
        }
