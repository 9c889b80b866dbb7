"""The shared tier through the library's door: after a restart, and with what cannot be."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

import ostinato
from doors.tiny import save_tiny_chat_model
from ostinato.errors import ParameterError, TierError
from ostinato.events import TierLoaded
from ostinato.kv import hashing
from ostinato.observe import LoadGauges, exposition, new_registry

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


def test_what_the_tier_does_can_be_watched(folder: Path, tmp_path: Path) -> None:
    settings = {"kv_cache": 1 << 20, "block_size": 4, "shared_tier": tmp_path, "shared_tier_bytes": "4MiB"}

    def values(engine: ostinato.Engine) -> dict[str, float]:
        registry = new_registry()
        registry.register(LoadGauges(engine.runtime.health))
        families = text_string_to_metric_families(exposition(registry)[0].decode())
        samples = [sample for family in families for sample in family.samples]
        return {s.name.removeprefix("ostinato_") + "".join(s.labels.values()): s.value for s in samples}

    with ostinato.load(folder, **settings) as engine:
        cold = engine.chat(TALK, **OPTIONS)
        num_blocks = cold.usage.written_tokens // 4
        for _ in range(1000):  # an answer does not wait for the write-back
            found = values(engine)
            has_all = found["kv_tier_write_back_blocks_totalstored"] == num_blocks
            if has_all and found["kv_tier_used_bytes"] == found["kv_tier_written_bytes_total"]:
                break  # both: a scrape is not one moment
            threading.Event().wait(0.01)
        assert found["external_prefix_cache_queries_total"] == cold.usage.prompt_tokens - 1
        assert found["external_prefix_cache_hits_total"] == 0
        assert found["kv_tier_used_bytes"] == found["kv_tier_written_bytes_total"] > 0
        assert found["kv_tier_used_bytes"] <= found["kv_tier_capacity_bytes"] <= 4 << 20
        assert found["kv_tier_index_bytes"] > 0
        bytes_of_block = found["kv_tier_used_bytes"] / num_blocks
    assert engine.runtime.health().tier is None, "it is closed"
    loads: list[TierLoaded] = []
    with ostinato.load(folder, **settings) as engine:
        engine.runtime.observers.append(lambda e: loads.append(e) if isinstance(e, TierLoaded) else None)
        warm = engine.chat(TALK, **OPTIONS)
        found = values(engine)
    assert found["external_prefix_cache_hits_total"] == warm.usage.cached_tokens
    assert found["kv_tier_loaded_tokens_total"] == warm.usage.cached_tokens == loads[0].num_tokens
    assert found["kv_tier_read_bytes_total"] == loads[0].num_bytes == len_read(warm) * bytes_of_block
    assert found["kv_tier_failed_blocks_total"] == found["kv_tier_misses_totalcorrupt"] == 0
    assert len(loads) == 1


def test_what_an_older_version_stored_is_not_found_and_goes_in_the_background(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"kv_cache": 1 << 20, "block_size": 4, "shared_tier": tmp_path, "shared_tier_bytes": "4MiB"}
    with ostinato.load(folder, **settings) as engine:
        cold = engine.chat(TALK, **OPTIONS)
    monkeypatch.setattr(hashing, "KEY_VERSION", hashing.KEY_VERSION + 1)
    with ostinato.load(folder, **settings) as engine:
        for _ in range(1000):
            tier = engine.runtime.health().tier
            assert tier is not None
            if tier.used_bytes == 0:
                break
            threading.Event().wait(0.01)
        assert tier.used_bytes == 0
        assert tier.evictions["stale"] == cold.usage.written_tokens // 4
        again = engine.chat(TALK, **OPTIONS)
        assert again.choices == cold.choices
        assert again.usage.cached_tokens == 0


def len_read(reply: ostinato.Reply) -> int:
    """Blocks of four tokens that were read for a reply."""
    return -(-reply.usage.cached_tokens // 4)


def test_a_tier_that_cannot_be_is_said_at_once(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(TierError, match="cannot be opened"):
        ostinato.load(folder, kv_cache=1 << 20, shared_tier=str(tmp_path / "file"))
    with pytest.raises(ParameterError, match="one block of this model takes"):
        ostinato.load(folder, kv_cache=1 << 20, shared_tier=tmp_path, shared_tier_bytes=100)
    with pytest.raises(ParameterError, match="shared_tier_bytes must be at least 1"):
        ostinato.load(folder, shared_tier=tmp_path, shared_tier_bytes=0)
