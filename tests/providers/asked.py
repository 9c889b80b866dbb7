"""Anthropic requests for the tests, in which a token is a byte of text."""

from __future__ import annotations

from datetime import date
from typing import Any

from ostinato.providers.rules import CacheRules, builtin_table
from ostinato.providers.shape import Block, Prompt, digest_of

DAY = date(2026, 12, 1)


def rules_of(model: str, vendor: str = "anthropic", on: date = DAY) -> CacheRules:
    return builtin_table().rules(vendor, model, on)


def block(
    name: str,
    tokens: int = 1000,
    *,
    level: Any = "messages",
    kind: str = "text",
    role: str = "user",
    ttl: str | None = None,
    ends: bool = True,
) -> Block:
    role = role if level == "messages" else ""
    return Block(level, kind, digest_of(name.encode()), tokens, (name,), True, ttl, role, ends)


def prompt(
    *blocks: Block, model: str = "claude-sonnet-4-5", vendor: str = "anthropic", **more: Any
) -> Prompt:
    return Prompt(vendor, model, tuple(blocks), **more)
