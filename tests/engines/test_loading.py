"""While blocks are read from below everybody else goes on, and whatever happens then costs no answer.

The tier here is the real one behind a gate: a load that waits at it lasts as long as a test wants.
"""

from __future__ import annotations

import errno
import os
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engines.driver import NAMESPACE, Flips, Harness, reference
from engines.models import VOCAB, build, loaded
from ostinato.errors import EngineError
from ostinato.events import Event, Preempted
from ostinato.kv.codecs.exact import RawCodec
from ostinato.kv.hashing import BlockKey
from ostinato.kv.terms import Selection
from ostinato.kv.tiers.base import Miss
from ostinato.kv.tiers.shared import SharedTier


def tokens(seed: int, length: int) -> list[int]:
    return random.Random(seed).choices(range(3, VOCAB), k=length)


class GatedTier(SharedTier):
    """Loads only while the gate is open; fails from block ``fails_from`` on."""

    gate: threading.Event
    at_gate: threading.Event
    fails_from = 1_000_000
    num_loads = 0

    @classmethod
    def open(cls, path: Path, **options: Any) -> GatedTier:
        tier = super().open(path, **options)
        tier.gate, tier.at_gate = threading.Event(), threading.Event()
        tier.gate.set()
        return tier

    def load(self, key: BlockKey, into: memoryview) -> bool:
        self.at_gate.set()
        assert self.gate.wait(60), "the gate was never opened"
        self.num_loads += 1
        return self.num_loads <= self.fails_from and super().load(key, into)


PROMPT = tokens(1, 46)
NUM_BLOCKS = 11


def wait_for(holds: Callable[[], bool]) -> bool:
    """Whether something comes true within a minute."""
    for _ in range(6000):
        if holds():
            return True
        threading.Event().wait(0.01)
    return False


@contextmanager
def engine_over(folder: Path, **options: Any) -> Iterator[tuple[Harness, GatedTier]]:
    engine = Harness(loaded("llama"), folder=folder, tier_type=GatedTier, **options)
    try:
        assert engine.link is not None
        assert isinstance(engine.link.tier, GatedTier)
        tier = engine.link.tier
        yield engine, tier
        tier.gate.set()
    finally:
        engine.close()


@pytest.fixture
def filled(tmp_path: Path) -> Path:
    """A tier in which the blocks of ``PROMPT`` are."""
    with engine_over(tmp_path) as (engine, _):
        engine.generate(PROMPT, 1)
    return tmp_path


def test_others_get_their_tokens_during_a_load(filled: Path, flips: Flips) -> None:
    own = build("llama", own=True)
    with engine_over(filled) as (engine, tier):
        tier.gate.clear()
        _, waiting = engine.submit(PROMPT, 8)
        assert tier.at_gate.wait(60)
        # From the first token to the last, with the load at the gate: prompts and decode steps go on.
        others = [tokens(seed, 20) for seed in (5, 6)]
        sinks = [engine.submit(prompt, 60)[1] for prompt in others]
        for prompt, sink in zip(others, sinks, strict=True):
            flips.check(own, prompt, reference(own, prompt, 60), sink.wait())
        assert not waiting.done.is_set()
        assert waiting.tokens == []
        assert engine.batcher.load().num_waiting == 1
        tier.gate.set()
        flips.check(own, PROMPT, reference(own, PROMPT, 8), waiting.wait())
        assert waiting.stats is not None
        assert waiting.stats.cached_tokens == 44


def test_who_waits_for_their_turn_to_compute_loads_meanwhile(filled: Path, flips: Flips) -> None:
    """A long prompt takes every row of many steps: the next request's blocks are read in these steps."""
    own = build("llama", own=True)
    with engine_over(filled, max_batch_tokens=4) as (engine, tier):
        tier.gate.clear()
        long = tokens(7, 200)
        _, first = engine.submit(long, 1)
        _, second = engine.submit(PROMPT, 8)
        assert tier.at_gate.wait(60)
        assert not first.first.is_set(), "the load began only when the long prompt was done"
        tier.gate.set()
        flips.check(own, long, reference(own, long, 1), first.wait())
        flips.check(own, PROMPT, reference(own, PROMPT, 8), second.wait())
        assert second.stats is not None
        assert second.stats.cached_tokens == 44


def test_a_request_that_shares_what_is_being_loaded_waits_for_it(filled: Path, flips: Flips) -> None:
    own = build("llama", own=True)
    with engine_over(filled) as (engine, tier):
        tier.gate.clear()
        sinks = [engine.submit(PROMPT, 4)[1] for _ in range(3)]
        assert tier.at_gate.wait(60)
        tier.gate.set()
        for sink in sinks:
            flips.check(own, PROMPT, reference(own, PROMPT, 4), sink.wait())
            assert sink.stats is not None
            assert sink.stats.cached_tokens >= 44
        assert tier.num_loads == NUM_BLOCKS, "something was read twice"


def test_cancelled_during_a_load(filled: Path, flips: Flips) -> None:
    """The end is said at once; the blocks stay reserved until nobody writes to them any more."""
    own = build("llama", own=True)
    with engine_over(filled) as (engine, tier):
        tier.gate.clear()
        sequence, sink = engine.submit(PROMPT, 8)
        assert tier.at_gate.wait(60)
        engine.batcher.cancel([sequence])
        assert sink.done.wait(60)
        assert sink.reason == "abort"
        assert engine.manager.num_held_blocks > 0
        tier.gate.set()
        flips.check(own, PROMPT, reference(own, PROMPT, 8), engine.generate(PROMPT, 8).tokens)
        engine.manager.check_integrity()
        assert engine.manager.num_held_blocks == 0


