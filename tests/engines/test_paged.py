"""The compiled kernel against the plain formula, and its promise: a row's bits depend on nothing else."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ostinato.engines import paged
from ostinato.engines.paged import PagedStep
from ostinato.kv.arena import Arena, LayerShape
from ostinato.types import SequencePlan, num_common

SHAPES = [(3, 3, 64, 64), (1, 1, 4, 4), (2, 4, 8, 8), (1, 2, 20, 12), (2, 1, 80, 128), (1, 8, 16, 40)]


@dataclass
class World:
    """Sequences of random queries, keys and values, and an arena to scatter them over."""

    kv_heads: int
    group: int
    query: list[Tensor]  # per sequence [heads, tokens, dim]
    key: list[Tensor]
    value: list[Tensor]
    block_size: int
    tables: list[np.ndarray]
    num_blocks: int

    def arena(self) -> Arena:
        shape = LayerShape(self.kv_heads, self.key[0].shape[2], self.value[0].shape[2])
        arena = Arena(
            [shape], self.num_blocks * self.block_size, dtype=torch.float32, device=torch.device("cpu")
        )
        for group in arena.groups:
            group.fill_(math.nan)  # what nobody wrote must not matter
        return arena

    def slots(self, sequence: int, start: int, end: int) -> np.ndarray:
        at = np.arange(start, end)
        return (self.tables[sequence][at // self.block_size] * self.block_size + at % self.block_size).astype(
            np.int32
        )

    def attend(
        self, rows: list[tuple[int, int, int]], *, window: int | None, num_threads: int = 2
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Rows ``(sequence, start, end)`` in one step; everything before is in the arena already."""
        arena = self.arena()
        for sequence, start, _ in rows:
            slots = torch.from_numpy(self.slots(sequence, 0, start).astype(np.int64))
            arena.keys[0][:, slots] = self.key[sequence][:, :start]
            arena.values[0][:, slots] = self.value[sequence][:, :start]
        plans = [
            SequencePlan(
                sequence,
                np.zeros(end - start, np.int32),
                np.arange(start, end, dtype=np.int32),
                self.slots(sequence, start, end),
                self.tables[sequence][: -(-end // self.block_size)],
                self.block_size,
                sample=True,
            )
            for sequence, start, end in rows
        ]
        slots = torch.from_numpy(np.concatenate([plan.slots for plan in plans]).astype(np.int64))
        step = PagedStep(arena, plans, slots)
        step._num_threads = num_threads
        query, key, value = (
            torch.cat([tensors[s][:, a:b] for s, a, b in rows], dim=1).unsqueeze(0)
            for tensors in (self.query, self.key, self.value)
        )
        output, lse = step.attend(0, query, key, value, scaling=0.3, window=window)
        lengths = [b - a for _, a, b in rows]
        return list(output[0].split(lengths)), list(lse.split(lengths))

    def expected(self, sequence: int, start: int, end: int, window: int | None) -> Tensor:
        """The textbook, in double precision: ``[rows, heads, dim]``."""
        query = self.query[sequence][:, start:end].double()
        key, value = (
            t[sequence][:, :end].double().repeat_interleave(self.group, 0) for t in (self.key, self.value)
        )
        distance = torch.arange(start, end).unsqueeze(1) - torch.arange(end).unsqueeze(0)
        hidden = (distance < 0) if window is None else (distance < 0) | (distance >= window)
        scores = (query @ key.transpose(1, 2) * 0.3).masked_fill(hidden, -math.inf)
        return (scores.softmax(-1) @ value).transpose(0, 1).float()


def make_world(
    lengths: list[int], *, shape: int, block_size: int, num_shared: int, seed: int, scale: float = 1.0
) -> World:
    """``num_shared`` blocks at the beginning of every sequence that is longer are the same ones."""
    kv_heads, group, key_dim, value_dim = SHAPES[shape]
    generator = torch.Generator().manual_seed(seed)
    chance = np.random.default_rng(seed)
    draw = [
        (
            torch.randn(kv_heads * group, n, key_dim, generator=generator) * scale,
            torch.randn(kv_heads, n, key_dim, generator=generator),
            torch.randn(kv_heads, n, value_dim, generator=generator),
        )
        for n in lengths
    ]
    counts = [-(-n // block_size) for n in lengths]
    num_blocks = sum(counts) + num_shared + 3
    ids = chance.permutation(num_blocks)
    common, free = ids[:num_shared], list(ids[num_shared:])
    tables = []
    for index, count in enumerate(counts):
        own = count - num_shared
        if own <= 0:  # not longer than the shared beginning: its own blocks
            tables.append(np.array([free.pop() for _ in range(count)], np.intp))
            continue
        tables.append(np.array([*common, *(free.pop() for _ in range(own))], np.intp))
        first = next(i for i, c in enumerate(counts) if c > num_shared)
        shared = num_shared * block_size
        for tensor in draw[index][1:]:
            source = draw[first][1:][0 if tensor is draw[index][1] else 1]
            tensor[:, :shared] = source[:, :shared]
    query, key, value = (list(t) for t in zip(*draw, strict=True))
    return World(kv_heads, group, query, key, value, block_size, tables, num_blocks)


@given(data=st.data())
@settings(max_examples=80, deadline=None)
def test_any_mix_of_rows_gives_what_the_formula_gives(data: st.DataObject) -> None:
    lengths = data.draw(st.lists(st.integers(1, 700), min_size=1, max_size=6))
    block_size = data.draw(st.sampled_from([1, 4, 16, 24, 64, 100]))
    scale = data.draw(st.sampled_from([0.1, 1.0, 30.0]))
    world = make_world(
        lengths,
        shape=data.draw(st.integers(0, len(SHAPES) - 1)),
        block_size=block_size,
        num_shared=data.draw(st.integers(0, 300 // block_size)),
        seed=data.draw(st.integers(0, 2**20)),
        scale=scale,
    )
    window = data.draw(st.one_of(st.none(), st.integers(1, 400)))
    rows = []
    for sequence, length in enumerate(lengths):
        table = world.tables[sequence]
        others = [t for i, t in enumerate(world.tables) if i != sequence]
        shared = max((num_common(table, other) for other in others), default=0) * block_size
        start = data.draw(st.integers(min(shared, length - 1), length - 1))  # what is shared is written
        rows.append((sequence, start, data.draw(st.integers(start + 1, length))))
    outputs, lses = world.attend(rows, window=window, num_threads=data.draw(st.integers(1, 3)))
    for (sequence, start, end), output in zip(rows, outputs, strict=True):
        expected = world.expected(sequence, start, end, window)
        torch.testing.assert_close(output, expected, atol=2e-5 * max(1.0, scale), rtol=2e-4)
    assert all(bool(torch.isfinite(lse).all()) for lse in lses)


@given(
    lengths=st.lists(st.integers(2, 900), min_size=2, max_size=5),
    shape=st.integers(0, len(SHAPES) - 1),
    window=st.one_of(st.none(), st.integers(1, 500)),
    seed=st.integers(0, 2**20),
    data=st.data(),
)
@settings(max_examples=40, deadline=None)
def test_a_rows_bits_depend_on_nothing_but_its_keys(
    lengths: list[int], shape: int, window: int | None, seed: int, data: st.DataObject
) -> None:
    """Alone, among others, sharing a prefix, in one piece or in chunks, in other blocks, by more threads."""
    block_size, num_shared = 16, data.draw(st.integers(0, 20))
    together = make_world(lengths, shape=shape, block_size=block_size, num_shared=num_shared, seed=seed)
    rows = [(i, n - 1, n) for i, n in enumerate(lengths)]
    outputs, lses = together.attend(rows, window=window, num_threads=2)
    for sequence, length in enumerate(lengths):
        elsewhere = World(
            together.kv_heads, together.group, together.query, together.key, together.value,
            block_size=data.draw(st.sampled_from([1, 5, 16, 64])), tables=[], num_blocks=0,
        )  # fmt: skip
        blocks = -(-length // elsewhere.block_size)
        elsewhere.num_blocks = blocks + 2
        chance = np.random.default_rng(seed)
        elsewhere.tables = [chance.permutation(blocks + 2)[:blocks].astype(np.intp)] * len(lengths)
        cut = data.draw(st.integers(0, length - 1))
        (whole,), (lse,) = elsewhere.attend([(sequence, cut, length)], window=window, num_threads=1)
        assert torch.equal(whole[-1], outputs[sequence][-1])
        assert torch.equal(lse[-1], lses[sequence][-1])


def test_a_number_that_is_none_is_seen_and_stays_with_its_row() -> None:
    world = make_world([300, 300], shape=0, block_size=16, num_shared=0, seed=1)
    world.key[0][1, 70] = math.nan
    (bad, good), _ = world.attend([(0, 299, 300), (1, 299, 300)], window=None)
    assert bool(torch.isnan(bad[:, 3:6]).all()), "the three query heads of key head 1"
    assert bool(torch.isfinite(bad[:, :3]).all())
    assert bool(torch.isfinite(good).all())


def test_scores_far_apart() -> None:
    world = make_world([513], shape=0, block_size=16, num_shared=0, seed=2, scale=1e4)
    (output,), _ = world.attend([(0, 0, 513)], window=None)
    torch.testing.assert_close(output, world.expected(0, 0, 513, None), atol=1e-2, rtol=1e-2)


def test_a_pool_of_threads_serves_where_torch_has_no_team(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paged, "_torch_team", lambda: None)
    paged._launcher.cache_clear()
    try:
        world = make_world([700, 90], shape=0, block_size=16, num_shared=0, seed=3)
        outputs, _ = world.attend([(0, 699, 700), (1, 30, 90)], window=None, num_threads=3)
    finally:
        paged._launcher.cache_clear()
    torch.testing.assert_close(outputs[0], world.expected(0, 699, 700, None), atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(outputs[1], world.expected(1, 30, 90, None), atol=1e-5, rtol=1e-4)


def test_whoever_waits_for_the_compiler_is_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    kernel, seen = paged.load_kernel(), []
    assert kernel is not None

    def compile_slowly(*_: object) -> None:
        limit_s = time.monotonic() + 20
        while not caplog.messages and time.monotonic() < limit_s:
            time.sleep(0.01)
        seen.extend(caplog.messages)

    monkeypatch.setattr(paged, "_SLOW_S", 0.01)
    monkeypatch.setattr(kernel, "write_rows", compile_slowly)
    assert paged.load_kernel.__wrapped__() is kernel
    assert seen == [paged.COMPILING], "while it lasts, not afterwards"


def test_rows_with_a_common_prefix_are_one_unit_of_work() -> None:
    """Cascade: a prefix that 32 sequences share is loaded once a part, not 32 times."""
    kernel = paged.load_kernel()
    assert kernel is not None
    token = np.full(32, 3519)
    shared = np.array([0] + [3456] * 31)
    units, _, _ = kernel.plan_units(token, shared, 3, 3, 0, 64, 2)
    assert {(int(u[kernel.U_FIRST]), int(u[kernel.U_LAST])) for u in units} == {(0, 32)}
    apart, _, _ = kernel.plan_units(token, np.zeros(32, np.int64), 3, 3, 0, 64, 2)
    assert len({int(u[kernel.U_FIRST]) for u in apart}) == 32
    assert units[:, kernel.U_COST].sum() < 0.4 * apart[:, kernel.U_COST].sum()
