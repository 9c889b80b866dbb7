"""Moved KV through every door: who may have it, what is said of it, and that nobody else gets its answers."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest

import ostinato
from doors.serving import serving
from doors.tiny import save_tiny_chat_model
from ostinato.config import Settings
from ostinato.errors import ParameterError
from ostinato.events import Event, MoveVerified, RequestFinished
from ostinato.library import Engine
from ostinato.tenants import read_tenants
from ostinato.types import Reuse, Reused, Usage, Verified
from ostinato.verifying import Watch

TEXT = "the quick brown fox jumps over the lazy dog while the rain in spain falls mainly on the plain. " * 3
OPTIONS: dict[str, Any] = {"temperature": 0.0, "max_tokens": 8, "ignore_eos": True}
BLOCK_BYTES = 2 * 2 * 2 * 8 * 4 * 4


def talk(date: str, text: str = TEXT) -> list[dict[str, Any]]:
    return [
        {"role": "system", "content": f"Today is {date}. Be brief."},
        {"role": "user", "content": text},
        {"role": "assistant", "content": "I see."},
        {"role": "user", "content": "And then?"},
    ]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_chat_model(tmp_path_factory.mktemp("tiny"), max_len=1024)


@pytest.fixture
def engine(folder: Path) -> Iterator[Engine]:
    with ostinato.load(folder, kv_cache=400 * BLOCK_BYTES, block_size=4, policy="lru") as loaded:
        yield loaded


def reuse_of(usage: Usage) -> Reused:
    assert usage.reuse is not None
    return usage.reuse


def test_nothing_is_moved_unasked(engine: Engine) -> None:
    engine.chat(talk("Monday"), **OPTIONS)
    usage = engine.chat(talk("Wednesday"), **OPTIONS).usage
    assert usage.reuse is None
    assert usage.cached_tokens < 40


def test_every_token_is_accounted_for(engine: Engine) -> None:
    engine.chat(talk("Monday"), **OPTIONS)
    usage = engine.chat(talk("Wednesday"), **OPTIONS, reuse={"mode": "moved", "repair": "20%"}).usage
    told = reuse_of(usage)
    assert told.mode == "moved"
    assert told.may_differ
    assert told.moved_tokens > 280
    assert told.repaired_tokens == round(0.2 * told.moved_tokens)
    assert usage.cached_tokens + told.moved_tokens + told.computed_tokens == usage.prompt_tokens
    assert told.deviation is not None
    assert told.deviation > 0
    none = engine.chat(talk("Friday"), **OPTIONS, reuse=Reuse("moved", "none")).usage
    assert (reuse_of(none).repaired_tokens, reuse_of(none).deviation) == (0, None)
    # The whole prompt is there already: nothing needs to be moved, and the answer is exact.
    again = engine.chat(talk("Monday"), **OPTIONS, reuse="moved").usage
    assert (reuse_of(again).moved_tokens, reuse_of(again).may_differ) == (0, False)


def test_verify_answers_exactly_and_tells_the_difference(engine: Engine) -> None:
    exact = engine.chat(talk("Wednesday"), **OPTIONS, salt="apart")
    engine.chat(talk("Monday"), **OPTIONS)
    reply = engine.chat(talk("Wednesday"), **OPTIONS, reuse={"mode": "verify", "repair": "none"})
    assert reply.choices == exact.choices
    told = reuse_of(reply.usage)
    assert told.mode == "verify"
    assert not told.may_differ
    assert told.moved_tokens > 280
    assert told.verified is not None
    assert told.verified.kl > 1e-6
    assert told.verified.num_compared == 8
    # All of it repaired is all of it computed.
    whole = engine.chat(talk("Friday"), **OPTIONS, reuse={"mode": "verify", "repair": "100%"})
    verified = reuse_of(whole.usage).verified
    assert verified is not None
    assert verified.kl < 1e-6
    assert verified.first_difference is None


def test_drawn_answers_are_drawn_alike(engine: Engine) -> None:
    engine.chat(talk("Monday"), **OPTIONS)
    options = OPTIONS | {"temperature": 1.0, "n": 2}
    reply = engine.chat(talk("Friday"), **options, reuse={"mode": "verify", "repair": "100%"})
    verified = reuse_of(reply.usage).verified
    assert verified is not None
    assert verified.first_difference is None
    assert len(reply.choices) == 2


def test_a_verification_can_be_cancelled(engine: Engine) -> None:
    engine.chat(talk("Monday"), **OPTIONS)
    for _ in range(3):
        chunks = engine.stream(talk("Friday"), **OPTIONS | {"max_tokens": 200}, reuse="verify")
        next(chunks)
        chunks.close()  # type: ignore[attr-defined]
    assert engine.chat(talk("Friday"), **OPTIONS).usage.completion_tokens == 8
    assert engine.runtime.health().num_waiting == 0


@pytest.mark.parametrize(
    ("reuse", "param"),
    [
        ("never", "reuse"),
        (3, "reuse"),
        ({"mode": "moved", "share": 1}, "reuse"),
        ({"mode": "moved", "repair": "most"}, "repair"),
        ({"mode": "moved", "repair": 15}, "reuse.repair"),
        ({"mode": "moved", "max_deviation": -1}, "reuse.max_deviation"),
        ({"mode": "moved", "max_deviation": "no"}, "reuse.max_deviation"),
    ],
)
def test_what_is_wrong_is_named(engine: Engine, reuse: Any, param: str) -> None:
    with pytest.raises(ParameterError) as caught:
        engine.chat(talk("Monday"), **OPTIONS, reuse=reuse)
    assert caught.value.param == param


def test_not_within_a_budget(engine: Engine) -> None:
    with pytest.raises(ParameterError, match="KV budget"):
        engine.chat(talk("Monday"), **OPTIONS, reuse="moved", kv_budget=200)
    assert engine.chat(talk("Monday"), **OPTIONS, reuse="exact", kv_budget=1000).usage.reuse is None


def test_such_answers_are_not_kept(folder: Path) -> None:
    settings: dict[str, Any] = {"kv_cache": 400 * BLOCK_BYTES, "block_size": 4, "answers": "memory"}
    with ostinato.load(folder, **settings, reuse="moved", reuse_repair="none") as engine:
        engine.chat(talk("Monday"), **OPTIONS, reuse="exact")
        moved = engine.chat(talk("Friday"), **OPTIONS)
        assert reuse_of(moved.usage).may_differ
        again = engine.chat(talk("Friday"), **OPTIONS)
        assert again.usage.served is None, "an answer with moved KV was given as a kept one"
        assert engine.chat(talk("Monday"), **OPTIONS, reuse="exact").usage.served is not None


def test_over_http_with_the_official_clients(engine: Engine) -> None:
    exact = engine.chat(talk("Sunday"), **OPTIONS, salt="apart").text
    with serving(engine) as client:
        ask = {"model": engine.runtime.model_name, "temperature": 0.0, "max_tokens": 8}

        def said(date: str, **body: Any) -> tuple[Any, dict[str, Any]]:
            extra = {"ignore_eos": True, **body}
            reply = client.chat.completions.create(messages=talk(date), **ask, extra_body=extra)  # type: ignore[call-overload]
            return reply, reply.model_extra["ostinato"]

        assert "reuse" not in said("Monday")[1]
        reply, told = said("Sunday", reuse={"mode": "verify", "repair": "none"})
        assert reply.choices[0].message.content == exact
        assert told["reuse"]["mode"] == "verify"
        assert told["reuse"]["verified"]["kl"] > 0
        assert told["reuse"]["verified"]["compared_tokens"] == 8
        _, told = said("Friday", reuse="moved")
        assert set(told["reuse"]) == {
            "mode", "prefix_tokens", "moved_tokens", "repaired_tokens", "computed_tokens", "deviation",
            "refused",
        }  # fmt: skip
        text = client.completions.create(prompt=TEXT, **ask, extra_body={"reuse": "moved"})
        assert (text.model_extra or {})["ostinato"]["reuse"]["mode"] == "moved"
        for reuse in ("never", {"repair": "none"}, {"mode": "moved", "repair": "x"}, 7):
            with pytest.raises(openai.BadRequestError):
                said("Monday", reuse=reuse)
        with anthropic.Anthropic(
            base_url=str(client.base_url).removesuffix("/v1/"), api_key="none", max_retries=0
        ) as other:
            system, *messages = talk("Tuesday")
            message = other.messages.create(
                model=ask["model"],
                max_tokens=8,
                system=system["content"],
                messages=messages,  # type: ignore[arg-type]
                extra_body={"reuse": {"mode": "verify", "repair": "none"}, "temperature": 0},
            )
            usage = message.usage.model_extra or {}
            assert usage["reuse"]["moved_tokens"] > 280
            assert usage["reuse"]["verified"]["kl"] >= 0


def test_the_servers_mode_and_a_tenants(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "tenants.toml").write_text('[anna]\nsalt = "anna"\nreuse = "exact"\n', encoding="utf-8")
    with ostinato.load(
        folder, kv_cache=400 * BLOCK_BYTES, block_size=4, reuse="moved", tenants=tmp_path / "tenants.toml"
    ) as engine:
        for salt in ("", "anna"):
            engine.chat(talk("Monday"), **OPTIONS, salt=salt)
        assert reuse_of(engine.chat(talk("Friday"), **OPTIONS).usage).mode == "moved"
        annas = engine.chat(talk("Friday"), **OPTIONS, salt="anna").usage
        assert annas.reuse is None
        assert annas.cached_tokens < 40
        # What is asked for to be kept is exact, whatever the mode.
        assert engine.pin(talk("Sunday")[:2]).num_tokens > 280


def test_a_sample_is_verified_and_ends_what_differs(folder: Path) -> None:
    events: list[Event] = []
    verified = threading.Semaphore(0)
    settings: dict[str, Any] = {"kv_cache": 800 * BLOCK_BYTES, "block_size": 4, "reuse": "moved"}
    with ostinato.load(
        folder, **settings, reuse_repair="none", reuse_sample=0.5, reuse_max_kl=1e-9
    ) as engine:

        def hear(event: Event) -> None:
            events.append(event)
            if isinstance(event, MoveVerified):
                verified.release()

        engine.runtime.observers.append(hear)
        engine.chat(talk("Monday"), **OPTIONS)
        for day in range(10):
            engine.chat(talk(f"the {day}th"), **OPTIONS)
        for _ in range(5):
            assert verified.acquire(timeout=20)
        report = engine.runtime.watch.report()
        assert report.is_off
        assert report.num_verified == 5
        assert report.mean_kl > 1e-9
        assert [event.is_off for event in events if isinstance(event, MoveVerified)] == [False] * 4 + [True]
        # Nobody is told of requests that nobody made.
        assert sum(isinstance(event, RequestFinished) for event in events) == 11
        off = reuse_of(engine.chat(talk("Sunday"), **OPTIONS).usage)
        assert (off.moved_tokens, off.may_differ) == (0, False)
        engine.runtime.watch.reset()
        assert reuse_of(engine.chat(talk("Saturday"), **OPTIONS).usage).may_differ


def test_a_watch_takes_its_share_and_stays_on_while_all_is_well() -> None:
    watch = Watch(0.25, 0.1)
    assert [watch.wants() for _ in range(8)] == [False, False, False, True] * 2
    for _ in range(30):
        watch.note(Verified(0.05, None, 1))
    assert not watch.report().is_off
    for _ in range(19):
        watch.note(Verified(0.2, 0, 1))
    report = watch.report()
    assert report.is_off
    assert (report.num_verified, report.num_same_token) == (49, 30)
    assert not Watch().is_on


def test_files_and_settings_are_checked(tmp_path: Path) -> None:
    path = tmp_path / "tenants.toml"
    path.write_text('[anna]\nsalt = "anna"\nreuse = "always"\n', encoding="utf-8")
    with pytest.raises(ParameterError, match="anna has a reuse that is none"):
        read_tenants(path, int)
    for name, value in (
        ("REUSE", "always"), ("REUSE_REPAIR", "lots"), ("REUSE_SAMPLE", "2"), ("REUSE_MAX_KL", "-1"),
    ):  # fmt: skip
        with pytest.raises(ParameterError):
            Settings.from_environment({f"OSTINATO_{name}": value})
    assert Settings.from_environment({"OSTINATO_REUSE": "moved"}).reuse == "moved"
