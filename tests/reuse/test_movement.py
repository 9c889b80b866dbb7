"""Moved KV is what the model computes at the new place: for every family, against what its attention gets."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf

from engines.models import _BASE, PAGED, VOCAB, build, loaded
from ostinato.engines.hf import observe_model
from ostinato.engines.rotations import observe_movement
from ostinato.engines.runners import LoadedModel
from ostinato.kv.arena import Arena
from ostinato.reuse.rope import Movement, Mover
from ostinato.types import SlotMove, SlotShift

_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
OTHERS: dict[str, hf.PretrainedConfig] = {
    "linear": hf.LlamaConfig(**_BASE, rope_parameters=_ROPE | {"rope_type": "linear", "factor": 3.0}),
    "dynamic": hf.LlamaConfig(**_BASE, rope_parameters=_ROPE | {"rope_type": "dynamic", "factor": 3.0}),
    "longrope": hf.Phi3Config(
        **_BASE,
        rope_parameters=_ROPE
        | {
            "rope_type": "longrope",
            "short_factor": [1.0, 1.5, 2.0, 2.5],
            "long_factor": [1.0, 3.0, 5.0, 9.0],
        },
        original_max_position_embeddings=128,
    ),
    "gpt-j": hf.GPTJConfig(
        vocab_size=VOCAB, n_positions=256, n_embd=32, n_layer=3, n_head=4, rotary_dim=4, eos_token_id=2
    ),
    "codegen": hf.CodeGenConfig(
        vocab_size=VOCAB,
        n_positions=256,
        n_ctx=256,
        n_embd=32,
        n_layer=3,
        n_head=4,
        rotary_dim=4,
        eos_token_id=2,
    ),
    "glm": hf.GlmConfig(**_BASE, head_dim=8),
    "cohere": hf.CohereConfig(**_BASE),
    "cohere2": hf.Cohere2Config(
        **_BASE, sliding_window=12, layer_types=["sliding_attention", "full_attention", "sliding_attention"]
    ),
    "smollm3": hf.SmolLM3Config(**_BASE, no_rope_layers=[1, 0, 1]),
    "olmo2": hf.Olmo2Config(**_BASE),
    "opt": hf.OPTConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        ffn_dim=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=256,
        word_embed_proj_dim=32,
    ),
}
MOVABLE = [name for name in (*PAGED, *OTHERS) if name not in ("gpt2", "opt")]


KV = list[tuple[torch.Tensor, torch.Tensor]]
"""Keys and values ``[sequences, kv_heads, tokens, dim]`` of each layer."""


def record(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    *,
    recorded: KV,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Transformers' own attention, and what it was given.

    Without Gemma-2's cap on scores, which that does not know: it is left out at the old place and at the new.
    """
    recorded.append((key, value))
    options.pop("softcap", None)
    return hf.AttentionInterface()["sdpa"](module, query, key, value, mask, **options)


hf.AttentionInterface.register("record", record)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tiny models are quicker without others to wait for."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


def models(name: str) -> tuple[LoadedModel, Any]:
    """The model observed, and a copy that records."""
    if name in PAGED:
        model, own = loaded(name), copy.deepcopy(build(name, own=True))
    else:
        torch.manual_seed(sum(name.encode()))
        own = hf.AutoModelForCausalLM.from_config(copy.deepcopy(OTHERS[name]), dtype=torch.float32).eval()
        model = observe_model(copy.deepcopy(own))
    return model, own


@torch.inference_mode()
def computed(model: Any, tokens: torch.Tensor, positions: torch.Tensor) -> KV:
    recorded: KV = []
    model.set_attn_implementation("record")
    model(input_ids=tokens, position_ids=positions, use_cache=False, recorded=recorded)
    return recorded


def moved(model: LoadedModel, movement: Movement, kv: KV, distance: int) -> KV:
    """One sequence's KV, put into an arena, moved there, and read from its new slots."""
    length = kv[0][0].shape[2]
    arena = Arena(model.layers, 2 * length + 3, dtype=model.dtype, device=model.device)
    for layer, (keys, values) in enumerate(kv):
        arena.keys[layer][:, :length] = keys[0]
        arena.values[layer][:, :length] = values[0]
    Mover(arena, movement.rotations).move([SlotShift(0, length + 3, length, distance)])
    return [
        (keys[:, length + 3 :].unsqueeze(0), values[:, length + 3 :].unsqueeze(0))
        for keys, values in zip(arena.keys, arena.values, strict=True)
    ]


