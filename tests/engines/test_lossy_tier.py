"""A lossy codec below: only for who asked for it, and never without saying so."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from engines.driver import Collected, Flips, Harness, reference
from engines.models import VOCAB, build, loaded
from engines.test_retention import keeping_of
from ostinato.engines.hf import observe_model
from ostinato.kv.codecs.layered import WINDOW_TOKENS
from ostinato.kv.tiers.base import Miss
from ostinato.kv.tiers.shared import SharedTier

CODECS = ["fp16", "bf16", "int8", "int8/int4", "int4", "0:int8,1-:fp16", "0:exact/int8"]


def tokens(seed: int, length: int) -> list[int]:
    return random.Random(seed).choices(range(3, VOCAB), k=length)


@contextmanager
def tiered(folder: Path, codec: str, name: str = "llama", **options: Any) -> Iterator[Harness]:
    engine = Harness(loaded(name), folder=folder, codec=codec, **options)
    try:
        yield engine
        assert engine.link is not None
        assert engine.link.write_back.flush(10)
    finally:
        engine.close()


def counts(sink: Collected) -> tuple[int, int]:
    assert sink.stats is not None
    return sink.stats.cached_tokens, sink.stats.approximate_tokens


@pytest.mark.parametrize("codec", CODECS)
def test_an_exact_engine_never_reads_what_a_lossy_one_stored(
    codec: str, tmp_path: Path, flips: Flips
) -> None:
    own = build("llama", own=True)
    prompt = tokens(1, 4 * WINDOW_TOKENS + 2)
    expected = reference(own, prompt, 6)
    with tiered(tmp_path, codec) as lossy:
        sink = lossy.generate(prompt, 6)
        assert counts(sink) == (0, 0), "what it computed itself is exact"
        flips.check(own, prompt, expected, sink.tokens)
    with tiered(tmp_path, "exact") as exact:
        sink = exact.generate(prompt, 6)
        assert counts(sink) == (0, 0)
        flips.check(own, prompt, expected, sink.tokens)
    with tiered(tmp_path, codec) as lossy:
        cached, approximate = counts(lossy.generate(prompt, 6))
        window = WINDOW_TOKENS if "int4" in codec else 1
        assert cached == approximate == (len(prompt) - window) // 4 * 4
    with tiered(tmp_path, "exact") as exact:
        sink = exact.generate(prompt, 6)
        assert counts(sink) == (4 * WINDOW_TOKENS, 0), "its own blocks, which lie beside the others"
        flips.check(own, prompt, expected, sink.tokens)


def test_lossy_codecs_do_not_read_each_other(tmp_path: Path) -> None:
    prompt = tokens(2, 50)
    for codec in ("int8", "fp16", "1:int8", "int8/fp16"):
        with tiered(tmp_path, codec) as engine:
            assert counts(engine.generate(prompt, 2)) == (0, 0)
    with tiered(tmp_path, "0-:int8/int8") as engine:
        assert counts(engine.generate(prompt, 2)) == (48, 48)


def test_what_stands_behind_approximate_kv_is_approximate_too(tmp_path: Path) -> None:
    head = tokens(3, 21)
    with tiered(tmp_path, "int8") as engine:
        engine.generate(head, 1)
    with tiered(tmp_path, "int8") as engine:
        assert counts(engine.generate(tokens(4, 30), 1)) == (0, 0)
        assert counts(engine.generate(head + tokens(5, 10), 4)) == (20, 20)
        # In the arena now, the part that was computed behind it as well; a hit that ends inside a block.
        assert counts(engine.generate(head + tokens(5, 10) + tokens(6, 9), 4)) == (31, 31)
        assert counts(engine.generate(head + tokens(5, 10)[:6] + tokens(7, 9), 4)) == (27, 27)
        assert counts(engine.generate(head + tokens(5, 10)[:6] + tokens(7, 9), 4)) == (35, 35)
        assert counts(engine.generate(tokens(4, 30) + tokens(8, 5), 1)) == (30, 0), "never was below"


def test_an_exact_head_in_the_arena_stays_exact(tmp_path: Path) -> None:
    prompt = tokens(9, 60)
    with tiered(tmp_path, "int8") as engine:
        engine.generate(prompt, 1)
    with tiered(tmp_path, "int8") as engine:
        assert engine.link is not None
        engine.link.rates.note_load(1, 5.0)
        engine.link.rates.note_compute(1, 0.001)
        assert counts(engine.generate(prompt[:22], 1)) == (0, 0), "computed, since that was faster"
        for _ in range(20):
            engine.link.rates.note_load(1, 1e-9)
        engine.link.rates.note_compute(1, 5.0)
        # Twenty tokens of the hit are exact; the block in which it ends is read as a whole.
        assert counts(engine.generate(prompt, 1)) == (59, 39)
        assert counts(engine.generate(prompt[:20] + tokens(10, 9), 1)) == (20, 0)
        assert counts(engine.generate(prompt[:22] + tokens(11, 9), 1)) == (22, 2)
        assert counts(engine.generate(prompt[:50] + tokens(12, 9), 1)) == (50, 30)


def test_slots_that_held_approximate_kv_hold_exact_kv_later(tmp_path: Path) -> None:
    prompt = tokens(14, 61)
    with tiered(tmp_path, "int8", num_blocks=18) as engine:
        engine.generate(prompt, 1)
    with tiered(tmp_path, "int8", num_blocks=18) as engine:
        assert counts(engine.generate(prompt, 1)) == (60, 60)
        for seed in (15, 16):
            other = tokens(seed, 61)
            assert counts(engine.generate(other, 1)) == (0, 0)
            assert counts(engine.generate([*other, 5], 1)) == (61, 0), "computed, where the other lay before"


@pytest.mark.parametrize("seed", range(6))
def test_answers_that_are_not_reported_are_exact_under_any_traffic(
    seed: int, tmp_path: Path, flips: Flips
) -> None:
    """An arena too small for two, a tier too small for all, three restarts; four bits: it would show."""
    rng = random.Random(seed)
    own = build("llama", own=True)
    trunk = tokens(50 + seed, 150)
    reported = 0
    for _ in range(3):
        with tiered(tmp_path, "int4", num_blocks=48, slots=60, max_batch_tokens=16) as engine:
            opened = []
            for _ in range(8):
                head = trunk[: rng.randint(1, 150)] if rng.random() < 0.7 else tokens(rng.randint(0, 3), 20)
                prompt = head + rng.choices(range(3, VOCAB), k=rng.randint(1, 15))
                opened.append((prompt, engine.submit(prompt, 5)[1]))
                if rng.random() < 0.6:
                    opened[-1][1].wait()
            for prompt, sink in opened:
                got = sink.wait()
                cached, approximate = counts(sink)
                reported += approximate > 0
                if approximate == 0:
                    flips.check(own, prompt, reference(own, prompt, 5), got)
                else:
                    assert cached <= len(prompt) - 1
    assert reported, "nothing came from below: nothing was tested"


@pytest.mark.parametrize("codec", CODECS)
def test_damage_is_a_counted_miss(codec: str, tmp_path: Path) -> None:
    prompt = tokens(1, 4 * WINDOW_TOKENS)
    with tiered(tmp_path, codec, slots=100) as engine:
        cold = engine.generate(prompt, 4)
        assert engine.link is not None
        payload_bytes = engine.link._codec.payload_bytes
    slab = bytearray((tmp_path / "slab").read_bytes())
    slot_bytes = len(slab) // 100
    slab[slot_bytes * 5 + payload_bytes // 2] ^= 4
    (tmp_path / "slab").write_bytes(slab)
    with tiered(tmp_path, codec, slots=100) as engine:
        assert counts(engine.generate(prompt, 4)) == (20, 20)
        assert engine.link is not None
        tier = engine.link.tier
        assert isinstance(tier, SharedTier)
        assert tier.counters.misses[Miss.CORRUPT] == 1
    assert cold.stats is not None


def test_kv_that_no_form_can_hold_is_computed_again(tmp_path: Path) -> None:
    """Values a billion times as large: their blocks are refused, and nothing else happens."""
    model = copy.deepcopy(build("llama", own=True))
    with torch.no_grad():
        model.model.layers[0].self_attn.v_proj.weight.mul_(1e9)
    large = observe_model(model)
    assert large.reuse_reason is None
    prompt = tokens(13, 40)
    for _ in range(2):
        engine = Harness(large, folder=tmp_path, codec="int8")
        assert counts(engine.generate(prompt, 2)) == (0, 0)
        engine.close()
        assert engine.link is not None
        assert engine.link.write_back.counters.unfit > 0
        assert engine.link.write_back.counters.stored == 0


def test_within_a_budget_both_are_said_and_nothing_pruned_is_stored(tmp_path: Path) -> None:
    """What is read is approximate, what does not fit is dropped; what was computed over that is nobody's."""
    prompt = tokens(9, 150)
    with tiered(tmp_path, "int8") as engine:
        engine.generate(prompt, 2)
    with tiered(tmp_path, "int8") as engine:
        keeping = keeping_of(64, "summary", 150, tuple(range(10)))
        _, sink = engine.submit(prompt, 40, keeping=keeping)
        sink.wait()
        assert sink.stats is not None
        assert counts(sink) == (keeping.keep.num_usable_hit, keeping.keep.num_usable_hit)
        assert sink.stats.dropped_tokens == 150 + 39 - keeping.num_places
    with tiered(tmp_path, "int8") as engine:
        cached, _ = counts(engine.generate([*prompt, *sink.tokens, 7], 2))
        assert 140 < cached <= 152  # what the first engine had, which dropped nothing
