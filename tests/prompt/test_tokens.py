"""Tokenizing: what ``tokenizers`` makes of the whole text, whatever the special tokens do around them."""

from __future__ import annotations

import itertools
import json
import shutil
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from ostinato.errors import ModelCorruptError, ModelUnsupportedError, TemplateError
from ostinato.prompt.memo import PieceMemo
from ostinato.prompt.tokens import HFTokenizer
from ostinato.types import Rendered, Segment

from .jinja_sources import LLAMA3, SETTINGS
from .talk import TEXT
from .vocabularies import KINDS, NONCE, tokenizer_json, write_folder

Tokenizers = Callable[[str], HFTokenizer]


def load(folder: Path) -> HFTokenizer:
    return HFTokenizer.from_folder(folder, nonce=NONCE)


def reference(folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


@st.composite
def renderings(draw: st.DrawFn, special_tokens: list[str]) -> Rendered:
    """Markers and texts in any order, several of a kind beside each other."""
    marker = st.sampled_from(special_tokens).map(lambda text: Segment(text, is_marker=True))
    text = TEXT.filter(lambda text: not any(token in text for token in special_tokens)).map(Segment)
    segments = draw(st.lists(marker | text, max_size=8))
    joined = "".join(segment.text for segment in segments)
    # Where texts beside each other happen to spell a marker, the whole text is no measure.
    markers = sum(segment.is_marker for segment in segments)
    if sum(joined.count(token) for token in special_tokens) != markers:
        return Rendered(())
    return Rendered(tuple(segments))


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=50, deadline=None)
@given(st.data())
def test_pieces_are_as_the_whole(tokenizers: Tokenizers, kind: str, data: st.DataObject) -> None:
    tokenizer = tokenizers(kind)
    rendered = data.draw(renderings(sorted(tokenizer.special_tokens)))
    backend = Tokenizer.from_str(tokenizer_json(kind))
    whole = backend.encode(rendered.text, add_special_tokens=False).ids
    assert tokenizer.encode_rendered(rendered).tolist() == whole
    assert tokenizer.encode_rendered(rendered).tolist() == whole  # now from memory


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=20, deadline=None)
@given(text=TEXT)
def test_raw_prompts_are_as_transformers_encodes_them(
    kind: str, text: str, folders: Callable[[str], tuple[HFTokenizer, Any]]
) -> None:
    tokenizer, their = folders(kind)
    if any(token in text for token in tokenizer.special_tokens):
        return
    assert tokenizer.encode_prompt(text).tolist() == their(text)["input_ids"]
    assert tokenizer.encode(text).tolist() == their(text, add_special_tokens=False)["input_ids"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[HFTokenizer, Any]]:
    root = tmp_path_factory.mktemp("raw")
    made: dict[str, tuple[HFTokenizer, Any]] = {}

    def make(kind: str) -> tuple[HFTokenizer, Any]:
        if kind not in made:
            folder = write_folder(root / kind, kind, config=SETTINGS.get(kind))
            made[kind] = load(folder), reference(folder)
        return made[kind]

    return make


def test_bos_comes_by_the_tokenizers_own_rule_and_once(tokenizers: Tokenizers) -> None:
    llama = tokenizers("llama3")
    bos = llama.special_tokens["<|begin_of_text|>"]
    assert llama.encode_prompt("hi").tolist()[0] == bos
    assert llama.encode_prompt("<|begin_of_text|>hi").tolist().count(bos) == 1  # the text's stays text
    assert bos not in llama.encode("hi").tolist()
    rendered = Rendered((Segment("<|begin_of_text|>", is_marker=True), Segment("hi")))
    assert llama.encode_rendered(rendered).tolist().count(bos) == 1
    assert tokenizers("chatml").encode_prompt("hi").tolist() == tokenizers("chatml").encode("hi").tolist()
    assert tokenizers("wordpiece").encode_prompt("").tolist() == [2, 3]


