"""The operator's door: what is kept and for whom, purge, pin, unpin. Only with the admin key."""

from __future__ import annotations

import asyncio
from math import inf, isfinite
from typing import Annotated, Any, Final, Protocol

import orjson
from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ..errors import NoAnswerError, NotPinnedError, ParameterError
from ..kv.keeper import CacheSummary, PurgeReport
from ..kv.pins import Pin
from ..kv.terms import Selection, is_id, model_id, prompt_id, tenant_id, tenant_of
from ..responses.stores.base import Removed, Use
from ..types import GenerationRequest
from .body import read_body
from .chat import ChatRequest
from .completions import CompletionRequest
from .fields import MAX_SHOWN_CHARS, Wire, decode, validate
from .sampling import namespace_salt
from .settings import ApiKey, ServerSettings

ADMIN_PREFIX: Final = "/v1/ostinato/"
ADMIN_ROUTES: Final = frozenset(
    ADMIN_PREFIX + name
    for name in ("cache", "cache/purge", "cache/pin", "cache/unpin", "cache/forget", "requests")
)

Name = Annotated[str, Field(min_length=1, max_length=1024)]
Seconds = Annotated[float, Field(ge=0)]


class Kept(Protocol):
    """What this door needs of a runtime, besides what every backend has."""

    @property
    def model_name(self) -> str: ...

    @property
    def weights_digest(self) -> str: ...

    def purge(self, selection: Selection, /) -> PurgeReport: ...

    def cache_summary(self) -> CacheSummary: ...

    def pin(self, request: GenerationRequest, ttl_s: float, /) -> Pin: ...

    def unpin(self, pin_id: str, /) -> bool: ...


class KeptAnswers(Protocol):
    """Whole answers that are kept, as far as this door needs them."""

    def purge(self, selection: Selection, /) -> Removed: ...

    def forget(self, entry_id: str, /) -> bool: ...

    def uses(self) -> list[Use]: ...


class PurgeRequest(Wire):
    """Everything that meets all conditions; ``all`` where there is none."""

    all: bool | None = None
    tenant: Name | None = None
    cache_salt: Name | None = None
    model: Name | None = None
    prompt_name: Name | None = None
    older_than_s: Seconds | None = None


class PinRequest(Wire):
    """A conversation's beginning or a raw prompt, of one tenant."""

    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    prompt: str | None = None
    tenant: Name | None = None
    cache_salt: Name | None = None
    ttl_s: Annotated[float, Field(ge=1)] | None = None


class UnpinRequest(Wire):
    id: Annotated[str, Field(min_length=1, max_length=64)]


class ForgetRequest(Wire):
    id: Annotated[str, Field(min_length=1, max_length=128)]


class AdminDoor:
    """The endpoints. Whether the caller may is checked at the border."""

    def __init__(self, kept: Kept, settings: ServerSettings, answers: KeptAnswers | None = None) -> None:
        self._kept = kept
        self._answers = answers
        self._settings = settings
        self._keys = {key.name: key for key in settings.api_keys}

    def routes(self) -> list[Route]:
        return [
            Route("/v1/ostinato/cache", self.show),
            Route("/v1/ostinato/cache/purge", self.purge, methods=["POST"]),
            Route("/v1/ostinato/cache/pin", self.pin, methods=["POST"]),
            Route("/v1/ostinato/cache/unpin", self.unpin, methods=["POST"]),
            Route("/v1/ostinato/cache/forget", self.forget, methods=["POST"]),
        ]

    async def show(self, _request: Request) -> Response:
        summary = await asyncio.to_thread(self._kept.cache_summary)
        names = tenant_names(self._settings)
        uses = None if self._answers is None else await asyncio.to_thread(self._answers.uses)
        return _json(summary_object(summary, names) | {"answers": answers_object(uses, names)})

    async def purge(self, request: Request) -> Response:
        fields = validate(PurgeRequest, await self._body(request))
        return _json(purge_object(*await self.do_purge(fields)))

    async def do_purge(self, fields: PurgeRequest) -> tuple[PurgeReport, Removed | None]:
        """Drops KV and, where some are kept, answers. Raises :class:`ParameterError`."""
        selection = self.selection(fields)
        report = await asyncio.to_thread(self._kept.purge, selection)
        removed = None
        if self._answers is not None:
            removed = await asyncio.to_thread(self._answers.purge, selection)
        return report, removed

    async def pin(self, request: Request) -> Response:
        return _json(pin_object(await self.do_pin(validate(PinRequest, await self._body(request)))))

    async def do_pin(self, fields: PinRequest) -> Pin:
        ttl_s = inf if fields.ttl_s is None else fields.ttl_s
        return await asyncio.to_thread(self._kept.pin, self.pinned(fields), ttl_s)

    async def unpin(self, request: Request) -> Response:
        fields = validate(UnpinRequest, await self._body(request))
        await self.do_unpin(fields.id)
        return _json({"id": fields.id, "unpinned": True})

    async def do_unpin(self, pin_id: str) -> None:
        """Raises :class:`NotPinnedError`."""
        if not await asyncio.to_thread(self._kept.unpin, pin_id):
            raise NotPinnedError(f"There is no pin '{pin_id[:MAX_SHOWN_CHARS]}' (any more).")

    async def forget(self, request: Request) -> Response:
        fields = validate(ForgetRequest, await self._body(request))
        answers = self._answers
        if answers is None or not await asyncio.to_thread(answers.forget, fields.id):
            raise NoAnswerError(f"There is no answer '{fields.id[:MAX_SHOWN_CHARS]}' (any more).")
        return _json({"id": fields.id, "forgotten": True})

    async def _body(self, request: Request) -> dict[str, Any]:
        return decode(await read_body(request.headers, request.receive, self._settings))

    def selection(self, fields: PurgeRequest) -> Selection:
        """What is meant by a purge. Raises :class:`ParameterError` where that is not clear."""
        given = fields.model_dump(exclude_none=True)
        if bool(given.pop("all", False)) == bool(given):
            raise ParameterError("Say what to purge, or that it is all: {'all': true}.", param="all")
        if fields.tenant is not None and fields.cache_salt is not None:
            raise ParameterError("Give 'tenant' or 'cache_salt', not both.", param="cache_salt")
        tenant = model = prompt = None
        if fields.tenant is not None:
            tenant = fields.tenant if is_id(fields.tenant) else tenant_id(self._key(fields.tenant).salt)
        elif fields.cache_salt is not None:
            tenant = tenant_of(namespace_salt("", fields.cache_salt))
        if fields.model is not None:
            own = model_id(self._kept.weights_digest)
            model = own if fields.model == self._kept.model_name else fields.model
            if not is_id(model):
                raise ParameterError("'model' is this server's model, or an id.", param="model")
        if fields.prompt_name is not None:
            prompt = fields.prompt_name if is_id(fields.prompt_name) else prompt_id(fields.prompt_name)
        return Selection(tenant, model, prompt, fields.older_than_s or 0.0)

    def pinned(self, fields: PinRequest) -> GenerationRequest:
        """What is pinned as a request for it, by the rules that requests are checked by."""
        key_salt = "" if fields.tenant is None else self._key(fields.tenant).salt
        common = {"model": self._kept.model_name, "cache_salt": fields.cache_salt}
        if (fields.messages is None) == (fields.prompt is None):
            raise ParameterError("Give 'messages' or 'prompt'.", param="messages")
        if fields.messages is not None:
            tools = {} if fields.tools is None else {"tools": fields.tools}
            chat = validate(ChatRequest, common | {"messages": fields.messages} | tools)
            return chat.generation(request_id="", key_salt=key_salt)
        completion = validate(CompletionRequest, common | {"prompt": fields.prompt})
        return completion.generations(request_id="", key_salt=key_salt)[0]

    def _key(self, name: str) -> ApiKey:
        key = self._keys.get(name)
        if key is None:
            shown = name[:MAX_SHOWN_CHARS]
            raise ParameterError(
                f"There is no tenant '{shown}': give the name of an API key.", param="tenant"
            )
        return key


