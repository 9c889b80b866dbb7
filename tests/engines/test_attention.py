"""Attention over runs against the plain formula."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ostinato.engines import attention
from ostinato.engines.attention import LayerRule, Run, attend, attend_rows, make_rows, merge


def plain(query: Tensor, key: Tensor, value: Tensor, position: int, rule: LayerRule) -> Tensor:
    """The textbook: ``[1, heads, rows, dim]`` over all keys at positions 0, 1, 2, …"""
    groups = query.shape[1] // key.shape[1]
    key, value = (t.repeat_interleave(groups, dim=1) for t in (key, value))
    scores = (query @ key.transpose(-1, -2)) * rule.scaling
    if rule.softcap is not None:
        scores = torch.tanh(scores / rule.softcap) * rule.softcap
    rows = torch.arange(position, position + query.shape[2]).unsqueeze(1)
    distance = rows - torch.arange(key.shape[2]).unsqueeze(0)
    hidden = distance < 0
    if rule.window is not None:
        hidden |= distance >= rule.window
    return torch.softmax(scores.masked_fill(hidden, -math.inf), dim=-1) @ value


@given(
    lengths=st.lists(st.integers(1, 40), max_size=12),
    num_rows=st.integers(1, 9),
    kv_heads=st.integers(1, 3),
    groups=st.integers(1, 3),
    window=st.one_of(st.none(), st.integers(1, 60)),
    softcap=st.one_of(st.none(), st.just(5.0)),
    adjacent=st.booleans(),
    seed=st.integers(0, 2**16),
)
@settings(max_examples=300, deadline=None)
def test_any_runs_give_what_the_formula_gives(
    lengths: list[int],
    num_rows: int,
    kv_heads: int,
    groups: int,
    window: int | None,
    softcap: float | None,
    adjacent: bool,
    seed: int,
) -> None:
    """The past scattered over the arena in runs, own rows behind the last one or elsewhere."""
    generator = torch.Generator().manual_seed(seed)
    dim, total = 8, sum(lengths) + num_rows
    rule = LayerRule(dim**-0.5, window, softcap)
    key, value = torch.randn(2, 1, kv_heads, total, dim, generator=generator)
    query = torch.randn(1, kv_heads * groups, num_rows, dim, generator=generator)
    keys, values = torch.full((2, kv_heads, 1000, dim), math.nan)
    runs, slot, position = [], 3, 0
    for length in [*lengths, num_rows]:
        runs.append(Run(slot, position, length))
        keys[:, slot : slot + length] = key[0, :, position : position + length]
        values[:, slot : slot + length] = value[0, :, position : position + length]
        position += length
        last_past = len(runs) == len(lengths)
        slot += length + (0 if adjacent and last_past else 1 + seed % 5)
    start = sum(lengths)
    rows = make_rows(0, num_rows, start, tuple(runs[:-1]), runs[-1].slot, dtype=torch.float32)
    output, _ = attend_rows(rows, query, key[:, :, start:], value[:, :, start:], keys, values, rule)
    torch.testing.assert_close(output, plain(query, key, value, start, rule), atol=2e-5, rtol=1e-4)


def test_rows_that_do_not_lie_in_one_run() -> None:
    key, value = torch.randn(2, 1, 1, 5, 8)
    query = torch.randn(1, 2, 3, 8)
    keys, values = torch.full((2, 1, 20, 8), math.nan)
    keys[:, 4:6], values[:, 4:6] = key[0, :, :2], value[0, :, :2]
    rows = make_rows(0, 3, 2, (Run(4, 0, 2),), None, dtype=torch.float32)
    rule = LayerRule(8**-0.5)
    output, _ = attend_rows(rows, query, key[:, :, 2:], value[:, :, 2:], keys, values, rule)
    torch.testing.assert_close(output, plain(query, key, value, 2, rule), atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("num_parts", [2, 4])
@pytest.mark.parametrize("rows", [1, 3, 100])
@pytest.mark.parametrize("num_keys", [512, 515])
def test_keys_in_parts_are_the_keys_in_one(
    num_parts: int, rows: int, num_keys: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "_num_parts", lambda *_: num_parts)
    query = torch.randn(1, 9, rows, 16)
    key, value = torch.randn(2, 1, 3, num_keys, 16)
    rule = LayerRule(0.25)
    output, lse = attend(query, key, value, rule, causal=False)
    whole, whole_lse = attention._attend_plain(query, key, value, rule, causal=False, mask=None)
    torch.testing.assert_close(output, whole, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(lse, whole_lse, atol=1e-5, rtol=1e-5)


def test_the_fewest_parts_that_keep_threads_busy() -> None:
    assert attention._num_parts(3, 300, 3500, 2) == 2  # 15 pieces on 2 threads
    assert attention._num_parts(3, 384, 3500, 2) == 1  # 18 pieces
    assert attention._num_parts(3, 3, 1500, 2) == 1  # too short to cut
    assert attention._num_parts(8, 4, 100_000, 8) == 1
    assert attention._num_parts(1, 1, 100_000, 8) == 8


def test_merging_is_exact_for_very_unequal_parts() -> None:
    query, key, value = torch.randn(1, 1, 4, 8), torch.randn(1, 1, 30, 8) * 20, torch.randn(1, 1, 30, 8)
    rule = LayerRule(1.0)
    parts = [
        attention._attend_plain(query, key[:, :, a:b], value[:, :, a:b], rule, causal=False, mask=None)
        for a, b in ((0, 1), (1, 7), (7, 30))
    ]
    whole = attention._attend_plain(query, key, value, rule, causal=False, mask=None)
    torch.testing.assert_close(merge(parts), whole, atol=1e-5, rtol=1e-4)
