"""The way in: signing in and out, what who is not signed in gets, and the files that all pages need."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeAlias

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ...ports import Clock
from ..settings import ServerSettings
from .access import Sessions, Visitor, is_same_origin
from .answering import HEADERS, Handler, form_of, html, see_other, with_errors_shown
from .assets import STATIC, assets, render

View: TypeAlias = Callable[[Request, Visitor], Awaitable[Response]]


class Door:
    """Stands before every view."""

    def __init__(self, settings: ServerSettings, clock: Clock) -> None:
        self._settings = settings
        self._sessions = Sessions(settings, clock)
        self.can_sign_in = self._sessions.can_sign_in
        self.is_own_form = self._sessions.is_own_form

    def routes(self) -> list[Route]:
        return [
            Route("/dashboard/sign-in", with_errors_shown(self.sign_in), methods=["GET", "POST"]),
            Route("/dashboard/sign-out", with_errors_shown(self.sign_out), methods=["POST"]),
            Route(STATIC + "{path:path}", with_errors_shown(self.static)),
        ]

    def last_route(self) -> Route:
        """What is under the dashboard's address and is none of its pages."""
        return Route("/dashboard/{path:path}", self.page(self.nothing))

    async def nothing(self, _request: Request, _visitor: Visitor) -> Response:
        raise HTTPException(404, "There is no such page.")

    def page(self, view: View) -> Handler:
        """A view for those who may look; others are sent to sign in, or told that nobody can."""

        async def shown(request: Request) -> Response:
            visitor = self._sessions.visitor(request)
            if visitor.standing == "locked":
                return html(render("locked.html"), 403)
            if not visitor.may_look:
                return see_other("/dashboard/sign-in")
            return await view(request, visitor)

        return with_errors_shown(shown)

    def part(self, view: View) -> Handler:
        """What pages ask for while they are shown: whose session is over is sent to sign in."""

        async def shown(request: Request) -> Response:
            visitor = self._sessions.visitor(request)
            if not visitor.may_look:
                return Response(status_code=401, headers=HEADERS | {"hx-redirect": "/dashboard/sign-in"})
            return await view(request, visitor)

        return with_errors_shown(shown)

    async def sign_in(self, request: Request) -> Response:
        visitor = self._sessions.visitor(request)
        if not self.can_sign_in or visitor.is_admin:
            return see_other("/")
        if request.method != "POST":
            return html(render("sign_in.html", is_wrong=False))
        if not is_same_origin(request):
            raise HTTPException(403, "This form comes from another site.")
        fields = await form_of(request, self._settings)
        answer = see_other("/")
        if self._sessions.sign_in(fields.get("key", ""), request, answer):
            return answer
        return html(render("sign_in.html", is_wrong=True), 401)

    async def sign_out(self, request: Request) -> Response:
        answer = see_other("/")
        self._sessions.sign_out(request, answer)
        return answer

    async def static(self, request: Request) -> Response:
        asset = assets().get(request.path_params["path"])
        if asset is None:
            raise HTTPException(404, "There is no such file.")
        is_known = request.query_params.get("v") == asset.digest
        age = "public, max-age=31536000, immutable" if is_known else "no-cache"
        return Response(asset.body, 200, HEADERS | {"cache-control": age, "content-type": asset.content_type})
