"""The gateway's application: the same doors as the server's, with upstreams behind them."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from datetime import UTC, date, datetime
from typing import Any, Final

import httpx2
import orjson
from prometheus_client import Counter
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from ..errors import MalformedRequestError, ParameterError, ShuttingDownError, UpstreamError
from ..observe import HttpMetrics, exposition, new_registry
from ..providers.rules import RuleTable
from ..server.answering import EVENT_STREAM
from ..server.body import read_body
from ..server.border import Border
from ..server.caching import CACHE_HEADER, cache_control
from ..server.settings import ServerSettings
from ..types import CacheControl
from .answers import AnswerCache, PassedAnswer, PassedRequest, Question, caller_salt
from .events import EventReader
from .events import Route as Kind
from .planning import Planning, Sent
from .relay import Relay, answer_headers, body_of, request_headers
from .upstreams import Protocol, Upstream, choose

logger = logging.getLogger("ostinato.gateway")

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
COSTS_ROUTE: Final = "/v1/ostinato/costs"


def create_gateway(
    upstreams: Sequence[Upstream],
    settings: ServerSettings,
    table: RuleTable,
    *,
    answers: AnswerCache | None = None,
) -> Starlette:
    """The gateway's ASGI application, to be run as the server's is.

    ``answers``: a response cache in front of the upstreams.
    """
    registry = new_registry()
    gateway = Gateway(upstreams, settings, Planning(table), answers)
    for counter in (gateway.tokens, gateway.dollars):
        registry.register(counter)
    metrics = HttpMetrics(registry)

    async def show_metrics(_request: Request) -> Response:
        body, content_type = exposition(registry)
        return Response(body, headers={"content-type": content_type})

    app = Starlette(
        routes=[
            *(Route(path, gateway.generate, methods=["POST"]) for path in _KINDS),
            *(Route(path, gateway.pass_on, methods=["POST"]) for path in _PLAIN),
            Route("/v1/models", gateway.models),
            Route(COSTS_ROUTE, gateway.costs),
            Route("/health", gateway.health),
            Route("/metrics", show_metrics),
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
    ) -> None:
        self.upstreams = tuple(upstreams)
        self.settings = settings
        self.planning = planning
        self.answers = answers
        self.relay = Relay(max_connections=settings.max_connections)
        self.tokens = Counter(
            "ostinato:upstream_tokens",
            "Tokens that upstreams reported, by what became of them.",
            ["vendor", "kind"],
            registry=None,
        )
        self.dollars = Counter(
            "ostinato:upstream_dollars", "What they cost at list price.", ["vendor"], registry=None
        )
        self._num_active = 0
        self._is_draining = False
        self._idle = asyncio.Event()
        self._idle.set()
        self._tasks: set[asyncio.Task[None]] = set()

    @asynccontextmanager
    async def lifespan(self, _app: Starlette) -> AsyncIterator[None]:
        yield
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
        body = await read_body(request.headers, request.receive, self.settings)
        try:
            parsed = orjson.loads(body)
        except orjson.JSONDecodeError as error:
            reason = str(error)[:80]
            raise MalformedRequestError(
                f"We could not parse the JSON body of your request: {reason}"
            ) from None
        if not isinstance(parsed, dict):
            raise MalformedRequestError("The body of the request must be a JSON object.")
        model = parsed.get("model")
        if not isinstance(model, str) or not model:
            raise ParameterError("Missing required parameter: 'model'.", param="model")
        upstream = choose(self.upstreams, protocol, model)
        tenant = request.state.tenant
        return _Passing(
            self,
            upstream,
            request.url.path,
            kind,
            body,
            parsed,
            request_headers(upstream, dict(request.headers), is_open=not self.settings.api_keys),
            tenant="" if tenant is None else tenant.name,
            salt=caller_salt(
                "" if tenant is None else tenant.salt, request.headers, upstream_key=upstream.key
            ),
            control=cache_control(request.headers, None),
        )

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
        """The ledger. For the holder of the admin key where there is one, else for nobody who needs a key."""
        if self.settings.api_keys and not self.settings.admin_key:
            raise HTTPException(404, "Not Found")
        rows = [
            {
                "vendor": account.vendor,
                "model": account.model,
                "tenant": account.tenant,
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
        return _json({"rows": rows, "unread_usages": self.planning.num_unread_usages})

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
        entered = await self.planning.ended(sent, usage, today())
        if entered is None:
            return
        use, money = entered
        vendor = sent.account.vendor
        self.tokens.labels(vendor, "uncached").inc(use.uncached)
        self.tokens.labels(vendor, "written").inc(use.num_written)
        self.tokens.labels(vendor, "read").inc(use.read)
        self.tokens.labels(vendor, "output").inc(use.output)
        if money is not None:
            self.dollars.labels(vendor).inc(float(money.total))


class _Passing(Response):
    """A request that is passed on when it is called. However it ends, the upstream's connection is let go."""

    def __init__(
        self,
        gateway: Gateway,
        upstream: Upstream,
        path: str,
        kind: Kind | None,
        body: bytes,
        parsed: Mapping[str, Any],
        headers: Mapping[str, str],
        *,
        tenant: str,
        salt: str,
        control: CacheControl,
    ) -> None:
        super().__init__()
        self._gateway, self._upstream, self._path, self._kind = gateway, upstream, path, kind
        self._given, self._parsed, self._passed_headers = body, parsed, headers
        self._tenant, self._salt = tenant, salt
        self._control = control
        self._cache_headers: list[tuple[bytes, bytes]] = []
        self._is_answered = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        task = asyncio.ensure_future(self._run(send))
        self._gateway.begin(task)
        watcher = asyncio.ensure_future(_until_gone(receive))
        try:
            done, _ = await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
            if task not in done and self._is_answered:
                await task  # nobody can leave any more: only the books are still open
            elif task not in done:
                task.cancel()
                with suppress(asyncio.CancelledError):
                    await task
                raise ClientDisconnect
            if task.cancelled():
                raise ShuttingDownError("The gateway is shutting down and ended this request.")
            task.result()
        finally:
            watcher.cancel()
            if not task.done():
                task.cancel()
            self._gateway.end(task)

    async def _run(self, send: Send) -> None:
        gateway, upstream = self._gateway, self._upstream
        is_stream = self._parsed.get("stream") is True
        question: Question | None = None
        if gateway.answers is not None and self._kind is not None:
            asked = PassedRequest(
                self._path,
                f"{upstream.name} {upstream.url}",
                str(self._parsed["model"]),
                self._salt,
                self._parsed,
                self._passed_headers,
                self._control,
                is_stream,
            )
            question = await asyncio.to_thread(gateway.answers.ask, asked)
            self._cache_headers = [(CACHE_HEADER.encode(), question.outcome.encode())]
            if (known := question.known) is not None:
                age = (b"age", str(int(question.age_s)).encode())
                headers = [(b"content-type", known.content_type), *self._cache_headers, age]
                await _send_whole(send, 200, headers, known.body)
                return
        body, sent = self._given, None
        if self._kind is not None:
            body, sent = await gateway.planning.prepare(
                upstream,
                self._given,
                self._parsed,
                tenant=self._tenant,
                betas=self._passed_headers.get("anthropic-beta", ""),
                now_s=time.monotonic(),
                on=today(),
                clock=time.monotonic,
            )
        usage: Mapping[str, Any] | None = None
        answer: PassedAnswer | None = None
        try:
            async with gateway.relay.answer(upstream, self._path, body, self._passed_headers) as response:
                kind = response.headers.get("content-type", "")
                if is_stream and response.status_code == 200 and kind.startswith("text/event-stream"):
                    assert self._kind is not None or sent is None
                    usage, answer = await self._stream(response, send, sent)
                else:
                    usage, answer = await self._whole(response, send, sent)
        finally:
            if sent is not None:
                await gateway.enter(sent, usage)
        if answer is not None and question is not None:
            await asyncio.to_thread(question.keep, answer)

    async def _whole(
        self, response: httpx2.Response, send: Send, sent: Sent | None
    ) -> tuple[Mapping[str, Any] | None, PassedAnswer | None]:
        body = b"".join([piece async for piece in body_of(self._upstream, response)])
        content_type = response.headers.get("content-type", "application/json").encode("latin-1")
        usage, answer = None, None
        if response.status_code == 200:
            try:
                parsed = orjson.loads(body)
            except orjson.JSONDecodeError:
                raise UpstreamError(
                    f"The upstream '{self._upstream.name}' sent an answer that is not JSON."
                ) from None
            if sent is not None:
                await self._gateway.planning.begun(sent, time.monotonic())
            found = parsed.get("usage") if isinstance(parsed, dict) else None
            usage = found if isinstance(found, dict) else None
            answer = PassedAnswer(content_type, body)
        headers = [
            (b"content-type", content_type),
            *answer_headers(response.headers),
            *self._cache_headers,
        ]
        self._is_answered = True
        await _send_whole(send, response.status_code, headers, body)
        return usage, answer

    async def _stream(
        self, response: httpx2.Response, send: Send, sent: Sent | None
    ) -> tuple[Mapping[str, Any] | None, PassedAnswer | None]:
        reader = EventReader(self._kind or "chat")
        pieces: list[bytes] = []
        is_kept = self._gateway.answers is not None
        headers = [
            (b"content-type", EVENT_STREAM),
            *answer_headers(response.headers),
            *self._cache_headers,
        ]
        is_started = False
        async for data in body_of(self._upstream, response):
            events, fault = reader.whole_events(data)
            if events and not is_started:
                is_started = True
                await send({"type": "http.response.start", "status": 200, "headers": headers})
            if sent is not None and reader.has_content:
                await self._gateway.planning.begun(sent, time.monotonic())
            if events:
                await send({"type": "http.response.body", "body": events, "more_body": True})
            if is_kept:
                pieces.append(events)
            if fault is not None:
                raise fault
        reader.finish()
        self._is_answered = True
        await send({"type": "http.response.body", "body": b"", "more_body": False})
        if reader.is_failed:
            return reader.usage or None, None
        return reader.usage or None, PassedAnswer(EVENT_STREAM, b"".join(pieces)) if is_kept else None


async def _send_whole(send: Send, status: int, headers: list[tuple[bytes, bytes]], body: bytes) -> None:
    headers = [*headers, (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def today() -> date:
    return datetime.now(UTC).date()


def _json(content: dict[str, Any], status: int = 200) -> Response:
    return Response(orjson.dumps(content), status, media_type="application/json")