def check_close(got: KV, expected: KV) -> None:
    for layer, (pair, other) in enumerate(zip(got, expected, strict=True)):
        for tensor, wanted in zip(pair, other, strict=True):
            error = (tensor - wanted).abs().max() / wanted.abs().max()
            assert error <= 5e-5, f"layer {layer}: {error:.1g}"


@pytest.mark.parametrize("name", MOVABLE)
def test_moved_kv_without_context_is_what_is_computed_there(name: str) -> None:
    """A token alone, and a short sequence alone, from everywhere to everywhere."""
    model, own = models(name)
    movement = observe_movement(model)
    assert movement.reason is None
    assert len(movement.rotations) == len(model.layers)
    last = model.max_model_len - 1
    for token, source, target in ((5, 0, 7), (9, 11, 3), (77, 3, last), (101, last, 64), (9, 40, 40)):
        one = torch.tensor([[token]])
        there, here = (computed(own, one, torch.tensor([[p]])) for p in (target, source))
        check_close(moved(model, movement, here, target - source), there)
    run = torch.arange(3, 13).unsqueeze(0)
    places = torch.arange(10).unsqueeze(0)
    for source, target in ((0, 90), (100, 2)):
        here, there = (computed(own, run, places + start) for start in (source, target))
        check_close(moved(model, movement, here, target - source), there)


