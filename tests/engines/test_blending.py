"""Moved KV through the engine: what it may change, what it may never reach, and that it lets go."""

from __future__ import annotations

import random
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from engines.driver import NAMESPACE, Collected, Flips, Harness, harness, reference
from engines.models import VOCAB, build, loaded
from ostinato.kv.terms import Selection
from ostinato.reuse.blend import Repair
from ostinato.types import SamplingParams

MODEL = "llama"
NONE, ALL, SOME = Repair(0.0, 0, np.inf), Repair(1.0, 0, np.inf), Repair(0.3, 4, np.inf)
TOLD = SamplingParams(temperature=0.0, logprobs=0)


def tokens(seed: int, length: int) -> list[int]:
    return random.Random(seed).choices(range(3, VOCAB), k=length)


HEAD, OTHER_HEAD, BODY, TAIL = tokens(1, 23), tokens(2, 31), tokens(3, 120), tokens(4, 9)


def moved(sink: Collected) -> tuple[int, int]:
    assert sink.stats is not None
    return sink.stats.moved_tokens, sink.stats.repaired_tokens


def logprobs(sink: Collected) -> list[float]:
    return [item.logprob for item in sink.logprobs if item is not None]


@pytest.mark.parametrize(
    "name",
    ["llama", "llama3-rope", "llama-yarn", "mistral-sliding", "gemma3", "phi", "gpt-oss", "deepseek-v3"],
)
def test_all_repaired_is_all_computed(name: str, flips: Flips) -> None:
    prompt = [*OTHER_HEAD, *BODY, *TAIL]
    with harness(loaded(name), num_blocks=200, moving=True, max_batch_tokens=40) as engine:
        exact = engine.generate(prompt, 8, params=TOLD)
    with harness(loaded(name), num_blocks=200, moving=True, max_batch_tokens=40) as engine:
        engine.generate([*HEAD, *BODY], 2)
        sink = engine.generate(prompt, 8, params=TOLD, repair=ALL)
        assert moved(sink) == (len(BODY), len(BODY))
    flips.check(build(name, own=True), prompt, exact.tokens, sink.tokens)
    if exact.tokens == sink.tokens:
        np.testing.assert_allclose(logprobs(sink), logprobs(exact), atol=2e-5)


def test_runs_of_several_sequences_are_joined() -> None:
    pieces = [tokens(seed, 50) for seed in range(10, 14)]
    with harness(loaded(MODEL), moving=True) as engine:
        for seed, piece in enumerate(pieces):
            engine.generate([*tokens(seed, 10 + seed), *piece], 1)
        prompt = [*HEAD, *pieces[2], *pieces[0], *TAIL, *pieces[3], *pieces[1]]
        sink = engine.generate(prompt, 4, repair=NONE)
        # The last token is computed in any case; a run may be cut where the next one begins with its next
        # token.
        assert moved(sink) == (4 * 50 - 1, 0)
        assert engine.generate(prompt, 4, repair=SOME).stats is not None


def test_what_is_not_repaired_does_differ() -> None:
    """Otherwise nothing here would show that anything was moved."""
    prompt = [*OTHER_HEAD, *BODY, *TAIL]
    with harness(loaded(MODEL), moving=True) as engine:
        exact = engine.generate(prompt, 1, params=TOLD, namespace=replace(NAMESPACE, salt="apart"))
        engine.generate([*HEAD, *BODY], 2)
        none = engine.generate(prompt, 1, params=TOLD, repair=NONE)
        assert moved(none) == (len(BODY), 0)
        assert abs(logprobs(none)[0] - logprobs(exact)[0]) > 1e-4


def test_exact_requests_never_find_it(flips: Flips) -> None:
    """Requests of a few texts in all orders, some with moved KV: the exact ones answer as without a cache."""
    own, chance = build(MODEL, own=True), random.Random(0)
    texts = [tokens(seed, chance.randrange(20, 60)) for seed in range(20, 25)]
    num_moved = 0
    with harness(loaded(MODEL), num_blocks=120, moving=True, max_batch_tokens=48) as engine:
        for _ in range(40):
            prompt = [token for text in chance.sample(texts, 3) for token in text]
            repair = chance.choice([None, NONE, SOME, Repair()])
            sink = engine.generate(prompt, 3, repair=repair)
            num_moved += moved(sink)[0]
            if repair is None:
                assert moved(sink) == (0, 0)
                flips.check(own, prompt, reference(own, prompt, 3), sink.tokens)
            engine.manager.check_integrity()
    assert num_moved > 500


