"""Puts the response caches in front of a runtime, as the settings say."""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, cast

from .config import Settings
from .front import Front
from .ports import Clock
from .responses.chunks import ChunkForm
from .responses.control import AnswersFor
from .responses.exact import Exact
from .responses.stores.base import Limits, Store
from .responses.stores.envelope import Envelope
from .runtime import Runtime

if TYPE_CHECKING:
    from .gateway.answers import KeptAnswers

IN_MEMORY = "memory"
_POSTGRES = ("postgresql://", "postgres://")


def is_file(place: str) -> bool:
    """Whether answers are kept in a file there."""
    return place != IN_MEMORY and not place.startswith(_POSTGRES)


def open_store(settings: Settings, now_ms: int) -> Store:
    """The store that the settings name.

    Raises:
        StoreError: it cannot be opened.
    """
    assert settings.answers, "no store was asked for"
    tenants = settings.all_tenants()
    limits = Limits(
        settings.answers_bytes,
        settings.tenant_answers,
        {tenant.id: tenant.answers_bytes for tenant in tenants if tenant.answers_bytes is not None},
    )
    envelope = Envelope(settings.answers_key)
    if not is_file(settings.answers) and settings.answers != IN_MEMORY:
        from .responses.stores.postgres import PostgresStore

        return PostgresStore(settings.answers, limits=limits, now_ms=now_ms, envelope=envelope)
    from .responses.stores.sqlite import SqliteStore

    path = None if settings.answers == IN_MEMORY else Path(settings.answers).expanduser()
    return SqliteStore(path, limits=limits, now_ms=now_ms, envelope=envelope)


def kept_answers(settings: Settings, clock: Clock) -> KeptAnswers | None:
    """What stands before a gateway's upstreams; its ``exact`` is to be closed. ``None``: no answers are kept.

    Raises:
        StoreError: the store cannot be opened.
    """
    if not settings.answers:
        return None
    from .gateway.answers import KeptAnswers, PassedForm

    store = open_store(settings, int(clock.now() * 1000))
    exact = Exact(store, PassedForm(), clock, ttl_s=_ttl_s(settings))
    answers_for = cast(AnswersFor, settings.answers_for)
    return KeptAnswers(exact, answers_for=answers_for, ttl_of=_ttl_of(settings))


def _ttl_s(settings: Settings) -> float:
    return inf if settings.answers_ttl is None else settings.answers_ttl


def _ttl_of(settings: Settings) -> Callable[[str], float]:
    by_tenant = {tenant.id: tenant.ttl_s for tenant in settings.all_tenants() if tenant.ttl_s is not None}
    return lambda tenant: by_tenant.get(tenant, inf)


def with_answers(
    settings: Settings, clock: Clock, build: Callable[[], Runtime]
) -> tuple[Runtime, Front | None]:
    """A runtime, and what stands before it and is closed with it; ``None`` where no answers are kept.

    The store is opened first: what is wrong with it is told before a model is loaded.

    Raises:
        StoreError: the store cannot be opened.
    """
    if not settings.answers:
        return build(), None
    store = open_store(settings, int(clock.now() * 1000))
    try:
        runtime = build()
    except BaseException:
        store.close()
        raise
    front = Front(
        runtime,
        Exact(store, ChunkForm(), clock, ttl_s=_ttl_s(settings), observer=runtime.observe),
        clock,
        answers_for=cast(AnswersFor, settings.answers_for),
        ttl_of=_ttl_of(settings),
    )
    runtime.on_close.append(front.close)
    return runtime, front
