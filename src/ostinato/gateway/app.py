"""The gateway's application: the same doors as the server's, with upstreams behind them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any, Final

import orjson
from prometheus_client import Counter
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Message, Receive

from .. import series
from ..errors import MalformedRequestError, ParameterError, QueueFullError, ShuttingDownError
from ..kv.terms import tenant_id
from ..observe import HttpMetrics, counter_of, exposition, new_registry
from ..providers.rules import RuleTable
from ..server.body import read_body
from ..server.border import Border
from ..server.caching import cache_control
from ..server.feedback import FeedbackDoor, Rated
from ..server.settings import ServerSettings
from .answers import AnswerCache, caller_salt
from .chat_to_messages import CHAT_TO_MESSAGES
from .dashboard import GatewayDashboard, GatewayState
from .events import Route as Kind
from .fleet import FleetRelay
from .keeping import Keeper
from .messages_to_chat import MESSAGES_TO_CHAT
from .passing import Call, Passing, today
from .planning import Booked, Planning, Sent
from .relay import Relay, joined_headers, request_headers
from .spelling import loads
from .translation import Target, Translation
from .upstreams import Protocol, Upstream, choose
from .workers import Fleet

_KINDS: Final[Mapping[str, tuple[Protocol, Kind]]] = {
    "/v1/chat/completions": ("openai", "chat"),
    "/v1/completions": ("openai", "chat"),
    "/v1/responses": ("openai", "responses"),
    "/v1/messages": ("anthropic", "messages"),
}
# Passed on as they are: nothing is generated.
_PLAIN: Final[Mapping[str, Protocol]] = {
    "/v1/embeddings": "openai",
    "/v1/messages/count_tokens": "anthropic",
}
# What can be said in the other API, too.
_TRANSLATIONS: Final[Mapping[str, Translation]] = {
    "/v1/chat/completions": CHAT_TO_MESSAGES,
    "/v1/messages": MESSAGES_TO_CHAT,
}
COSTS_ROUTE: Final = "/v1/ostinato/costs"
MISSES_ROUTE: Final = "/v1/ostinato/misses"
PROMPT_HEADER: Final = "x-ostinato-prompt"
MAX_NAME_CHARS: Final = 200
# Of all requests' bodies that are here at once.
MAX_BODIES_BYTES: Final = 512 << 20


def create_gateway(
    upstreams: Sequence[Upstream],
    settings: ServerSettings,
    table: RuleTable,
    *,
    answers: AnswerCache | None = None,
    rated: Rated | None = None,
    fleet: Fleet | None = None,
) -> Starlette:
    """The gateway's ASGI application, to be run as the server's is.

    ``answers``: a response cache in front of the upstreams; ``rated``: what learns from what callers think of
    its answers. ``fleet``: workers of which each request gets one; then they are the only upstream.
    """
    registry = new_registry()
    if fleet is not None:
        assert not upstreams, "a fleet is the only upstream"
        upstreams = fleet.upstreams
        fleet.show(registry)
    gateway = Gateway(
        upstreams, settings, Planning(table, time.monotonic), answers, None if fleet is None else fleet.relay
    )
    for counter in gateway.counters:
        registry.register(counter)
    metrics = HttpMetrics(registry)

    async def show_metrics(_request: Request) -> Response:
        body, content_type = exposition(registry)
        return Response(body, headers={"content-type": content_type})

    app = Starlette(
        routes=[
            *(Route(path, gateway.generate, methods=["POST"]) for path in _KINDS),
            *(Route(path, gateway.pass_on, methods=["POST"]) for path in _PLAIN),
            *((Route("/v1/models", gateway.models),) if fleet is None else fleet.routes(gateway.check_admin)),
            Route(COSTS_ROUTE, gateway.costs),
            Route(MISSES_ROUTE, gateway.misses),
            Route("/health", gateway.health),
            Route("/metrics", show_metrics),
            *(() if rated is None else (FeedbackDoor(rated, settings, gateway.tenants_of).route(),)),
            *GatewayDashboard(gateway.planning.ledger, gateway.state, settings).routes(),
        ],
        middleware=[
            Middleware(Border, api_keys=settings.api_keys, admin_key=settings.admin_key, metrics=metrics)
        ],
        exception_handlers={HTTPException: _reraise},
        lifespan=gateway.lifespan,
    )
    app.router.redirect_slashes = False
    app.state.backend = gateway  # whoever runs the app drains it
    return app


async def _reraise(_request: Request, error: Exception) -> Response:
    raise error


class Gateway:
    """All requests that are under way."""

    def __init__(
        self,
        upstreams: Sequence[Upstream],
        settings: ServerSettings,
        planning: Planning,
        answers: AnswerCache | None,
        relay: FleetRelay | None = None,
    ) -> None:
        self.upstreams = tuple(upstreams)
        self.settings = settings
        self.planning = planning
        self.answers = answers
        self.relay: Relay = relay or Relay(max_connections=settings.max_connections)
        self._watched = relay
        self.tokens = counter_of(series.UPSTREAM_TOKENS, None)
        self.dollars = counter_of(series.UPSTREAM_DOLLARS, None)
        self.uncached_dollars = counter_of(series.UPSTREAM_UNCACHED_DOLLARS, None)
        self.missed = counter_of(series.UPSTREAM_MISSES, None)
        self.looked_up = counter_of(series.REUSE_LOOKUP, None)
        self.reused = counter_of(series.REUSE_HIT, None)
        self.keeper = Keeper(self.relay, planning, clock=time.monotonic, today=today, enter=self._book)
        self._num_active = 0
        self._num_body_bytes = 0
        self._is_draining = False
        self._idle = asyncio.Event()
        self._idle.set()
        self._tasks: set[asyncio.Task[None]] = set()

    @asynccontextmanager
    async def lifespan(self, _app: Starlette) -> AsyncIterator[None]:
        tasks: list[asyncio.Task[None]] = []
        if any(upstream.keep_alive for upstream in self.upstreams):
            tasks.append(asyncio.create_task(self.keeper.run()))
        if self._watched is not None:
            tasks.append(asyncio.create_task(self._watched.watch()))
        yield
        for task in tasks:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
        await self.relay.close()

    async def drain(self, timeout_s: float, /) -> None:
        """Take nothing new; end what still runs when the time is up."""
        self._is_draining = True
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        for task in list(self._tasks):
            task.cancel()

    async def generate(self, request: Request) -> Response:
        protocol, kind = _KINDS[request.url.path]
        return await self._exchange(request, protocol, kind)

    async def pass_on(self, request: Request) -> Response:
        return await self._exchange(request, _PLAIN[request.url.path], None)

    async def _exchange(self, request: Request, protocol: Protocol, kind: Kind | None) -> Response:
        if self._is_draining:
            raise ShuttingDownError("The gateway is shutting down: send the request elsewhere.")
        reserved = _Reserved(self)
        try:
            body = await read_body(request.headers, reserved.counting(request.receive), self.settings)
            return Passing(self, self._call(request, protocol, kind, body), reserved.release)
        except BaseException:
            reserved.release()
            raise

    def _call(self, request: Request, protocol: Protocol, kind: Kind | None, body: bytes) -> Call:
        try:
            parsed = loads(body)
        except ValueError as error:
            reason = str(error)[:80]
            raise MalformedRequestError(
                f"We could not parse the JSON body of your request: {reason}"
            ) from None
        if not isinstance(parsed, dict):
            raise MalformedRequestError("The body of the request must be a JSON object.")
        model = parsed.get("model")
        if not isinstance(model, str) or not model:
            raise ParameterError("Missing required parameter: 'model'.", param="model")
        if len(model) > MAX_NAME_CHARS:
            raise ParameterError("'model' is too long to be the name of one.", param="model")
        path, tenant = request.url.path, request.state.tenant
        translation = _TRANSLATIONS.get(path)
        upstream = choose(self.upstreams, protocol, model, is_translatable=translation is not None)
        headers = joined_headers(request.headers.raw)
        if upstream.protocol == protocol:
            translation = None
        return Call(
            upstream,
            path,
            kind,
            body,
            parsed,
            request_headers(
                upstream,
                headers,
                is_open=not self.settings.api_keys,
                dropped="" if translation is None else translation.headers_dropped,
            ),
            tenant="" if tenant is None else tenant.name,
            prompt_name=headers.get(PROMPT_HEADER, "")[:MAX_NAME_CHARS],
            salt=caller_salt(
                "" if tenant is None else tenant.salt, request.headers, upstream_key=upstream.key
            ),
            control=cache_control(request.headers, None),
            query="" if translation is not None else request.url.query,
            translation=translation,
            target=self._target(upstream, model),
        )

    def tenants_of(self, request: Request, _cache_salt: str | None) -> list[str]:
        """Whose a request may be, as answers are kept: its key's, or, where an upstream has one, all's."""
        tenant = request.state.tenant
        salt = "" if tenant is None else tenant.salt
        keys = {upstream.key for upstream in self.upstreams}
        return [tenant_id(caller_salt(salt, request.headers, upstream_key=key)) for key in keys]

    def _target(self, upstream: Upstream, model: str) -> Target:
        has_breakpoints = False
        if upstream.vendor == "openai":
            has_breakpoints = self.planning.table.rules("openai", model, today()).mechanism == "endpoints"
        return Target(upstream.vendor, has_breakpoints, upstream.max_tokens)

    async def models(self, _request: Request) -> Response:
        """Those whose names are said in full in the configuration."""
        names = {
            (name, upstream.name)
            for upstream in self.upstreams
            for name in upstream.models
            if "*" not in name
        }
        data = [
            {"id": name, "object": "model", "created": 0, "owned_by": owner} for name, owner in sorted(names)
        ]
        return _json({"object": "list", "data": data})

    def state(self) -> GatewayState:
        names = tuple(upstream.name for upstream in self.upstreams)
        return GatewayState(not self._is_draining, self._num_active, names, self.planning.num_unread_usages)

    async def health(self, _request: Request) -> Response:
        status = 503 if self._is_draining else 200
        word = "unavailable" if self._is_draining else "ok"
        body = {
            "status": word,
            "num_running": self._num_active,
            "upstreams": [u.name for u in self.upstreams],
        }
        return _json(body, status)

    async def costs(self, request: Request) -> Response:
        """The ledger."""
        self.check_admin()
        rows = [
            {
                "vendor": account.vendor,
                "model": account.model,
                "tenant": account.tenant,
                "prompt": account.prompt_name,
                "requests": entry.num_requests,
                "unpriced_requests": entry.num_unpriced,
                "uncached_tokens": entry.use.uncached,
                "written_tokens": dict(entry.use.written),
                "read_tokens": entry.use.read,
                "output_tokens": entry.use.output,
                "dollars": str(entry.money.total),
                "dollars_without_cache": str(entry.money.without_cache),
                "doubts": list(entry.use.doubts),
            }
            for account, entry in self.planning.ledger
        ]
        return _json(
            {
                "rows": rows,
                "unread_usages": self.planning.num_unread_usages,
                "untold_usages": self.planning.num_untold_usages,
            }
        )

    async def misses(self, request: Request) -> Response:
        """The latest requests that read less than went before, and why."""
        self.check_admin()
        return _json({"rows": list(self.planning.misses.latest)})

    def check_admin(self) -> None:
        """For the holder of the admin key where there is one, else for nobody who needs a key."""
        if self.settings.api_keys and not self.settings.admin_key:
            raise HTTPException(404, "Not Found")

    def begin(self, task: asyncio.Task[None]) -> None:
        self._num_active += 1
        self._tasks.add(task)
        self._idle.clear()

    def end(self, task: asyncio.Task[None]) -> None:
        self._num_active -= 1
        self._tasks.discard(task)
        if self._num_active == 0:
            self._idle.set()

    async def enter(self, sent: Sent, usage: Mapping[str, Any] | None) -> None:
        """Enter what a request used into the books."""
        self._book(sent, await self.planning.ended(sent, usage, today()))

    @property
    def counters(self) -> tuple[Counter, ...]:
        """What is told of upstreams on ``/metrics``."""
        return (
            *(self.tokens, self.dollars, self.uncached_dollars),
            *(self.missed, self.looked_up, self.reused),
        )

    def _book(self, sent: Sent, booked: Booked) -> None:
        vendor = sent.account.vendor
        if booked.miss is not None:
            self.missed.labels(vendor, booked.miss).inc()
        if (use := booked.use) is None:
            return
        self.tokens.labels(vendor, "uncached").inc(use.uncached)
        self.tokens.labels(vendor, "written").inc(use.num_written)
        self.tokens.labels(vendor, "read").inc(use.read)
        self.tokens.labels(vendor, "output").inc(use.output)
        self.looked_up.labels("provider").inc(use.input)
        self.reused.labels("provider").inc(use.read)
        if booked.money is not None:
            self.dollars.labels(vendor).inc(float(booked.money.total))
            self.uncached_dollars.labels(vendor).inc(float(booked.money.without_cache))

    def hold(self, num_bytes: int) -> None:
        """More bytes of a request have come (fewer: it is over). Raises :class:`QueueFullError`."""
        if num_bytes > 0 and self._num_body_bytes + num_bytes > MAX_BODIES_BYTES:
            raise QueueFullError("The gateway has as many requests in hand as fit.", retry_after_s=1.0)
        self._num_body_bytes += num_bytes


class _Reserved:
    """What one request's body takes."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._num_bytes = 0

    def counting(self, receive: Receive) -> Receive:
        async def counted() -> Message:
            message = await receive()
            size = len(message.get("body", b""))
            self._gateway.hold(size)
            self._num_bytes += size
            return message

        return counted

    def release(self) -> None:
        self._gateway.hold(-self._num_bytes)
        self._num_bytes = 0


def _json(content: dict[str, Any], status: int = 200) -> Response:
    return Response(orjson.dumps(content), status, media_type="application/json")
