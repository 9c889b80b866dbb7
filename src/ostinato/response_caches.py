"""Puts the response caches in front of a runtime, as the settings say."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, TypeVar, cast

from .config import Settings
from .events import Observer
from .front import Front
from .ports import Clock
from .responses.chunks import ChunkForm
from .responses.control import AnswersFor, SemanticFor
from .responses.exact import Exact, Form
from .responses.semantic_chats import SemanticChats, text_of
from .responses.stores.base import Limits, Store
from .responses.stores.envelope import Envelope
from .runtime import Runtime

if TYPE_CHECKING:
    from .gateway.answers import KeptAnswers
    from .responses.likeness.judge import Judge
    from .responses.semantic import Semantic

P = TypeVar("P")

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
        ModelError: the embedder cannot be had, where questions are to be compared.
        StoreError: the store cannot be opened.
    """
    if not settings.answers:
        return None
    from .gateway.alike import SemanticBodies, answer_text
    from .gateway.answers import KeptAnswers, PassedForm

    judge = _judge(settings)
    store = open_store(settings, int(clock.now() * 1000))
    form = PassedForm()
    exact = Exact(store, form, clock, ttl_s=_ttl_s(settings))
    second = None
    if judge is not None:
        semantic = _semantic(settings, store, form, judge, clock, answer_text)
        whose = cast(SemanticFor, settings.semantic)
        second = SemanticBodies(semantic, whose=whose, is_guarded=settings.semantic_history == "guarded")
    answers_for = cast(AnswersFor, settings.answers_for)
    return KeptAnswers(exact, answers_for=answers_for, ttl_of=_ttl_of(settings), second=second)


def _judge(settings: Settings) -> Judge | None:
    """What decides whether questions mean the same, where that is asked for; fetches the embedder.

    Raises:
        ModelError: it cannot be had.
    """
    if settings.semantic == "off":
        return None
    from .models.embedder import DEFAULT_EMBEDDER, fetch_embedder
    from .models.store import ModelStore
    from .responses.embed.minilm import MiniLM
    from .responses.likeness.judge import Judge

    assert settings.store is not None, "settings without a model store"
    name = DEFAULT_EMBEDDER if "@" in settings.embedder else settings.embedder
    model = fetch_embedder(name, ModelStore(settings.store), offline=settings.offline)
    return Judge(MiniLM(model.path, model.weights_digest), budget=settings.semantic_budget)


def _semantic(
    settings: Settings,
    store: Store,
    form: Form[P],
    judge: Judge,
    clock: Clock,
    text_of: Callable[[Sequence[P]], str],
    observer: Observer = lambda event: None,
) -> Semantic[P]:
    assert settings.answers, "no store was asked for"
    from .responses.embed.base import Embedder, MemoEmbedder
    from .responses.embed.remote import RemoteEmbedder
    from .responses.semantic import Semantic, SemanticSettings

    embedder: Embedder | None = None
    if "@" in settings.embedder:
        name, _, url = settings.embedder.partition("@")
        embedder = MemoEmbedder(RemoteEmbedder(url, name, key=settings.embedder_key))
    folder = None
    if is_file(settings.answers) and settings.answers_key is None:  # vectors tell of what was asked
        folder = Path(f"{Path(settings.answers).expanduser()}-indexes")
    return Semantic(
        store,
        form,
        judge,
        clock,
        text_of=text_of,
        chance=Random().random,
        settings=SemanticSettings(check_share=settings.semantic_checks),
        embedder=embedder,
        ttl_s=_ttl_s(settings),
        folder=folder,
        observer=observer,
    )


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
        ModelError: the embedder cannot be had, where questions are to be compared.
    """
    if not settings.answers:
        return build(), None
    judge = _judge(settings)
    store = open_store(settings, int(clock.now() * 1000))
    try:
        runtime = build()
    except BaseException:
        store.close()
        raise
    form = ChunkForm()
    second = None
    if judge is not None:
        semantic = _semantic(settings, store, form, judge, clock, text_of, runtime.observe)
        whose = cast(SemanticFor, settings.semantic)
        second = SemanticChats(semantic, whose=whose, is_guarded=settings.semantic_history == "guarded")
    front = Front(
        runtime,
        Exact(store, form, clock, ttl_s=_ttl_s(settings), observer=runtime.observe),
        clock,
        answers_for=cast(AnswersFor, settings.answers_for),
        ttl_of=_ttl_of(settings),
        second=second,
    )
    runtime.on_close.append(front.close)
    return runtime, front
