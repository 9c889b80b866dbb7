"""What an operator decides about the server. Every limit that a client can meet is a field here."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from ..tenants import Tenant, tenants_of_keys


@dataclass(frozen=True, slots=True)
class ApiKey:
    """A tenant: ``name`` for the logs, its secret ``key``, and the ``salt`` of its own cache namespace.

    Two keys with the same salt share their cache; with different salts neither can ever meet the other's.
    """

    name: str
    key: str = field(repr=False)
    salt: str = field(default="", repr=False)


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """Where to listen and how much to put up with.

    ``port`` 0: any free one. ``api_keys`` empty: everyone may ask. ``header_timeout_s`` and
    ``body_timeout_s`` bound how long one request's head and body may take to arrive, ``write_timeout_s``
    how long a client may leave the answer unread, ``keep_alive_s`` how long an idle connection is kept.
    ``heartbeat_s`` is the longest silence in a stream: then a comment is sent, so that proxies do not hang
    up during a long prefill. ``drain_timeout_s`` is how long running requests may go on after SIGTERM.
    ``max_choices`` bounds one request's answers: ``n`` times its prompts. ``cors_origins`` empty: browsers
    of other origins are not served. With ``admin_key`` its holder may look after the cache.
    ``dollars_per_hour``: what the machine costs, for the dashboard.
    ``anthropic_rules``: a model of Anthropic's by whose rules ``/v1/messages`` counts, instead of by what was
    read and written; empty: none. ``pin_breakpoints``: keep KV up to ``cache_control`` for its time, as a pin
    does.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    api_keys: tuple[ApiKey, ...] = ()
    max_connections: int = 1024
    max_head_bytes: int = 64 << 10
    max_body_bytes: int = 8 << 20
    max_choices: int = 128
    header_timeout_s: float = 10.0
    body_timeout_s: float = 60.0
    write_timeout_s: float = 60.0
    keep_alive_s: float = 65.0
    heartbeat_s: float = 15.0
    drain_timeout_s: float = 30.0
    cors_origins: tuple[str, ...] = ()
    admin_key: str | None = field(default=None, repr=False)
    anthropic_rules: str = ""
    pin_breakpoints: bool = False
    dollars_per_hour: float | None = None


def server_settings(
    *, api_keys: str = "", tenants: Iterable[Tenant] | None = None, **others: Any
) -> ServerSettings:
    """Settings from an operator's comma-separated keys, or from ``tenants`` where those are known already.

    Tenants without a key cannot come in here. ``others`` are fields of :class:`ServerSettings`.
    """
    known = tenants_of_keys(api_keys) if tenants is None else tenants
    keys = tuple(ApiKey(tenant.name, tenant.key, tenant.salt) for tenant in known if tenant.key is not None)
    return ServerSettings(api_keys=keys, **others)
