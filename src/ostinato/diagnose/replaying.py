"""Prompts through the real prefix index, with no model: what a cache with room for all would find."""

from __future__ import annotations

from collections.abc import Sequence

from ..kv.hashing import Namespace
from ..kv.manager import KVManager
from ..types import TokenArray


def hits_of(prompts: Sequence[TokenArray], spaces: Sequence[str]) -> list[int]:
    """How many leading tokens of each prompt were there, one after the other, each in a space of its own."""
    assert len(prompts) == len(spaces), f"{len(prompts)} prompts in {len(spaces)} spaces"
    if not prompts:
        return []
    manager = KVManager(max(1, sum(len(tokens) for tokens in prompts)), 1)
    found: list[int] = []
    for tokens, space in zip(prompts, spaces, strict=True):
        if len(tokens) == 0:
            found.append(0)
            continue
        namespace = Namespace("log", "", "", "", "", "").with_salt(space)
        with manager.acquire(namespace, tokens) as lease:
            found.append(lease.prefix_len)
            if lease.reserve(len(tokens)):
                lease.commit(tokens)
    return found
