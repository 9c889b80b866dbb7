"""The dashboard's routes: who may see what, and which figures go into which page."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import orjson
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ...errors import ClientError
from ...ports import Clock, SystemClock
from ...request_log import line_of
from ...types import TokenArray
from ..admin import AdminDoor, KeptAnswers, tenant_names
from ..backend import Backend
from ..settings import ServerSettings
from .access import Visitor
from .actions import Actions
from .answering import data, form_of, html
from .asked import Part, parts_by_length, parts_with_text, stop_text
from .assets import render
from .diffs import diff_page
from .door import Door
from .history import History
from .memory import TenantNames, memory_figures, prompt_names
from .overview import PATTERN_NAMES, figures, series
from .recent import Content, RecentRequest, RecentRequests
from .recorder import Recorder
from .sources import SOURCE_NAMES, Inside, spans_of
from .tree import node_page, tree_data, widest

_MAX_SHOWN: Final = 200
_NUM_ON_OVERVIEW: Final = 10
_NUM_USERS: Final = 20
_NUM_WIDEST: Final = 40
_NUM_OTHERS: Final = 50

_PAGES: Final = (
    ("overview", "/", "Overview"),
    ("tree", "/dashboard/tree", "Tree"),
    ("requests", "/dashboard/requests", "Requests"),
    ("memory", "/dashboard/memory", "Memory"),
)
_OUTSIDE: Final = ("overview", "requests")  # of a backend that shows nothing of its inside


class Dashboard:
    """Pages about one backend. It listens to the backend's events, in a thread of its own.

    ``inside``: the same runtime, where it lets itself be looked into; ``admin``: where somebody may change
    things. ``answers``: whole answers that are kept.
    """

    def __init__(
        self,
        backend: Backend,
        settings: ServerSettings,
        *,
        inside: Inside | None = None,
        admin: AdminDoor | None = None,
        answers: KeptAnswers | None = None,
        clock: Clock | None = None,
    ) -> None:
        self._backend = backend
        self._inside = inside
        self._answers = answers
        self._settings = settings
        self._clock = clock or SystemClock()
        self._door = Door(settings, self._clock)
        self._tenant_name = TenantNames(tenant_names(settings))
        self.history = History(self._clock)
        keeps_content = inside is not None and self._door.can_sign_in
        self.recent = RecentRequests(self._clock, inside.ttl_s if inside and keeps_content else None)
        self.recorder = Recorder(
            self.history,
            self.recent,
            self._clock,
            block_tokens=16 if inside is None else inside.block_tokens,
            marker_ids=backend.tokenizer.special_tokens.values(),
        )
        backend.observers.append(self.recorder)
        if inside is not None:
            inside.on_purge.append(self.recorder.purged)
        self._actions = None if admin is None or inside is None else Actions(admin, inside, self.recent)

    def close(self) -> None:
        """Stop listening."""
        self.recorder.close()

    def routes(self) -> list[Route]:
        page, part = self._door.page, self._door.part
        found = [
            Route("/", page(self.overview)),
            Route("/dashboard/parts/overview", part(self.overview_part)),
            Route("/dashboard/parts/requests", part(self.requests_part)),
            Route("/dashboard/data/series", part(self.series)),
            Route("/dashboard/requests", page(self.requests)),
            Route("/dashboard/requests/{name}", page(self.request)),
            *self._door.routes(),
        ]
        if self._inside is not None:
            found += [
                Route("/dashboard/memory", page(self.memory)),
                Route("/dashboard/diff", page(self.diff)),
                Route("/dashboard/tree", page(self.tree)),
                Route("/dashboard/parts/widest", part(self.widest)),
                Route("/dashboard/data/tree", part(self.tree_data)),
                Route("/dashboard/tree/{serial:int}", page(self.node)),
            ]
        if self._actions is not None:
            found.append(Route("/dashboard/actions/{name}", page(self.action), methods=["POST"]))
        return [*found, self._door.last_route()]

    # ------------------------------------------------------------ what everybody sees

    def _common(self, visitor: Visitor, view: str) -> dict[str, Any]:
        health = self._backend.health()
        return {
            "view": view,
            "pages": _PAGES if self._inside is not None else [each for each in _PAGES if each[0] in _OUTSIDE],
            "visitor": visitor,
            "footing": f"{self._backend.model_name} · {'serving' if health.ok else health.detail}",
            "is_well": health.ok,
            "health": health,
            "has_inside": self._inside is not None,
            "can_act": visitor.is_admin and self._actions is not None,
            "now_s": self._clock.now(),
            "tenant_name": self._tenant_name,
            "pattern_names": PATTERN_NAMES,
            "source_names": SOURCE_NAMES,
            "num_dropped": self.recorder.num_dropped,
        }

    def _overview(self, request: Request, visitor: Visitor) -> dict[str, Any]:
        health = self._backend.health()
        found = figures(
            self.history, health, request.query_params.get("last"), self._settings.dollars_per_hour
        )
        found["recent"] = self.recent.newest(_NUM_ON_OVERVIEW)
        found["part"] = request.query_params.get("part", "")
        return self._common(visitor, "overview") | found

    async def overview(self, request: Request, visitor: Visitor) -> Response:
        return html(render("overview.html", **self._overview(request, visitor)))

    async def overview_part(self, request: Request, visitor: Visitor) -> Response:
        return html(render("overview_part.html", **self._overview(request, visitor)))

    async def series(self, request: Request, visitor: Visitor) -> Response:
        return data(series(self.history, request.query_params.get("last")))

    def _requests(self, request: Request, visitor: Visitor) -> dict[str, Any]:
        wanted = {
            name: value
            for name in ("pattern", "prompt", "found", "tenant")
            if (value := request.query_params.get(name, ""))
        }
        shown = self.recent.newest(_MAX_SHOWN, lambda seen: _is_wanted(seen, wanted))
        tenants = sorted({seen.tenant for seen in self.recent.newest(10**6)})
        return self._common(visitor, "requests") | {
            "recent": shown,
            "wanted": {"pattern": "", "prompt": "", "found": "", "tenant": ""} | wanted,
            "prompts": list(self.history.groups("prompt")),
            "tenants": tenants,
            "query": request.url.query,
        }

    async def requests(self, request: Request, visitor: Visitor) -> Response:
        return html(render("requests.html", **self._requests(request, visitor)))

    async def requests_part(self, request: Request, visitor: Visitor) -> Response:
        return html(render("requests_part.html", **self._requests(request, visitor)))

    async def request(self, request: Request, visitor: Visitor) -> Response:
        found = self.recent.get(request.path_params["name"])
        if found is None:
            raise HTTPException(404, "This request is not remembered (any more): the last 1,000 are.")
        seen, content = found
        may_read = visitor.is_admin and content is not None
        parts = await asyncio.to_thread(self._parts, seen, content if may_read else None)
        others = await asyncio.to_thread(self.recent.alike, seen.name, _NUM_OTHERS) if may_read else []
        values = {
            "seen": seen,
            "parts": parts,
            "spans": spans_of(seen.usage, sum(part.num_tokens for part in parts)),
            "has_text": may_read,
            "stop_text": stop_text(seen),
            "content": content if may_read else None,
            "others": others,
        }
        return html(render("request.html", **self._common(visitor, "requests"), **values))

    async def diff(self, request: Request, visitor: Visitor) -> Response:
        if not visitor.is_admin:
            raise HTTPException(
                403, "Two requests are compared by their text: for the admin key's holder only."
            )
        pair: list[tuple[RecentRequest, Content]] = []
        for side in ("a", "b"):
            found = self.recent.get(request.query_params.get(side, ""))
            if found is None or found[1] is None:
                raise HTTPException(404, "What one of these requests asked is not kept (any more).")
            pair.append((found[0], found[1]))
        known = self._known
        values = await asyncio.to_thread(
            diff_page,
            pair[0],
            pair[1],
            origins=self._origins,
            words=known.words,
            block_tokens=known.block_tokens,
        )
        return html(render("diff.html", **self._common(visitor, "requests"), **values))

    def _origins(self, content: Content) -> TokenArray | None:
        """The message of each token, where that can be told."""
        if self._inside is None:
            return None
        try:
            owners = self._inside.origins(content.request)
        except ClientError:  # roles, templates and limits may have changed since
            return None
        return owners if owners is not None and len(owners) == len(content.tokens) else None

    def _parts(self, seen: RecentRequest, content: Content | None) -> list[Part]:
        if content is None:
            return parts_by_length(seen)
        owners = self._origins(content)
        return parts_with_text(seen, content.request, content.tokens, owners, self._text)

    def _text(self, tokens: Sequence[int]) -> str:
        return self._backend.tokenizer.decode(tokens, skip_special_tokens=False)

    def _text_of_bytes(self, tokens: bytes) -> str:
        return self._text(np.frombuffer(tokens, np.int32).tolist())

    async def logged(self, _request: Request) -> Response:
        """The requests that are remembered with their text, as lines of a request log, for the holder of the
        admin key. In the place of a salt stands the digest of it."""

        def made() -> bytes:
            records = self.recent.records(self._known.block_tokens)
            lines = [line_of(record, "", with_content=True) for record in records]
            return b"".join(_json_line(line) for line in lines)

        body = await asyncio.to_thread(made)
        return Response(body, media_type="application/jsonl", headers={"cache-control": "no-store"})

    # ------------------------------------------------------------ what a runtime shows of its inside

    @property
    def _known(self) -> Inside:
        assert self._inside is not None, "a page of the inside of a backend that shows nothing"
        return self._inside

    def _prompt_names(self) -> dict[str, str]:
        return prompt_names(list(self._known.prompts.statistics()))

    async def memory(self, request: Request, visitor: Visitor) -> Response:
        summary = await asyncio.to_thread(self._known.cache_summary)
        uses = None if self._answers is None else await asyncio.to_thread(self._answers.uses)
        values = memory_figures(summary, uses, self._tenant_name, self._prompt_names())
        values["prompt_list"] = list(self._known.prompts.statistics())
        values["tenant_list"] = [key.name for key in self._settings.api_keys]
        return html(render("memory.html", **self._common(visitor, "memory"), **values))

    async def tree(self, request: Request, visitor: Visitor) -> Response:
        rows = await asyncio.to_thread(self._widest, None, visitor)
        return html(render("tree.html", **self._common(visitor, "tree"), **rows))

    async def widest(self, request: Request, visitor: Visitor) -> Response:
        rows = await asyncio.to_thread(self._widest, _serial(request), visitor)
        return html(render("widest.html", **self._common(visitor, "tree"), **rows))

    async def tree_data(self, request: Request, visitor: Visitor) -> Response:
        def made() -> bytes | None:
            return tree_data(
                self._known.surveyor.survey(),
                root=_serial(request),
                tenant_name=self._tenant_name,
                prompt_name=self._prompt_names(),
                text_of=self._text_of_bytes if visitor.is_admin else None,
            )

        found = await asyncio.to_thread(made)
        if found is None:
            raise HTTPException(404, "This node has gone, or was merged with another.")
        return data(found)

    def _widest(self, root: int | None, visitor: Visitor) -> dict[str, Any]:
        return widest(
            self._known.surveyor.survey(),
            root=root,
            num=_NUM_WIDEST,
            tenant_name=self._tenant_name,
            prompt_name=self._prompt_names(),
            text_of=self._text_of_bytes if visitor.is_admin else None,
        )

    async def node(self, request: Request, visitor: Visitor) -> Response:
        facts = await asyncio.to_thread(self._known.surveyor.facts, request.path_params["serial"])
        if facts is None:
            raise HTTPException(404, "This node has gone, or was merged with another.")
        values = node_page(facts, self._text_of_bytes if visitor.is_admin else None, self._prompt_names())
        values["users"] = self.recent.users_of(facts.space.digest, facts.path, _NUM_USERS)
        return html(render("node.html", **self._common(visitor, "tree"), **values))

    async def action(self, request: Request, visitor: Visitor) -> Response:
        assert self._actions is not None, "an action where nobody may act"
        fields = await form_of(request, self._settings)
        if not self._door.is_own_form(request, visitor, fields.pop("token", "")):
            raise HTTPException(403, "This form is not (or no longer) yours: load the page again.")
        shown = await self._actions.act(request.path_params["name"], fields)
        return html(render("action.html", **self._common(visitor, "memory"), **shown))


def _json_line(line: dict[str, Any]) -> bytes:
    try:
        return orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE)
    except orjson.JSONEncodeError:  # text that is not Unicode
        return b""


def _serial(request: Request) -> int | None:
    given = request.query_params.get("root", "")
    return int(given) if given.isdecimal() and len(given) < 19 and int(given) else None


def _is_wanted(seen: RecentRequest, wanted: dict[str, str]) -> bool:
    share = seen.hit_rate or 0.0
    found = {"": True, "warm": share >= 0.5, "cold": share < 0.5, "failed": seen.finish_reason == "error"}
    return (
        wanted.get("pattern", seen.pattern) == seen.pattern
        and wanted.get("prompt", seen.usage.prompt_name) == seen.usage.prompt_name
        and wanted.get("tenant", seen.tenant) == seen.tenant
        and found.get(wanted.get("found", ""), True)
    )
