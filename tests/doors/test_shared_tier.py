"""The shared tier through the library's door: after a restart, and with what cannot be."""

from __future__ import annotations

from pathlib import Path

import pytest

import ostinato
from doors.tiny import save_tiny_chat_model
from ostinato.errors import ParameterError, TierError

TALK = [{"role": "user", "content": "Tell me, at some length, what an ostinato is and where it comes from."}]
OPTIONS = {"temperature": 0.0, "max_tokens": 12, "ignore_eos": True}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_chat_model(tmp_path_factory.mktemp("tiny"))


def test_an_answer_after_a_restart_is_the_same_and_reads_its_prompt(folder: Path, tmp_path: Path) -> None:
    settings = {"kv_cache": 1 << 20, "block_size": 4, "shared_tier": tmp_path, "shared_tier_bytes": "4MiB"}
    with ostinato.load(folder, kv_cache=1 << 20, block_size=4) as engine:
        expected = engine.chat(TALK, **OPTIONS)
    with ostinato.load(folder, **settings) as engine:
        cold = engine.chat(TALK, **OPTIONS)
    with ostinato.load(folder, **settings) as engine:
        other = engine.chat(TALK, salt="tenant", **OPTIONS)
        warm = engine.chat(TALK, **OPTIONS)
        again = engine.chat(TALK, **OPTIONS)
    texts = {reply.choices[0].token_ids for reply in (expected, cold, other, warm, again)}
    assert len(texts) == 1
    assert cold.usage.cached_tokens == other.usage.cached_tokens == 0
    usable = warm.usage.prompt_tokens - 1
    assert warm.usage.cached_tokens == min(usable, warm.usage.prompt_tokens // 4 * 4) > 0
    assert again.usage.cached_tokens == usable
    # What was read is not reported as written.
    assert warm.usage.written_tokens == cold.usage.written_tokens - warm.usage.cached_tokens


def test_a_tier_that_cannot_be_is_said_at_once(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(TierError, match="cannot be opened"):
        ostinato.load(folder, kv_cache=1 << 20, shared_tier=str(tmp_path / "file"))
    with pytest.raises(ParameterError, match="one block of this model takes"):
        ostinato.load(folder, kv_cache=1 << 20, shared_tier=tmp_path, shared_tier_bytes=100)
    with pytest.raises(ParameterError, match="shared_tier_bytes must be at least 1"):
        ostinato.load(folder, shared_tier=tmp_path, shared_tier_bytes=0)