def tenant_names(settings: ServerSettings) -> dict[str, str]:
    """Names of those that have one, by their ids."""
    return {tenant_id(key.salt): key.name for key in settings.api_keys}


def purge_object(report: PurgeReport, answers: Removed | None = None) -> dict[str, Any]:
    arena = report.arena
    removed = None if answers is None else {"entries": answers.num_entries, "bytes": answers.num_bytes}
    return {
        "arena": {
            "tokens": arena.num_tokens,
            "freed_blocks": arena.num_freed_blocks,
            "held_blocks": arena.num_held_blocks,
            "pins": arena.num_pins,
        },
        "shared_tier": {"blocks": report.num_tier_blocks},
        "answers": removed,
        "freed_bytes": report.freed_bytes,
    }


def answers_object(uses: list[Use] | None, names: dict[str, str]) -> list[dict[str, Any]] | None:
    """What is kept of answers; ``None`` where none are."""
    if uses is None:
        return None
    return [
        {
            "tenant": use.tenant,
            "name": names.get(use.tenant),
            "model": use.model,
            "kind": use.kind,
            "entries": use.num_entries,
            "bytes": use.num_bytes,
        }
        for use in uses
    ]


def pin_object(pin: Pin) -> dict[str, Any]:
    expires_in_s = round(pin.expires_in_s, 3) if isfinite(pin.expires_in_s) else None
    return {
        "id": pin.id,
        "tenant": pin.tenant,
        "tokens": pin.num_tokens,
        "blocks": pin.num_blocks,
        "expires_in_s": expires_in_s,
    }


def summary_object(summary: CacheSummary, names: dict[str, str]) -> dict[str, Any]:
    """``names`` of tenants by their ids, of those that have one."""
    size = summary.block_bytes
    shared = None
    if summary.tier is not None:
        shared = [
            {
                "tenant": content.tenant,
                "name": names.get(content.tenant),
                "model": content.model,
                "prompt": content.prompt,
                "blocks": content.num_blocks,
                "bytes": content.num_blocks * summary.tier_block_bytes,
                "first_stored_ms": content.first_stored_ms,
                "last_stored_ms": content.last_stored_ms,
            }
            for content in summary.tier
        ]
    return {
        "block_bytes": size,
        "arena": {
            "blocks": summary.num_blocks,
            "held": summary.num_held_blocks,
            "evictable": summary.num_evictable_blocks,
            "free": summary.num_free_blocks,
            "pinned": summary.num_pinned_blocks,
            "may_be_pinned": summary.max_pinned_blocks,
        },
        "tenants": [
            {
                "tenant": use.tenant,
                "name": names.get(use.tenant),
                "blocks": use.num_blocks,
                "bytes": use.num_blocks * size,
                "quota_bytes": None if use.max_blocks is None else use.max_blocks * size,
            }
            for use in summary.tenants
        ],
        "pins": [pin_object(pin) for pin in summary.pins],
        "shared_tier": shared,
    }


def _json(content: Any) -> Response:
    return Response(orjson.dumps(content), media_type="application/json")
