"""Tokenizing only what is new gives what tokenizing everything gives."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from ostinato.prompt import pieces
from ostinato.prompt.pieces import NO_NEIGHBOUR
from ostinato.prompt.resync import find_joints
from ostinato.prompt.template import chatml, named_template
from ostinato.prompt.tokens import HFTokenizer
from ostinato.types import Rendered, Segment

from .jinja_sources import SETTINGS
from .talk import TEXT, conversation
from .vocabularies import CORPUS, KINDS, NONCE, special, tokenizer_json, write_folder

Tokenizers = Callable[[str], HFTokenizer]


def essay(seed: int, num_chars: int = 4_000) -> str:
    """Text of the kind the vocabularies were trained on, with what is odd at its borders."""
    chance = random.Random(seed)
    parts: list[str] = []
    while sum(map(len, parts)) < num_chars:
        parts.append(chance.choice(CORPUS))
        parts.append(
            chance.choice([" ", "\n", "\n\n", "  ", " 12345 ", " e\u0301 ", "'s ", "<think>", " <|x|> ", ""])
        )
    return "".join(parts)


def whole(kind: str, text: str) -> list[int]:
    backend = Tokenizer.from_str(tokenizer_json(kind))
    backend.encode_special_tokens = True
    ids: list[int] = backend.encode(text, add_special_tokens=False).ids
    return ids


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_here_can_be_cut(kind: str) -> None:
    assert find_joints(json.loads(tokenizer_json(kind))) is not None


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=40, deadline=None)
@given(st.data())
def test_a_text_that_grows(tokenizers: Tokenizers, kind: str, data: st.DataObject) -> None:
    tokenizer = tokenizers(kind)
    text = essay(data.draw(st.integers(0, 10**6)))
    for _ in range(3):
        assert tokenizer.encode(text).tolist() == whole(kind, text)
        kept = data.draw(st.integers(len(text) // 2, len(text)))  # another branch, or the same goes on
        text = text[:kept] + data.draw(TEXT) + essay(data.draw(st.integers(0, 10**6)), 200)


@pytest.mark.parametrize("kind", KINDS)
def test_only_what_is_new_is_encoded(
    tokenizers: Tokenizers, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = tokenizers(kind)
    text = essay(1, 20_000)
    tokenizer.encode(text)
    encoded: list[int] = []
    encode = pieces.PieceEncoder._encode

    def counted(self: Any, backend: Any, left: str, part: str, right: str) -> Any:
        encoded.append(len(part))
        return encode(self, backend, left, part, right)

    monkeypatch.setattr(pieces.PieceEncoder, "_encode", counted)
    grown = text + " and so the fox and the dog went on."
    assert tokenizer.encode(grown).tolist() == whole(kind, grown)
    assert sum(encoded) < 1_000


@pytest.mark.parametrize("kind", KINDS)
def test_long_pieces_between_markers(tokenizers: Tokenizers, kind: str) -> None:
    tokenizer = tokenizers(kind)
    backend = Tokenizer.from_str(tokenizer_json(kind))
    for name in tokenizer.special_tokens:
        for seed in (3, 4):
            text = essay(5) + essay(seed, 300)
            if any(token in text for token in tokenizer.special_tokens):
                continue
            rendered = Rendered((Segment(name, True), Segment(text), Segment("  "), Segment(name, True)))
            expected = backend.encode(rendered.text, add_special_tokens=False).ids
            assert tokenizer.encode_rendered(rendered).tolist() == expected


def test_texts_with_added_tokens_after_the_cut(tmp_path: Path) -> None:
    """Llama 2's kind puts a ▁ after every added token; only the whole text can tell where."""
    content = json.loads(tokenizer_json("llama2"))
    last = max(token["id"] for token in content["added_tokens"])
    extra = {
        **content["added_tokens"][0],
        "id": max(last, len(content["model"]["vocab"])),
        "content": "<note>",
    }
    content["added_tokens"].append({**extra, "special": False})
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    tokenizer = HFTokenizer.from_folder(tmp_path, nonce=NONCE)
    backend = Tokenizer.from_str(json.dumps(content))
    text = essay(8)
    for grown in (text, text + " and <note>so the fox", text + " and <note>so the fox and <note> dog"):
        assert tokenizer.encode(grown).tolist() == backend.encode(grown, add_special_tokens=False).ids


