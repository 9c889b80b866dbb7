"""Small model folders as save_pretrained writes them, and the same as the files of a repository."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

WORDS = {"<unk>": 0, "<s>": 1, "</s>": 2, "hello": 3, "world": 4}


def save_model(folder: Path, *, max_shard_size: str = "5GB", **sizes: Any) -> Path:
    """A tiny random Llama with a tokenizer."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=32,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        **sizes,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(str(folder), max_shard_size=max_shard_size)
    save_tokenizer(folder)
    return folder


def save_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.WordLevel(WORDS, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
    tokenizer.save_pretrained(str(folder))


def edit_config(folder: Path, **changes: Any) -> None:
    """Change entries of ``config.json``; ``None`` removes one."""
    path = folder / "config.json"
    config = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.is_file()}
