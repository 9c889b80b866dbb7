"""Expected attention, against the formula applied to what transformers' own model computes."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AttentionInterface
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from engines.driver import harness
from engines.models import build, loaded
from engines.test_retention import BLOCK, MODEL, keeping_of, prompt_of, run
from ostinato.retention.keeping import Keeping


def _recording_attention(
    module: Any, query: Any, key: Any, value: Any, attention_mask: Any, *, recorded: Any = None, **rest: Any
) -> tuple[Any, None]:
    recorded.append((query, key, value, rest["scaling"]))
    return AttentionInterface()["sdpa"](module, query, key, value, attention_mask, **rest)


AttentionInterface.register("recording-queries", _recording_attention)


@dataclass(slots=True)
class Told(Keeping):
    """Remembers what it was told to expect."""

    told: list[tuple[int, np.ndarray[Any, Any]]] = field(default_factory=list)

    def note_expected(self, mass: Any) -> None:
        self.told.append((self.num_places, np.stack(mass)))
        Keeping.note_expected(self, mass)


@torch.inference_mode()
def _naive(tokens: list[int]) -> np.ndarray[Any, Any]:
    """``[layers, kv_heads, tokens]``, in float64 and in so many words."""
    model = copy.deepcopy(build(MODEL, own=True))
    model.set_attn_implementation("recording-queries")
    recorded: list[Any] = []
    model(input_ids=torch.tensor([tokens]), use_cache=False, recorded=recorded)
    rotary, count = model.model.rotary_emb, len(tokens)
    result = []
    for query, key, value, scale in recorded:
        cos, sin = rotary(value, torch.arange(count).unsqueeze(0))
        plain = apply_rotary_pos_emb(query, query, cos, -sin)[0][0, :, 4:].double()
        cos, sin = (t[0].double() for t in rotary(value, torch.arange(count, count + 512).unsqueeze(0)))
        dim = cos.shape[1]
        swap = torch.zeros(dim, dim, dtype=torch.float64)
        swap[dim // 2 :, : dim // 2], swap[: dim // 2, dim // 2 :] = torch.eye(dim // 2), -torch.eye(dim // 2)
        turn = torch.diag(cos.mean(0)) + torch.diag(sin.mean(0)) @ swap
        group = query.shape[1] // key.shape[1]
        heads = []
        for head in range(key.shape[1]):
            keys, shares = key[0, head, 4:].double(), []
            for asked in plain[head * group : (head + 1) * group]:
                mean, covariance = turn @ asked.mean(0), turn @ torch.cov(asked.T, correction=0) @ turn.T
                logits = keys @ mean * scale + (keys @ covariance * keys).sum(1) * scale**2 / 2
                shares.append(logits.softmax(0))
            scores = (torch.stack(shares).mean(0) + 0.01) * value[0, head, 4:].double().norm(dim=1)
            heads.append(scores.numpy())
        result.append(np.stack(heads))
    return np.stack(result)


def test_what_is_expected_is_the_formula() -> None:
    prompt = prompt_of(100)
    keep = keeping_of(64, "expected", 100, (0, 1, 2, 3)).keep
    info = loaded(MODEL).info
    keeping = Told(keep, len(info.kv_heads), info.kv_heads[0])
    with harness(loaded(MODEL), num_blocks=64, block_size=BLOCK) as engine:
        run(engine, prompt, 30, keeping)
    count, told = keeping.told[0]
    assert keep.budget_tokens - keep.chunk < count <= keep.budget_tokens
    np.testing.assert_allclose(told[:, :, 4:], _naive(prompt[:count]), rtol=2e-3)
    assert len(keeping.told) > 5  # while it answers, too


@pytest.mark.parametrize("method", ["h2o", "expected"])
def test_what_asks_all_rows_does_not_depend_on_what_was_cached(method: str) -> None:
    prompt = prompt_of(100)
    with harness(loaded(MODEL), num_blocks=100, block_size=BLOCK) as engine:
        cold = keeping_of(64, method, 100)
        answer = run(engine, prompt, 30, cold).tokens
        engine.generate(prompt, 4)
        warm = keeping_of(64, method, 100)
        assert run(engine, prompt, 30, warm).tokens == answer
        np.testing.assert_array_equal(warm.positions, cold.positions)
