"""The gateway's page: what upstreams reported, what it cost, and what their caches saved."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ..ports import Clock, SystemClock
from ..providers.accounting import Account, Entry, Ledger
from ..server.dashboard.access import Visitor
from ..server.dashboard.answering import html
from ..server.dashboard.assets import render
from ..server.dashboard.door import Door
from ..server.settings import ServerSettings


@dataclass(frozen=True, slots=True)
class Row:
    """An account, with what its page shows of it."""

    account: Account
    entry: Entry

    @property
    def read_share(self) -> float | None:
        use = self.entry.use
        return use.read / use.input if use.input else None

    @property
    def is_priced(self) -> bool:
        return self.entry.num_unpriced < self.entry.num_requests


@dataclass(frozen=True, slots=True)
class GatewayState:
    """How busy it is, for whoever looks."""

    is_well: bool
    num_running: int
    upstreams: tuple[str, ...]
    num_unread_usages: int


class GatewayDashboard:
    """One page, with the door of the server's."""

    def __init__(
        self,
        ledger: Ledger,
        state: Callable[[], GatewayState],
        settings: ServerSettings,
        clock: Clock | None = None,
    ) -> None:
        self._ledger = ledger
        self._state = state
        self._door = Door(settings, clock or SystemClock())

    def routes(self) -> list[Route]:
        return [
            Route("/", self._door.page(self.overview)),
            Route("/dashboard/parts/overview", self._door.part(self.part)),
            *self._door.routes(),
            self._door.last_route(),
        ]

    async def overview(self, _request: Request, visitor: Visitor) -> Response:
        return html(render("gateway.html", **self._values(visitor)))

    async def part(self, _request: Request, visitor: Visitor) -> Response:
        return html(render("gateway_part.html", **self._values(visitor)))

    def _values(self, visitor: Visitor) -> dict[str, Any]:
        state = self._state()
        rows = sorted(
            (Row(account, entry) for account, entry in self._ledger),
            key=lambda row: (-row.entry.money.without_cache, -row.entry.use.input),
        )
        names = ", ".join(state.upstreams)
        return {
            "view": "overview",
            "pages": (("overview", "/", "Overview"),),
            "visitor": visitor,
            "footing": f"gateway to {names} · {'passing on' if state.is_well else 'shutting down'}",
            "is_well": state.is_well,
            "num_dropped": 0,
            "state": state,
            "rows": rows,
            "total": self._ledger.total,
            "num_requests": sum(row.entry.num_requests for row in rows),
            "num_unpriced": sum(row.entry.num_unpriced for row in rows),
            "uncached": sum(row.entry.use.uncached for row in rows),
            "written": sum(row.entry.use.num_written for row in rows),
            "read": sum(row.entry.use.read for row in rows),
            "output": sum(row.entry.use.output for row in rows),
            "nothing": Decimal(0),
        }
