"""Answers that come back in the tokens they were generated in, where that is asked for."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import ostinato
from doors.serving import serving
from doors.tiny import save_tiny_chat_model

QUESTION = {"role": "user", "content": "Sing."}
MORE = {"role": "user", "content": "More."}
NUM_TOKENS = 12


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that sings "l" after "l", though its tokenizer has a token for two of them."""
    return save_tiny_chat_model(tmp_path_factory.mktemp("tiny") / "tiny", merges=(("l", "l"),))


@pytest.fixture(scope="module")
def keeping(folder: Path) -> Iterator[ostinato.Engine]:
    with ostinato.load(folder, kv_cache=1 << 20, block_size=4, keep_answers=True) as loaded:
        yield loaded


@pytest.fixture(scope="module")
def plain(folder: Path) -> Iterator[ostinato.Engine]:
    with ostinato.load(folder, kv_cache=1 << 20, block_size=4) as loaded:
        yield loaded


def singing(engine: ostinato.Engine) -> dict[str, Any]:
    (letter,) = engine.runtime.tokenizer.encode("l").tolist()
    return {"temperature": 0.0, "max_tokens": NUM_TOKENS, "logit_bias": {letter: 100.0}}


def test_through_the_library(keeping: ostinato.Engine) -> None:
    first = keeping.chat([QUESTION], **singing(keeping))
    assert first.text == "l" * NUM_TOKENS
    assert first.usage.kept_tokens == 0
    second = keeping.chat([QUESTION, first.message, MORE], **singing(keeping))
    # The question with its "assistant", the answer, and nothing computed again but what is new.
    role = len(keeping.runtime.tokenizer.encode("assistant\n"))
    assert second.usage.kept_tokens == role + NUM_TOKENS
    assert second.usage.cached_tokens == first.usage.prompt_tokens + NUM_TOKENS - 1
    third = keeping.chat([QUESTION, first.message, MORE, second.message, MORE], **singing(keeping))
    assert third.usage.kept_tokens == 2 * (role + NUM_TOKENS)
    assert third.usage.cached_tokens == second.usage.prompt_tokens + NUM_TOKENS - 1


def test_not_without_asking(plain: ostinato.Engine) -> None:
    first = plain.chat([QUESTION], **singing(plain))
    second = plain.chat([QUESTION, first.message, MORE], **singing(plain))
    assert second.usage.kept_tokens == 0
    assert second.usage.cached_tokens == first.usage.prompt_tokens


def test_not_for_another_tenant_nor_another_text(keeping: ostinato.Engine) -> None:
    first = keeping.chat([QUESTION], salt="a", **singing(keeping))
    other = keeping.chat([QUESTION, first.message, MORE], salt="b", **singing(keeping))
    assert other.usage.kept_tokens == 0
    changed = {"role": "assistant", "content": first.text + "!"}
    assert keeping.chat([QUESTION, changed, MORE], salt="a", **singing(keeping)).usage.kept_tokens == 0
    cut = keeping.chat([QUESTION], salt="c", stop="ll", **singing(keeping))
    assert cut.text == ""
    again = keeping.chat([QUESTION, cut.message, MORE], salt="c", **singing(keeping))
    assert again.usage.kept_tokens == 0


def test_through_the_server(keeping: ostinato.Engine) -> None:
    with serving(keeping) as client:
        options = singing(keeping)
        (letter,) = options["logit_bias"]

        def ask(messages: list[Any]) -> Any:
            return client.chat.completions.create(
                model="tiny",
                messages=messages,
                temperature=0,
                max_tokens=NUM_TOKENS,
                logit_bias={str(letter): 100},
                extra_body={"cache_salt": "wire"},
            )

        first = ask([QUESTION])
        text = first.choices[0].message.content
        second = ask([QUESTION, {"role": "assistant", "content": text}, MORE])
        assert "kept_tokens" not in first.ostinato
        assert second.ostinato["kept_tokens"] == len("assistant\n") + NUM_TOKENS
        assert second.usage.prompt_tokens_details.cached_tokens == first.usage.prompt_tokens + NUM_TOKENS - 1


def test_both_doors_say_how_to_ask() -> None:
    from click.testing import CliRunner

    from ostinato.cli import main

    assert "--keep-answers" in CliRunner().invoke(main, ["serve", "--help"]).output
