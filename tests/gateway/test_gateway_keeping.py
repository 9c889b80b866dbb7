"""Entries that are read once more before they expire: when it pays, with the right request, not for ever."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from dataclasses import replace
from datetime import date
from typing import Any

import pytest

from gateway.raw_upstream import RawUpstream, whole
from ostinato.errors import ParameterError
from ostinato.gateway import Upstream
from ostinato.gateway.keeping import Keeper
from ostinato.gateway.planning import Booked, Incoming, Planning, Sent
from ostinato.gateway.relay import Relay
from ostinato.providers.rules import builtin_table

DAY = date(2026, 12, 1)
USAGE = {"input_tokens": 4, "cache_read_input_tokens": 9000, "output_tokens": 0}
REPLY = whole(json.dumps({"type": "message", "content": [], "usage": USAGE}).encode())


class Days:
    """A gateway's planning and keeping under a clock of our own."""

    def __init__(self, raw: RawUpstream, relay: Relay) -> None:
        self.now_s = 0.0
        self.upstream = Upstream(
            "raw", raw.url, "anthropic", key="k", plan="plan", keep_alive=True, max_retries=0
        )
        self.planning = Planning(builtin_table(), lambda: self.now_s)
        self.booked: list[Booked] = []

        def enter(sent: Sent, booked: Booked) -> None:
            self.booked.append(booked)

        self.keeper = Keeper(relay, self.planning, clock=lambda: self.now_s, today=lambda: DAY, enter=enter)

    async def turn(self, number: int, *, name: str = "one", follow: bool = False, **more: Any) -> None:
        messages: list[Any] = []
        for n in range(number):
            messages += [{"role": "user", "content": f"{name} {n} " + "words " * 600}]
            messages += [{"role": "assistant", "content": "fine"}]
        text = f"{name} {number} " + "words " * 600
        last = {"type": "text", "text": text, "cache_control": {"type": "ephemeral"}}
        messages.append({"role": "user", "content": [last]})
        body = {"model": "claude-opus-5", "max_tokens": 99, "stream": True, "messages": messages} | more
        incoming = Incoming("/v1/messages", json.dumps(body).encode(), body)
        made, sent = await self.planning.prepare(self.upstream, incoming, DAY)
        self.now_s += 1.0
        await self.planning.begun(sent, self.now_s)
        await self.planning.ended(sent, USAGE, DAY)
        if follow:
            self.keeper.follow(
                self.upstream, "/v1/messages", made, {"content-type": "application/json"}, sent
            )

    async def habit(self, gap_s: float) -> None:
        """Conversations that all go on after so long."""
        for conversation in range(12):
            for number in range(6):
                await self.turn(number, name=str(conversation))
                self.now_s += gap_s

    async def pass_s(self, seconds: float) -> int:
        end_s, num_sent = self.now_s + seconds, 0
        while self.now_s < end_s:
            self.now_s += 1.0
            num_sent += await self.keeper.keep_due()
        return num_sent


@pytest.fixture
async def relay() -> AsyncIterator[Relay]:
    made = Relay()
    yield made
    await made.close()


async def test_what_will_be_asked_for_is_kept(relay: Relay) -> None:
    with RawUpstream([REPLY]) as raw:
        days = Days(raw, relay)
        await days.habit(440.0)
        await days.turn(3, follow=True)
        assert len(days.keeper) == 1
        assert await days.pass_s(250.0) == 0
        assert await days.pass_s(100.0) == 1
        body = json.loads(raw.seen[0].body)
        assert body["max_tokens"] == 0
        assert "stream" not in body
        assert "cache_control" in raw.seen[0].body.decode()
        (booked,) = days.booked
        assert booked.use is not None
        assert booked.use.read == 9000
        assert booked.money is not None


async def test_what_nobody_comes_back_to_is_let_go(relay: Relay) -> None:
    with RawUpstream([REPLY]) as raw:
        days = Days(raw, relay)
        await days.habit(20.0)  # all go on at once, so who is late will not come
        await days.turn(3, follow=True)
        assert await days.pass_s(1000.0) == 0
        assert raw.seen == []
        assert len(days.keeper) == 0


async def test_it_ends_and_a_conversation_that_goes_on_is_one_entry(relay: Relay) -> None:
    with RawUpstream([REPLY]) as raw:
        days = Days(raw, relay)
        await days.habit(440.0)
        for number in range(3, 6):
            await days.turn(number, follow=True)
            days.now_s += 10.0
        assert len(days.keeper) == 1
        assert 0 < await days.pass_s(40_000.0) <= 12
        assert len(days.keeper) == 0


@pytest.mark.parametrize(
    "more",
    [
        {"thinking": {"type": "enabled", "budget_tokens": 1024}},
        {"tool_choice": {"type": "any"}},
        {"output_config": {"format": {"type": "json_schema"}}},
    ],
)
async def test_requests_that_vendors_refuse_without_an_answer_are_not_sent(relay: Relay, more: Any) -> None:
    with RawUpstream([REPLY]) as raw:
        days = Days(raw, relay)
        await days.habit(440.0)
        await days.turn(3, follow=True, **more)
        assert await days.pass_s(400.0) == 0


@pytest.mark.parametrize("reply", [whole(b'{"error": {}}', "400 Bad"), whole(b"nonsense"), [b""]])
async def test_an_upstream_that_refuses_is_not_asked_again(relay: Relay, reply: list[bytes | None]) -> None:
    with RawUpstream([reply]) as raw:
        days = Days(raw, relay)
        await days.habit(440.0)
        await days.turn(3, follow=True)
        await days.pass_s(1000.0)
        assert len(raw.seen) == 1
        assert days.booked == []


def test_nobody_elses_key_is_spent() -> None:
    ours = Upstream("u", "http://x", "anthropic", key="k", plan="plan", keep_alive=True)
    with pytest.raises(ParameterError, match="key_env"):
        replace(ours, key="")
    with pytest.raises(ParameterError, match="plan"):
        replace(ours, plan="observe")
