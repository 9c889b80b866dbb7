"""Tiny random models of every architecture we promise, built from their transformers configurations."""

from __future__ import annotations

import copy
import functools
from typing import Any

import torch
import transformers as hf

from ostinato.engines.hf import observe_model
from ostinato.engines.runners import LoadedModel

VOCAB = 128
_BASE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    # Random weights of the usual size give nearly flat logits; larger ones decide clearly between tokens.
    "initializer_range": 0.2,
}
_NO_GROUPS = {k: v for k, v in _BASE.items() if k != "num_key_value_heads"}

PAGED: dict[str, hf.PretrainedConfig] = {
    "llama": hf.LlamaConfig(**_BASE),
    "llama3-rope": hf.LlamaConfig(
        **_BASE,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    ),
    "llama-yarn": hf.LlamaConfig(
        **_BASE,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    ),
    "qwen2": hf.Qwen2Config(**_BASE),
    "qwen3": hf.Qwen3Config(**_BASE, head_dim=16),
    "mistral": hf.MistralConfig(**_BASE, sliding_window=None),
    "mistral-sliding": hf.MistralConfig(**_BASE, sliding_window=12),
    "gemma2": hf.Gemma2Config(**_BASE, head_dim=8, sliding_window=12),
    "gemma3": hf.Gemma3TextConfig(
        **_BASE | {"num_hidden_layers": 4},
        head_dim=8,
        sliding_window=12,
        layer_types=["sliding_attention", "full_attention"] * 2,
    ),
    "phi": hf.PhiConfig(**_BASE, partial_rotary_factor=0.5),
    "phi3": hf.Phi3Config(**_BASE),
    "gpt2": hf.GPT2Config(
        vocab_size=VOCAB,
        n_embd=32,
        n_layer=3,
        n_head=4,
        n_positions=256,
        bos_token_id=1,
        eos_token_id=2,
        initializer_range=0.2,
    ),
    "gpt-neox": hf.GPTNeoXConfig(**_NO_GROUPS),
    "gpt-oss": hf.GptOssConfig(
        **_BASE,
        head_dim=8,
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=12,
        layer_types=["sliding_attention", "full_attention", "full_attention"],
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    ),
    "deepseek-v3": hf.DeepseekV3Config(
        **_BASE | {"num_key_value_heads": 4},
        q_lora_rank=None,
        kv_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=8,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        moe_intermediate_size=16,
        first_k_dense_replace=1,
    ),
}

STATEFUL: dict[str, hf.PretrainedConfig] = {
    "mamba": hf.MambaConfig(
        vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2, state_size=8, eos_token_id=2, bos_token_id=1
    ),
    "recurrent-gemma": hf.RecurrentGemmaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        lru_width=32,
        attention_window_size=12,
        eos_token_id=2,
        bos_token_id=1,
    ),
    "bloom": hf.BloomConfig(vocab_size=VOCAB, hidden_size=32, n_layer=2, n_head=4, eos_token_id=2),
}


@functools.cache
def build(name: str, *, own: bool) -> Any:
    """The model of that name, always with the same weights; ``own``: a second copy with its own attention."""
    return fresh(name)


def fresh(name: str) -> Any:
    """A copy that a test may change."""
    config = copy.deepcopy({**PAGED, **STATEFUL}[name])  # a model changes its own configuration
    torch.manual_seed(sum(name.encode()))
    return hf.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


@functools.cache
def loaded(name: str) -> LoadedModel:
    """That model observed: once in a process, because observing changes it."""
    return observe_model(build(name, own=False))


@functools.cache
def quantized(name: str) -> LoadedModel:
    """The same with its linear layers in eight bits."""
    return observe_model(fresh(name), quantization="int8")
