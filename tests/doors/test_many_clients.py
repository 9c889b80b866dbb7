"""Thirty-two real clients stream at once and hang up at random: no wrong byte, nothing stuck or left held.

Eight seconds as a part of the suite; ``OSTINATO_SOAK_S=600`` makes it ten minutes, and looks at memory too.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import statistics
import time
from collections import Counter
from pathlib import Path

import openai
import psutil
import pytest

from doors.test_serve import Served, start, stop
from doors.tiny import save_tiny_chat_model

SOAK_S = float(os.environ.get("OSTINATO_SOAK_S", "8"))
NUM_CLIENTS = 32
SYSTEMS = [f"You are number {i}. " + "Say what you hear, in order. " * (2 + i) for i in range(4)]
QUESTIONS = [f"Question {i}: {'la ' * (1 + 3 * i)}?" for i in range(6)]
LENGTHS = (3, 17, 40)
Asked = tuple[int, int, int]


def conversation(asked: Asked) -> list[dict[str, str]]:
    return [
        {"role": "system", "content": SYSTEMS[asked[0]]},
        {"role": "user", "content": QUESTIONS[asked[1]]},
    ]


class Client:
    """Asks one thing after the other; half of the time it hangs up in the middle."""

    def __init__(self, url: str, model: str, seed: int, expected: dict[Asked, str], ends_s: float) -> None:
        self._own = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60)
        self._model = model
        self._chance = random.Random(seed)
        self._expected = expected
        self._ends_s = ends_s
        self.counts: Counter[str] = Counter()

    async def run(self) -> None:
        async with self._own:
            while time.monotonic() < self._ends_s:
                await self._ask()

    async def _ask(self) -> None:
        asked = self._chance.choice(list(self._expected))
        wanted = self._expected[asked]
        stream = await self._own.chat.completions.create(
            model=self._model,
            messages=conversation(asked),  # type: ignore[arg-type]
            max_tokens=LENGTHS[asked[2]],
            temperature=0,
            stream=True,
            extra_body={"ignore_eos": True, "cache_salt": self._chance.choice(["a", "b"])},
        )
        leaves_after = self._chance.choice([None, None, 0, 1, 5])
        text, num_pieces, reason = "", 0, None
        async for piece in stream:
            text += piece.choices[0].delta.content or ""
            reason = piece.choices[0].finish_reason
            assert wanted.startswith(text), f"{text!r} is not the beginning of {wanted!r}"
            if leaves_after is not None and num_pieces >= leaves_after:
                await stream.close()
                self.counts["left"] += 1
                return
            num_pieces += 1
        assert text == wanted
        assert reason == "length"
        self.counts["whole"] += 1


def expected_answers(served: Served) -> dict[Asked, str]:
    answers = {}
    for system in range(len(SYSTEMS)):
        for question in range(len(QUESTIONS)):
            for length in range(len(LENGTHS)):
                asked = (system, question, length)
                reply = served.ask(conversation(asked), max_tokens=LENGTHS[length])
                answers[asked] = reply.choices[0].message.content
    return answers


async def talk(served: Served, expected: dict[Asked, str], memory_mib: list[float]) -> Counter[str]:
    process = psutil.Process(served.process.pid)
    ends_s = time.monotonic() + SOAK_S
    clients = [Client(served.url, served.model, seed, expected, ends_s) for seed in range(NUM_CLIENTS)]
    work = asyncio.gather(*(client.run() for client in clients))
    while not work.done():
        memory_mib.append(process.memory_info().rss / 2**20)
        await asyncio.wait([work], timeout=1.0)
    await work
    return sum((client.counts for client in clients), Counter())


@pytest.mark.slow
def test_thirty_two_clients_that_come_and_go(tmp_path: Path) -> None:
    """The arena holds a fraction of what they ask for: sequences wait, are preempted, and are evicted."""
    served = start(
        save_tiny_chat_model(tmp_path / "tiny", max_len=1024), "--kv-cache", "1500K", "--block-size", "8"
    )
    try:
        expected = expected_answers(served)
        memory_mib: list[float] = []
        counts = asyncio.run(talk(served, expected, memory_mib))
        assert counts["whole"] > NUM_CLIENTS
        assert counts["left"] > NUM_CLIENTS
        served.wait_for_nothing_held()
        if len(memory_mib) >= 300:
            half = len(memory_mib) // 2
            growth_mib = statistics.mean(memory_mib[-half // 2 :]) - statistics.mean(
                memory_mib[half : -half // 2]
            )
            logging.getLogger(__name__).info(
                f"{counts}, {memory_mib[-1]:.0f} MiB, {growth_mib:+.2f} MiB in the last half"
            )
            assert growth_mib < 4, memory_mib[:: len(memory_mib) // 20]
    finally:
        assert stop(served) == 0
