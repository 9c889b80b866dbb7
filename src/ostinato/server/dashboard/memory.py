"""Where KV lies and whose it is: by tier, by tenant, and what is pinned."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

from ...kv.keeper import CacheSummary
from ...kv.terms import prompt_id
from ...responses.stores.base import Use


@dataclass(frozen=True, slots=True)
class Holding:
    """What one tenant has, in bytes. ``quota_bytes`` ``None``: there is none."""

    tenant: str
    name: str
    arena_bytes: int
    quota_bytes: int | None
    tier_bytes: int
    answer_bytes: int
    num_answers: int

    @property
    def total_bytes(self) -> int:
        return self.arena_bytes + self.tier_bytes + self.answer_bytes


class TenantNames:
    """What to call a tenant: the name of its key, or the beginning of its digest."""

    def __init__(self, names: dict[str, str]) -> None:
        self._names = names

    def __call__(self, tenant: str) -> str:
        if not tenant:
            return "no salt"
        return self._names.get(tenant) or f"salt {tenant.partition(':')[2][:8]}"


def prompt_names(names: list[str]) -> dict[str, str]:
    """Named prompts by their digests."""
    return {prompt_id(name): name for name in names}


def memory_figures(
    summary: CacheSummary, uses: list[Use] | None, tenant_name: TenantNames, prompts: dict[str, str]
) -> dict[str, Any]:
    """All of the memory page."""
    arena: dict[str, int] = {}
    quotas: dict[str, int | None] = {}
    for use in summary.tenants:
        arena[use.tenant] = use.num_blocks * summary.block_bytes
        quotas[use.tenant] = None if use.max_blocks is None else use.max_blocks * summary.block_bytes
    tier: defaultdict[str, int] = defaultdict(int)
    by_prompt: defaultdict[str, int] = defaultdict(int)
    for content in summary.tier or ():
        num_bytes = content.num_blocks * summary.tier_block_bytes
        tier[content.tenant] += num_bytes
        if content.prompt:
            by_prompt[prompts.get(content.prompt, content.prompt[:11])] += num_bytes
    answers: defaultdict[str, int] = defaultdict(int)
    num_answers: defaultdict[str, int] = defaultdict(int)
    for kept in uses or ():
        answers[kept.tenant] += kept.num_bytes
        num_answers[kept.tenant] += kept.num_entries
    holdings = [
        Holding(
            tenant,
            tenant_name(tenant),
            arena.get(tenant, 0),
            quotas.get(tenant),
            tier.get(tenant, 0),
            answers.get(tenant, 0),
            num_answers.get(tenant, 0),
        )
        for tenant in {*arena, *tier, *answers}
    ]
    holdings.sort(key=lambda each: -each.total_bytes)
    return {
        "summary": summary,
        "holdings": holdings,
        "most_bytes": max((each.total_bytes for each in holdings), default=0),
        "has_tier": summary.tier is not None,
        "has_answers": uses is not None,
        "tier_by_prompt": sorted(by_prompt.items(), key=lambda each: -each[1]),
        "pins": [(pin, tenant_name(pin.tenant)) for pin in summary.pins],
    }