def test_only_what_stands_before_is_kept_of_it() -> None:
    prompt = [*OTHER_HEAD, *BODY, *TAIL]
    with harness(loaded(MODEL), moving=True) as engine:
        engine.generate([*HEAD, *BODY], 2)
        engine.generate(prompt, 8, repair=SOME)
        array = np.array([*prompt, 0], np.int32)
        assert engine.manager.peek(NAMESPACE, array) == len(OTHER_HEAD)
        again = engine.generate(prompt, 8)
        assert again.stats is not None
        assert again.stats.cached_tokens == len(OTHER_HEAD)


def test_beside_others_and_in_small_steps(flips: Flips) -> None:
    own = build(MODEL, own=True)
    with harness(loaded(MODEL), moving=True, max_batch_tokens=16, itl_target_s=1e-4) as engine:
        engine.generate([*HEAD, *BODY], 2)
        plain = [tokens(seed, 40) for seed in range(30, 33)]
        asked = [engine.submit(prompt, 30) for prompt in plain]
        blended = [
            engine.submit([*tokens(seed, 12), *BODY, *TAIL], 10, repair=repair)
            for seed, repair in ((40, NONE), (41, SOME), (42, Repair()), (43, ALL))
        ]
        for (_, sink), prompt in zip(asked, plain, strict=True):
            flips.check(own, prompt, reference(own, prompt, 30), sink.wait())
        for _, sink in blended:
            assert len(sink.wait()) == 10
        assert moved(blended[0][1]) == (len(BODY), 0)
        last = [*tokens(43, 12), *BODY, *TAIL]
        flips.check(own, last, reference(own, last, 10), blended[3][1].tokens)


def test_a_bound_that_cannot_be_held_is_answered_exactly(flips: Flips) -> None:
    prompt = [*OTHER_HEAD, *BODY, *TAIL]
    own = build(MODEL, own=True)
    with harness(loaded(MODEL), moving=True) as engine:
        engine.generate([*HEAD, *BODY], 2)
        sink = engine.generate(prompt, 8, repair=Repair(None, 0, 1e-6))
        assert sink.stats is not None
        assert sink.stats.is_move_refused
        assert sink.stats.deviation is not None
        assert sink.stats.deviation > 1e-6
        assert moved(sink) == (0, 0)
        flips.check(own, prompt, reference(own, prompt, 8), sink.tokens)
        # What was computed exactly may be found.
        again = engine.generate(prompt, 8)
        assert again.stats is not None
        assert again.stats.cached_tokens == len(prompt) - 1


@pytest.mark.parametrize("delay_steps", [0, 1, 3, 6])
def test_cancelled_on_the_way(delay_steps: int, tmp_path: Path) -> None:
    steps = threading.Semaphore(0)
    engine = Harness(
        loaded(MODEL),
        moving=True,
        max_batch_tokens=16,
        folder=tmp_path,
        observer=lambda event: steps.release(),
    )
    try:
        engine.generate([*HEAD, *BODY], 2)
        for _ in range(3):
            while steps.acquire(blocking=False):
                pass
            sequence, sink = engine.submit([*OTHER_HEAD, *BODY, *TAIL], 30, repair=SOME)
            for _ in range(delay_steps):
                steps.acquire(timeout=5)
            engine.batcher.cancel([sequence])
            assert sink.done.wait(30)
        assert engine.manager.num_held_blocks == 0
    finally:
        engine.close()


def test_when_there_is_no_room_it_waits_and_lets_go() -> None:
    """Many at once in a small arena: some are preempted and blend again."""
    with harness(loaded(MODEL), num_blocks=70, moving=True, max_batch_tokens=32) as engine:
        engine.generate([*HEAD, *BODY], 2)
        asked = [engine.submit([*tokens(seed, 20), *BODY], 40, repair=SOME) for seed in range(50, 55)]
        for _, sink in asked:
            assert len(sink.wait()) == 40


