"""A request's body: only JSON, only as much and only as slowly as the settings allow."""

from __future__ import annotations

import asyncio
from typing import Final

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import Receive

from ..errors import RequestTimeoutError, RequestTooLargeError
from .settings import ServerSettings

JSON: Final = "application/json"
FORM: Final = "application/x-www-form-urlencoded"


async def read_body(headers: Headers, receive: Receive, settings: ServerSettings, kind: str = JSON) -> bytes:
    """The whole body, of a content type ``kind``.

    Raises :class:`HTTPException` (415) for anything but that in plain UTF-8, :class:`RequestTooLargeError`,
    :class:`RequestTimeoutError`, and :class:`ClientDisconnect` where the client went away.
    """
    _check_kind(headers, kind)
    declared = headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > settings.max_body_bytes:
        raise _too_large(settings)
    pieces: list[bytes] = []
    num_bytes = 0
    try:
        async with asyncio.timeout(settings.body_timeout_s):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientDisconnect
                piece = message.get("body", b"")
                num_bytes += len(piece)
                if num_bytes > settings.max_body_bytes:
                    raise _too_large(settings)
                pieces.append(piece)
                if not message.get("more_body", False):
                    return b"".join(pieces)
    except TimeoutError:
        text = f"The body of the request did not arrive within {settings.body_timeout_s:g} seconds."
        raise RequestTimeoutError(text) from None


def _check_kind(headers: Headers, wanted: str) -> None:
    # A browser may send any type but JSON across origins without asking first: this is a guard, too.
    kind, _, parameters = headers.get("content-type", "").partition(";")
    if kind.strip().lower() != wanted:
        raise HTTPException(415, f"The content type of the request must be {wanted}.")
    charset = parameters.strip().lower().removeprefix("charset=").strip('"')
    if parameters.strip() and charset not in ("utf-8", "utf8"):
        name = "JSON" if wanted == JSON else "a form"
        raise HTTPException(415, f"The body of the request must be {name} in UTF-8.")
    if headers.get("content-encoding", "identity").strip().lower() != "identity":
        raise HTTPException(415, "Compressed requests are not supported; send the body as it is.")


def _too_large(settings: ServerSettings) -> RequestTooLargeError:
    return RequestTooLargeError(
        f"The body of the request is over the limit of {settings.max_body_bytes} bytes."
    )
