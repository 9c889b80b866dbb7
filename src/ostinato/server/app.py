"""The application: routes, and the way of a request from its body to its answer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any, Final, Protocol
from uuid import uuid4

import orjson
from blake3 import blake3
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ..errors import PromptTooLongError, UnknownModelError
from ..observe import AnswerGauges, HttpMetrics, LoadGauges, PrometheusObserver, exposition, new_registry
from ..providers.rules import builtin_table
from .admin import ADMIN_PREFIX, AdminDoor, Kept, KeptAnswers
from .answering import Answer
from .anthropic import COUNT_ROUTE, MESSAGES_ROUTE, MessagesRequest, MessageWriter, message_event
from .backend import Backend
from .body import read_body
from .border import Border
from .breakpoints import BreakpointReader, Pinner, StrictCache
from .caching import (
    ANSWER_HEADER,
    CACHE_HEADER,
    GUARDS_HEADER,
    NAMESPACE_HEADER,
    SIMILARITY_HEADER,
    with_cache_control,
)
from .chat import ChatRequest, ChatWriter
from .completions import CompletionRequest, CompletionWriter
from .dashboard import Dashboard
from .dashboard.sources import Inside
from .feedback import FeedbackDoor, Rated
from .fields import MAX_SHOWN_CHARS, decode, validate
from .sampling import namespace_salt
from .sessions import SESSION_HEADER, SessionWord, with_session
from .settings import ServerSettings
from .wire import Frame, Json, TokenText, Work

# Rendering and tokenising mostly hold the GIL: more threads would only take turns with the engine's.
_NUM_PREPARE_THREADS: Final = 2


class Looked(Kept, Inside, Protocol):
    """A runtime that can be looked after, and looked into."""


def create_app(
    backend: Backend,
    settings: ServerSettings,
    kept: Looked | None = None,
    answers: KeptAnswers | None = None,
    rated: Rated | None = None,
) -> Starlette:
    """The server's ASGI application. Its observers are added to ``backend.observers``.

    ``kept``: what the dashboard looks into, and the holder of the admin key may look after; without a key
    nobody can change anything. ``answers``: whole answers that are kept, if any; ``rated``:
    what learns from what callers think of them.

    Whoever runs it must run its lifespan; :func:`ostinato.server.serve` does, and adds the defences that a
    bare ASGI server lacks (slow heads, malformed HTTP, connection limits).
    """
    registry = new_registry()
    registry.register(LoadGauges(backend.health))
    backend.observers.append(PrometheusObserver(registry))
    metrics = HttpMetrics(registry)
    admin = AdminDoor(kept, settings, answers) if kept is not None and settings.admin_key else None
    dashboard = Dashboard(backend, settings, inside=kept, admin=admin, answers=answers)
    doors = _Doors(backend, settings, registry, kept, on_end=dashboard.close)
    if answers is not None:
        registry.register(AnswerGauges(answers.uses))
    admin_key = settings.admin_key if admin is not None else None
    middleware = [Middleware(Border, api_keys=settings.api_keys, admin_key=admin_key, metrics=metrics)]
    if settings.cors_origins:
        middleware.insert(0, _cors(settings))
    app = Starlette(
        routes=[
            *doors.routes(),
            *(admin.routes() if admin is not None else ()),
            *((Route(ADMIN_PREFIX + "requests", dashboard.logged),) if admin is not None else ()),
            *dashboard.routes(),
            *(() if rated is None else (FeedbackDoor(rated, settings).route(),)),
        ],
        middleware=middleware,
        # Back to the border, which alone shapes errors; Starlette's own handler would write plain text.
        exception_handlers={HTTPException: _reraise},
        lifespan=doors.lifespan,
    )
    app.router.redirect_slashes = False
    app.state.dashboard = dashboard
    app.state.backend = backend  # whoever runs the app drains it
    return app


def _cors(settings: ServerSettings) -> Middleware:
    return Middleware(
        CORSMiddleware,
        allow_origins=settings.cors_origins,
        allow_methods=["GET", "POST"],
        allow_headers=[
            *("authorization", "cache-control", "content-type", "x-request-id"),
            *(SESSION_HEADER, CACHE_HEADER, NAMESPACE_HEADER),
        ],
        expose_headers=[
            *("x-request-id", "retry-after", "age"),
            *(CACHE_HEADER, ANSWER_HEADER, SIMILARITY_HEADER, GUARDS_HEADER),
        ],
    )


async def _reraise(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if error.status_code in (404, 405):
        shown = request.url.path[:MAX_SHOWN_CHARS]
        error.detail = f"{error.detail}: {request.method} {shown}"
    raise error


class _Doors:
    """The endpoints, and what they share."""

    def __init__(
        self,
        backend: Backend,
        settings: ServerSettings,
        registry: Any,
        kept: Kept | None,
        on_end: Callable[[], None],
    ) -> None:
        self._backend = backend
        self._settings = settings
        self._registry = registry
        self._on_end = on_end
        self._tokens = TokenText(backend.tokenizer)
        rules = builtin_table().rules("anthropic", settings.anthropic_rules, datetime.now(UTC).date())
        strict = StrictCache(rules) if settings.anthropic_rules else None
        self._breakpoints = BreakpointReader(backend.tokenizer, rules, strict)
        self._pinner = Pinner(kept, rules) if kept is not None and settings.pin_breakpoints else None
        self._threads = ThreadPoolExecutor(_NUM_PREPARE_THREADS, thread_name_prefix="ostinato-prepare")
        identity = f"{backend.model_name}/{backend.tokenizer.identity}/{backend.revision}"
        self._fingerprint = f"fp_{blake3(identity.encode()).hexdigest(length=6)}"

    def routes(self) -> list[Route]:
        return [
            Route("/v1/chat/completions", self.chat, methods=["POST"]),
            Route("/v1/completions", self.completions, methods=["POST"]),
            Route(MESSAGES_ROUTE, self.messages, methods=["POST"]),
            Route(COUNT_ROUTE, self.count_tokens, methods=["POST"]),
            Route("/v1/sessions/{id:path}", self.session, methods=["POST"]),
            Route("/v1/models", self.models),
            Route("/v1/models/{id:path}", self.model),
            Route("/health", self.health),
            Route("/metrics", self.metrics),
        ]

    @asynccontextmanager
    async def lifespan(self, _app: Starlette) -> AsyncIterator[None]:
        yield
        self._threads.shutdown(wait=False, cancel_futures=True)
        await asyncio.to_thread(self._on_end)

    async def chat(self, request: Request) -> Response:
        return await self._answer(request, self._chat_work, too_long_param="messages")

    async def completions(self, request: Request) -> Response:
        return await self._answer(request, self._completion_work, too_long_param="prompt")

    async def messages(self, request: Request) -> Response:
        return await self._answer(request, self._messages_work, too_long_param="messages")

    async def count_tokens(self, request: Request) -> Response:
        """How many tokens a request's prompt has here. Nothing is generated."""
        body = await read_body(request.headers, request.receive, self._settings)

        def count() -> int:
            fields = validate(MessagesRequest, decode(body))
            fields.check(**self._message_limits(), is_counting=True)
            generation = fields.generation(request_id="", key_salt=_salt_of(request))
            generation = replace(generation, params=replace(generation.params, max_tokens=1))
            return self._backend.num_prompt_tokens(generation)

        loop = asyncio.get_running_loop()
        return _json({"input_tokens": await loop.run_in_executor(self._threads, count)})

    async def session(self, request: Request) -> Response:
        """Says how a session stands, for clients that have nothing more to ask."""
        body = await read_body(request.headers, request.receive, self._settings)
        word = validate(SessionWord, decode(body))
        session = word.session(request.path_params["id"])
        tenant = request.state.tenant
        salt = namespace_salt(tenant.salt if tenant is not None else "", word.cache_salt)
        is_known = await asyncio.to_thread(self._backend.tell_session, session, salt)
        answer = {"id": session.id, "object": "session", "state": session.state, "known": is_known}
        return _json(answer)

    async def models(self, _request: Request) -> Response:
        return _json({"object": "list", "data": [self._model_card()]})

    async def model(self, request: Request) -> Response:
        name = request.path_params["id"]
        if name != self._backend.model_name:
            raise UnknownModelError(f"The model '{name[:MAX_SHOWN_CHARS]}' does not exist.")
        return _json(self._model_card())

    async def health(self, _request: Request) -> Response:
        health = self._backend.health()
        body = {
            "status": "ok" if health.ok else "unavailable",
            "detail": health.detail,
            "model": self._backend.model_name,
            "num_running": health.num_running,
            "num_waiting": health.num_waiting,
            "num_pinned_blocks": health.num_pinned_blocks,
        }
        return _json(body, status=200 if health.ok else 503)

    async def metrics(self, _request: Request) -> Response:
        body, content_type = exposition(self._registry)
        return Response(body, headers={"content-type": content_type})

    async def _answer(
        self, request: Request, work_of: Callable[[bytes, str], Work], *, too_long_param: str
    ) -> Response:
        body = await read_body(request.headers, request.receive, self._settings)
        key_salt = _salt_of(request)

        def prepare() -> tuple[Work, list[Any]]:
            work = work_of(body, key_salt)
            generations = with_session(work.requests, request.headers.get(SESSION_HEADER))
            generations = with_cache_control(generations, request.headers, work.cache_answer)
            return work, [self._backend.prepare(generation) for generation in generations]

        try:
            loop = asyncio.get_running_loop()
            work, prepared = await loop.run_in_executor(self._threads, prepare)
        except PromptTooLongError as error:
            error.param = too_long_param
            raise
        return Answer(self._backend, work, prepared, heartbeat_s=self._settings.heartbeat_s)

    def _chat_work(self, body: bytes, key_salt: str) -> Work:
        fields = validate(ChatRequest, decode(body))
        fields.check(**self._limits())
        frame = self._frame("chatcmpl")
        generation = fields.generation(request_id=frame.id, key_salt=key_salt)
        writer = ChatWriter(
            frame,
            self._tokens,
            logprobs=bool(fields.logprobs),
            include_usage=fields.include_usage,
            max_calls=1 if fields.parallel_tool_calls is False else None,
        )
        return Work((generation,), writer, bool(fields.stream), fields.include_usage, fields.cache_answer)

    def _completion_work(self, body: bytes, key_salt: str) -> Work:
        fields = validate(CompletionRequest, decode(body))
        fields.check(**self._limits())
        frame = self._frame("cmpl")
        generations = fields.generations(request_id=frame.id, key_salt=key_salt)
        writer = CompletionWriter(
            frame,
            self._tokens,
            num_choices=fields.num_choices,
            logprobs=fields.logprobs,
            # Read only once an answer is there: by then the runtime has checked the token ids.
            echo=lambda index: self._text(fields.prompts[index]) if fields.echo else "",
            include_usage=fields.include_usage,
        )
        return Work(generations, writer, bool(fields.stream), fields.include_usage, fields.cache_answer)

    def _messages_work(self, body: bytes, key_salt: str) -> Work:
        given = decode(body)
        fields = validate(MessagesRequest, given)
        fields.check(**self._message_limits())
        message_id = f"msg_{uuid4().hex}"
        generation = fields.generation(request_id=message_id, key_salt=key_salt)
        breakpoints = self._breakpoints.read(given, scope=generation.salt)
        pins = self._pinner.pins(fields, breakpoints, generation) if self._pinner is not None else None
        writer = MessageWriter(message_id, fields.model, breakpoints, is_prewarm=fields.is_prewarm)
        return Work(
            (generation,),
            writer,
            bool(fields.stream),
            include_usage=False,
            encode=message_event,
            closing=b"",
            after=pins,
        )

    def _message_limits(self) -> dict[str, Any]:
        rules = self._settings.anthropic_rules
        names = (self._backend.model_name, *([rules] if rules else []))
        return {"model_names": names, "max_model_len": self._backend.max_model_len}

    def _limits(self) -> dict[str, Any]:
        return {
            "model_name": self._backend.model_name,
            "max_choices": self._settings.max_choices,
            "max_model_len": self._backend.max_model_len,
        }

    def _text(self, prompt: str | tuple[int, ...]) -> str:
        if isinstance(prompt, str):
            return prompt
        return self._backend.tokenizer.decode(prompt, skip_special_tokens=False)

    def _frame(self, prefix: str) -> Frame:
        model = self._backend.model_name
        return Frame(f"{prefix}-{uuid4().hex}", int(time.time()), model, self._fingerprint)

    def _model_card(self) -> Json:
        return {
            "id": self._backend.model_name,
            "object": "model",
            "created": self._backend.created_s,
            "owned_by": "ostinato",
            "max_model_len": self._backend.max_model_len,
        }


def _salt_of(request: Request) -> str:
    tenant = request.state.tenant
    return tenant.salt if tenant is not None else ""


def _json(content: Json, status: int = 200) -> Response:
    return Response(orjson.dumps(content), status, media_type="application/json")