@pytest.mark.parametrize(
    "change",
    [
        {"normalizer": {"type": "Precompiled", "precompiled_charsmap": ""}},
        {"normalizer": {"type": "Replace", "pattern": {"Regex": "a"}, "content": "b"}},
        {"pre_tokenizer": {"type": "UnicodeScripts"}},
        {"pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": True, "use_regex": True}},
        {
            "pre_tokenizer": {
                "type": "Split",
                "pattern": {"Regex": "(?<=a)b"},
                "behavior": "Isolated",
                "invert": False,
            }
        },
        {
            "pre_tokenizer": {
                "type": "Split",
                "pattern": {"Regex": r"\bx"},
                "behavior": "Isolated",
                "invert": False,
            }
        },
        {
            "pre_tokenizer": {
                "type": "Split",
                "pattern": {"Regex": "x.*y"},
                "behavior": "Isolated",
                "invert": False,
            }
        },
        {
            "pre_tokenizer": {
                "type": "Split",
                "pattern": {"Regex": r"\s+$"},
                "behavior": "Isolated",
                "invert": False,
            }
        },
        {"pre_tokenizer": None, "model": {"type": "BPE", "vocab": {"a▁b": 0}, "merges": []}},
        {"pre_tokenizer": None, "model": {"type": "Unigram", "vocab": []}},
        {"added_tokens": [{"content": "two words"}]},
    ],
)
def test_what_is_not_certain_is_not_cut(change: dict[str, Any]) -> None:
    plain = json.loads(tokenizer_json("chatml"))
    assert find_joints(plain) is not None
    assert find_joints({**plain, **change}) is None


def test_real_patterns_can_be_cut() -> None:
    # Qwen's, Llama 3's and GPT-4o's (https://github.com/openai/tiktoken)
    letters = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re)?"
    o200k = letters + r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    split = {"type": "Split", "pattern": {"Regex": o200k}, "behavior": "Isolated", "invert": False}
    level = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}
    description = {
        "normalizer": {"type": "NFC"},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, level]},
        "model": {"type": "BPE", "vocab": {}, "merges": []},
    }
    assert find_joints(description) is not None


def test_what_is_kept_for_growing_is_bounded(tokenizers: Tokenizers, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = tokenizers("chatml")
    for seed in range(50):
        tokenizer.encode(f"{seed} " + essay(seed, 2_500))
    assert len(tokenizer._pieces._anchors) == 32
    growing = essay(99)
    for _ in range(10):
        growing += " and so on the fox goes"
        tokenizer.encode(growing)
    own = [anchor for anchor in tokenizer._pieces._anchors if anchor[1].startswith(growing[:3_000])]
    assert len(own) == 1
    monkeypatch.setattr(pieces, "_MAX_ANCHOR_CHARS", 20_000)
    tokenizer.encode("the dog " * 2_000)
    assert sum(len(anchor[1]) for anchor in tokenizer._pieces._anchors) <= 20_000


# ---------------------------------------------------------------- spans


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=40, deadline=None)
@given(texts=st.lists(TEXT.filter(bool), min_size=1, max_size=5), data=st.data())
def test_every_token_knows_its_segment(
    tokenizers: Tokenizers, kind: str, texts: list[str], data: st.DataObject
) -> None:
    tokenizer = tokenizers(kind)
    markers = st.sampled_from(sorted(tokenizer.special_tokens))
    segments = []
    for text in texts:
        if data.draw(st.booleans()):
            segments.append(Segment(data.draw(markers), is_marker=True))
        segments.append(Segment(text))
    rendered = Rendered(tuple(segments))
    spanned = tokenizer.encode_spans(rendered)
    assert spanned.ids.tolist() == tokenizer.encode_rendered(rendered).tolist()
    assert len(spanned.segments) == len(spanned.ids)
    assert (np.diff(spanned.segments) >= 0).all()
    for index, segment in enumerate(segments):
        own = spanned.ids[spanned.segments == index].tolist()
        if segment.is_marker:
            assert own == [tokenizer.special_tokens[segment.text]]


def test_spans_are_where_the_text_is(tokenizers: Tokenizers) -> None:
    tokenizer = tokenizers("chatml")
    rendered = chatml(default_system="Be kind.").render(
        conversation(("user", "the fox"), ("assistant", "the dog"))
    )
    spanned = tokenizer.encode_spans(rendered)
    for index, segment in enumerate(rendered.segments):
        own = spanned.ids[spanned.segments == index].tolist()
        assert tokenizer.decode(own, skip_special_tokens=False) == segment.text
    by_message = {
        message: tokenizer.decode(
            [
                number
                for number, segment in zip(spanned.ids.tolist(), spanned.segments.tolist(), strict=True)
                if rendered.segments[segment].message_index == message
            ]
        )
        for message in (0, 1)
    }
    assert by_message == {0: "user\nthe fox\n", 1: "assistant\nthe dog\n"}


