"""The outermost layer: who asks, what went wrong, and exactly one end for every request."""

from __future__ import annotations

import hashlib
import hmac
import logging
import re
import time
from typing import Final
from uuid import uuid4

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..errors import AuthenticationError, OstinatoError
from ..observe import HttpMetrics
from .admin import ADMIN_PREFIX, ADMIN_ROUTES
from .answering import EVENT_STREAM
from .anthropic import COUNT_ROUTE, MESSAGES_ROUTE
from .failures import Failure, failure_of
from .feedback import FEEDBACK_ROUTE
from .settings import ApiKey
from .wire import event

logger = logging.getLogger("ostinato.server")

_REQUEST_ID: Final = re.compile(r"[A-Za-z0-9._:/+=-]{1,128}")
_CLIENT_CLOSED: Final = 499  # nginx's number for it; no client ever sees it
_MODEL_ROUTE: Final = "/v1/models/"
_ANTHROPIC_ROUTES: Final = frozenset({MESSAGES_ROUTE, COUNT_ROUTE})
_RESPONSES_ROUTE: Final = "/v1/responses"
_ROUTES: Final = _ANTHROPIC_ROUTES | {
    "/health", "/metrics", "/v1/chat/completions", "/v1/completions", "/v1/models", FEEDBACK_ROUTE,
    _RESPONSES_ROUTE, "/v1/embeddings",
}  # fmt: skip


def route_of(path: str) -> str:
    """A label out of a fixed few: paths are the clients' to choose, the number of series is not."""
    if path in _ROUTES or path in ADMIN_ROUTES:
        return path
    if path == "/" or path.startswith("/dashboard/"):
        return "dashboard"
    return "/v1/models/{id}" if path.startswith(_MODEL_ROUTE) else "other"


class Keyring:
    """Finds the tenant of a key in a time that tells nothing about the keys."""

    def __init__(self, api_keys: tuple[ApiKey, ...]) -> None:
        self._keys = [(hashlib.sha256(key.key.encode()).digest(), key) for key in api_keys]

    def tenant(self, headers: Headers) -> ApiKey | None:
        """The caller, or ``None`` where no keys are configured. Raises :class:`AuthenticationError`."""
        if not self._keys:
            return None
        scheme, _, given = headers.get("authorization", "").partition(" ")
        if "authorization" not in headers and "x-api-key" in headers:  # Anthropic's clients
            scheme, given = "bearer", headers["x-api-key"]
        if scheme.lower() != "bearer" or not given.strip():
            text = "You didn't provide an API key. Send it as 'Authorization: Bearer YOUR_KEY'."
            raise AuthenticationError(text)
        digest = hashlib.sha256(given.strip().encode("latin-1")).digest()
        found = [key for known, key in self._keys if hmac.compare_digest(known, digest)]
        if not found:
            raise AuthenticationError("Incorrect API key provided.")
        return found[0]


class _Exchange:
    """One response on its way out: knows whether it began, whether it is a stream and whether it ended."""

    def __init__(self, send: Send, request_id: str, path: str) -> None:
        self._send = send
        self._request_id = request_id
        self._is_anthropic = path in _ANTHROPIC_ROUTES
        self._is_responses = path == _RESPONSES_ROUTE
        self.status = 0
        self.is_stream = False
        self.is_ended = False

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            headers = list(message.get("headers", []))
            self.is_stream = (b"content-type", EVENT_STREAM) in headers
            headers.append((b"x-request-id", self._request_id.encode()))
            message = {**message, "headers": headers}
        elif message["type"] == "http.response.body":
            self.is_ended = not message.get("more_body", False)
        await self._send(message)

    async def fail(self, failure: Failure) -> None:
        """The one terminal message: a response of its own, or the last event of the stream that runs."""
        if self.is_ended:
            return
        if self.status == 0:
            body = failure.anthropic_body(self._request_id) if self._is_anthropic else failure.body()
            headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
            headers += [(name.encode("latin-1"), value.encode("latin-1")) for name, value in failure.headers]
            await self.send({"type": "http.response.start", "status": failure.status, "headers": headers})
            await self.send({"type": "http.response.body", "body": body})
        elif self.is_stream:
            await self.send({"type": "http.response.body", "body": self._last_event(failure)})
        # A body of known length that broke off cannot be mended: the connection is closed by the server.

    def _last_event(self, failure: Failure) -> bytes:
        if self._is_anthropic:
            return b"event: error\n" + event(failure.anthropic_body(self._request_id))
        if self._is_responses:
            return b"event: error\n" + event(failure.responses_event())
        return event(failure.body())


class Border:
    """ASGI middleware around everything: request ids, keys, errors in OpenAI's shape, counters, one log line.

    The tenant is found at ``scope["state"]["tenant"]``, the request id at ``scope["state"]["request_id"]``.
    """

    def __init__(
        self, app: ASGIApp, *, api_keys: tuple[ApiKey, ...], admin_key: str | None, metrics: HttpMetrics
    ) -> None:
        self._app = app
        self._keyring = Keyring(api_keys)
        self._admins = Keyring((ApiKey("admin", admin_key),)) if admin_key else None
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started_s = time.perf_counter()
        headers = Headers(scope=scope)
        request_id = _request_id(headers)
        exchange = _Exchange(send, request_id, scope["path"])
        failure: Failure | None = None
        try:
            state = scope.setdefault("state", {})
            state["request_id"] = request_id
            state["tenant"] = None
            if self._admins is not None and scope["path"].startswith(ADMIN_PREFIX):
                self._admins.tenant(headers)
            elif scope["path"].startswith("/v1/"):
                state["tenant"] = self._keyring.tenant(headers)
            await self._app(scope, receive, exchange.send)
        except ClientDisconnect:
            failure = Failure(_CLIENT_CLOSED, "The client went away.", "client_closed")
        except (OstinatoError, HTTPException) as error:
            failure = failure_of(error)
            if failure.status == 500:  # 503 is no fault, and what a client did wrong it is told itself
                logger.error("%s failed in the engine", request_id, exc_info=error)
            await exchange.fail(failure)
        except Exception as error:
            logger.exception("%s failed: a bug in the server", request_id)
            failure = failure_of(error)
            await exchange.fail(failure)
        finally:
            status = failure.status if failure is not None else exchange.status or _CLIENT_CLOSED
            self._account(scope, request_id, status, time.perf_counter() - started_s)

    def _account(self, scope: Scope, request_id: str, status: int, duration_s: float) -> None:
        route = route_of(scope["path"])
        self._metrics.observe(route, status, duration_s)
        logger.info("%s %s %s %d %.1f ms", request_id, scope["method"], route, status, duration_s * 1e3)


def _request_id(headers: Headers) -> str:
    """The client's own where it is printable and short, else a new one."""
    given = headers.get("x-request-id", "")
    return given if _REQUEST_ID.fullmatch(given) else f"req-{uuid4().hex}"
