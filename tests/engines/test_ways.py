"""Attention on devices: which way is chosen, what FlexAttention and FlashInfer are told, what comes of it.

FlexAttention runs on processors, too: as torch's plain reading of the mask, and compiled. What needs a GPU is
skipped where there is none.
"""

from __future__ import annotations

import logging
import math
import os
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention

from engines.driver import Flips, harness, reference
from engines.models import VOCAB, build, loaded
from engines.test_paged import make_world
from ostinato.engines import flex, ways
from ostinato.engines.attention import LayerRule, RunsStep
from ostinato.engines.flash_infer import Pages
from ostinato.engines.flex import FlexStep
from ostinato.engines.hf import load_model
from ostinato.engines.step import Step
from ostinato.engines.ways import Kind, by_capability, ways_for, works
from ostinato.kv.arena import Arena, LayerShape
from ostinato.types import SequencePlan

CPU = torch.device("cpu")
has_gpu = torch.cuda.is_available()


def kind(
    device: str = "cuda", dtype: torch.dtype = torch.bfloat16, dim: int = 64, value_dim: int | None = None,
    **rule: Any,
) -> Kind:  # fmt: skip
    shape = LayerShape(2, dim, dim if value_dim is None else value_dim)
    return Kind(torch.device(device), dtype, 6, shape, LayerRule(dim**-0.5, **rule))