def test_a_marker_that_is_no_token_is_named(tokenizers: Tokenizers) -> None:
    with pytest.raises(TemplateError, match=r"'<\|eot_id\|>', which is no token of this model"):
        tokenizers("chatml").encode_rendered(Rendered((Segment("<|eot_id|>", is_marker=True),)))


def test_added_tokens_that_are_not_special_are_read_in_text_as_ever(tokenizers: Tokenizers) -> None:
    tokenizer = tokenizers("qwen")
    think = tokenizer.encode("<think>").tolist()
    assert len(think) == 1
    assert think[0] not in tokenizer.special_tokens.values()
    as_marker = Rendered((Segment("<think>", is_marker=True), Segment("x")))
    as_text = Rendered((Segment("<think>x"),))
    assert tokenizer.encode_rendered(as_marker).tolist() == tokenizer.encode_rendered(as_text).tolist()


@pytest.mark.parametrize("text", ["</s>", "a</s>b", "</s>" * 500, "<s></s>", " </s> ", "</s", "s>"])
def test_vocabularies_that_know_special_tokens_as_words(tokenizers: Tokenizers, text: str) -> None:
    tokenizer = tokenizers("unigram")
    backend = Tokenizer.from_str(tokenizer_json("unigram"))
    backend.encode_special_tokens = True
    special = set(tokenizer.special_tokens.values()) - {0}
    if "</s>" in text:
        assert special & set(backend.encode(text).ids)  # the library alone does not keep them apart
    numbers = tokenizer.encode(text).tolist()
    assert not special & set(numbers)
    assert tokenizer.decode(numbers).strip() == text.strip()


def test_a_special_token_that_is_one_character_is_refused_as_text(tmp_path: Path) -> None:
    content = json.loads(tokenizer_json("chatml"))
    number = content["model"]["vocab"]["~"]
    entry = {**content["added_tokens"][0], "id": number, "content": "~"}
    content["added_tokens"].insert(0, entry)
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    tokenizer = load(tmp_path)
    assert tokenizer.encode_rendered(Rendered((Segment("~", is_marker=True),))).tolist() == [number]
    with pytest.raises(TemplateError, match="'~', which this model's tokenizer can only read as a special"):
        tokenizer.encode("a~b")


@pytest.mark.parametrize("kind", ["chatml", "llama2", "unigram"])
def test_text_with_the_secret_in_it(tokenizers: Tokenizers, kind: str) -> None:
    tokenizer = tokenizers(kind)
    text = f"{NONCE}n{NONCE} and {NONCE}b{NONCE}{NONCE}l{NONCE}"
    rendered = Rendered((Segment(text),))
    backend = Tokenizer.from_str(tokenizer_json(kind))
    expected = backend.encode(text, add_special_tokens=False).ids
    assert tokenizer.encode_rendered(rendered).tolist() == tokenizer.encode(text).tolist() == expected
    assert kind == "unigram" or tokenizer.decode(expected) == text  # it does not know all digits


def test_the_result_does_not_depend_on_the_secret(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, "mistral", config=SETTINGS["mistral"])
    other = HFTokenizer.from_folder(folder, nonce="1" * 20)
    assert other.identity == load(folder).identity
    assert other.encode("the dog").tolist() == load(folder).encode("the dog").tolist()


def test_ids_are_int32_and_the_remembered_cannot_be_changed(tokenizers: Tokenizers) -> None:
    tokenizer = tokenizers("chatml")
    ids = tokenizer.encode("the dog")
    assert ids.dtype == np.int32
    with pytest.raises(ValueError, match="read-only"):
        ids[0] = 1
    rendered = Rendered((Segment("the dog"),))
    assert tokenizer.encode_rendered(rendered).dtype == np.int32
    assert tokenizer.encode_rendered(Rendered(())).tolist() == []


# ---------------------------------------------------------------- folders


