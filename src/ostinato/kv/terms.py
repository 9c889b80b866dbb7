"""Whose a block is and how long it may stay: what requests, tenants and operators say about keeping KV.

Names of tenants, models and prompts are digests of fixed length everywhere below the doors: no text that
somebody chose becomes part of a key, a record, a metric or a log.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from math import inf

from blake3 import blake3

ID_BYTES = 16
NOBODY = ""
"""The tenant of requests without salt or key, and the name of a prompt that has none."""

_ID_PREFIX = "b3:"


def short_id(kind: str, text: str) -> str:
    """``b3:`` and 32 hex digits that stand for ``text``; empty for empty. ``kind`` says what is named.

    Whoever knows the text can find its id, nobody the text from the id, unless it can be guessed.
    """
    if not text:
        return NOBODY
    # Off the wire a lone surrogate may come: it must still have exactly one encoding.
    data = text.encode("utf-8", "surrogatepass")
    return _ID_PREFIX + blake3(data, derive_key_context=f"ostinato {kind} id v1").hexdigest(length=ID_BYTES)


def tenant_id(name: str) -> str:
    """The tenant of this name (a salt, or whatever the salts of an API key are made of)."""
    return short_id("tenant", name)


def tenant_salt(tenant: str, salt: str) -> str:
    """A salt of a tenant that has several."""
    assert tenant != NOBODY, "nobody has salts"
    assert is_id(tenant), "a tenant is named by its id"
    return f"{tenant}/{salt}"


def tenant_of(salt: str) -> str:
    """Whose a salt is: the tenant's that ``tenant_salt`` was told, else it is a tenant by itself."""
    tenant, slash, _ = salt.partition("/")
    return tenant if slash and tenant and is_id(tenant) else tenant_id(salt)


def model_id(weights: str) -> str:
    """The model whose weights have this digest."""
    return short_id("model", weights)


def prompt_id(name: str) -> str:
    """The prompt that an application calls ``name``."""
    return short_id("prompt", name)


def is_id(text: str) -> bool:
    """Whether ``text`` is what the functions above return."""
    if not text:
        return True
    digits = text.removeprefix(_ID_PREFIX)
    return len(text) == len(_ID_PREFIX) + 2 * ID_BYTES and all(c in "0123456789abcdef" for c in digits)


@lru_cache(maxsize=4096)
def id_to_bytes(name: str) -> bytes:
    """An id as ``ID_BYTES`` bytes: zeros for nobody."""
    assert is_id(name), "a name that is not an id"
    return bytes.fromhex(name.removeprefix(_ID_PREFIX)) or bytes(ID_BYTES)


def id_from_bytes(data: bytes) -> str:
    """The way back."""
    return _ID_PREFIX + data.hex() if any(data) else NOBODY


@dataclass(frozen=True, slots=True)
class Terms:
    """What one request says about what is kept of it: for how long after its last use, under which name.

    ``prompt`` is a :func:`prompt_id`. Entries of different terms are never joined in the index, so what one
    request bounds stays bounded when another goes on from it.
    """

    ttl_s: float = inf
    prompt: str = NOBODY

    def __post_init__(self) -> None:
        assert self.ttl_s > 0, f"a TTL of {self.ttl_s} seconds"
        assert is_id(self.prompt), "a prompt's name is a digest here"


NO_TERMS = Terms()


@dataclass(frozen=True, slots=True)
class Origin:
    """The same of a block on its way to a lower tier, and whose it is; all names are ids.

    ``epoch`` is the number of the last purge that its sender had heard of when it was sent: later ones apply
    to it. ``None``: it was sent right now.
    """

    tenant: str = NOBODY
    model: str = NOBODY
    prompt: str = NOBODY
    ttl_s: float = inf
    epoch: int | None = None


NO_ORIGIN = Origin()


@dataclass(frozen=True, slots=True)
class Allowance:
    """What a tenant may keep: ``max_blocks`` blocks (``None``: any), ``ttl_s`` after their last use."""

    max_blocks: int | None = None
    ttl_s: float = inf

    def __post_init__(self) -> None:
        assert self.max_blocks is None or self.max_blocks >= 0, f"a quota of {self.max_blocks} blocks"
        assert self.ttl_s > 0, f"a TTL of {self.ttl_s} seconds"


@dataclass(frozen=True, slots=True)
class Allowances:
    """Every tenant's allowance: its own, or the one for all."""

    default: Allowance = Allowance()
    by_tenant: Mapping[str, Allowance] = field(default_factory=dict)

    def of(self, tenant: str) -> Allowance:
        return self.by_tenant.get(tenant, self.default)

    def ttl_s(self, tenant: str, terms: Terms) -> float:
        """The shortest that server, tenant and request say: a request can only ask for less."""
        return min(self.of(tenant).ttl_s, terms.ttl_s)


FREE_FOR_ALL = Allowances()


@dataclass(frozen=True, slots=True)
class Selection:
    """What is to be purged: all that meets every condition given. Without any it is everything.

    ``tenant``, ``model`` and ``prompt`` are ids (``NOBODY`` means those without one); ``min_age_s`` means
    blocks stored at least so long ago.
    """

    tenant: str | None = None
    model: str | None = None
    prompt: str | None = None
    min_age_s: float = 0.0

    def takes_space(self, tenant: str, model: str) -> bool:
        """Whether something of this tenant and model may be meant."""
        return self.tenant in (None, tenant) and self.model in (None, model)

    def takes_entry(self, prompt: str, age_s: float) -> bool:
        """Whether an entry of a space that is meant is meant."""
        is_old = self.min_age_s <= 0 or age_s >= self.min_age_s  # everything is: also where a clock went back
        return self.prompt in (None, prompt) and is_old


@dataclass(frozen=True, slots=True)
class Purged:
    """What a purge took away at once. ``num_held_blocks`` are in use and freed when they no longer are;
    they cannot be found any more. ``num_pins`` pins ended with it."""

    num_tokens: int = 0
    num_freed_blocks: int = 0
    num_held_blocks: int = 0
    num_pins: int = 0

    def __add__(self, other: Purged) -> Purged:
        return Purged(
            self.num_tokens + other.num_tokens,
            self.num_freed_blocks + other.num_freed_blocks,
            self.num_held_blocks + other.num_held_blocks,
            self.num_pins + other.num_pins,
        )


@dataclass(frozen=True, slots=True)
class TenantUse:
    """What one tenant has: blocks in use or kept, of ``max_blocks`` it may keep."""

    tenant: str
    num_blocks: int
    max_blocks: int | None
