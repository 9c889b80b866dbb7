"""With a lower tier, across restarts and evictions: the answer stays what it is without any cache."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from engines.driver import NAMESPACE, Flips, Harness, reference
from engines.models import PAGED, VOCAB, build, loaded
from ostinato.kv.codecs.exact import RawCodec
from ostinato.kv.tiers.base import Miss
from ostinato.kv.tiers.shared import SharedTier


def tokens(seed: int, length: int) -> list[int]:
    return random.Random(seed).choices(range(3, VOCAB), k=length)


def expect(engine: Harness, own: Any, flips: Flips, prompt: list[int], max_new: int = 8) -> int:
    """Generate, compare with transformers, and give the number of cached tokens."""
    sink = engine.generate(prompt, max_new)
    flips.check(own, prompt, reference(own, prompt, max_new), sink.tokens)
    assert sink.stats is not None
    return sink.stats.cached_tokens


@contextmanager
def tiered(name: str, folder: Path, **options: Any) -> Iterator[Harness]:
    engine = Harness(loaded(name), folder=folder, **options)
    try:
        yield engine
    finally:
        engine.close()


@pytest.mark.parametrize("name", PAGED)
def test_a_restart_reads_what_was_computed_before(name: str, tmp_path: Path, flips: Flips) -> None:
    own = build(name, own=True)
    head, tail = tokens(1, 37), tokens(2, 9)
    with tiered(name, tmp_path) as engine:
        assert expect(engine, own, flips, head + tail) == 0
    with tiered(name, tmp_path) as engine:
        # 46 tokens, the last of which is always computed: eleven blocks of four.
        assert expect(engine, own, flips, head + tail) == 44
        assert expect(engine, own, flips, head + tokens(3, 12)) == 37
    with tiered(name, tmp_path) as engine:
        assert expect(engine, own, flips, head + tokens(3, 12)) == 48
        assert expect(engine, own, flips, head + tail) == 44, "seven blocks in the arena, the rest below"


def test_what_the_arena_gave_up_comes_back(tmp_path: Path, flips: Flips) -> None:
    own = build("llama", own=True)
    prompts = [tokens(seed, 40) for seed in range(6)]
    with tiered("llama", tmp_path, num_blocks=26) as engine:
        for prompt in prompts:
            expect(engine, own, flips, prompt)
        assert engine.link is not None
        assert engine.link.write_back.flush(10)
        cached = [expect(engine, own, flips, prompt) for prompt in prompts]
    assert min(cached) >= 36
    assert max(cached) <= 39


@pytest.mark.parametrize("seed", range(4))
def test_any_traffic_in_a_small_arena(seed: int, tmp_path: Path, flips: Flips) -> None:
    """Shared heads cut anywhere, an arena too small for two, a tier too small for all, two restarts."""
    rng = random.Random(seed)
    own = build("gemma3", own=True)
    trunk = tokens(50 + seed, 60)
    for _ in range(3):
        with tiered("gemma3", tmp_path, num_blocks=24, slots=20, max_batch_tokens=16) as engine:
            open_requests = []
            for _ in range(10):
                prompt = trunk[: rng.randint(1, 60)] + rng.choices(range(3, VOCAB), k=rng.randint(1, 15))
                open_requests.append((prompt, engine.submit(prompt, 5)[1]))
                if rng.random() < 0.6:
                    open_requests[-1][1].wait()
            for prompt, sink in open_requests:
                flips.check(own, prompt, reference(own, prompt, 5), sink.wait())


def test_damage_below_is_computed_again(tmp_path: Path, flips: Flips) -> None:
    own = build("llama", own=True)
    prompt = tokens(1, 46)
    with tiered("llama", tmp_path, slots=20) as engine:
        expect(engine, own, flips, prompt)
    slab = bytearray((tmp_path / "slab").read_bytes())
    payload_bytes = RawCodec(engine.runner.arena.groups, 4).payload_bytes  # type: ignore[union-attr]
    slab[payload_bytes * 5 + 100] ^= 4
    (tmp_path / "slab").write_bytes(slab)
    with tiered("llama", tmp_path, slots=20) as engine:
        assert expect(engine, own, flips, prompt) == 20
        assert engine.link is not None
        tier = engine.link.tier
        assert isinstance(tier, SharedTier)
        assert tier.counters.misses[Miss.CORRUPT] == 1
    with tiered("llama", tmp_path, slots=20) as engine:
        assert expect(engine, own, flips, prompt) == 44, "it was stored anew"


def test_tenants_share_nothing_below_either(tmp_path: Path, flips: Flips) -> None:
    own = build("llama", own=True)
    prompt = tokens(1, 46)
    with tiered("llama", tmp_path) as engine:
        expect(engine, own, flips, prompt)
    with tiered("llama", tmp_path) as engine:
        other = engine.generate(prompt, 4, namespace=NAMESPACE.with_salt("other"))
        assert other.stats is not None
        assert other.stats.cached_tokens == 0
        assert expect(engine, own, flips, prompt) == 44


def test_a_slow_tier_is_not_asked(tmp_path: Path, flips: Flips) -> None:
    own = build("llama", own=True)
    prompt = tokens(1, 46)
    with tiered("llama", tmp_path) as engine:
        expect(engine, own, flips, prompt)
    with tiered("llama", tmp_path) as engine:
        assert engine.link is not None
        engine.link.rates.note_load(1, 5.0)
        engine.link.rates.note_compute(1, 0.001)
        assert expect(engine, own, flips, prompt) == 0


def test_under_pressure_blocks_are_dropped_and_memory_is_not_exceeded(tmp_path: Path, flips: Flips) -> None:
    own = build("llama", own=True)
    prompt = tokens(1, 200)
    with tiered("llama", tmp_path, buffers=2) as engine:
        expect(engine, own, flips, prompt)
        assert engine.link is not None
        counters = engine.link.write_back.counters
        codec = RawCodec(engine.runner.arena.groups, 4)  # type: ignore[union-attr]
        assert counters.peak_buffered_bytes <= 2 * codec.payload_bytes
        assert counters.dropped > 0
    with tiered("llama", tmp_path) as engine:
        cached = expect(engine, own, flips, prompt)
        # Whole blocks; where only blocks of the answer were dropped all of the prompt but its last token.
        assert cached % 4 == 0 or cached == len(prompt) - 1
        assert cached <= counters.stored * 4
