"""From a caller's word, or the end of an answer, to the cache: through the library, on a tiny model."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import ostinato
from doors.test_tool_calls import BROKEN, CHATML, TAGGED, TALK, TOOLS, talking
from doors.tiny import save_tiny_chat_model
from ostinato.errors import ParameterError
from ostinato.kv.policy import Outlook

OPTIONS: dict[str, Any] = {"temperature": 0.0, "max_tokens": 8, "ignore_eos": True}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_chat_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(params=["workload", "lru"])
def engine(folder: Path, request: pytest.FixtureRequest) -> Iterator[ostinato.Engine]:
    with ostinato.load(folder, kv_cache=1 << 20, block_size=4, policy=request.param) as loaded:
        yield loaded


@pytest.fixture
def said(engine: ostinato.Engine, monkeypatch: pytest.MonkeyPatch) -> list[tuple[Outlook, int]]:
    """What reaches the cache: what is said, and of how many tokens."""
    manager, heard = engine.runtime._manager, list[tuple[Outlook, int]]()
    hint = manager.hint

    def spy(namespace: Any, tokens: Any, outlook: Outlook) -> int:
        moved = hint(namespace, tokens, outlook)
        heard.append((outlook, moved))
        return moved

    monkeypatch.setattr(manager, "hint", spy)
    return heard


def wait_until(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline_s, "it never came true"
        time.sleep(0.005)


def test_a_session_is_closed_with_its_last_answer_or_by_a_word(
    engine: ostinato.Engine, said: list[tuple[Outlook, int]]
) -> None:
    first = engine.chat("Hello", session="a", **OPTIONS)
    kept = first.usage.prompt_tokens + first.usage.completion_tokens - 1
    assert engine.session("a", "idle")
    assert engine.session("a", "closed")
    assert not engine.session("a", "closed")
    assert not engine.session("b", "closed")
    last = engine.chat("Good bye", session=ostinato.Session("c", "closed"), **OPTIONS)
    wait_until(lambda: len(said) == 3)
    shared = len(["<|im_start|>", *"user\n"])
    own = last.usage.prompt_tokens + last.usage.completion_tokens - 1
    assert [outlook for outlook, _ in said] == [Outlook.LATER, Outlook.OVER, Outlook.OVER]
    assert said[0][1] == said[1][1] == kept
    assert said[2][1] == own - shared


def test_a_session_expires(engine: ostinato.Engine, said: list[tuple[Outlook, int]]) -> None:
    engine.chat("Hello", session=ostinato.Session("a", expires_in_s=0.05), **OPTIONS)
    wait_until(lambda: engine.runtime._sessions is not None and engine.runtime._sessions.num_sessions == 1)
    time.sleep(0.1)
    engine.chat("Another", **OPTIONS)  # whatever happens, the tender is woken
    wait_until(lambda: [outlook for outlook, _ in said] == [Outlook.OVER])


def test_a_word_of_another_salt_moves_nothing(
    engine: ostinato.Engine, said: list[tuple[Outlook, int]]
) -> None:
    engine.chat("Hello", session="a", salt="mine", **OPTIONS)
    assert not engine.session("a", "closed")
    assert not engine.session("a", "closed", salt="other")
    assert said == []
    assert engine.session("a", "closed", salt="mine")


def test_an_abandoned_stream_says_so(engine: ostinato.Engine, said: list[tuple[Outlook, int]]) -> None:
    stream = engine.stream("Tell me a long story", **{**OPTIONS, "max_tokens": 300})
    next(stream)
    stream.close()  # type: ignore[attr-defined]
    wait_until(lambda: [outlook for outlook, _ in said] == [Outlook.ABANDONED])


def test_the_answers_that_nobody_went_on_from_have_lost(
    engine: ostinato.Engine, said: list[tuple[Outlook, int]]
) -> None:
    options = {**OPTIONS, "temperature": 1.5, "seed": 3}
    asked = [{"role": "user", "content": "Choose"}]
    reply = engine.chat(asked, n=3, **options)
    texts = [choice.token_ids for choice in reply.choices]
    assert len(set(texts)) == 3
    runtime = engine.runtime
    prompt = runtime.prepare(
        ostinato.types.GenerationRequest(ostinato.Conversation((ostinato.Message("user", "Choose"),)))
    )
    longer = [*prompt.tokens.tolist(), *texts[1], 5, 6, 7]
    assert said == []
    engine.complete(longer, **OPTIONS)
    wait_until(lambda: [outlook for outlook, _ in said] == [Outlook.OVER, Outlook.OVER])
    assert all(0 < moved < 8 for _, moved in said)


@pytest.mark.parametrize("script", [TAGGED, BROKEN], ids=["calls", "text"])
def test_how_an_answer_ends_says_what_will_follow(
    script: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with talking(tmp_path / "scripted", "qwen2.5", "\n", script, CHATML) as engine:
        manager, heard = engine.runtime._manager, list[Outlook]()
        monkeypatch.setattr(manager, "hint", lambda namespace, tokens, outlook: heard.append(outlook))
        engine.chat(TALK, tools=TOOLS)
        wait_until(lambda: len(heard) == 1)
        engine.chat(TALK)  # without tools an end says nothing
        engine.chat(TALK, tools=TOOLS, max_tokens=5)  # nor does one that was cut off
        engine.chat("Another.", tools=TOOLS)
        wait_until(lambda: len(heard) == 2)
        expected = Outlook.SOON if script is TAGGED else Outlook.LATER
        assert heard == [expected, expected]


def test_an_unknown_policy_is_refused_by_name(folder: Path) -> None:
    with pytest.raises(ParameterError, match="workload") as caught:
        ostinato.load(folder, policy="best")
    assert caught.value.param == "policy"


def test_the_answers_are_the_same_under_any_policy(folder: Path) -> None:
    """A cache of a few dozen blocks, so that every turn evicts."""
    told: dict[str, list[str]] = {}
    for policy in ("lru", "workload", "s3-fifo"):
        with ostinato.load(folder, kv_cache=100_000, block_size=4, policy=policy) as loaded:
            told[policy] = [
                loaded.chat(f"Question {number % 5} of many", session=f"s{number % 3}", **OPTIONS).text
                for number in range(24)
            ]
            assert loaded.runtime.health().num_held_blocks == 0
            loaded.runtime._manager.check_integrity()
    assert told["lru"] == told["workload"] == told["s3-fifo"]
