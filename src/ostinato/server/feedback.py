"""What callers think of semantic answers: good or bad, by the id that an answer came with."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Annotated, Final, Protocol

import orjson
from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ..errors import NoAnswerError
from ..kv.terms import tenant_of
from .body import read_body
from .fields import MAX_SHOWN_CHARS, Wire, decode, validate
from .sampling import namespace_salt
from .settings import ServerSettings

FEEDBACK_ROUTE: Final = "/v1/feedback"


class Rated(Protocol):
    """What learns from it."""

    def feedback(self, entry_id: str, is_good: bool, tenant: str, /) -> bool: ...


class FeedbackRequest(Wire):
    id: Annotated[str, Field(min_length=1, max_length=128)]
    good: bool
    cache_salt: Annotated[str, Field(min_length=1, max_length=1024)] | None = None


class FeedbackDoor:
    """The endpoint. Callers rate answers of their own only: ``tenants_of`` says whose a request may be."""

    def __init__(
        self,
        rated: Rated,
        settings: ServerSettings,
        tenants_of: Callable[[Request, str | None], list[str]] | None = None,
    ) -> None:
        self._rated = rated
        self._settings = settings
        self._tenants_of = tenants_of or _tenants_of

    def route(self) -> Route:
        return Route(FEEDBACK_ROUTE, self.rate, methods=["POST"])

    async def rate(self, request: Request) -> Response:
        """``{"id": "answer-…", "good": false}``; 404 where there is no such answer (any more)."""
        body = await read_body(request.headers, request.receive, self._settings)
        fields = validate(FeedbackRequest, decode(body))
        tenants = self._tenants_of(request, fields.cache_salt)

        def tell() -> bool:
            return any(self._rated.feedback(fields.id, fields.good, tenant) for tenant in tenants)

        if not await asyncio.to_thread(tell):
            raise NoAnswerError(f"There is no answer '{fields.id[:MAX_SHOWN_CHARS]}' (any more).")
        content = orjson.dumps({"id": fields.id, "good": fields.good})
        return Response(content, media_type="application/json")


def _tenants_of(request: Request, cache_salt: str | None) -> list[str]:
    tenant = request.state.tenant
    return [tenant_of(namespace_salt(tenant.salt if tenant is not None else "", cache_salt))]
