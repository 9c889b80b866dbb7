"""What an operator decides about the server. Every limit that a client can meet is a field here."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final

from blake3 import blake3

_SALT_CONTEXT: Final = "ostinato server key salt v1"


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
    of other origins are not served.
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


def server_settings(*, api_keys: str = "", **others: Any) -> ServerSettings:
    """Settings from an operator's comma-separated keys, each of which gets a salt of its own.

    The salt is derived from the key: a holder's cache survives a change of the list, and never meets
    another's. ``others`` are fields of :class:`ServerSettings`.
    """
    keys = [key.strip() for key in api_keys.split(",") if key.strip()]
    tenants = tuple(
        ApiKey(f"key-{index}", key, blake3(key.encode(), derive_key_context=_SALT_CONTEXT).hexdigest())
        for index, key in enumerate(keys, start=1)
    )
    return ServerSettings(api_keys=tenants, **others)
