"""A fleet as the one upstream of a gateway: what it is called, its doors, and what is counted of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Final

import orjson
from prometheus_client import CollectorRegistry
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from .. import series
from ..errors import MalformedRequestError
from ..observe import counter_of, gauge_of
from ..routing import Choice
from .fleet import FleetOptions, FleetRelay
from .relay import joined_headers, request_headers
from .upstreams import Upstream

WORKERS_ROUTE: Final = "/v1/ostinato/workers"
DRAIN_ROUTE: Final = "/v1/ostinato/workers/drain"


class Fleet:
    """Workers with one model, behind one name.

    Args:
        workers: addresses; each speaks OpenAI's API, and Anthropic's where clients use it.
        options: how they are chosen and looked after.
        name: of the fleet. Kept answers are its, not a worker's: routers that share a store of answers, and
            have equal models behind them, have one name.
        max_connections: to all workers together.
    """

    def __init__(
        self,
        workers: Sequence[Upstream],
        options: FleetOptions,
        *,
        name: str = "fleet",
        max_connections: int = 4096,
    ) -> None:
        self._routed = counter_of(series.ROUTED, None)
        self._hit = counter_of(series.ROUTED_HIT, None)
        self._again = counter_of(series.ROUTED_AGAIN, None)
        self._open = gauge_of(series.WORKER_OPEN, None)
        self.relay = FleetRelay(
            workers,
            options,
            now_s=time.monotonic,
            max_connections=max_connections,
            on_choice=self._chosen,
            on_again=lambda worker, reason: self._again.labels(worker, reason).inc(),
            on_open=lambda worker, is_open: self._open.labels(worker).set(int(is_open)),
        )
        url, key = f"http://{name}", workers[0].key
        self.upstreams = (
            Upstream(name, url, key=key, plan="off", own_headers=True),
            Upstream(name, url, protocol="anthropic", key=key, plan="off", own_headers=True),
        )

    def show(self, registry: CollectorRegistry) -> None:
        for shown in (self._routed, self._hit, self._again, self._open):
            registry.register(shown)

    def routes(self, check_admin: Callable[[], None]) -> list[BaseRoute]:
        """Its own doors. ``check_admin`` raises for whoever may not look after workers."""

        async def models(request: Request) -> Response:
            headers = request_headers(self.upstreams[0], joined_headers(request.headers.raw), is_open=True)
            status, body = await self.relay.models(headers)
            return Response(body, status, media_type="application/json")

        async def workers(_request: Request) -> Response:
            check_admin()
            return _json({"rows": self.relay.workers()})

        async def drain(request: Request) -> Response:
            check_admin()
            name, is_drained = _drained(await request.body())
            self.relay.drain(name, is_drained)
            return _json({"rows": self.relay.workers()})

        return [
            Route("/v1/models", models),
            Route(WORKERS_ROUTE, workers),
            Route(DRAIN_ROUTE, drain, methods=["POST"]),
        ]

    def _chosen(self, choice: Choice) -> None:
        self._routed.labels(choice.worker, choice.reason).inc()
        self._hit.labels(choice.worker).inc(choice.hit_tokens)


def _drained(body: bytes) -> tuple[str, bool]:
    """``{"worker": NAME, "drain": true}``. Raises :class:`MalformedRequestError`."""
    try:
        given: Any = orjson.loads(body)
        name, is_drained = given["worker"], given.get("drain", True)
    except (orjson.JSONDecodeError, KeyError, TypeError, AttributeError):
        raise MalformedRequestError('Write {"worker": NAME, "drain": true or false}.') from None
    if not isinstance(name, str) or not isinstance(is_drained, bool):
        raise MalformedRequestError('Write {"worker": NAME, "drain": true or false}.')
    return name, is_drained


def _json(content: dict[str, Any]) -> Response:
    return Response(orjson.dumps(content), media_type="application/json")
