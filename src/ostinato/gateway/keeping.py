"""Entries of vendors' caches that are read once more before they expire, where that is likely to pay.

Opt-in: it spends tokens when nobody asks. What is sent is the request itself with ``max_tokens: 0``, which
vendors answer with nothing; only where the request is of a kind for which they do.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import date
from typing import Any, Final

import orjson

from ..errors import OstinatoError
from ..providers.keep_alive import KeepAlive, keep_alive
from .planning import Booked, Planning, Sent
from .relay import Relay, body_of
from .upstreams import Upstream

logger = logging.getLogger("ostinato.gateway")

MAX_KEPT: Final = 1000
MAX_BYTES: Final = 128 << 20
# However likely it seems that somebody comes back: one entry is not kept for longer than about an hour so.
MAX_TIMES: Final = 12
POLL_S: Final = 1.0


@dataclass(frozen=True, slots=True)
class _Due:
    upstream: Upstream
    path: str
    body: bytes
    headers: Mapping[str, str]
    sent: Sent
    place: int
    at_s: float
    num_times: int = 0


class Keeper:
    """The latest request of every conversation, until it is not worth it any more.

    ``enter`` is told what a request of its own cost.
    """

    def __init__(
        self,
        relay: Relay,
        planning: Planning,
        *,
        clock: Callable[[], float],
        today: Callable[[], date],
        enter: Callable[[Sent, Booked], None],
    ) -> None:
        self._relay, self._planning = relay, planning
        self._clock, self._today, self._enter = clock, today, enter
        self._due: OrderedDict[bytes, _Due] = OrderedDict()
        self._num_bytes = 0

    def __len__(self) -> int:
        return len(self._due)

    def follow(
        self, upstream: Upstream, path: str, body: bytes, headers: Mapping[str, str], sent: Sent
    ) -> None:
        """A request was answered: what it has in the cache may be worth keeping."""
        if sent.history is None or sent.asked is None or sent.prompt is None:
            return
        chain = sent.asked.chain
        for digest in chain.digests[:-1]:
            self._drop(digest)  # the conversation has gone on: this one reads that one, too
        places = [*sent.asked.writes, *([] if sent.asked.hit is None else [sent.asked.hit])]
        if not places:
            return
        warming = _warming(body)
        place = max(places)
        advice = keep_alive(sent.history, chain, place, self._clock())
        if warming is None or advice is None:
            return
        self._put(chain.digests[place], _Due(upstream, path, warming, headers, sent, place, advice.at_s))

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await asyncio.sleep(POLL_S)
            with suppress(OstinatoError):
                await self.keep_due()

    async def keep_due(self) -> int:
        """Send what is due now; how many were sent."""
        now_s, num_sent = self._clock(), 0
        for digest, due in [(digest, due) for digest, due in self._due.items() if due.at_s <= now_s]:
            self._drop(digest)
            advice = self._advice(due, now_s)
            if advice is None:
                continue
            if advice.at_s > now_s:  # somebody else has read it
                self._put(digest, replace(due, at_s=advice.at_s))
            elif advice.pays and due.num_times < MAX_TIMES:
                num_sent += 1
                await self._send(digest, due)
        return num_sent

    def _advice(self, due: _Due, now_s: float) -> KeepAlive | None:
        assert due.sent.history is not None, "only such are followed"
        assert due.sent.asked is not None, "only such are followed"
        return keep_alive(due.sent.history, due.sent.asked.chain, due.place, now_s)

    async def _send(self, digest: bytes, due: _Due) -> None:
        history, prompt, rules = due.sent.history, due.sent.prompt, due.sent.rules
        assert history is not None, "only such are followed"
        assert prompt is not None, "only such are followed"
        assert rules is not None, "what has a history has rules"
        try:
            async with self._relay.answer(due.upstream, due.path, due.body, due.headers) as response:
                data = b"".join([piece async for piece in body_of(due.upstream, response)])
            answer = orjson.loads(data) if response.status_code == 200 else None
        except (OstinatoError, orjson.JSONDecodeError) as error:
            logger.info("an entry is not kept alive: %s", type(error).__name__)
            return
        if not isinstance(answer, dict):
            return  # the vendor does not take it: not tried again
        now_s = self._clock()
        history.kept_alive(prompt, now_s)
        self._enter(
            due.sent, self._planning.entered(due.sent.account, answer.get("usage"), rules, self._today())
        )
        advice = self._advice(due, now_s)
        if advice is not None:
            self._put(digest, replace(due, at_s=advice.at_s, num_times=due.num_times + 1))

    def _put(self, digest: bytes, due: _Due) -> None:
        self._drop(digest)
        self._due[digest] = due
        self._num_bytes += len(due.body)
        while len(self._due) > MAX_KEPT or self._num_bytes > MAX_BYTES:
            self._drop(next(iter(self._due)))

    def _drop(self, digest: bytes) -> None:
        if (due := self._due.pop(digest, None)) is not None:
            self._num_bytes -= len(due.body)


def _warming(body: bytes) -> bytes | None:
    """The request as one that only reads; ``None``: vendors refuse that for this kind."""
    made: dict[str, Any] = orjson.loads(body)
    thinking, choice, output = (_object(made, name) for name in ("thinking", "tool_choice", "output_config"))
    if thinking.get("type", "disabled") != "disabled" or output.get("format") is not None:
        return None
    if choice.get("type") in ("tool", "any"):
        return None
    made.pop("stream", None)
    made.pop("diagnostics", None)
    return orjson.dumps({**made, "max_tokens": 0})


def _object(holder: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = holder.get(name)
    return value if isinstance(value, Mapping) else {}
