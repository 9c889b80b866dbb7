"""A tiny random chat model in a folder: bytes as tokens, ChatML, a Llama of a few thousand weights."""

from __future__ import annotations

from pathlib import Path

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content']"
    " + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def save_tiny_chat_model(
    folder: Path,
    *,
    with_template: bool = True,
    max_len: int = 512,
    merges: tuple[tuple[str, str], ...] = (),
) -> Path:
    """Write the model to ``folder``; always the same weights. ``merges`` are more tokens, of two letters."""
    import torch
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = [*alphabet, *(first + second for first, second in merges)]
    backend = Tokenizer(models.BPE({symbol: i for i, symbol in enumerate(vocabulary)}, list(merges)))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(
        [AddedToken(text, special=True, normalized=False) for text in ("<|im_start|>", "<|im_end|>")]
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<|im_start|>", eos_token="<|im_end|>", pad_token="<|im_end|>"
    )
    if with_template:
        tokenizer.chat_template = CHATML
    tokenizer.save_pretrained(str(folder))
    config = LlamaConfig(
        vocab_size=len(vocabulary) + 2,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=max_len,
        bos_token_id=len(vocabulary),
        eos_token_id=len(vocabulary) + 1,
        pad_token_id=len(vocabulary) + 1,
        initializer_range=0.2,
    )
    torch.manual_seed(1)
    LlamaForCausalLM(config).save_pretrained(str(folder))
    return folder