@pytest.mark.parametrize("name", ["llama", "gpt-j", "deepseek-v3", "smollm3", "llama-yarn"])
def test_each_token_by_its_own_distance_is_as_one_after_the_other(name: str) -> None:
    model = models(name)[0]
    rotations = observe_movement(model).rotations
    chance = np.random.default_rng(3)
    one, other = (Arena(model.layers, 60, dtype=model.dtype, device=model.device) for _ in range(2))
    for arena in (one, other):
        torch.manual_seed(2)
        for group in arena.groups:
            group.copy_(torch.randn(group.shape))
    heads = model.layers[0].kv_heads
    sources = np.stack(
        [[np.sort(chance.permutation(40)[:10]) for _ in range(heads)] for _ in model.layers]
    ).astype(np.int64)
    distances = chance.integers(-30, 5, sources.shape)
    targets = np.arange(5, 15, dtype=np.int32)  # over some of the sources
    expected = []
    for layer in range(len(model.layers)):
        for head in range(heads):
            for source, distance in zip(sources[layer, head], distances[layer, head], strict=True):
                Mover(other, rotations).move([SlotShift(int(source), 59, 1, int(distance))])
                expected.append((other.keys[layer][head, 59].clone(), other.values[layer][head, 59].clone()))
    Mover(one, rotations).move_each(SlotMove(sources, targets, distances))
    got = [
        (one.keys[layer][head, target], one.values[layer][head, target])
        for layer in range(len(model.layers))
        for head in range(heads)
        for target in targets
    ]
    for pair, wanted in zip(got, expected, strict=True):
        torch.testing.assert_close(pair, wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", ["llama", "gpt-j", "deepseek-v3", "gemma3", "phi"])
def test_the_check_can_fail(name: str) -> None:
    """Keys that were moved by one position too few are not what is computed there."""
    model, own = models(name)
    movement = observe_movement(model)
    one = torch.tensor([[9]])
    here, there = (computed(own, one, torch.tensor([[p]])) for p in (2, 50))
    with pytest.raises(AssertionError, match="layer"):
        check_close(moved(model, movement, here, 47), there)


@pytest.mark.parametrize("name", ["gpt2", "opt"])
def test_learned_positions_cannot_be_moved(name: str) -> None:
    movement = observe_movement(models(name)[0])
    assert movement.rotations == ()
    assert movement.reason is not None
    assert "adds positions to its tokens" in movement.reason


def test_what_is_observed_is_what_the_model_has() -> None:
    """Layouts and frequencies by name: so that right keys do not come about in some other way."""
    expected = [10000.0 ** (-i / 4) for i in range(4)]
    for name, first, second, frequencies in (
        ("llama", (0, 1, 2, 3), (4, 5, 6, 7), expected),
        ("linear", (0, 1, 2, 3), (4, 5, 6, 7), [f / 3 for f in expected]),
        ("cohere", (0, 2, 4, 6), (1, 3, 5, 7), [500000.0 ** (-i / 4) for i in range(4)]),
        ("gpt-j", (0, 2), (1, 3), [1.0, 0.01]),
        ("glm", (0, 2), (1, 3), [1.0, 0.01]),
        ("phi", (0, 1), (2, 3), [1.0, 0.01]),
        ("deepseek-v3", (8, 9, 10, 11), (12, 13, 14, 15), expected),
    ):
        rotation = observe_movement(models(name)[0]).rotations[0]
        assert (rotation.first, rotation.second) == (first, second), name
        assert rotation.frequencies == pytest.approx(frequencies, abs=1e-7), name
    local, far = observe_movement(loaded("gemma3")).rotations[:2]
    assert local.frequencies == pytest.approx(expected, abs=1e-7)
    assert far.frequencies == pytest.approx([1e6 ** (-i / 4) for i in range(4)], abs=1e-7)
    for name in ("smollm3", "cohere2"):
        turning, still, _ = observe_movement(models(name)[0]).rotations
        assert turning.first
        assert not still.first


def test_keys_that_change_otherwise_are_not_moved() -> None:
    """Keys that grow as they turn; keys that turn at another speed further on; pairs that are none."""
    changes: list[Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = [
        lambda keys, places: keys * (1 + places / 300),
        lambda keys, places: torch.where(places > 200, keys.flip(-1), keys),
        lambda keys, places: keys + places * keys.roll(1, -1) / 50,
    ]
    for change in changes:
        torch.manual_seed(1)
        own = hf.AutoModelForCausalLM.from_config(copy.deepcopy(PAGED["llama"]), dtype=torch.float32).eval()
        model = observe_model(own)
        places: list[torch.Tensor] = []

        def note(module: Any, args: Any, kwargs: Any, places: list[torch.Tensor] = places) -> None:
            places.append(kwargs["position_ids"].unsqueeze(-1))

        def spoil(
            module: Any, args: Any, output: torch.Tensor, change: Any = change, places: Any = places
        ) -> torch.Tensor:
            return change(output, places[-1])

        layer = own.model.layers[1]
        layer.register_forward_pre_hook(note, with_kwargs=True)
        layer.self_attn.k_proj.register_forward_hook(spoil)
        movement = observe_movement(model)
        assert len(places) == 1, "the hook never ran"
        assert movement.rotations == ()
        assert movement.reason is not None
        assert "otherwise than by a rotation" in movement.reason


def test_frequencies_that_change_with_the_length_are_moved_below_the_change_only() -> None:
    model = observe_model(models("longrope")[1])
    assert model.max_model_len == 128
    longer = observe_model(models("longrope")[1], max_model_len=200)
    assert longer.reuse_reason is not None
    assert "change beyond 128" in longer.reuse_reason


def test_few_positions_are_too_few() -> None:
    model = observe_model(models("olmo2")[1], max_model_len=3)
    movement = observe_movement(model)
    assert movement.reason is not None
    assert "too few" in movement.reason


@pytest.mark.parametrize("name", ["llama", "cohere", "gemma3", "gpt2"])
def test_half_precision(name: str) -> None:
    """Pairs so slow that their turn drowns in rounding are copied; the others are as exact as can be."""
    config = copy.deepcopy({**PAGED, **OTHERS}[name])
    torch.manual_seed(2)
    model = observe_model(hf.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval())
    assert model.reuse_reason is None
    movement = observe_movement(model)
    if name == "gpt2":
        assert movement.reason is not None
        return
    assert movement.reason is None
    exact = observe_movement(models(name)[0])
    for rotation, other in zip(movement.rotations, exact.rotations, strict=True):
        seen = len(rotation.first)
        assert (rotation.first, rotation.second) == (other.first[:seen], other.second[:seen])
        assert rotation.frequencies == pytest.approx(other.frequencies[:seen], abs=2e-4)
        assert all(frequency * model.max_model_len < 0.1 for frequency in other.frequencies[seen:])
