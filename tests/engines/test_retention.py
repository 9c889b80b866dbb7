"""Sequences within a budget: what they answer is what attention over the kept tokens alone answers."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AttentionInterface

from engines.driver import GREEDY, NAMESPACE, Collected, Harness, harness, reference
from engines.models import build, loaded
from ostinato.events import Event, StepFinished
from ostinato.retention.keeping import Keep, Keeping, StepRows
from ostinato.retention.methods import METHOD_NAMES, method_by_name
from ostinato.types import SamplingParams

MODEL = "llama"
BLOCK = 4
WITH_LOGPROBS = SamplingParams(temperature=0.0, logprobs=0)


@dataclass(slots=True)
class Recorded(Keeping):
    """Remembers what every token could see as it was computed: ``[layers, heads, positions]``."""

    seen: dict[int, np.ndarray[Any, Any]] = field(default_factory=dict)

    def note_rows(self, start: int, rows: StepRows, mass: Any) -> None:
        before = self.positions.copy()
        for position in range(start, start + rows.num_rows):
            own = np.broadcast_to(np.arange(start, position + 1), (*before.shape[:2], position + 1 - start))
            self.seen[position] = np.concatenate([before, own], axis=2)
        # What another Keeping's zero-argument super() would do; slots make a new class of this one.
        Keeping.note_rows(self, start, rows, mass)


def keeping_of(budget: int, method: str, num_prompt: int, protected: tuple[int, ...] = ()) -> Recorded:
    info = loaded(MODEL).info
    flags = np.zeros(num_prompt, np.bool_)
    flags[list(protected)] = True
    keep = Keep(budget, method_by_name(method), flags, np.zeros(num_prompt, np.bool_))
    return Recorded(keep, len(info.kv_heads), info.kv_heads[0])


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(5, loaded(MODEL).info.vocab_size, length).tolist()


def _masked_attention(
    module: Any, query: Any, key: Any, value: Any, attention_mask: Any, *, hidden: Any = None, **rest: Any
) -> tuple[Any, None]:
    """Plain attention in which row ``t`` of each key head sees what ``hidden`` leaves it."""
    group = query.shape[1] // key.shape[1]
    keys, values = (t.repeat_interleave(group, dim=1) for t in (key, value))
    scores = query @ keys.transpose(-1, -2) * rest["scaling"]
    scores = scores.masked_fill(hidden[module.layer_idx].repeat_interleave(group, dim=0), float("-inf"))
    return (scores.softmax(-1) @ values).transpose(1, 2), None


AttentionInterface.register("masked-reference", _masked_attention)


@torch.inference_mode()
def logprobs_of(tokens: list[int], num_prompt: int, keeping: Recorded) -> tuple[list[int], list[float]]:
    """What the model, by itself, finds likeliest at every place of the answer, and how likely that is."""
    model = copy.deepcopy(build(MODEL, own=True))
    model.set_attn_implementation("masked-reference")
    length = len(tokens) - 1  # the last one was never computed
    hidden = torch.ones(keeping.num_layers, keeping.num_heads, length, length, dtype=torch.bool)
    for position in range(length):  # those that came from the cache saw everything before them
        seen = keeping.seen.get(
            position, np.broadcast_to(np.arange(position + 1), (*hidden.shape[:2], position + 1))
        )
        hidden[:, :, position].scatter_(2, torch.tensor(seen, dtype=torch.int64), False)
    logits = model(input_ids=torch.tensor([tokens[:-1]]), use_cache=False, hidden=hidden).logits[0]
    best = torch.log_softmax(logits[num_prompt - 1 :].double(), -1).max(-1)
    return best.indices.tolist(), best.values.tolist()


def run(engine: Harness, prompt: list[int], max_new: int, keeping: Keeping) -> Collected:
    _, sink = engine.submit(prompt, max_new, params=WITH_LOGPROBS, keeping=keeping)
    sink.wait()
    return sink


@pytest.mark.parametrize("method", METHOD_NAMES)
def test_the_answer_is_that_of_attention_over_what_was_kept(method: str) -> None:
    prompt, protected = prompt_of(150), (0, 1, 40, 41, 148, 149)
    keeping = keeping_of(64, method, len(prompt), protected)
    with harness(loaded(MODEL), num_blocks=64, block_size=BLOCK) as engine:
        sink = run(engine, prompt, 70, keeping)
    assert sink.stats is not None
    assert sink.stats.dropped_tokens == 150 + 69 - keeping.num_places > 0
    expected, values = logprobs_of([*prompt, *sink.tokens], len(prompt), keeping)
    np.testing.assert_allclose([item.logprob for item in sink.logprobs if item], values, atol=2e-4)
    assert sink.tokens == expected
    for row in keeping.positions.reshape(-1, keeping.num_places):
        assert set(protected) <= set(row.tolist())


@pytest.mark.parametrize("method", METHOD_NAMES)
def test_with_room_for_everything_nothing_changes(method: str) -> None:
    prompt = prompt_of(50)
    expected = reference(build(MODEL, own=True), prompt, 30)
    with harness(loaded(MODEL), num_blocks=64, block_size=BLOCK) as engine:
        keeping = keeping_of(79, method, len(prompt))
        assert run(engine, prompt, 30, keeping).tokens == expected
        assert keeping.num_dropped == 0


@pytest.mark.parametrize("budget", [61, 64])
def test_it_never_holds_more_than_its_budget(budget: int) -> None:
    held: list[int] = []

    def observe(event: Event) -> None:
        if isinstance(event, StepFinished):
            held.append(engine.manager.num_held_blocks)

    with harness(loaded(MODEL), num_blocks=64, block_size=BLOCK, observer=observe) as engine:
        run(engine, prompt_of(150), 60, keeping_of(budget, "summary", 150))
    assert max(held) <= -(-budget // BLOCK)


def test_what_was_thinned_out_cannot_be_found_and_what_was_exact_stays() -> None:
    prompt = prompt_of(150)
    expected = reference(build(MODEL, own=True), prompt, 8)
    with harness(loaded(MODEL), num_blocks=200, block_size=BLOCK) as engine:
        thinned = run(engine, prompt, 40, keeping_of(64, "summary", 150, tuple(range(10))))
        tokens = np.array([*prompt, *thinned.tokens, 7], np.int32)
        assert engine.manager.peek(NAMESPACE, tokens) == 10  # what is protected before anything was dropped
        assert engine.generate(prompt, 8).tokens == expected
        # Now all of it is there: it is taken as far as the budget goes, and written over nowhere.
        again = run(engine, prompt, 40, keeping_of(64, "summary", 150, tuple(range(10))))
        assert again.stats is not None
        assert again.stats.cached_tokens == keeping_of(64, "summary", 150).keep.num_usable_hit
        assert engine.generate(prompt, 8).tokens == expected
        engine.manager.check_integrity()


def test_an_answer_that_outgrows_its_budget_leaves_the_prompt_findable() -> None:
    prompt = prompt_of(50)
    expected = reference(build(MODEL, own=True), prompt, 8)
    with harness(loaded(MODEL), num_blocks=200, block_size=BLOCK) as engine:
        keeping = keeping_of(64, "summary", 50)
        sink = run(engine, prompt, 100, keeping)
        assert keeping.num_dropped > 0
        tokens = np.array([*prompt, *sink.tokens], np.int32)
        assert engine.manager.peek(NAMESPACE, tokens) == 50
        assert engine.generate(prompt, 8).tokens == expected
        values = logprobs_of([*prompt, *sink.tokens], len(prompt), keeping)
        assert sink.tokens == values[0]


def test_many_at_once_in_a_small_arena_among_others() -> None:
    """More than there is room for: some are thrown out and start over, all finish, and all as if alone."""
    kept = [(prompt_of(120, seed), keeping_of(64, method, 120)) for seed, method in enumerate(METHOD_NAMES)]
    plain = [prompt_of(40, seed) for seed in range(100, 104)]
    expected = [reference(build(MODEL, own=True), prompt, 30) for prompt in plain]
    with harness(loaded(MODEL), num_blocks=40, block_size=BLOCK) as engine:
        sinks = [engine.submit(p, 50, params=WITH_LOGPROBS, keeping=k)[1] for p, k in kept]
        others = [engine.submit(p, 30)[1] for p in plain]
        assert [sink.wait() for sink in others] == expected
        for (prompt, keeping), sink in zip(kept, sinks, strict=True):
            assert logprobs_of([*prompt, *sink.wait()], 120, keeping)[0] == sink.tokens
        engine.manager.check_integrity()


def test_the_only_one_may_have_every_block() -> None:
    """Its prompt is cached in the whole arena, and it must replace what it shares."""
    prompt = prompt_of(64)
    with harness(loaded(MODEL), num_blocks=18, block_size=BLOCK) as engine:
        engine.generate(prompt, 4)
        keeping = keeping_of(64, "sinks", 64)
        sink = run(engine, prompt, 60, keeping)
        assert logprobs_of([*prompt, *sink.tokens], 64, keeping)[0] == sink.tokens
        engine.manager.check_integrity()


def test_cancelled_amid_its_prompt_it_leaves_nothing() -> None:
    with harness(loaded(MODEL), num_blocks=64, block_size=BLOCK, max_batch_tokens=8) as engine:
        sequence, sink = engine.submit(prompt_of(300), 50, params=GREEDY, keeping=keeping_of(64, "h2o", 300))
        engine.batcher.cancel([sequence])
        assert sink.done.wait(60)
        assert sink.reason == "abort"
    assert engine.manager.num_free_blocks + engine.manager.num_evictable_blocks == 64
