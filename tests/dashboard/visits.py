"""A browser without a screen: cookies, forms and redirects over plain HTTP."""

from __future__ import annotations

import http.cookiejar
import re
import urllib.error
import urllib.parse
import urllib.request
from dataclasses import dataclass
from email.message import Message
from html.parser import HTMLParser


@dataclass
class Page:
    status: int
    text: str
    headers: Message
    url: str


class Forms(HTMLParser):
    """Hidden and given fields of every form, by its action."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.by_action: dict[str, list[dict[str, str]]] = {}
        self._open: dict[str, str] | None = None
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        if tag == "form":
            self._open = {}
            self.by_action.setdefault(given.get("action") or "", []).append(self._open)
        elif tag == "input" and self._open is not None and given.get("type") == "hidden":
            self._open[given.get("name") or ""] = given.get("value") or ""


class _Straight(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *args: object) -> None:
        return None


class Visit:
    """One visitor. ``follow`` false: a redirect is what is returned."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.jar = http.cookiejar.CookieJar()
        cookies = urllib.request.HTTPCookieProcessor(self.jar)
        self._following = urllib.request.build_opener(cookies)
        self._straight = urllib.request.build_opener(cookies, _Straight)

    def get(self, path: str, *, follow: bool = True, **headers: str) -> Page:
        return self._send(urllib.request.Request(self.url + path, headers=headers), follow)

    def post(self, path: str, fields: dict[str, str], *, follow: bool = True, **headers: str) -> Page:
        body = urllib.parse.urlencode(fields).encode()
        return self._send(urllib.request.Request(self.url + path, body, headers), follow)

    def sign_in(self, key: str) -> Page:
        return self.post("/dashboard/sign-in", {"key": key})

    def token(self) -> str:
        """What stands in the forms of this visitor's pages."""
        return re.findall(r'name="token" value="([0-9a-f]{64})"', self.get("/dashboard/memory").text)[0]

    def _send(self, request: urllib.request.Request, follow: bool) -> Page:
        opener = self._following if follow else self._straight
        try:
            with opener.open(request, timeout=30) as reply:
                return Page(reply.status, reply.read().decode(), reply.headers, reply.url)
        except urllib.error.HTTPError as error:
            with error:
                return Page(error.code, error.read().decode(), error.headers, error.url or "")
