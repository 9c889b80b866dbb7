"""Planning without sockets: who waits for whom, and what is remembered at most."""

from __future__ import annotations

import asyncio
import json
from datetime import date
from typing import Any

import pytest

from ostinato.gateway import Upstream, planning
from ostinato.gateway.planning import Incoming, Planning, Sent
from ostinato.providers.rules import builtin_table

DAY = date(2026, 12, 1)
UPSTREAM = Upstream("u", "http://127.0.0.1:9", "anthropic", plan="plan")
SYSTEM: Any = [{"type": "text", "text": "shared " * 1000, "cache_control": {"type": "ephemeral"}}]
USAGE = {"input_tokens": 5, "output_tokens": 1}


def incoming(question: str, model: str = "claude-opus-5", **more: Any) -> Incoming:
    body = {
        "model": model,
        "max_tokens": 5,
        "system": SYSTEM,
        "messages": [{"role": "user", "content": question}],
    }
    return Incoming("/v1/messages", json.dumps(body).encode(), body, **more)


class Waiting:
    """Requests that were asked for at once, and those that were let go so far."""

    def __init__(self, num_requests: int) -> None:
        self.planning = Planning(builtin_table(), lambda: 100.0)
        self.gone: list[Sent] = []
        self.tasks = [asyncio.create_task(self._one(str(number))) for number in range(num_requests)]

    async def _one(self, question: str) -> None:
        self.gone.append((await self.planning.prepare(UPSTREAM, incoming(question), DAY))[1])

    async def settle(self) -> list[Sent]:
        for _ in range(50):
            await asyncio.sleep(0)
        return self.gone


def writes(sent: Sent) -> bool:
    """Whether it writes what all share, and not just its own end."""
    assert sent.asked is not None
    return sent.asked.use.num_written > 1000


async def test_when_the_first_begins_all_the_others_go_and_read() -> None:
    waiting = Waiting(6)
    (first,) = await waiting.settle()
    assert writes(first)
    await waiting.planning.begun(first, 100.0)
    assert [writes(sent) for sent in await waiting.settle()] == [True] + [False] * 5


async def test_when_the_first_fails_one_of_the_others_takes_its_place() -> None:
    waiting = Waiting(6)
    (first,) = await waiting.settle()
    for failed in range(3):
        await waiting.planning.ended(waiting.gone[-1], None, DAY)
        assert len(await waiting.settle()) == failed + 2
    await waiting.planning.begun(waiting.gone[-1], 100.0)
    gone = await waiting.settle()
    assert [writes(sent) for sent in gone] == [True] * 4 + [False] * 2
    assert first in gone


async def test_nobody_waits_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "MAX_WAIT_S", 0.05)
    waiting = Waiting(3)
    await asyncio.wait_for(asyncio.gather(*waiting.tasks), 5)
    assert len(waiting.gone) == 3


async def test_a_request_that_is_given_up_while_it_waits_leaves_nothing() -> None:
    waiting = Waiting(3)
    (first,) = await waiting.settle()
    for task in waiting.tasks:
        task.cancel()
    await asyncio.gather(*waiting.tasks, return_exceptions=True)
    await waiting.planning.ended(first, None, DAY)
    assert first.history is not None
    assert first.history.writing == {}


async def test_names_of_models_cannot_fill_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "MAX_ALL_PREFIXES", 500)
    monkeypatch.setattr(planning, "MAX_ACCOUNTS", 50)
    made = Planning(builtin_table(), lambda: 100.0)
    for number in range(512):
        asked = incoming(f"q {number}", f"claude-{number}", tenant=f"t{number}", prompt_name=f"p{number}")
        _, sent = await made.prepare(UPSTREAM, asked, DAY)
        await made.begun(sent, 100.0)
        await made.ended(sent, USAGE, DAY)
    assert sum(history.size for history in made._histories.values()) <= 500
    assert len(list(made.ledger)) <= 51
    assert sum(entry.num_requests for _, entry in made.ledger) == 512