CONFIGS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "names": {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "</s>"},
    "declared": {
        "eos_token": {
            "__type": "AddedToken",
            "content": "<|end|>",
            "lstrip": False,
            "rstrip": True,
            "normalized": False,
        },
        "additional_special_tokens": ["<|user|>", "<|fresh|>"],
        "added_tokens_decoder": {
            "600": {"content": "<|late|>", "special": True, "normalized": False, "rstrip": True},
            "601": {"content": "<|word|>", "special": False, "normalized": False},
        },
    },
    "new names": {"pad_token": "[PAD]", "mask_token": "[MASK]", "image_token": "<image>"},
    "add bos": {"add_bos_token": True, "bos_token": "<s>"},
}


@pytest.mark.parametrize("name", CONFIGS)
def test_special_tokens_are_those_of_transformers(tmp_path: Path, name: str) -> None:
    folder = write_folder(tmp_path, "phi3", config=CONFIGS[name])
    ours, theirs = load(folder), reference(folder)
    special = {
        token.content: number for number, token in theirs.added_tokens_decoder.items() if token.special
    }
    assert {**special, **ours.special_tokens} == ours.special_tokens
    for role in ("bos_token", "eos_token", "unk_token", "pad_token"):
        assert ours.named_tokens.get(role) == getattr(theirs, role)
    text = "the <|word|> dog <|late|>  x"
    markers = Rendered((Segment("the "), Segment("<|end|>", is_marker=True), Segment("\n dog")))
    expected = theirs("the <|end|>\n dog", add_special_tokens=False)["input_ids"]
    assert ours.encode_rendered(markers).tolist() == expected
    assert ours.encode_prompt("the dog").tolist() == theirs("the dog")["input_ids"]
    if "<|late|>" in ours.special_tokens:
        late = Rendered((Segment("the <|word|> dog "), Segment("<|late|>", is_marker=True), Segment("  x")))
        assert ours.encode_rendered(late).tolist() == theirs(text, add_special_tokens=False)["input_ids"]


def test_the_older_map_of_special_tokens(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, "llama2")
    (folder / "special_tokens_map.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"}))
    ours, theirs = load(folder), reference(folder)
    assert (ours.bos_token, ours.eos_token) == (theirs.bos_token, theirs.eos_token) == ("<s>", "</s>")


def test_control_tokens_of_the_configuration_cannot_be_written_as_text(tmp_path: Path) -> None:
    folder = write_folder(
        tmp_path, "qwen", config={"eos_token": "</tool_call>", "chat_control_tokens": ["<tool_call>"]}
    )
    tokenizer = load(folder)
    for text in ("</tool_call>", "<tool_call>"):
        number = tokenizer.special_tokens[text]
        assert number not in tokenizer.encode(text).tolist()
        assert tokenizer.decode([number]) == ""
    assert len(tokenizer.encode("<think>")) == 1


def test_end_tokens_of_all_files(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, "chatml", config={"eos_token": "<|im_end|>"})
    end = load(folder).special_tokens["<|im_end|>"]
    assert load(folder).eos_token_ids == {end}
    (folder / "config.json").write_text(json.dumps({"eos_token_id": 7}))
    assert load(folder).eos_token_ids == {7, end}
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [8, 9]}))
    assert load(folder).eos_token_ids == {8, 9, end}


def test_chat_templates_of_all_files(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, "chatml")
    assert load(folder).chat_template is None
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": "oldest"}))
    assert load(folder).chat_template == "oldest"
    listed = [{"name": "default", "template": "listed"}, {"name": "tool_use", "template": "tools"}]
    write_folder(folder, "chatml", config={"chat_template": listed})
    assert load(folder).chat_templates == {"default": "listed", "tool_use": "tools"}
    write_folder(folder, "chatml", config={"chat_template": "in the config"}, template=LLAMA3)
    assert load(folder).chat_template == LLAMA3
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "rag.jinja").write_text("documents")
    assert load(folder).chat_templates == {"default": LLAMA3, "rag": "documents"}


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ('{"model": {', "is not valid JSON"),
        ("[]", "not a JSON object"),
        ("{}", "describes no tokenizer model"),
        ('{"model": {"type": "Cipher"}}', "tokenizers cannot read"),
    ],
)
def test_broken_files_are_named(tmp_path: Path, content: str, says: str) -> None:
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ModelCorruptError, match=says):
        load(tmp_path)


