"""KV budgets through every door: who may set one, what is refused, what is said of it."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest

import ostinato
from doors.serving import serving
from doors.tiny import save_tiny_chat_model
from ostinato.config import Settings
from ostinato.errors import BudgetTooSmallError, ParameterError, PromptTooLongError
from ostinato.library import Engine
from ostinato.protect import check_retention, keep_of
from ostinato.retention.keeping import Keep
from ostinato.tenants import read_tenants
from ostinato.types import Conversation, GenerationRequest, Message, Retention

SYSTEM = "You answer in one sentence."
TEXT = "the quick brown fox jumps over the lazy dog and the code is 48213 while the rain falls " * 3
TALK: list[dict[str, Any]] = [
    {"role": "system", "content": SYSTEM},
    {"role": "user", "content": TEXT},
    {"role": "assistant", "content": "I see."},
    {"role": "user", "content": "What is the code?"},
]
OPTIONS: dict[str, Any] = {"temperature": 0.0, "max_tokens": 8, "ignore_eos": True}
BLOCK_BYTES = 2 * 2 * 2 * 8 * 4 * 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_chat_model(tmp_path_factory.mktemp("tiny"), max_len=1024)


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[Engine]:
    with ostinato.load(folder, kv_cache=400 * BLOCK_BYTES, block_size=4, policy="lru") as loaded:
        yield loaded


def keep_for(engine: Engine, talk: list[dict[str, Any]], pinned: tuple[int, ...] = (), **fields: Any) -> Keep:
    runtime = engine.runtime
    messages = tuple(Message(item["role"], item["content"]) for item in talk)
    request = GenerationRequest(Conversation(messages), pinned=pinned, retention=Retention(**fields))
    assembled = runtime.assembler.assemble(request, 1024)
    keep = keep_of(request, assembled, runtime.assembler, runtime.info, 8, 10_000)
    assert keep is not None
    return keep


def spelled(engine: Engine, talk: list[dict[str, Any]], flags: Any) -> str:
    """The text of the tokens that have a flag."""
    runtime = engine.runtime
    messages = tuple(Message(item["role"], item["content"]) for item in talk)
    tokens = runtime.assembler.assemble(GenerationRequest(Conversation(messages)), 1024).tokens
    return b"".join(runtime.assembler.pieces(tokens[np.flatnonzero(flags)])).decode()


def test_a_budget_is_reported_and_without_one_nothing_is(engine: Engine) -> None:
    plain = engine.chat(TALK, **OPTIONS)
    assert (plain.usage.dropped_tokens, plain.usage.retention) == (0, "")
    kept = engine.chat(TALK, **OPTIONS, kv_budget="60%", retention="sinks")
    assert kept.usage.retention == "sinks"
    assert kept.usage.dropped_tokens > 0.3 * kept.usage.prompt_tokens
    roomy = engine.chat(TALK, **OPTIONS, kv_budget=1000)
    assert (roomy.usage.dropped_tokens, roomy.usage.retention) == (0, "summary")
    assert roomy.choices == plain.choices
    two = engine.chat(TALK, **OPTIONS, n=2, kv_budget="60%", retention="sinks")
    assert two.usage.dropped_tokens == 2 * kept.usage.dropped_tokens
    assert two.text == kept.text


def test_what_stays_is_what_was_said(engine: Engine) -> None:
    keep = keep_for(engine, TALK, budget=200)
    protected = spelled(engine, TALK, keep.protected)
    assert SYSTEM in protected
    assert protected.endswith("What is the code?<|im_end|>\n<|im_start|>assistant\n")
    assert "fox" not in protected
    assert "48213" in spelled(engine, TALK, keep.preferred)
    assert "rain" not in spelled(engine, TALK, keep.preferred)
    pinned = keep_for(engine, TALK, pinned=(2,), budget=200, pinned_text=("lazy dog",), entities=False)
    assert spelled(engine, TALK, pinned.protected).count("lazy dog") == 3
    assert "I see." in spelled(engine, TALK, pinned.protected)
    assert not pinned.preferred.any()


def test_a_document_in_the_newest_turn_is_not_all_protected(engine: Engine) -> None:
    talk = [{"role": "user", "content": TEXT + "What is the code?"}]
    assert keep_for(engine, talk, budget=100).protected.sum() < 30


def test_pins_that_fill_the_budget_are_refused_with_both_numbers(engine: Engine) -> None:
    talk = [dict(item) for item in TALK]
    talk[1]["pin"] = True
    with pytest.raises(BudgetTooSmallError) as caught:
        engine.chat(talk, **OPTIONS, kv_budget=200)
    assert caught.value.num_protected > 260
    assert caught.value.budget_tokens == 200
    assert engine.chat(talk, **OPTIONS).usage.dropped_tokens == 0  # without a budget a pin asks for nothing
    with pytest.raises(ParameterError, match="pin must be true or false"):
        engine.chat([{**TALK[0], "pin": 1}, TALK[3]], **OPTIONS)


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"kv_budget": 0}, "kv_budget"),
        ({"kv_budget": "much"}, "kv_budget"),
        ({"kv_budget": 200, "retention": "lru"}, "retention"),
        ({"kv_budget": 200, "retention": 3}, "retention"),
        ({"kv_budget": 200, "entities": "yes"}, "entities"),
        ({"kv_budget": 200, "pinned_text": [""]}, "pinned_text"),
        ({"kv_budget": 200, "pinned_text": 7}, "pinned_text"),
        ({"kv_budget": 200, "renumber": "yes"}, "renumber"),
        ({"renumber": True}, "renumber"),
        ({"retention": "sinks"}, "retention"),
        ({"pinned_text": "x"}, "pinned_text"),
    ],
)
def test_what_is_wrong_is_named(engine: Engine, options: dict[str, Any], param: str) -> None:
    with pytest.raises(ParameterError) as caught:
        engine.chat(TALK, **OPTIONS, **options)
    assert caught.value.param == param


def test_over_http(engine: Engine) -> None:
    with serving(engine) as client:
        ask = {"model": engine.runtime.model_name, "temperature": 0.0, "max_tokens": 8}
        body = {"kv_budget": "60%", "retention": "snapkv", "ignore_eos": True}
        answer = client.chat.completions.create(messages=TALK, **ask, extra_body=body)  # type: ignore[call-overload]
        said = answer.model_extra["ostinato"]["retention"]
        assert said["method"] == "snapkv"
        assert said["dropped_tokens"] > 100
        text = client.completions.create(prompt=TEXT, **ask, extra_body={"kv_budget": 150})
        assert (text.model_extra or {})["ostinato"]["retention"]["method"] == "summary"
        pinned = [TALK[0], {**TALK[1], "pin": True}, *TALK[2:]]
        for messages, extra, code in (
            (pinned, {"kv_budget": 200}, "kv_budget_too_small"),
            (TALK, {"kv_budget": 1.5}, None),
            (TALK, {"kv_budget": True}, None),
            (TALK, {"retention": "sinks"}, None),
            (TALK, {"kv_budget": 200, "pinned_text": "x"}, None),
        ):
            with pytest.raises(openai.BadRequestError) as caught:
                client.chat.completions.create(messages=messages, **ask, extra_body=extra)  # type: ignore[call-overload]
            assert code in (None, caught.value.code)


def test_the_servers_budget_and_a_tenants(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "tenants.toml").write_text('[anna]\nsalt = "anna"\nkv_budget = "50%"\n', encoding="utf-8")
    with ostinato.load(
        folder, kv_cache=400 * BLOCK_BYTES, block_size=4, kv_budget=200, retention="sinks",
        tenants=tmp_path / "tenants.toml",
    ) as engine:  # fmt: skip
        others, annas = engine.chat(TALK, **OPTIONS), engine.chat(TALK, **OPTIONS, salt="anna")
        assert others.usage.retention == "sinks"
        assert annas.usage.dropped_tokens > others.usage.dropped_tokens > 0
        assert engine.chat(TALK, **OPTIONS, kv_budget=1000).usage.dropped_tokens == 0
        # A pin is computed in full: it is for everybody, whatever budget they have.
        assert engine.pin(TALK[:2]).num_tokens > 260


def test_files_and_settings_are_checked(tmp_path: Path) -> None:
    path = tmp_path / "tenants.toml"
    path.write_text('[anna]\nsalt = "anna"\nkv_budget = "lots"\n', encoding="utf-8")
    with pytest.raises(ParameterError, match="anna has a kv_budget that is none"):
        read_tenants(path, int)
    with pytest.raises(ParameterError, match="kv_budget"):
        Settings.from_environment({"OSTINATO_KV_BUDGET": "lots"})
    with pytest.raises(ParameterError, match="no retention method"):
        Settings.from_environment({"OSTINATO_RETENTION": "lru"})
    assert Settings.from_environment({"OSTINATO_KV_BUDGET": "2048"}).kv_budget == "2048"


def test_a_prompt_may_be_longer_than_the_arena(folder: Path) -> None:
    with ostinato.load(folder, kv_cache=50 * BLOCK_BYTES, block_size=4) as engine:
        assert engine.runtime.max_model_len == 200
        reply = engine.chat(TALK, **OPTIONS, kv_budget=150)
        assert reply.usage.prompt_tokens > 300
        assert reply.usage.completion_tokens == 8
        assert (
            engine.chat(TALK, **OPTIONS, kv_budget=4000).usage.dropped_tokens > 0
        )  # as far as there is room


def test_the_next_turn_gets_its_past_back(folder: Path) -> None:
    settings: dict[str, Any] = {"kv_cache": 400 * BLOCK_BYTES, "block_size": 4, "kv_budget": "50%"}
    with ostinato.load(folder, **settings, kv_recall="64MiB") as engine:
        first = engine.chat(TALK, **OPTIONS)
        more = [*TALK, {"role": "assistant", "content": first.text}, {"role": "user", "content": "Why?"}]
        again = engine.chat(more, **OPTIONS)
        assert again.usage.recalled_tokens > 200
        assert again.usage.dropped_tokens > 0
        engine.purge(salt="anna")
        assert engine.chat(more, **OPTIONS).usage.recalled_tokens == 0
    with ostinato.load(folder, **settings, kv_recall="64MiB", cache_ttl=60.0) as engine:
        engine.chat(TALK, **OPTIONS)
        assert engine.chat(TALK, **OPTIONS).usage.recalled_tokens == 0  # it may be kept for a time only
    with pytest.raises(ParameterError, match="kv_recall must be at least 1"):
        ostinato.load(folder, kv_recall=0)
    wrongs: tuple[dict[str, Any], ...] = (
        {"kv_recall_every": 64},
        {"kv_recall_every": 0, "kv_recall": "1MiB"},
    )
    for wrong in wrongs:
        with pytest.raises(ParameterError, match="kv_recall_every is a number of tokens"):
            ostinato.load(folder, **wrong)
    with ostinato.load(folder, **settings, kv_recall="64MiB", kv_recall_every=16) as engine:
        long = engine.chat(TALK, **OPTIONS | {"max_tokens": 40})
        assert long.usage.completion_tokens == 40
        assert long.usage.recalled_tokens > 200


def test_a_sequence_may_be_longer_than_the_model_where_it_is_renumbered(tmp_path: Path) -> None:
    folder = save_tiny_chat_model(tmp_path, max_len=256)
    with ostinato.load(folder, kv_cache=400 * BLOCK_BYTES, block_size=4) as short:
        for options in ({"kv_budget": 150}, {"kv_budget": 150, "retention": "sinks"}):
            with pytest.raises(PromptTooLongError):
                short.chat(TALK, **OPTIONS, **options)
        reply = short.chat(TALK, **OPTIONS, kv_budget=150, retention="sinks", renumber=True)
        assert reply.usage.prompt_tokens > 300
        assert reply.usage.retention == "sinks+renumber"
        long = short.complete(
            TEXT, temperature=0.0, max_tokens=300, ignore_eos=True, kv_budget=150, renumber=True
        )
        assert long.usage.completion_tokens == 300
        # A budget beyond the model's length is one of its length.
        most = short.chat(TALK, **OPTIONS, kv_budget=2000, renumber=True)
        assert most.usage.dropped_tokens >= most.usage.prompt_tokens + 7 - 256
        hello = [{"role": "user", "content": "Hello"}]
        assert (
            short.chat(hello, **OPTIONS, kv_budget=200, renumber=True).text
            == short.chat(hello, **OPTIONS).text
        )
        with serving(short) as client:
            answer = client.chat.completions.create(  # type: ignore[call-overload]
                messages=TALK, model=short.runtime.model_name, max_tokens=8,
                extra_body={"kv_budget": 150, "renumber": True},
            )  # fmt: skip
            assert answer.model_extra["ostinato"]["retention"]["method"] == "summary+renumber"


@pytest.mark.parametrize("options", [{"renumber": True}, {"method": "expected"}])
def test_models_with_learned_positions_are_refused_by_name(options: dict[str, Any]) -> None:
    from engines.models import loaded

    info = loaded("gpt2").info
    check_retention(Retention(100), info, "gpt2")
    with pytest.raises(ParameterError, match=r"gpt2 cannot do what .* asks for: .*adds positions"):
        check_retention(Retention(100, **options), info, "gpt2")


@pytest.mark.parametrize(("name", "reason"), [("gemma2", "sliding window"), ("mamba", "recurrent state")])
def test_models_that_cannot_are_refused_by_name(name: str, reason: str) -> None:
    from engines.models import loaded

    with pytest.raises(ParameterError, match=f"{name} cannot be kept within a KV budget: .*{reason}"):
        check_retention(Retention(100), loaded(name).info, name)


def test_a_model_that_cannot_is_refused_at_the_start(folder: Path, tmp_path: Path) -> None:
    """And its thread ends: it used to wait for requests for ever, and whoever loaded for the thread."""
    windowed = shutil.copytree(folder, tmp_path / "windowed")
    config = json.loads((windowed / "config.json").read_text())
    config |= {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": 64}
    (windowed / "config.json").write_text(json.dumps(config))
    told: list[Exception] = []

    def load() -> None:
        try:
            ostinato.load(windowed, kv_cache=400 * BLOCK_BYTES, kv_budget="50%")
        except ParameterError as error:
            told.append(error)

    loading = threading.Thread(target=load, daemon=True)
    loading.start()
    loading.join(60)
    assert not loading.is_alive(), "it hangs"
    assert "sliding window" in str(told[0])
    with ostinato.load(windowed, kv_cache=400 * BLOCK_BYTES) as engine:
        assert engine.chat(TALK, **OPTIONS).usage.completion_tokens == 8
