"""Everything that the library can do at once, in an arena that is too small for it: exact answers stay exact.

What a request answers must not depend on its company: requests within budgets, drawn, forked, searched, left
in the middle, too late, pinned and purged run beside it, and blocks come and go between arena and tier.
"""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import ostinato
from doors.tiny import save_tiny_chat_model
from ostinato.errors import DeadlineError, PinRefusedError

TOKEN_BYTES = 2 * 2 * 2 * 8 * 4  # of KV
SYSTEMS = [f"You are number {i}. " + "Answer briefly, and in order. " * (1 + i) for i in range(3)]
QUESTIONS = [f"What is {'really ' * i}the matter?" for i in range(4)]
SECONDS = 5.0
NUM_THREADS = 8

EXACT: list[dict[str, Any]] = [
    {"temperature": 0.0, "max_tokens": 17},
    {"temperature": 0.0, "max_tokens": 5, "logprobs": 3},
    {"temperature": 1.0, "seed": 7, "max_tokens": 20},
    {"temperature": 0.8, "seed": 3, "top_p": 0.9, "repetition_penalty": 1.2, "max_tokens": 12},
    {"temperature": 1.0, "seed": 11, "max_tokens": 9, "n": 3},
    {"temperature": 1.0, "seed": 5, "max_tokens": 6, "n": 1, "best_of": 4},
    {"temperature": 0.0, "max_tokens": 24, "stop": ["e", "\n\n"]},
]
Asked = tuple[int, int, int]
Answer = tuple[tuple[str, tuple[int, ...], str], ...]


def talk(asked: Asked) -> list[dict[str, str]]:
    return [
        {"role": "system", "content": SYSTEMS[asked[0]]},
        {"role": "user", "content": QUESTIONS[asked[1]]},
    ]


def answer(engine: ostinato.Engine, asked: Asked, **more: Any) -> Answer:
    reply = engine.chat(talk(asked), ignore_eos=True, **EXACT[asked[2]], **more)
    assert reply.usage.dropped_tokens == 0
    return tuple((choice.text, choice.token_ids, choice.finish_reason) for choice in reply.choices)


class Company:
    """What else is going on: one thing after the other, at random."""

    def __init__(self, engine: ostinato.Engine, chance: random.Random) -> None:
        self.engine = engine
        self.chance = chance
        self.things: list[Callable[[list[dict[str, str]]], object]] = [
            self.within_a_budget, self.left_early, self.too_late, self.searched, self.pinned, self.purged,
            self.hinted,
        ]  # fmt: skip

    def within_a_budget(self, messages: list[dict[str, str]]) -> None:
        method = self.chance.choice(["sinks", "snapkv"])
        long = [{"role": "user", "content": "la " * 90}, {"role": "assistant", "content": "I see."}]
        talk = [*long, messages[-1]]
        reply = self.engine.chat(talk, max_tokens=20, ignore_eos=True, kv_budget="60%", retention=method)
        assert reply.usage.completion_tokens == 20
        assert reply.usage.dropped_tokens > 0

    def left_early(self, messages: list[dict[str, str]]) -> None:
        stream = self.engine.stream(messages, max_tokens=40, ignore_eos=True, n=self.chance.choice([1, 2]))
        for _ in range(self.chance.randrange(4)):
            next(stream)
        stream.close()

    def too_late(self, messages: list[dict[str, str]]) -> None:
        try:
            reply = self.engine.chat(messages, max_tokens=200, ignore_eos=True, deadline=0.02)
        except DeadlineError:
            return
        assert reply.finish_reason == "length"

    def searched(self, messages: list[dict[str, str]]) -> None:
        beams = self.engine.beam_search(messages, beam_width=2, max_tokens=3, ignore_eos=True)
        assert len(beams) == 2

    def pinned(self, messages: list[dict[str, str]]) -> None:
        try:
            pin = self.engine.pin(messages[:1], ttl_s=0.5)
        except PinRefusedError:
            return
        if self.chance.random() < 0.7:
            self.engine.unpin(pin)

    def purged(self, messages: list[dict[str, str]]) -> None:
        if self.chance.random() < 0.2:
            self.engine.purge()

    def hinted(self, messages: list[dict[str, str]]) -> None:
        self.engine.chat(messages, max_tokens=2, session="s", salt="x")
        self.engine.session("s", "closed", salt="x")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_chat_model(tmp_path_factory.mktemp("tiny"), max_len=1024)


