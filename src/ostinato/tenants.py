"""Who may ask and what each may keep: API keys with names, and a file of tenants with their limits.

A tenant's salts are derived from its key: its cache survives a change of the list, never meets another's.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from typing import Any, Final

from blake3 import blake3

from .errors import ParameterError
from .kv.terms import Allowance, Allowances, tenant_id
from .retention.budgets import parse_budget
from .types import REUSE_MODES, ReuseMode

_SALT_CONTEXT: Final = "ostinato server key salt v1"
_SIZES: Final = ("kv_cache", "shared_tier", "answers")
_FIELDS: Final = frozenset({"api_key", "salt", "ttl", "kv_budget", "reuse", *_SIZES})


def key_salt(key: str) -> str:
    """What the salts of an API key's holder are made of."""
    return blake3(key.encode(), derive_key_context=_SALT_CONTEXT).hexdigest()


@dataclass(frozen=True, slots=True)
class Tenant:
    """One tenant: its API ``key``, if it has one, and what its salts are made of.

    ``kv_bytes``, ``tier_bytes`` and ``answers_bytes`` bound what is kept of it in the arena, in the shared
    tier and of answers, ``ttl_s`` for how long, ``kv_budget`` the KV of each of its requests; ``reuse`` says
    what KV they may be answered with; ``None``: as for everyone.
    """

    name: str
    key: str | None = field(default=None, repr=False)
    salt: str = field(default="", repr=False)
    kv_bytes: int | None = None
    tier_bytes: int | None = None
    ttl_s: float | None = None
    answers_bytes: int | None = None
    kv_budget: int | str | None = None
    reuse: ReuseMode | None = None

    @property
    def id(self) -> str:
        """By which it is known below the doors."""
        return tenant_id(self.salt)


def tenants_of_keys(api_keys: str) -> tuple[Tenant, ...]:
    """Comma-separated keys, named ``key-1``, ``key-2`` … in their order."""
    keys = [key.strip() for key in api_keys.split(",") if key.strip()]
    return tuple(Tenant(f"key-{index}", key, key_salt(key)) for index, key in enumerate(keys, start=1))


def read_tenants(path: Path, parse_size: Any) -> tuple[Tenant, ...]:
    """Tenants from a TOML file, one table each::

        [anna]
        api_key = "sk-…"        # or, for the library: salt = "…"
        kv_cache = "1GiB"       # of it in the arena at most
        shared_tier = "4GiB"    # and in the shared tier
        answers = "100MiB"      # and of whole answers
        ttl = 3600              # seconds after the last use (of answers: after they were stored)
        kv_budget = "50%"       # of the KV of each of its requests (tokens, a part of the prompt, bytes)
        reuse = "moved"         # KV of text that stands elsewhere now may be used (exact, moved, verify)

    Args:
        parse_size: reads ``"1GiB"`` as bytes.

    Raises:
        ParameterError: it cannot be read, or a table says what is not known; the message never shows a key.
    """
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ParameterError(f"{path} cannot be read: {error.strerror}", param="tenants") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError):
        # What the parser says may show a part of a key.
        raise ParameterError(f"{path} is not TOML", param="tenants") from None
    tenants = tuple(_tenant(path, name, table, parse_size) for name, table in tables.items())
    salts = [tenant.salt for tenant in tenants]
    if len(set(salts)) < len(salts):
        raise ParameterError(f"{path}: two tenants have the same key or salt", param="tenants")
    return tenants


def _tenant(path: Path, name: str, table: Any, parse_size: Any) -> Tenant:
    def wrong(text: str) -> ParameterError:
        return ParameterError(f"{path}: {name} {text}", param="tenants")

    if not isinstance(table, Mapping):
        raise wrong("is not a table of its own")
    if unknown := sorted(set(table) - _FIELDS):
        raise wrong(f"has {unknown[0]}, which is not known; there are {', '.join(sorted(_FIELDS))}")
    key, salt = table.get("api_key"), table.get("salt", "")
    if (key is None) == (not salt) or not isinstance(key, str | None) or not isinstance(salt, str):
        raise wrong("needs an api_key or a salt, as text")
    if key is not None and (not key.strip() or key != key.strip() or "," in key):
        raise wrong("has an api_key with a comma or space around it, or an empty one")
    sizes = {}
    for field_name in _SIZES:
        try:
            sizes[field_name] = None if field_name not in table else parse_size(str(table[field_name]))
        except ValueError:
            raise wrong(f"has a {field_name} that is not a size; write for example 1GiB") from None
    ttl = table.get("ttl")
    if ttl is not None and (isinstance(ttl, bool) or not isinstance(ttl, int | float) or not ttl >= 1):
        raise wrong("has a ttl that is not a number of seconds, at least 1")
    if (budget := table.get("kv_budget")) is not None:
        try:
            parse_budget(budget)
        except ParameterError:
            raise wrong('has a kv_budget that is none; write 2048, "50%" or "64MiB"') from None
    if (reuse := table.get("reuse")) not in (None, *REUSE_MODES):
        raise wrong(f"has a reuse that is none; write {', '.join(REUSE_MODES)}")
    salt = key_salt(key) if key is not None else salt
    kv_bytes, tier_bytes, answers_bytes = (sizes[name] for name in _SIZES)
    return Tenant(name, key, salt, kv_bytes, tier_bytes, ttl, answers_bytes, budget, reuse)


def allowances(
    tenants: tuple[Tenant, ...], *, block_bytes: int, in_tier: bool, default_bytes: int | None, ttl_s: float
) -> Allowances:
    """What everyone may keep of blocks of ``block_bytes``, in the arena or in the tier."""

    def blocks(size: int | None) -> int | None:
        return None if size is None else size // block_bytes

    by_tenant = {}
    for tenant in tenants:
        size = tenant.tier_bytes if in_tier else tenant.kv_bytes
        limit_s = inf if tenant.ttl_s is None else tenant.ttl_s
        most = blocks(default_bytes if size is None else size)
        by_tenant[tenant.id] = Allowance(most, min(ttl_s, limit_s))
    return Allowances(Allowance(blocks(default_bytes), ttl_s), by_tenant)
