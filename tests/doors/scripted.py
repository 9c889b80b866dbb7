"""A real model that says what it was made to say: its weights are a table of which token follows which."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path


def save_scripted_model(
    folder: Path, *, after: str, script: Sequence[str], special: Sequence[str], max_len: int = 4096
) -> Path:
    """Write a Llama to ``folder`` that answers with the tokens of ``script``, and then ends.

    Args:
        after: the last token of every prompt.
        script: the answer, a token each, no two alike. Those in ``special`` are special tokens.
        special: special tokens; the first one ends the answer.
    """
    import torch
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({symbol: i for i, symbol in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in special])
    plain = [text for text in script if text not in special]
    backend.add_tokens([AddedToken(text, special=False, normalized=False) for text in plain])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token=special[0], additional_special_tokens=list(special[1:])
    )
    tokenizer.save_pretrained(str(folder))

    size = 4 * (backend.get_vocab_size() // 4 + 1)
    config = LlamaConfig(
        vocab_size=size,
        hidden_size=size,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=max_len,
        eos_token_id=backend.token_to_id(special[0]),
        bos_token_id=None,
        pad_token_id=None,
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(config)
    (last,) = backend.encode(after).ids
    chain = [last, *(backend.token_to_id(text) for text in script), config.eos_token_id]
    assert len(set(chain)) == len(chain), "a token stands in the script twice"
    with torch.no_grad():
        layer = model.model.layers[0]
        layer.self_attn.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()
        model.model.embed_tokens.weight.copy_(torch.eye(size))
        model.lm_head.weight.zero_()
        for current, following in pairwise(chain):
            model.lm_head.weight[following, current] = 10.0
    model.save_pretrained(str(folder))
    return folder