def test_spans_of_a_long_piece_of_many_segments(tokenizers: Tokenizers) -> None:
    tokenizer = tokenizers("llama2")
    turns = [("user" if number % 2 == 0 else "assistant", essay(number, 800)) for number in range(9)]
    rendered = named_template("plain").render(conversation(*turns))
    spanned = tokenizer.encode_spans(rendered)
    assert spanned.ids.tolist() == tokenizer.encode_rendered(rendered).tolist()
    for index in range(len(rendered.segments)):
        own = spanned.ids[spanned.segments == index].tolist()
        text = rendered.segments[index].text
        assert abs(len(tokenizer.decode(own)) - len(text)) < 8


def test_no_prompt_no_spans(tokenizers: Tokenizers) -> None:
    assert len(tokenizers("chatml").encode_spans(Rendered(())).ids) == 0


# ---------------------------------------------------------------- real text


@pytest.mark.model
def test_agent_sessions_grow_turn_by_turn(default_model_path: Path) -> None:
    """Real sessions, each prompt longer than the one before: equal tokens, and far fewer encoded."""
    folder = Path(__file__).parents[3] / "shared" / "data" / "traces" / "agent" / "taubench"
    if not folder.is_dir():
        pytest.skip("the agent traces are not here (../shared/data/traces/agent)")
    tokenizer = HFTokenizer.from_folder(default_model_path, nonce=NONCE)
    fresh = Tokenizer.from_file(str(default_model_path / "tokenizer.json"))
    fresh.encode_special_tokens = True
    count = 0
    for file in sorted(folder.glob("*.jsonl")):
        for line in file.read_text(encoding="utf-8").splitlines()[:12]:
            text = json.loads(line)["input"]
            assert tokenizer.encode(text).tolist() == fresh.encode(text, add_special_tokens=False).ids
            count += 1
    assert count > 20


def test_a_special_token_between_words_does_not_hide_a_cut(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, "chatml", config=SETTINGS.get("chatml"))
    content = json.loads((folder / "tokenizer.json").read_text())
    assert special("<|im_end|>").content in {token["content"] for token in content["added_tokens"]}
    tokenizer = HFTokenizer.from_folder(folder, nonce=NONCE)
    text = essay(11) + " the <|im_end|> fox <|im_start|>"
    for grown in (text, text + " and on", text + " and on <|im_end|> and on"):
        assert tokenizer.encode(grown).tolist() == whole("chatml", grown)
    assert tokenizer._pieces.encode(NO_NEIGHBOUR, "", NO_NEIGHBOUR).tolist() == []


@pytest.mark.parametrize(
    "text", ["short", "long enough to be remembered as the beginning of others, too. " * 60]
)
def test_what_is_remembered_for_one_tenant_is_not_looked_up_for_another(
    tokenizers: Callable[[str], HFTokenizer], tmp_path: Path, text: str
) -> None:
    folder = write_folder(tmp_path / "chatml", "chatml")
    tokenizer = HFTokenizer.from_folder(folder, nonce=NONCE)
    expected = tokenizers("chatml").encode(text).tolist()
    asked: list[str] = []

    class Counting:
        """The backend, noting what it is asked to encode."""

        def __init__(self, backend: Any) -> None:
            self._backend = backend

        def encode(self, text: str, **options: Any) -> Any:
            asked.append(text)
            return self._backend.encode(text, **options)

        def encode_batch(self, texts: list[str], **options: Any) -> Any:
            asked.extend(texts)
            return self._backend.encode_batch(texts, **options)

        def encode_batch_fast(self, texts: list[str], **options: Any) -> Any:
            asked.extend(texts)
            return self._backend.encode_batch_fast(texts, **options)

    encoder = tokenizer._pieces
    counting = replace(encoder._backend, tokenizer=Counting(encoder._backend.tokenizer))
    encoder._backend = encoder._suffix_backend = counting
    for scope, num_encoded in (("a", 1), ("a", 1), ("b", 2), ("", 3), ("b", 3), ("", 3)):
        assert tokenizer.encode(text, scope=scope).tolist() == expected
        assert len(asked) == num_encoded
        assert len(asked[-1]) >= len(text), "a part of it was taken from another tenant"
