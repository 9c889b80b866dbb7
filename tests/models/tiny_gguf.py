"""Small but whole GGUF files of several architectures, with random weights and a working tokenizer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
NORMAL, CONTROL, BYTE, UNKNOWN = 1, 3, 6, 2


@dataclass(frozen=True)
class Architecture:
    """What GGUF calls it, how transformers configures it, and the metadata that says the same."""

    gguf_name: str
    config_class: str
    config: Mapping[str, Any]
    metadata: Mapping[str, Any]
    tokenizer: str = "gpt2"


_SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
_METADATA = {
    "context_length": 256,
    "embedding_length": 64,
    "block_count": 2,
    "feed_forward_length": 96,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "attention.layer_norm_rms_epsilon": 1e-5,
    "rope.freq_base": 10000.0,
}

ARCHITECTURES = {
    "llama": Architecture("llama", "LlamaConfig", _SIZES, {**_METADATA, "rope.dimension_count": 16}),
    "llama-tied": Architecture(
        "llama",
        "LlamaConfig",
        {**_SIZES, "tie_word_embeddings": True},
        {**_METADATA, "rope.dimension_count": 16},
    ),
    "llama-sentencepiece": Architecture(
        "llama", "LlamaConfig", _SIZES, {**_METADATA, "rope.dimension_count": 16}, tokenizer="llama"
    ),
    "llama-wide": Architecture(
        "llama",
        "LlamaConfig",
        {**_SIZES, "hidden_size": 256, "intermediate_size": 256},
        {**_METADATA, "embedding_length": 256, "feed_forward_length": 256, "rope.dimension_count": 64},
    ),
    "qwen2": Architecture("qwen2", "Qwen2Config", _SIZES, _METADATA),
    "qwen3": Architecture("qwen3", "Qwen3Config", {**_SIZES, "head_dim": 128}, _METADATA),
    "gemma3": Architecture(
        "gemma3",
        "Gemma3TextConfig",
        {**_SIZES, "head_dim": 16, "tie_word_embeddings": True},
        {**_METADATA, "attention.key_length": 16, "attention.sliding_window": 64},
        tokenizer="llama",
    ),
    "phi3": Architecture(
        "phi3",
        "Phi3Config",
        {**_SIZES, "pad_token_id": 0},
        {**_METADATA, "tokenizer.ggml.padding_token_id": 0},
        tokenizer="llama",
    ),
    "gpt2": Architecture(
        "gpt2",
        "GPT2Config",
        {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 1024},
        {
            "context_length": 1024,
            "embedding_length": 64,
            "block_count": 2,
            "feed_forward_length": 256,
            "attention.head_count": 4,
            "attention.layer_norm_epsilon": 1e-5,
        },
    ),
    "qwen3moe": Architecture(
        "qwen3moe",
        "Qwen3MoeConfig",
        {**_SIZES, "head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 768},
        {**_METADATA, "attention.key_length": 16, "expert_count": 4, "expert_used_count": 2},
    ),
    "lfm2": Architecture(
        "lfm2",
        "Lfm2Config",
        {**_SIZES, "block_auto_adjust_ff_dim": False, "layer_types": ["conv", "full_attention"]},
        {**_METADATA, "attention.head_count_kv": [0, 2], "shortconv.l_cache": 3},
    ),
}


def write_gguf(
    path: Path,
    architecture: str = "llama",
    *,
    quantisation: str = "F32",
    seed: int = 0,
    leave_out: str | None = None,
    metadata: Mapping[str, Any] | None = None,
    layers: int = 2,
) -> Path:
    """Write a model file. ``quantisation`` is used for matrices whose rows it divides, F32 for all else."""
    spec = ARCHITECTURES[architecture]
    tokens, types, scores = _vocabulary(spec.tokenizer)
    shapes = _shapes(spec, len(tokens), layers)
    writer = gguf.GGUFWriter(path, spec.gguf_name)
    writer.add_name(f"tiny {architecture}")
    for key, value in {**spec.metadata, "block_count": layers, **(metadata or {})}.items():
        _add(
            writer,
            key if key.startswith(("general.", "tokenizer.", "split.")) else f"{spec.gguf_name}.{key}",
            value,
        )
    _add_tokenizer(writer, spec.tokenizer, tokens, types, scores)
    random = np.random.default_rng(seed)
    for name, shape in shapes.items():
        if name == leave_out:
            continue
        values = (random.standard_normal(shape) * 0.05).astype(np.float32)
        _add_tensor(writer, name, values, quantisation, random)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_tensor(
    writer: gguf.GGUFWriter, name: str, values: np.ndarray, quantisation: str, random: np.random.Generator
) -> None:
    kind = gguf.GGMLQuantizationType[quantisation]
    block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    if values.ndim < 2 or values.shape[-1] % block or kind == gguf.GGMLQuantizationType.F32:
        writer.add_tensor(name, values)
        return
    try:
        data = gguf.quantize(values, kind)
    except NotImplementedError:  # gguf can only unpack these: any bytes are a valid block
        rows = (*values.shape[:-1], values.shape[-1] // block * block_bytes)
        # Below 60 none of them, read as the block's half-precision scale, is infinite or not a number.
        data = random.integers(0, 60, size=rows, dtype=np.uint8)
    writer.add_tensor(name, data, raw_dtype=kind)


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, str):
        writer.add_string(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, list):
        writer.add_array(key, value)
    else:
        writer.add_uint32(key, value)


def _shapes(spec: Architecture, vocab_size: int, layers: int) -> dict[str, tuple[int, ...]]:
    """The model's tensors under their GGUF names, in the shapes that llama.cpp's converter gives them."""
    import torch
    import transformers

    sizes = dict(spec.config)
    if "num_hidden_layers" in sizes:
        sizes["num_hidden_layers"] = layers
    config = getattr(transformers, spec.config_class)(
        vocab_size=vocab_size, bos_token_id=1, eos_token_id=2, **sizes
    )
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    arch = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == spec.gguf_name)
    names = gguf.get_tensor_name_map(arch, layers)
    shapes: dict[str, tuple[int, ...]] = {}
    seen: set[int] = set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) in seen:
            continue
        seen.add(id(tensor))
        shape = tuple(tensor.shape)
        if name.endswith("experts.gate_up_proj"):
            layer = name.split(".")[2]
            for part in ("gate", "up"):
                shapes[f"blk.{layer}.ffn_{part}_exps.weight"] = (shape[0], shape[1] // 2, shape[2])
            continue
        stem, _, suffix = name.rpartition(".")
        known = names.get_name(stem) if suffix in ("weight", "bias") else None
        known, suffix = (names.get_name(name), "weight") if known is None else (known, suffix)
        assert known is not None, f"no GGUF name for {name}"
        if spec.gguf_name == "gpt2" and len(shape) == 2 and ("attn" in known or "ffn" in known):
            shape = shape[::-1]
        if name.endswith("conv.conv.weight"):
            shape = (shape[0], shape[2])
        shapes[f"{known}.{suffix}"] = shape
    return shapes


# ---------------------------------------------------------------- tokenizers


def _vocabulary(kind: str) -> tuple[list[str], list[int], list[float]]:
    if kind == "gpt2":
        alphabet = _byte_alphabet()
        words = ["he", "ll", "hell", "hello", "Ġw", "or", "ld", "orld", "Ġworld"]
        tokens = [*SPECIAL, *alphabet, *words]
        types = [CONTROL] * len(SPECIAL) + [NORMAL] * (len(alphabet) + len(words))
        return tokens, types, [0.0] * len(tokens)
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    types = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256]
    words = ["▁", "h", "e", "l", "o", "w", "r", "d", "he", "ll", "hell", "hello", "▁hello", "or", "ld"]
    tokens += [*words, "<|im_start|>", "<|im_end|>"]
    types += [NORMAL] * len(words) + [CONTROL, CONTROL]
    return tokens, types, [0.0] * 259 + [-float(i) for i in range(len(words))] + [0.0, 0.0]


def _add_tokenizer(
    writer: gguf.GGUFWriter, kind: str, tokens: list[str], types: list[int], scores: list[float]
) -> None:
    writer.add_tokenizer_model(kind)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    if kind == "gpt2":
        writer.add_tokenizer_pre("smollm")
        writer.add_token_merges(["h e", "l l", "he ll", "hell o", "Ġ w", "o r", "l d", "or ld", "Ġw orld"])
    else:
        writer.add_token_scores(scores)
        writer.add_add_bos_token(True)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template(CHATML)


def _byte_alphabet() -> list[str]:
    """GPT-2's printable stand-ins for the 256 bytes."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [byte for byte in range(256) if byte not in printable]
    return [chr(byte) for byte in printable] + [chr(256 + i) for i in range(len(rest))]
