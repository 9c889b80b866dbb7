"""Kept tokens that get new positions: what is answered is what attention at these positions answers."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AttentionInterface
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from engines.driver import NAMESPACE, harness, reference
from engines.models import build, loaded
from engines.test_retention import BLOCK, MODEL, Recorded, keeping_of, prompt_of, run

LENGTH = 256  # the model's own


def _keeping(budget: int, method: str, num_prompt: int, protected: tuple[int, ...] = ()) -> Recorded:
    keeping = keeping_of(budget, method, num_prompt, protected)
    return Recorded(replace(keeping.keep, renumbers=True), keeping.num_layers, keeping.num_heads)


def _renumbered_attention(
    module: Any, query: Any, key: Any, value: Any, attention_mask: Any, *, plain: Any = None, **rest: Any
) -> tuple[Any, None]:
    """Row by row and head by head: what a row saw stands at 0, 1, 2, ..., the row itself last."""
    rotary, seen = plain
    group = query.shape[1] // key.shape[1]
    output = torch.empty(1, query.shape[2], query.shape[1], value.shape[3])
    for row in range(query.shape[2]):
        for head in range(key.shape[1]):
            columns = torch.from_numpy(np.array(seen[row][module.layer_idx, head], np.int64))
            places = torch.arange(len(columns)).unsqueeze(0)
            cos, sin = rotary(value, places)
            keys = apply_rotary_pos_emb(key[:, head : head + 1, columns], key[:, :1, columns], cos, sin)[0][
                0, 0
            ]
            heads = slice(head * group, (head + 1) * group)
            asked = query[:, heads, row].unsqueeze(2)
            asked = apply_rotary_pos_emb(asked, asked, cos[:, -1:], sin[:, -1:])[0][0, :, 0]
            weights = (asked @ keys.T * rest["scaling"]).softmax(-1)
            output[0, row, heads] = weights @ value[0, head, columns]
    return output, None


AttentionInterface.register("renumbered-reference", _renumbered_attention)


@torch.inference_mode()
def logprobs_of(tokens: list[int], num_prompt: int, keeping: Recorded) -> tuple[list[int], list[float]]:
    """What the model, by itself, finds likeliest at every place of the answer, and how likely that is."""
    model = copy.deepcopy(build(MODEL, own=True))
    model.set_attn_implementation("renumbered-reference")
    length = len(tokens) - 1
    shape = keeping.num_layers, keeping.num_heads
    seen = [
        keeping.seen.get(row, np.broadcast_to(np.arange(row + 1), (*shape, row + 1))) for row in range(length)
    ]
    nowhere = torch.zeros(1, length, dtype=torch.int64)  # queries and keys come without a turn
    logits = model(
        input_ids=torch.tensor([tokens[:-1]]), position_ids=nowhere, use_cache=False,
        plain=(model.model.rotary_emb, seen),
    ).logits[0]  # fmt: skip
    best = torch.log_softmax(logits[num_prompt - 1 :].double(), -1).max(-1)
    return best.indices.tolist(), best.values.tolist()


@pytest.mark.parametrize("method", ["sinks", "summary", "expected"])
def test_the_answer_is_that_of_attention_at_the_new_positions(method: str) -> None:
    """Also beyond the model's length: no position is as high as the budget."""
    prompt = prompt_of(LENGTH + 20)
    keeping = _keeping(64, method, len(prompt), (0, 1, 40, 41))
    with harness(loaded(MODEL), num_blocks=64, block_size=BLOCK) as engine:
        sink = run(engine, prompt, 40, keeping)
        tokens = np.array([*prompt, *sink.tokens], np.int32)
        assert engine.manager.peek(NAMESPACE, tokens) <= 2  # what is protected before anything was dropped
    assert keeping.num_dropped > LENGTH - 64
    expected, values = logprobs_of([*prompt, *sink.tokens], len(prompt), keeping)
    assert sink.tokens == expected
    np.testing.assert_allclose([item.logprob for item in sink.logprobs if item], values, atol=5e-4)


def test_the_check_can_fail() -> None:
    """Tokens that kept their positions are not what is computed at new ones."""
    prompt = prompt_of(150)
    keeping = keeping_of(64, "sinks", 150, (0, 1, 40, 41))
    with harness(loaded(MODEL), num_blocks=64, block_size=BLOCK) as engine:
        sink = run(engine, prompt, 40, keeping)
    _, values = logprobs_of([*prompt, *sink.tokens], 150, keeping)
    got = [item.logprob for item in sink.logprobs if item]
    assert np.abs(np.array(got) - np.array(values)).max() > 1e-2


def test_with_room_for_everything_nothing_changes() -> None:
    prompt = prompt_of(50)
    with harness(loaded(MODEL), num_blocks=64, block_size=BLOCK) as engine:
        keeping = _keeping(79, "summary", 50)
        assert run(engine, prompt, 30, keeping).tokens == reference(build(MODEL, own=True), prompt, 30)


def test_it_shares_what_is_cached_and_spoils_nothing() -> None:
    """Several at once, of a prompt that is in the cache as a whole; recall keeps out of it."""
    prompt = prompt_of(150)
    expected = reference(build(MODEL, own=True), prompt, 8)
    with harness(loaded(MODEL), num_blocks=100, block_size=BLOCK, recall_bytes=1 << 24) as engine:
        engine.generate(prompt, 4)
        keepings = [_keeping(64, method, 150) for method in ("sinks", "summary", "tova")]
        sinks = [engine.submit(prompt, 60, keeping=keeping)[1] for keeping in keepings]
        for keeping, sink in zip(keepings, sinks, strict=True):
            assert logprobs_of([*prompt, *sink.wait()], 150, keeping)[0] == sink.tokens
            assert sink.stats is not None
            assert sink.stats.cached_tokens > 0
        assert engine.archives is not None
        assert engine.archives.size_bytes == 0
        assert engine.generate(prompt, 8).tokens == expected
        engine.manager.check_integrity()
