"""Rows with gaps, places that are not positions, attention mass, early ends: against plain computations."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from engines.models import build, loaded
from engines.test_invariance import EXACT
from ostinato.engines import ways
from ostinato.engines.attention import LayerRule
from ostinato.engines.hf import load_model
from ostinato.engines.runners import LoadedModel, PagedRunner
from ostinato.engines.step import Step
from ostinato.kv.arena import Arena, LayerShape
from ostinato.types import Plan, SamplingParams, SequencePlan

GREEDY = SamplingParams(temperature=0.0)
BLOCK_SIZE = 8


@pytest.fixture(params=["kernel", "fallback"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "fallback":
        monkeypatch.setattr(ways, "can_page", lambda *_: False)
    return str(request.param)


class World:
    """A paged model and one sequence of ``length`` tokens over scattered blocks."""

    def __init__(self, model: str | LoadedModel, length: int, seed: int = 0) -> None:
        self.model = loaded(model) if isinstance(model, str) else model
        chance = np.random.default_rng(seed)
        self.tokens = chance.integers(3, self.model.vocab_size, length).astype(np.int32)
        num_blocks = -(-length // BLOCK_SIZE)
        self.table = chance.permutation(num_blocks + 3)[:num_blocks].astype(np.intp)
        self.runner = PagedRunner(self.model, (num_blocks + 3) * BLOCK_SIZE)
        self.runner.open(0, self.tokens, GREEDY)

    def slots(self, places: np.ndarray) -> np.ndarray:
        slots: np.ndarray = self.table[places // BLOCK_SIZE] * BLOCK_SIZE + places % BLOCK_SIZE
        return slots.astype(np.int32)

    def plan(self, places: Any, positions: Any = None, *, num_watched: int = 0) -> SequencePlan:
        places = np.asarray(places, np.int32)
        positions = places if positions is None else np.asarray(positions, np.int32)
        return SequencePlan(
            0, self.tokens[positions], positions, self.slots(places), self.table, BLOCK_SIZE, True, places,
            num_watched,
        )  # fmt: skip

    def logits(self, plan: SequencePlan) -> Tensor:
        """Of the last row."""
        captured = []
        sample = self.runner._samplers.sample

        def capture(ids: Any, rows: Tensor, *more: Any) -> Any:
            captured.append(rows)
            return sample(ids, rows, *more)

        self.runner._samplers.sample = capture  # type: ignore[method-assign]
        try:
            self.runner.execute(Plan((plan,)))
        finally:
            self.runner._samplers.sample = sample  # type: ignore[method-assign]
        return captured[0][0]

    def kv(self) -> list[Tensor]:
        """Of the whole sequence, by place: per layer keys and values."""
        slots = torch.from_numpy(self.slots(np.arange(len(self.tokens))).astype(np.int64))
        arena = self.runner.arena
        return [tensor[:, slots].clone() for tensor in (*arena.keys, *arena.values)]

    def spoil(self, places: np.ndarray) -> None:
        slots = torch.from_numpy(self.slots(places).astype(np.int64))
        for group in self.runner.arena.groups:
            group[:, :, slots] = math.nan


@pytest.mark.parametrize("name", EXACT)
def test_rows_with_gaps_are_bit_for_bit_those_of_the_whole(name: str) -> None:
    world = World(name, 75)
    expected, before = world.logits(world.plan(np.arange(75))), world.kv()
    rows = np.array([0, 1, 2, 17, 18, 40, 63, 64, 74])
    world.spoil(rows)
    assert torch.equal(world.logits(world.plan(rows)), expected)
    assert all(torch.equal(now, then) for now, then in zip(world.kv(), before, strict=True))


@pytest.mark.model
@pytest.mark.slow
def test_the_default_model(default_model_path: Path) -> None:
    """Half the tokens computed again, spread over 600: the same bits; deviations none; mass sums up."""
    world = World(load_model(default_model_path), 600)
    expected, before = world.logits(world.plan(np.arange(600))), world.kv()
    rows = np.sort(np.random.default_rng(1).permutation(599)[:300])
    found = world.runner.deviations(world.plan(rows), 1)
    assert float(found.value.max()) == float(found.key.max()) == 0.0
    world.spoil(rows)
    plan = world.plan(np.append(rows, 599), num_watched=7)
    assert torch.equal(world.logits(plan), expected)
    assert all(torch.equal(now, then) for now, then in zip(world.kv(), before, strict=True))
    mass = world.runner.execute(Plan((plan,))).mass[0]
    heads = world.model.model.config.num_attention_heads
    np.testing.assert_allclose([layer.sum() for layer in mass], 7.0 * heads, rtol=1e-4)


@pytest.mark.parametrize("name", ["llama", "mistral-sliding", "gemma2", "gpt-oss", "deepseek-v3"])
def test_rows_with_gaps_without_the_kernel(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ways, "can_page", lambda *_: False)
    world = World(name, 75)
    expected, before = world.logits(world.plan(np.arange(75))), world.kv()
    rows = np.array([0, 1, 2, 17, 18, 40, 63, 64, 74])
    world.spoil(rows)
    torch.testing.assert_close(world.logits(world.plan(rows)), expected, atol=1e-4, rtol=1e-4)
    for now, then in zip(world.kv(), before, strict=True):
        torch.testing.assert_close(now, then, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["llama", "qwen3", "llama-yarn", "phi", "gpt2", "gpt-neox"])
def test_compacted_places_are_a_cache_with_tokens_taken_out(name: str, way: str) -> None:
    """Every layer keeps tokens of its own choice; new ones go on behind them, at their true positions."""
    length, num_kept, num_new = 60, 21, 7
    world = World(name, length + num_new)
    world.logits(world.plan(np.arange(length)))
    chance = np.random.default_rng(1)
    choices = [np.sort(chance.permutation(length)[:num_kept]) for _ in range(len(world.runner.arena.layers))]

    reference = build(name, own=True)
    cache = transformers.DynamicCache(config=reference.config)
    tokens = torch.from_numpy(world.tokens.astype(np.int64)).unsqueeze(0)
    with torch.inference_mode():
        reference(input_ids=tokens[:, :length], cache=cache)
        for layer, kept in zip(cache.layers, choices, strict=True):
            layer.keys, layer.values = layer.keys[:, :, kept], layer.values[:, :, kept]
        positions = torch.arange(length, length + num_new).unsqueeze(0)
        output = reference(
            input_ids=tokens[:, length:],
            position_ids=positions,
            cache=cache,
            attention_mask=torch.ones(1, num_kept + num_new, dtype=torch.long),
        )

    before = world.kv()
    arena = world.runner.arena
    target = torch.from_numpy(world.slots(np.arange(num_kept)).astype(np.int64))
    for layer, kept in enumerate(choices):
        arena.keys[layer][:, target] = before[layer][:, kept]
        arena.values[layer][:, target] = before[len(choices) + layer][:, kept]
    world.spoil(np.arange(num_kept, length + num_new))
    got = []
    for start, end in ((0, 4), (4, 5), (5, num_new)):  # some at once, one alone, some
        places, positions = (
            np.arange(num_kept + start, num_kept + end),
            np.arange(length + start, length + end),
        )
        got.append(world.logits(world.plan(places, positions)))
    expected = output.logits[0, [3, 4, num_new - 1]]
    torch.testing.assert_close(torch.stack(got), expected, atol=2e-4, rtol=2e-4)


def test_models_whose_places_must_be_positions_say_so() -> None:
    assert loaded("llama").info.compaction_reason is None
    for name in ("mistral-sliding", "gemma3", "gemma2", "gpt-oss"):
        assert "window" in (loaded(name).info.compaction_reason or "")
    assert "Bloom" in (loaded("bloom").info.compaction_reason or "")
    world = World("mistral-sliding", 20)
    with pytest.raises(AssertionError, match="window"):
        world.runner.execute(Plan((world.plan(np.arange(5), np.arange(10, 15)),)))


@pytest.mark.parametrize("name", ["llama", "gemma2", "mistral-sliding", "gpt-oss", "gpt2", "deepseek-v3"])
def test_mass_is_what_the_models_own_attention_gives(name: str, way: str) -> None:
    """Of rows at the end, of a single row, of all; also where scores are squashed, cut off, or sunk."""
    world = World(name, 50)
    reference = copy.deepcopy(build(name, own=True))
    reference.set_attn_implementation("eager")
    tokens = torch.from_numpy(world.tokens.astype(np.int64)).unsqueeze(0)
    with torch.inference_mode():
        weights = reference(input_ids=tokens, output_attentions=True, use_cache=False).attentions
    kv_heads = [shape.kv_heads for shape in world.runner.arena.layers]
    for start, end, num_watched in ((0, 30, 30), (30, 49, 6), (49, 50, 1)):
        result = world.runner.execute(Plan((world.plan(np.arange(start, end), num_watched=num_watched),)))
        mass = result.mass[0]
        for layer, heads in enumerate(kv_heads):
            own = weights[layer][0, :, end - num_watched : end, :end]
            expected = own.reshape(heads, -1, num_watched, end).sum(dim=(1, 2))
            torch.testing.assert_close(torch.from_numpy(mass[layer]), expected, atol=1e-4, rtol=1e-3)
    assert 0 in result.sampled
    assert world.runner.execute(Plan((world.plan([49]),))).mass == {}


@given(
    lengths=st.lists(st.integers(1, 400), min_size=1, max_size=3),
    shape=st.sampled_from([LayerShape(2, 8, 8), LayerShape(3, 64, 64), LayerShape(1, 20, 12)]),
    group=st.integers(1, 4),
    window=st.one_of(st.none(), st.integers(1, 300)),
    with_kernel=st.booleans(),
    seed=st.integers(0, 2**16),
    data=st.data(),
)
@settings(max_examples=60, deadline=None)
def test_any_gaps_and_any_watched_rows(
    lengths: list[int], shape: LayerShape, group: int, window: int | None, with_kernel: bool, seed: int,
    data: st.DataObject,
) -> None:  # fmt: skip
    """Output and mass against the softmax in double precision."""
    generator, chance = torch.Generator().manual_seed(seed), np.random.default_rng(seed)
    counts = [-(-n // BLOCK_SIZE) for n in lengths]
    free = list(chance.permutation(sum(counts)))
    arena = Arena([shape], sum(counts) * BLOCK_SIZE, dtype=torch.float32, device=torch.device("cpu"))
    plans, expected = [], []
    query, key, value = [], [], []
    for length, count in zip(lengths, counts, strict=True):
        table = np.array([free.pop() for _ in range(count)], np.intp)
        places = np.sort(chance.permutation(length)[: data.draw(st.integers(1, length))]).astype(np.int32)
        num_watched = data.draw(st.integers(0, len(places)))
        at = np.arange(length)
        slots = table[at // BLOCK_SIZE] * BLOCK_SIZE + at % BLOCK_SIZE
        keys = torch.randn(shape.kv_heads, length, shape.key_dim, generator=generator)
        values = torch.randn(shape.kv_heads, length, shape.value_dim, generator=generator)
        queries = torch.randn(shape.kv_heads * group, len(places), shape.key_dim, generator=generator)
        arena.keys[0][:, slots], arena.values[0][:, slots] = keys, values
        arena.keys[0][:, slots[places]] = arena.values[0][:, slots[places]] = math.nan
        zeros = np.zeros(len(places), np.int32)
        plans.append(
            SequencePlan(
                len(plans), zeros, places, slots[places].astype(np.int32), table, BLOCK_SIZE, False, places,
                num_watched,
            )
        )  # fmt: skip
        query.append(queries)
        key.append(keys[:, places])
        value.append(values[:, places])
        distance = torch.from_numpy(places).unsqueeze(1) - torch.arange(length)
        hidden = (distance < 0) | (distance >= (window or length))
        scores = queries.double() @ keys.double().repeat_interleave(group, 0).transpose(1, 2) * 0.3
        weights = scores.masked_fill(hidden, -math.inf).softmax(-1)
        output = (weights @ values.double().repeat_interleave(group, 0)).transpose(0, 1)
        watched = weights[:, len(places) - num_watched :, : int(places[-1]) + 1]
        mass = watched.reshape(shape.kv_heads, -1, watched.shape[2]).sum(1) if num_watched else None
        expected.append((output, mass))
    step = Step(arena, plans, torch.device("cpu"))
    whole = ways.can_page
    try:
        if not with_kernel:
            ways.can_page = lambda *_: False
        got = step.attend(
            0, LayerRule(0.3, window), *(torch.cat(t, dim=1).unsqueeze(0) for t in (query, key, value))
        )[0].split([len(plan.tokens) for plan in plans])
    finally:
        ways.can_page = whole
    masses = iter(step.mass.get(0, []))
    for own, (output, mass) in zip(got, expected, strict=True):
        torch.testing.assert_close(own, output.float(), atol=2e-5, rtol=2e-4)
        if mass is not None:
            torch.testing.assert_close(next(masses), mass.float(), atol=2e-5, rtol=2e-4)
    assert next(masses, None) is None


@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt2"])
@pytest.mark.parametrize("rows", [np.arange(40), np.array([3, 4, 20, 39]), np.array([11])])
def test_deviations_of_exact_kv_are_none(name: str, rows: np.ndarray, way: str) -> None:
    world = World(name, 40)
    world.runner.execute(Plan((world.plan(np.arange(40)),)))
    before = world.kv()
    for layer in range(len(world.runner.arena.layers)):
        found = world.runner.deviations(world.plan(rows), layer)
        assert found.key.shape == found.value.shape == (len(rows),)
        assert float(np.max(found.key / found.key_norm)) < 1e-9
        assert float(np.max(found.value / found.value_norm)) < 1e-9
    for now, then in zip(world.kv(), before, strict=True):
        torch.testing.assert_close(now, then, atol=1e-5, rtol=1e-4)


def test_deviations_are_the_difference_and_what_is_behind_stays() -> None:
    world = World("llama", 40)
    world.runner.execute(Plan((world.plan(np.arange(40)),)))
    exact = world.kv()
    arena = world.runner.arena
    rows = np.array([5, 6, 30])
    slots = torch.from_numpy(world.slots(rows).astype(np.int64))
    for layer in range(3):
        arena.keys[layer][:, slots] += 0.5
        arena.values[layer][:, slots] *= 3.0
    spoiled = world.kv()
    found = world.runner.deviations(world.plan(rows), 1)
    keys, values = exact[1][:, rows], exact[3 + 1][:, rows]
    np.testing.assert_allclose(found.key, np.full(3, 0.25 * keys[:, 0].numel()), rtol=1e-3)
    np.testing.assert_allclose(found.value, 4 * values.square().sum((0, 2)).numpy(), rtol=1e-3)
    np.testing.assert_allclose(found.key_norm, keys.square().sum((0, 2)).numpy(), rtol=1e-3)
    np.testing.assert_allclose(found.value_norm, values.square().sum((0, 2)).numpy(), rtol=1e-3)
    now = world.kv()
    for tensor in (0, 3):  # layer 0: computed as in any step
        torch.testing.assert_close(now[tensor], exact[tensor], atol=1e-5, rtol=1e-4)
    for tensor in (1, 2, 4, 5):
        assert torch.equal(now[tensor], spoiled[tensor])
