"""Who may look: the holder of the admin key, by a cookie; where nobody has keys, everyone, at figures only.

======================  ====================================================================
keys                    what a browser gets
======================  ====================================================================
none                    figures, no text of any request, nothing that changes anything
API keys, no admin key  a page that says what to do
an admin key            a page to sign in; then everything
======================  ====================================================================

The cookie is a random name of a session that lives in this process. It is ``HttpOnly`` and
``SameSite=Strict``; a form is believed only with the session's own token in it, and from this origin.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections import OrderedDict
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias
from urllib.parse import urlsplit

from starlette.requests import Request
from starlette.responses import Response

from ...ports import Clock
from ..settings import ServerSettings

COOKIE: Final = "ostinato-session"
SESSION_S: Final = 12 * 3600
_MAX_SESSIONS: Final = 64

Standing: TypeAlias = Literal["open", "admin", "stranger", "locked"]


@dataclass(frozen=True, slots=True)
class Visitor:
    """``open``: may see figures; ``admin``: everything; ``stranger``: has to sign in; ``locked``: nobody can.

    ``token`` stands in the forms of an admin's pages.
    """

    standing: Standing
    token: str = ""

    @property
    def may_look(self) -> bool:
        return self.standing in ("open", "admin")

    @property
    def is_admin(self) -> bool:
        return self.standing == "admin"


class Sessions:
    """Who is signed in. For one event loop."""

    def __init__(self, settings: ServerSettings, clock: Clock) -> None:
        self._admin_key = settings.admin_key
        self._has_api_keys = bool(settings.api_keys)
        self._clock = clock
        self._expires_s: OrderedDict[bytes, float] = OrderedDict()  # by digest: no cookie is in memory
        self._secret = secrets.token_bytes(32)

    @property
    def can_sign_in(self) -> bool:
        return self._admin_key is not None

    def visitor(self, request: Request) -> Visitor:
        if self._admin_key is None:
            return Visitor("locked" if self._has_api_keys else "open")
        cookie = request.cookies.get(COOKIE, "")
        expires_s = self._expires_s.get(_digest(cookie))
        if expires_s is None or expires_s <= self._clock.monotonic():
            return Visitor("stranger")
        return Visitor("admin", self._token(cookie))

    def sign_in(self, key: str, request: Request, response: Response) -> bool:
        """Sets the cookie where this is the admin key. Takes the same time for every other."""
        known = (self._admin_key or "").encode()
        if not hmac.compare_digest(_digest(key), hashlib.sha256(known).digest()) or not known:
            return False
        cookie = secrets.token_urlsafe(32)
        self._expires_s[_digest(cookie)] = self._clock.monotonic() + SESSION_S
        if len(self._expires_s) > _MAX_SESSIONS:
            self._expires_s.popitem(last=False)
        response.set_cookie(
            COOKIE,
            cookie,
            max_age=SESSION_S,
            path="/",
            secure=request.url.scheme == "https",
            httponly=True,
            samesite="strict",
        )
        return True

    def sign_out(self, request: Request, response: Response) -> None:
        self._expires_s.pop(_digest(request.cookies.get(COOKIE, "")), None)
        response.delete_cookie(COOKIE, path="/", httponly=True, samesite="strict")

    def is_own_form(self, request: Request, visitor: Visitor, token: str) -> bool:
        """Whether a form comes from a page of ours, that this admin was shown."""
        return (
            visitor.is_admin
            and hmac.compare_digest(visitor.token.encode(), token.encode("utf-8", "replace"))
            and is_same_origin(request)
        )

    def _token(self, cookie: str) -> str:
        return hmac.new(self._secret, cookie.encode("utf-8", "replace"), hashlib.sha256).hexdigest()


def is_same_origin(request: Request) -> bool:
    """Browsers say where a form comes from; one that does not is held back by the cookie's own rule."""
    origin = request.headers.get("origin")
    if origin is not None and urlsplit(origin).netloc != request.headers.get("host", ""):
        return False
    return request.headers.get("sec-fetch-site", "same-origin") in ("same-origin", "none")


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode("utf-8", "replace")).digest()
