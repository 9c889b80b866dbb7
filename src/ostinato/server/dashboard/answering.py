"""What every page and every refusal is sent with: nothing comes from elsewhere, and nothing stays behind."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Final, TypeAlias
from urllib.parse import parse_qsl

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from ...errors import ClientError, MalformedRequestError, OstinatoError
from ..body import FORM, read_body
from ..failures import failure_of
from ..settings import ServerSettings
from .assets import render

Handler: TypeAlias = Callable[[Request], Awaitable[Response]]

POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
HEADERS: Final = {
    "content-security-policy": POLICY,
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "same-origin",  # without any, browsers hide a form's origin as well
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
}
_MAX_FIELDS: Final = 64


def html(text: str, status: int = 200) -> Response:
    headers = HEADERS | {"cache-control": "no-store"}
    return Response(text, status, headers, media_type="text/html")


def data(body: bytes) -> Response:
    headers = HEADERS | {"cache-control": "no-store"}
    return Response(body, 200, headers, media_type="application/json")


def see_other(path: str) -> Response:
    """After a form: what to show next."""
    return Response(status_code=303, headers=HEADERS | {"location": path, "cache-control": "no-store"})


def with_errors_shown(handler: Handler) -> Handler:
    """What goes wrong is said on a page. Bugs go on to the border, which logs them and answers in JSON."""

    async def shown(request: Request) -> Response:
        try:
            return await handler(request)
        except ClientDisconnect:
            raise
        except (ClientError, HTTPException) as error:
            failure = failure_of(error)
            return error_page(failure.status, failure.message)
        except OstinatoError as error:
            failure = failure_of(error)
            return error_page(failure.status, str(error))

    return shown


def error_page(status: int, message: str) -> Response:
    return html(render("error.html", status=status, message=message), status)


async def form_of(request: Request, settings: ServerSettings) -> dict[str, str]:
    """A form's fields, those left empty aside. Raises :class:`MalformedRequestError` where it is none."""
    body = await read_body(request.headers, request.receive, settings, FORM)
    try:
        pairs = parse_qsl(body.decode("ascii"), errors="strict", max_num_fields=_MAX_FIELDS)
    except (ValueError, UnicodeDecodeError):
        raise MalformedRequestError("This is not a form of ours: load the page again.") from None
    return {name: value for name, value in pairs if value.strip()}