def test_a_vocabulary_with_gaps_is_refused(tmp_path: Path) -> None:
    content = json.loads(tokenizer_json("chatml"))
    content["model"]["vocab"]["~"] = 10_000
    content["added_tokens"] = []
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(ModelUnsupportedError, match="has gaps"):
        load(tmp_path)


def test_several_threads_at_once(tokenizers: Tokenizers, tmp_path: Path) -> None:
    tokenizer = tokenizers("mistral")
    texts = [f"the fox {number} and " * (number * 20) for number in range(1, 20)]
    expected = [tokenizer.encode(text).tolist() for text in texts]
    fresh = load(write_folder(tmp_path, "mistral", config=SETTINGS["mistral"]))
    with ThreadPoolExecutor(4) as pool:
        for _ in range(3):
            assert [ids.tolist() for ids in pool.map(fresh.encode, texts)] == expected


def test_a_folder_without_a_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(ModelUnsupportedError, match=r"has no tokenizer\.json"):
        load(tmp_path)


def test_identity_is_the_content(tmp_path: Path) -> None:
    first = write_folder(tmp_path / "a", "mistral", config=SETTINGS["mistral"])
    identity = load(first).identity
    assert identity.startswith("b3:")
    assert len(identity) == 3 + 64
    # The same in another order and layout, with what does not bear on tokens changed.
    second = tmp_path / "b"
    shutil.copytree(first, second)
    content = json.loads((first / "tokenizer.json").read_text())
    shuffled = {**dict(reversed(content.items())), "truncation": {"max_length": 5, "strategy": "LongestFirst",
                "stride": 0, "direction": "Right"}}  # fmt: skip
    (second / "tokenizer.json").write_text(json.dumps(shuffled, indent=3, ensure_ascii=True))
    assert load(second).identity == identity
    assert len(load(second).encode("the dog " * 10)) > 5  # and no truncation
    # One merge less, one special token more, another end token: other tokens.
    content["model"]["merges"].pop()
    (second / "tokenizer.json").write_text(json.dumps(content))
    changed = load(second).identity
    write_folder(second, "mistral", config={**SETTINGS["mistral"], "pad_token": "[PAD]"})
    assert len({identity, changed, load(second).identity}) == 3


def test_memory_is_bounded_and_forgets_the_oldest() -> None:
    memo = PieceMemo(capacity_bytes=10_000)
    ids = np.arange(100, dtype=np.int32)
    for number in range(100):
        memo.put(("", f"piece {number}", ""), ids)
        memo.get(("", "piece 0", ""))
    assert 5 < len(memo) < 15
    assert memo.size_bytes <= 10_000
    assert memo.get(("", "piece 0", "")) is not None
    assert memo.get(("", "piece 50", "")) is None
    assert memo.get(("n", "piece 99", "")) is None
    memo.put(("", "x" * 9_000, ""), ids)
    assert memo.get(("", "x" * 9_000, "")) is None
    memo.put(("", "piece 0", ""), ids)
    assert memo.size_bytes <= 10_000


def test_other_threads_run_while_a_long_text_is_encoded(tokenizers: Callable[[str], HFTokenizer]) -> None:
    tokenizer, ticks, done = tokenizers(next(iter(KINDS))), list[float](), threading.Event()

    def tick() -> None:
        while not done.wait(0.001):
            ticks.append(time.perf_counter())

    ticker = threading.Thread(target=tick)
    ticker.start()
    began = time.perf_counter()
    tokenizer.encode("no end of it " * 60_000)
    ended = time.perf_counter()
    done.set()
    ticker.join()
    edges = [began, *(moment for moment in ticks if began < moment < ended), ended]
    # Turning the result into Python's own values does hold the others up.
    assert max(b - a for a, b in itertools.pairwise(edges)) < 0.6 * (ended - began)