def test_purged_during_a_load(filled: Path, flips: Flips) -> None:
    """It is answered, and what it had read is not kept for anybody."""
    own = build("llama", own=True)
    with engine_over(filled) as (engine, tier):
        tier.gate.clear()
        _, sink = engine.submit(PROMPT, 8)
        assert tier.at_gate.wait(60)
        engine.manager.purge(Selection())
        tier.gate.set()
        flips.check(own, PROMPT, reference(own, PROMPT, 8), sink.wait())
        assert engine.manager.peek(NAMESPACE, np.array(PROMPT, np.int32)) == 0
        engine.manager.check_integrity()


@pytest.mark.parametrize("fails_from", [0, 1, 5, NUM_BLOCKS - 1])
def test_what_cannot_be_read_is_computed_and_counted(filled: Path, fails_from: int, flips: Flips) -> None:
    own = build("llama", own=True)
    with engine_over(filled) as (engine, tier):
        # In the arena: ten tokens, so that a hit ends inside a block, which is copied or read as a whole.
        flips.check(own, PROMPT[:10], reference(own, PROMPT[:10], 1), engine.generate(PROMPT[:10], 1).tokens)
        tier.num_loads, tier.fails_from = 0, fails_from
        sink = engine.generate(PROMPT, 8)
        flips.check(own, PROMPT, reference(own, PROMPT, 8), sink.tokens)
        assert sink.stats is not None
        assert engine.link is not None
        first = sink.stats.cached_tokens // 4 if fails_from == 0 else 2
        assert sink.stats.cached_tokens == (10 if fails_from == 0 else 4 * (first + min(fails_from, 9)))
        assert engine.link.counters.failed_blocks == max(0, 9 - fails_from)


def test_a_disk_that_fails_costs_no_answer(
    filled: Path, flips: Flips, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = build("llama", own=True)
    other = tokens(9, 30)

    def fails(*_: object) -> int:
        raise OSError(errno.EIO, "the disk is gone")

    with engine_over(filled) as (engine, tier):
        with monkeypatch.context() as disk:
            disk.setattr(os, "preadv", fails)
            disk.setattr(os, "pwrite", fails)
            for prompt in (PROMPT, other):
                sink = engine.generate(prompt, 8)
                flips.check(own, prompt, reference(own, prompt, 8), sink.tokens)
                assert sink.stats is not None
                assert sink.stats.cached_tokens == 0
            assert engine.link is not None
            assert engine.link.write_back.flush(60)
        assert tier.counters.misses[Miss.IO_ERROR] == 1, "the first block that fails ends a load"
        assert engine.link.counters.failed_blocks == NUM_BLOCKS
        assert engine.link.write_back.counters.not_stored >= 7


def test_our_own_fault_in_a_load_fails_the_request_and_not_the_engine(
    filled: Path, flips: Flips, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = build("llama", own=True)

    def fails(self: RawCodec, payload: memoryview, slot: int) -> None:
        raise AssertionError("a bug")

    with engine_over(filled) as (engine, _):
        with monkeypatch.context() as bug:
            bug.setattr(RawCodec, "decode", fails)
            _, sink = engine.submit(PROMPT, 8)
            assert sink.done.wait(60)
            assert sink.reason == "error"
            assert isinstance(sink.error, EngineError)
        sink = engine.generate(PROMPT, 8)
        flips.check(own, PROMPT, reference(own, PROMPT, 8), sink.tokens)
        assert sink.stats is not None
        assert sink.stats.cached_tokens == 44


def test_a_load_gives_way_to_a_running_sequence(filled: Path, flips: Flips) -> None:
    """The arena is full: the load ends, its blocks go to the one that grows, and it begins again later."""
    own = build("llama", own=True)
    growing = tokens(8, 30)
    with engine_over(filled, num_blocks=28) as (engine, tier):
        tier.gate.clear()
        _, running = engine.submit(growing, 50)
        assert running.first.wait(60)
        loading, waiting = engine.submit(PROMPT, 8)
        assert tier.at_gate.wait(60)
        load = loading.load
        assert load is not None
        assert wait_for(lambda: load.is_stopped), "the sequence that grows never asked for room"
        assert not running.done.is_set()
        tier.gate.set()
        flips.check(own, growing, reference(own, growing, 50), running.wait())
        flips.check(own, PROMPT, reference(own, PROMPT, 8), waiting.wait())
        engine.manager.check_integrity()


def test_what_a_preempted_sequence_had_computed_comes_back_from_below(tmp_path: Path, flips: Flips) -> None:
    """Two sequences that do not fit together: the younger gives its blocks to the other and reads them later.

    The elder needs all of the arena in the end, so nothing of the younger can have stayed there.
    """
    own = build("llama", own=True)
    events: list[Event] = []
    elder, younger = tokens(11, 40), tokens(12, 41)
    with engine_over(tmp_path, num_blocks=26, observer=events.append) as (engine, _):
        _, first = engine.submit(elder, 64)
        assert first.first.wait(60)
        _, second = engine.submit(younger, 12)
        flips.check(own, elder, reference(own, elder, 64), first.wait())
        flips.check(own, younger, reference(own, younger, 12), second.wait())
        engine.manager.check_integrity()
        assert engine.link is not None
        assert any(isinstance(event, Preempted) for event in events), "nobody was preempted"
        assert engine.link.counters.loaded_tokens >= 40
        assert second.stats is not None
        assert second.stats.cached_tokens == 0, "that of the first start: nothing was cached then"