@pytest.mark.parametrize("codec", ["exact", "int8"])
def test_from_the_tier_below(codec: str, tmp_path: Path, flips: Flips) -> None:
    own = build(MODEL, own=True)
    prompt = [*OTHER_HEAD, *BODY, *TAIL]
    engine = Harness(loaded(MODEL), moving=True, folder=tmp_path, codec=codec, num_blocks=100)
    try:
        engine.generate([*HEAD, *BODY], 2)
        assert engine.link is not None
        assert engine.link.write_back.flush(10)
        engine.manager.clear()
        sink = engine.generate(prompt, 8, repair=NONE)
        num_moved = moved(sink)[0]
        assert sink.stats is not None
        # Whole blocks are stored; of a lossy codec the last tokens that are read are computed.
        least = len(BODY) - 3 if codec == "exact" else 32
        most = len(BODY) if codec == "exact" else len(BODY) - 1
        assert least <= num_moved <= most
        assert (sink.stats.approximate_tokens > 0) == (codec == "int8")
        engine.manager.clear()
        all_again = engine.generate(prompt, 8, repair=ALL)
        assert moved(all_again)[0] == num_moved
        flips.check(own, prompt, reference(own, prompt, 8), all_again.tokens)
    finally:
        engine.close()


def test_what_is_gone_is_computed_and_forgotten(flips: Flips) -> None:
    own = build(MODEL, own=True)
    prompt = [*OTHER_HEAD, *BODY]
    with harness(loaded(MODEL), moving=True) as engine:
        assert engine.blender is not None
        engine.generate([*HEAD, *BODY], 1)
        engine.manager.clear()
        before = engine.blender.num_tokens
        assert before == len(HEAD) + len(BODY)
        sink = engine.generate(prompt, 4, repair=SOME)
        assert moved(sink) == (0, 0)
        flips.check(own, prompt, reference(own, prompt, 4), sink.tokens)
        engine.generate([*HEAD, *BODY], 1)
        engine.manager.purge(Selection())
        assert engine.blender.num_tokens == 0
        assert moved(engine.generate([*tokens(60, 9), *BODY], 1, repair=SOME)) == (0, 0)


def test_nobody_else_gets_it() -> None:
    with harness(loaded(MODEL), moving=True) as engine:
        engine.generate([*HEAD, *BODY], 1)
        other = replace(NAMESPACE, salt="anna")
        assert moved(engine.generate([*OTHER_HEAD, *BODY], 1, repair=SOME, namespace=other)) == (0, 0)


def test_learned_positions_are_used_where_they_stand() -> None:
    body = tokens(3, 90)
    with harness(loaded("gpt2"), moving=True) as engine:
        assert engine.runner._loaded.info.movement_reason is not None
        engine.generate([*HEAD, *body], 1)
        assert moved(engine.generate([*tokens(9, 29), *body], 1, repair=NONE)) == (0, 0)
        same_place = [*tokens(9, len(HEAD)), *body]
        assert moved(engine.generate(same_place, 1, repair=NONE))[0] == len(body) - 1


def test_distributions_are_told() -> None:
    with harness(loaded(MODEL), moving=True) as engine:
        sequence, sink = engine.submit([*HEAD, *BODY], 3, params=TOLD, wants_distribution=True)
        sink.wait()
        assert sequence.distribution is not None
        assert np.exp(sequence.distribution).sum() == pytest.approx(1.0, abs=1e-4)
        assert sequence.distribution.argmax() == sink.tokens[0]
        first = sink.logprobs[0]
        assert first is not None
        assert sequence.distribution.max() == pytest.approx(first.logprob, abs=1e-6)


def test_turns_behind_moved_ones_are_moved_themselves(flips: Flips) -> None:
    """A head that changes at every turn: no turn is computed twice, and exact requests see none of it."""
    own = build(MODEL, own=True)
    first, second, third = (tokens(seed, 40) for seed in (70, 71, 72))
    with harness(loaded(MODEL), num_blocks=400, moving=True) as engine:
        engine.generate([*HEAD, *BODY], 1)
        history = [*BODY, *first]
        assert moved(engine.generate([*OTHER_HEAD, *history], 1, repair=NONE))[0] == len(BODY)
        engine.manager.check_integrity()
        for seed, turn in ((73, second), (74, third)):
            before = len(history)
            history += turn
            prompt = [*tokens(seed, 25), *history]
            assert moved(engine.generate(prompt, 1, repair=SOME))[0] == before
        exact = engine.generate(prompt, 4)
        assert exact.stats is not None
        assert exact.stats.cached_tokens == 25
        flips.check(own, prompt, reference(own, prompt, 4), exact.tokens)
        engine.manager.check_integrity()
