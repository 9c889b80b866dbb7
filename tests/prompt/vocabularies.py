"""Small tokenizers of every kind, trained here, in folders as the hub lays them out."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

NONCE = "73849506127384950612"

CORPUS = [
    "The quick brown fox jumps over the lazy dog, and the dog does not mind at all.",
    "She said: \"It's 10:45, we're late!\" -- and they'd left before I'd even answered.",
    "def add(a, b):\n    return a + b\n\nfor i in range(10):\n\tprint(add(i, 1))",
    "Ein Vogel fliegt über das große Haus; die Tür öffnet sich, Straßenbahnen fahren.",
    "Le café est très bon, l'été prochain nous irons à la plage. Où êtes-vous allés ?",
    "user assistant system tool function name arguments weather in Paris and in London",
    "你好，世界。今天天气很好。 Привет, мир! Как дела? 日本語のテキスト。 🙂 emoji 🚀 and more.",
    "<b>bold</b> and {\"json\": [1, 2.5, null, true]} and | pipes | and < angles >",
    "AAAA aaaa    spaces   and\n\n\nlines\r\n and tabs\t\t.",
]  # fmt: skip

# Llama 3's and GPT-4's cut into words (https://github.com/openai/tiktoken, cl100k_base).
CL100K = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def special(text: str, **flags: bool) -> AddedToken:
    return AddedToken(text, special=True, **{"normalized": False, **flags})


def plain(text: str, **flags: bool) -> AddedToken:
    return AddedToken(text, special=False, **{"normalized": False, **flags})


def byte_level_bpe(added: Sequence[AddedToken], *, pattern: str | None = None, **model: Any) -> Tokenizer:
    """GPT-2's kind (SmolLM, Qwen, Llama 3): bytes as characters, no unknown text."""
    tokenizer = Tokenizer(models.BPE(**model))
    if pattern is None:
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(pattern), "isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=500, show_progress=False, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens(list(added))
    return tokenizer


def sentencepiece_bpe(added: Sequence[AddedToken], *, style: str, bos: str | None = None) -> Tokenizer:
    """Llama 2's kind: ``▁`` for a space, bytes as tokens of their own where a character is unknown.

    ``style``: ``legacy`` puts the first ``▁`` by its normalizer after every special token, ``first`` by its
    pre-tokenizer at the beginning only, ``gemma`` not at all.
    """
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Metaspace()
    ascii_text = [text.encode("ascii", "ignore").decode() for text in CORPUS]
    trained.train_from_iterator(ascii_text, trainers.BpeTrainer(vocab_size=300, show_progress=False))
    model = json.loads(trained.to_str())["model"]
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *model["vocab"]]
    vocabulary = {piece: number for number, piece in enumerate(dict.fromkeys(pieces))}
    merges = [tuple(merge) for merge in model["merges"]]
    tokenizer = Tokenizer(
        models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    replace = normalizers.Replace(" ", "▁")
    tail = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if style == "legacy":
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), replace])
        tail.append(decoders.Strip(" ", 1, 0))
    elif style == "first":
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
        tail.append(decoders.Strip(" ", 1, 0))
    else:
        assert style == "gemma", style
        tokenizer.normalizer = replace
        tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    tokenizer.decoder = decoders.Sequence(tail)
    tokenizer.add_tokens([special("<unk>"), special("<s>"), special("</s>"), *added])
    if bos is not None:
        number = tokenizer.token_to_id(bos)
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, number)]
        )
    return tokenizer


def unigram(added: Sequence[AddedToken]) -> Tokenizer:
    """T5's and XLM-R's kind; its vocabulary has ``</s>`` among the ordinary pieces."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=260, show_progress=False, unk_token="<unk>", special_tokens=["<unk>", "<s>", "</s>"]
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens(list(added))
    return tokenizer


def wordpiece(added: Sequence[AddedToken]) -> Tokenizer:
    """BERT's kind: lower case, ``##`` inside words, unknown words as one token, ``[SEP]`` at the end."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(
        vocab_size=400, show_progress=False, special_tokens=["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens(list(added))
    numbers = [(name, tokenizer.token_to_id(name)) for name in ("[CLS]", "[SEP]")]
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B [SEP]", special_tokens=numbers
    )
    return tokenizer


CHATML = [special("<|endoftext|>"), special("<|im_start|>"), special("<|im_end|>")]
QWEN = [*CHATML, plain("<think>"), plain("</think>"), plain("<tool_call>"), plain("</tool_call>")]
LLAMA3 = [
    special(f"<|{name}|>")
    for name in ("begin_of_text", "end_of_text", "start_header_id", "end_header_id", "eot_id", "eom_id")
] + [special("<|python_tag|>")]
PHI3 = [
    special("<|endoftext|>"),
    *(special(f"<|{name}|>", rstrip=True) for name in ("system", "user", "assistant", "end")),
]
GEMMA = [special("<bos>"), special("<eos>"), special("<start_of_turn>"), special("<end_of_turn>")]
MISTRAL = [special(text) for text in ("[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]")] + [
    special("[TOOL_CALLS]"),
    special("[TOOL_RESULTS]"),
    special("[/TOOL_RESULTS]"),
]
STRIPPING = [
    special("<|both|>", lstrip=True, rstrip=True),
    special("<|left|>", lstrip=True),
    special("<|right|>", rstrip=True),
    special("<|none|>"),
]


@functools.cache
def tokenizer_json(kind: str) -> str:
    """The ``tokenizer.json`` of one of :data:`KINDS`."""
    tokenizer = KINDS[kind]()
    text: str = tokenizer.to_str()
    return text


def _llama3() -> Tokenizer:
    tokenizer = byte_level_bpe(LLAMA3, pattern=CL100K, ignore_merges=True)
    number = tokenizer.token_to_id("<|begin_of_text|>")
    tokenizer.post_processor = processors.Sequence(
        [
            processors.ByteLevel(trim_offsets=False),
            processors.TemplateProcessing(
                single="<|begin_of_text|> $A",
                pair="<|begin_of_text|> $A <|begin_of_text|> $B",
                special_tokens=[("<|begin_of_text|>", number)],
            ),
        ]
    )
    return tokenizer


KINDS = {
    "chatml": lambda: byte_level_bpe(CHATML),
    "qwen": lambda: byte_level_bpe(QWEN, pattern=CL100K),
    "llama3": _llama3,
    "llama2": lambda: sentencepiece_bpe([], style="legacy", bos="<s>"),
    "mistral": lambda: sentencepiece_bpe(MISTRAL, style="first", bos="<s>"),
    "phi3": lambda: sentencepiece_bpe(PHI3, style="legacy"),
    "gemma": lambda: sentencepiece_bpe(GEMMA, style="gemma", bos="<bos>"),
    "stripping-bytes": lambda: byte_level_bpe(STRIPPING),
    "stripping-first": lambda: sentencepiece_bpe(STRIPPING, style="first"),
    "stripping-legacy": lambda: sentencepiece_bpe(STRIPPING, style="legacy"),
    "unigram": lambda: unigram([special("<|im_start|>"), special("<|im_end|>")]),
    "wordpiece": lambda: wordpiece([special("[USER]"), special("[BOT]")]),
}


def write_folder(
    folder: Path, kind: str, *, config: Mapping[str, Any] | None = None, template: str | None = None
) -> Path:
    """A model folder's tokenizer files."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(tokenizer_json(kind), encoding="utf-8")
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", **(config or {})}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    if template is not None:
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    return folder
