"""An exception as OpenAI's clients want to read it: ``{"error": {message, type, param, code}}``."""

from __future__ import annotations

import math
from dataclasses import dataclass
from http import HTTPStatus
from typing import Final

import orjson
from starlette.exceptions import HTTPException

from ..errors import ClientError, QueueFullError, ServerError, ShuttingDownError, UpstreamError

_INTERNAL = "The server had an error while processing this request. Its log says more, under the request id."


_ANTHROPIC_TYPES: Final = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


@dataclass(frozen=True, slots=True)
class Failure:
    """What one failed request is told. ``headers`` are sent with it (``retry-after``, ``allow`` …)."""

    status: int
    message: str
    type: str
    code: str | None = None
    param: str | None = None
    headers: tuple[tuple[str, str], ...] = ()

    def body(self) -> bytes:
        """The JSON object, for a response's body or for a stream's ``data:``."""
        error = {"message": self.message, "type": self.type, "param": self.param, "code": self.code}
        return orjson.dumps({"error": error})

    def responses_event(self) -> bytes:
        """The last event of a stream of OpenAI's Responses; ``error`` is what makes its clients raise."""
        error = {"message": self.message, "param": self.param, "code": self.code}
        return orjson.dumps({"type": "error", **error, "error": {**error, "type": self.type}})

    def anthropic_body(self, request_id: str) -> bytes:
        """The same as Anthropic's clients read it."""
        kind = _ANTHROPIC_TYPES.get(
            self.status, "api_error" if self.status >= 500 else "invalid_request_error"
        )
        error = {"type": kind, "message": self.message}
        return orjson.dumps({"type": "error", "error": error, "request_id": request_id})


def refusal(status: int, message: str, *, code: str | None = None) -> Failure:
    """A failure of the HTTP exchange itself, which no exception stands for."""
    return Failure(status, message, "server_error" if status >= 500 else "invalid_request_error", code)


def failure_of(error: BaseException) -> Failure:
    """What to tell the client about ``error``; of our own faults no more than that there was one."""
    if isinstance(error, QueueFullError):
        retry_after = (("retry-after", str(max(1, math.ceil(error.retry_after_s)))),)
        return Failure(error.status, str(error), "rate_limit_error", error.code, headers=retry_after)
    if isinstance(error, ClientError):
        return Failure(error.status, str(error), "invalid_request_error", error.code, error.param)
    if isinstance(error, ShuttingDownError):
        return Failure(error.status, str(error), "server_error", error.code, headers=(("retry-after", "5"),))
    if isinstance(error, UpstreamError):  # its message is ours, and says nothing of what was sent
        return Failure(error.status, str(error), "server_error", error.code)
    if isinstance(error, ServerError):
        return Failure(error.status, _INTERNAL, "server_error", error.code)
    if isinstance(error, HTTPException):
        return _http_failure(error)
    return Failure(500, _INTERNAL, "server_error", "internal_error")


def _http_failure(error: HTTPException) -> Failure:
    headers = tuple((name.lower(), value) for name, value in (error.headers or {}).items())
    code = HTTPStatus(error.status_code).phrase.lower().replace(" ", "_")
    return Failure(error.status_code, error.detail, "invalid_request_error", code, headers=headers)