@pytest.fixture(scope="module")
def expected(folder: Path) -> dict[Asked, Answer]:
    """What each answers alone, with nothing cached."""
    every = [(s, q, e) for s in range(len(SYSTEMS)) for q in range(len(QUESTIONS)) for e in range(len(EXACT))]
    with ostinato.load(folder, kv_cache="8MiB") as alone:
        return {asked: answer(alone, asked, salt=f"{asked}") for asked in every}


@given(
    block_size=st.sampled_from([1, 3, 16, 64]),
    num_tokens=st.integers(300, 1200),
    max_batch_tokens=st.sampled_from([1, 7, 64, 5000]),
    max_sequences=st.sampled_from([1, 3, 64]),
    itl_target_ms=st.sampled_from([None, 1e-3, 1e9]),
    policy=st.sampled_from(["lru", "workload"]),
    seed=st.integers(0, 100),
)
@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_whatever_is_set_the_answers_are_the_same(
    folder: Path, expected: dict[Asked, Answer], num_tokens: int, seed: int, **given: Any
) -> None:
    chosen = random.Random(seed).sample(list(expected), 8)
    with (
        ostinato.load(folder, kv_cache=num_tokens * TOKEN_BYTES + 200, **given) as engine,
        ThreadPoolExecutor(8) as pool,
    ):
        found = list(pool.map(lambda asked: answer(engine, asked), chosen))
        assert found == [expected[asked] for asked in chosen]
        engine.runtime._manager.check_integrity()
        assert engine.runtime.health().num_held_blocks == 0


@pytest.mark.slow
@pytest.mark.parametrize("with_tier", [False, True], ids=["arena", "tier"])
def test_exact_answers_stay_exact_in_any_company(
    folder: Path, expected: dict[Asked, Answer], tmp_path: Path, with_tier: bool
) -> None:
    tier: dict[str, Any] = {"shared_tier": tmp_path / "tier"} if with_tier else {}
    counts: Counter[str] = Counter()
    failures: list[BaseException] = []
    with ostinato.load(
        folder, kv_cache=600 * TOKEN_BYTES, block_size=4, max_batch_tokens=48, max_sequences=6, **tier
    ) as engine:
        ends_s = time.monotonic() + SECONDS

        def run(seed: int) -> None:
            chance = random.Random(seed)
            company = Company(engine, chance)
            try:
                # On a busy machine longer than meant: until enough was asked to say something.
                while not failures and (
                    time.monotonic() < ends_s or min(counts["exact"], counts["company"]) <= 20
                ):
                    asked = chance.choice(list(expected))
                    if chance.random() < 0.5:
                        company.chance.choice(company.things)(talk(asked))
                        counts["company"] += 1
                        continue
                    salt = chance.choice(["", "", "a", "b"])
                    assert answer(engine, asked, salt=salt) == expected[asked], asked
                    counts["exact"] += 1
            except BaseException as error:  # noqa: BLE001 - told by the test, not by a thread
                failures.append(error)

        threads = [threading.Thread(target=run, args=(seed,), daemon=True) for seed in range(NUM_THREADS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
            assert not thread.is_alive(), "something is stuck"
        if failures:
            raise failures[0]
        assert min(counts["exact"], counts["company"]) > 20
        health = engine.runtime.health()
        assert (health.num_running, health.num_waiting) == (0, 0)
        for pin in engine.runtime._manager.pins():
            engine.unpin(pin)
        engine.runtime._manager.check_integrity()
        assert engine.runtime.health().num_held_blocks == 0