# ---------------------------------------------------------------- the choice


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Says what a machine has: the compute capability of its card, and which packages."""

    def has(capability: tuple[int, int], *packages: str) -> None:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        monkeypatch.setattr(ways, "find_spec", lambda name: object() if name in packages else None)

    return has


def test_what_a_device_can_do_decides(machine: Any) -> None:
    machine((9, 0), "triton", "flashinfer")
    assert by_capability(kind()) == ("flashinfer", "flex")
    assert by_capability(kind(window=100, softcap=30.0)) == ("flashinfer", "flex")
    assert by_capability(kind(dtype=torch.float32)) == ("flex",)
    assert by_capability(kind(dim=96)) == ("flex",)
    assert by_capability(kind(dim=128, value_dim=64)) == ("flex",)
    machine((9, 0), "triton")
    assert by_capability(kind()) == ("flex",)
    assert by_capability(kind("xpu")) == ("flex",)
    machine((9, 0))
    assert by_capability(kind()) == ()
    machine((7, 5), "triton", "flashinfer")
    assert by_capability(kind()) == ()
    assert by_capability(kind("mps")) == ()


def test_a_processor_has_its_kernel_and_else_goes_by_runs() -> None:
    assert ways_for(kind("cpu", torch.float32)) == ("kernel", "runs")
    assert ways_for(kind("cpu", torch.float32, window=9)) == ("kernel", "runs")
    assert ways_for(kind("cpu", torch.float32, softcap=9.0)) == ("runs",)
    assert ways_for(kind("cpu", torch.bfloat16)) == ("runs",)


def test_what_does_not_work_is_left_out(
    machine: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Here neither does: there is no GPU, and no FlashInfer."""
    machine((9, 0), "triton", "flashinfer")
    monkeypatch.setattr(ways, "_seen_to_work", ways._seen_to_work.__wrapped__)
    if not has_gpu:
        with caplog.at_level(logging.WARNING):
            assert ways_for(kind()) == ("runs",)
        assert "attention does not go through flashinfer here" in caplog.text
        assert "attention does not go through flex here" in caplog.text


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("rule", [{}, {"window": 30}, {"softcap": 2.0}])
def test_a_way_is_tried_against_the_plain_one(
    rule: dict[str, Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        assert works("flex", kind("cpu", dtype, **rule))
    right = FlexStep._visible

    def sees_one_more(self: FlexStep, window: int | None) -> Any:
        inner = right(self, window)
        return lambda batch, head, row, slot: inner(batch, head, row, slot) | (slot == 17 * 16)

    monkeypatch.setattr(FlexStep, "_visible", sees_one_more)
    with caplog.at_level(logging.WARNING):
        assert not works("flex", kind("cpu", torch.float32, **rule))
    assert "differs by" in caplog.text


# ---------------------------------------------------------------- FlexAttention


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's plain reading of the mask. It does not look at which tiles are to be read."""

    def plainly(*tensors: Tensor, **options: Any) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that it is not compiled
            return flex_attention(*tensors, **options)

    monkeypatch.setattr(flex, "compiled", lambda: plainly)


class Scattered:
    """Sequences of :func:`engines.test_paged.make_world`, with KV in the arena and rows to attend."""

    def __init__(
        self, lengths: list[int], *, num_shared: int, block_size: int, shape: int, seed: int
    ) -> None:
        self.world = make_world(lengths, shape=shape, block_size=block_size, num_shared=num_shared, seed=seed)
        self.arena = self.world.arena()
        for group in self.arena.groups:
            group.zero_()
        for sequence in range(len(lengths)):
            slots = torch.from_numpy(self.world.slots(sequence, 0, lengths[sequence]).astype(np.int64))
            self.arena.keys[0][:, slots] = self.world.key[sequence]
            self.arena.values[0][:, slots] = self.world.value[sequence]

    def plans(self, places: list[np.ndarray]) -> tuple[SequencePlan, ...]:
        plans = []
        for sequence, at in enumerate(places):
            table, size = self.world.tables[sequence], self.world.block_size
            slots = table[at // size] * size + at % size
            at = at.astype(np.int32)
            plans.append(SequencePlan(sequence, at, at, slots.astype(np.int32), table, size, True, at))
        return tuple(plans)

    def query(self, places: list[np.ndarray]) -> Tensor:
        return torch.cat([self.world.query[i][:, at] for i, at in enumerate(places)], dim=1).unsqueeze(0)

    def expected(self, places: list[np.ndarray], rule: LayerRule) -> Tensor:
        """The textbook, ``[1, T, heads, dim]``."""
        rows = []
        for i, at in enumerate(places):
            key, value = (
                t[i].repeat_interleave(self.world.group, 0) for t in (self.world.key, self.world.value)
            )
            scores = self.world.query[i][:, at] @ key.transpose(1, 2) * rule.scaling
            if rule.softcap is not None:
                scores = torch.tanh(scores / rule.softcap) * rule.softcap
            distance = torch.from_numpy(at).unsqueeze(1) - torch.arange(key.shape[1])
            hidden = (distance < 0) | (distance >= (rule.window or math.inf))
            rows.append((scores.masked_fill(hidden, -math.inf).softmax(-1) @ value).transpose(0, 1))
        return torch.cat(rows).unsqueeze(0)


def drawn_rows(chance: np.random.Generator, length: int, how: str) -> np.ndarray:
    if how == "decode":
        return np.array([length - 1])
    if how == "chunk":
        return np.arange(int(chance.integers(0, length)), length)
    return np.sort(chance.permutation(length)[: int(chance.integers(1, length + 1))])


@pytest.mark.usefixtures("eager")
@given(
    lengths=st.lists(st.integers(1, 150), min_size=1, max_size=6),
    how=st.lists(st.sampled_from(["decode", "chunk", "gaps"]), min_size=6, max_size=6),
    num_shared=st.integers(0, 3),
    block_size=st.sampled_from([1, 8, 16, 200]),
    window=st.one_of(st.none(), st.integers(1, 60)),
    softcap=st.one_of(st.none(), st.just(2.0)),
    shape=st.integers(0, 2),
    seed=st.integers(0, 2**16),
)
@settings(max_examples=25, deadline=None)
def test_the_mask_is_what_the_plan_says(
    lengths: list[int],
    how: list[str],
    num_shared: int,
    block_size: int,
    window: int | None,
    softcap: float | None,
    shape: int,
    seed: int,
) -> None:
    chance = np.random.default_rng(seed)
    scattered = Scattered(lengths, num_shared=num_shared, block_size=block_size, shape=shape, seed=seed)
    places = [drawn_rows(chance, length, way) for length, way in zip(lengths, how, strict=False)]
    plans, query, rule = scattered.plans(places), scattered.query(places), LayerRule(0.3, window, softcap)
    step = FlexStep(scattered.arena, plans, CPU)
    output, lse = step.attend(0, query, rule)
    torch.testing.assert_close(output, scattered.expected(places, rule), atol=1e-4, rtol=1e-4)
    rows = RunsStep(scattered.arena, plans, CPU)
    slots = torch.from_numpy(np.concatenate([plan.slots for plan in plans]).astype(np.int64))
    key, value = (t[0][:, slots].unsqueeze(0) for t in (scattered.arena.keys, scattered.arena.values))
    _, expected_lse = rows.attend(0, query, key, value, rule)
    torch.testing.assert_close(lse, expected_lse, atol=1e-4, rtol=1e-4)
    # Every tile of the arena in which a row sees something is read, and no other.
    sees = step._visible(window)
    slot = torch.arange(scattered.arena.num_slots)
    for tile, found in enumerate(step._tiles(window)):
        of_rows = torch.arange(tile * flex.TILE, min((tile + 1) * flex.TILE, query.shape[2])).unsqueeze(1)
        seen = sees(slot, slot, of_rows, slot.unsqueeze(0)).any(0)
        assert set(found) >= set((slot[seen] // flex.TILE).tolist())
        assert len(found) <= len({int(s) // flex.TILE for s in slot[seen]}) + 2 * len(plans)


@pytest.mark.skipif(
    "OSTINATO_TEST_COMPILED" not in os.environ,
    reason="compiling takes a minute: OSTINATO_TEST_COMPILED=1 does it",
)
@pytest.mark.filterwarnings("ignore")  # torch's compiler has many
@pytest.mark.parametrize("window", [None, 40])
def test_compiled_it_reads_the_tiles_that_it_is_told(
    window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With these sizes: code for any makes no sense to a compiler in torch 2.13, on processors."""
    monkeypatch.setattr(flex, "compiled", lambda: torch.compile(flex_attention, fullgraph=True))
    chance = np.random.default_rng(1)
    lengths = chance.integers(150, 400, 4).tolist()
    scattered = Scattered(lengths, num_shared=3, block_size=16, shape=0, seed=1)
    places = [drawn_rows(chance, length, "gaps") for length in lengths]
    places[0] = np.arange(lengths[0])[-129:]
    rule = LayerRule(0.125, window)
    step = FlexStep(scattered.arena, scattered.plans(places), CPU)
    with torch.inference_mode():
        output, _ = step.attend(0, scattered.query(places), rule, with_lse=False)
    torch.testing.assert_close(output, scattered.expected(places, rule), atol=1e-4, rtol=1e-4)
    # It does look at them: with the last of each row left out it is wrong.
    mask = step._mask(window)
    mask.kv_num_blocks = mask.kv_num_blocks - 1
    with torch.inference_mode():
        output, _ = step.attend(0, scattered.query(places), rule, with_lse=False)
    assert not torch.allclose(output, scattered.expected(places, rule), atol=1e-2)


class Zeroed(Arena):
    """As an arena of a device is: set to zero."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        for group in self.groups:
            group.zero_()


@pytest.fixture
def through_flex(monkeypatch: pytest.MonkeyPatch) -> None:
    from ostinato.engines import runners

    monkeypatch.setattr(runners, "Arena", Zeroed)
    monkeypatch.setattr("ostinato.engines.step.ways_for", lambda kind: ("flashinfer", "flex", "runs"))
    # FlashInfer cannot be here: rows are said to have gaps.
    monkeypatch.setattr("ostinato.engines.step.are_at_the_end", lambda sequences: False)


def tokens(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(3, VOCAB, length).tolist()  # type: ignore[no-any-return]


@pytest.mark.usefixtures("through_flex", "eager")
@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt-oss", "deepseek-v3"])
def test_whole_models_answer_the_same_through_it(name: str, flips: Flips) -> None:
    """Together, warm and cold, in a small arena: what transformers answers."""
    own = build(name, own=True)
    head = tokens(1, 30)
    prompts = [head[: 10 + 3 * i] + tokens(20 + i, 6 + i) for i in range(5)]
    with harness(loaded(name), num_blocks=24, block_size=4, max_batch_tokens=16) as engine:
        for _ in range(2):
            sinks = [engine.submit(prompt, 6)[1] for prompt in prompts]
            for prompt, sink in zip(prompts, sinks, strict=True):
                flips.check(own, prompt, reference(own, prompt, 6), sink.wait())


@pytest.mark.usefixtures("eager")
def test_what_is_not_a_number_stays_in_its_own_sequence(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under a mask a weight is zero, and zero times infinity is not."""
    monkeypatch.setattr("ostinato.engines.step.ways_for", lambda kind: ("flex", "runs"))
    arena = Zeroed([LayerShape(1, 8, 8)], 64, dtype=torch.float32, device=CPU)
    at = np.arange(4, dtype=np.int32)
    plans = [
        SequencePlan(i, at, at, (at + 16 * i).astype(np.int32), np.array([i], np.intp), 16, True)
        for i in range(2)
    ]
    query, key, value = torch.randn(3, 1, 1, 8, 8).unbind()
    value[:, :, :4] = math.inf
    key[:, :, 1] = math.nan
    output = Step(arena, plans, CPU).attend(0, LayerRule(0.3), query, key, value)
    alone = Step(arena, plans[1:], CPU).attend(
        0, LayerRule(0.3), *(tensor[:, :, 4:] for tensor in (query, key, value))
    )
    assert alone.isfinite().all()
    torch.testing.assert_close(output[:, 4:], alone)


# ---------------------------------------------------------------- FlashInfer


@given(
    lengths=st.lists(st.tuples(st.integers(1, 90), st.integers(1, 90)), min_size=1, max_size=5),
    block_size=st.sampled_from([1, 8, 16]),
    seed=st.integers(0, 2**16),
)
@settings(max_examples=50, deadline=None)
def test_what_flashinfer_is_told(lengths: list[tuple[int, int]], block_size: int, seed: int) -> None:
    """Read as its documentation says, its tables are the plan."""
    scattered = Scattered([n for n, _ in lengths], num_shared=1, block_size=block_size, shape=1, seed=seed)
    places = [np.arange(max(0, n - rows), n) for n, rows in lengths]
    pages = Pages.of(scattered.plans(places))
    assert {t.dtype for t in (pages.rows, pages.pages, pages.ids, pages.last_lengths)} == {torch.int32}
    keys = scattered.arena.keys[0]
    blocks = keys.unflatten(1, (-1, block_size)).transpose(0, 1)
    for i, at in enumerate(places):
        ids = pages.ids[pages.pages[i] : pages.pages[i + 1]]
        num_keys = block_size * (len(ids) - 1) + int(pages.last_lengths[i])
        assert num_keys == lengths[i][0]
        assert int(pages.rows[i + 1] - pages.rows[i]) == len(at)
        found = blocks[ids.long()].transpose(0, 1).flatten(1, 2)[:, :num_keys]
        assert torch.equal(found, scattered.world.key[i])


# ---------------------------------------------------------------- on a GPU


@pytest.mark.skipif(not has_gpu, reason="there is no GPU here")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rule", [{}, {"window": 30}, {"softcap": 20.0}])
def test_the_fused_ways_work_here(dtype: torch.dtype, rule: dict[str, Any]) -> None:
    found = kind("cuda", dtype, **rule)
    assert ways_for(found) == (*by_capability(found), "runs")


@pytest.mark.skipif(not has_gpu, reason="there is no GPU here")
@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt-oss", "deepseek-v3", "mistral-sliding"])
def test_whole_models_on_a_gpu(name: str, flips: Flips, tmp_path: Any) -> None:
    own = build(name, own=True)
    own.save_pretrained(tmp_path)
    model = load_model(tmp_path, dtype=torch.float32, device="cuda")
    assert model.reuse_reason is None
    prompts = [tokens(1, 30)[: 10 + 3 * i] + tokens(20 + i, 6 + i) for i in range(5)]
    with harness(model, num_blocks=24, block_size=4, max_batch_tokens=16) as engine:
        for _ in range(2):
            sinks = [engine.submit(prompt, 6)[1] for prompt in prompts]
            for prompt, sink in zip(prompts, sinks, strict=True):
                flips.check(own, prompt, reference(own, prompt, 6), sink.wait())
