"""Text that comes token by token is the text of all tokens, and ends at stop strings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ostinato.errors import ParameterError
from ostinato.prompt.detokenize import Detokenizer
from ostinato.prompt.tokens import HFTokenizer

from .talk import TEXT
from .vocabularies import KINDS, NONCE

Tokenizers = Callable[[str], HFTokenizer]

BUSY = "naïve 你好🙂🙂🏽‍🚀 e\u0301 <tag> 'tis  \n\n x\t\u200b ½ ﷽ \ufffd end"


def pieces_of(tokenizer: HFTokenizer, ids: Sequence[int], stop: tuple[str, ...] = ()) -> list[str]:
    detokenizer = Detokenizer(tokenizer, stop)
    return [*(detokenizer.push(number) for number in ids), detokenizer.finish()]


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=40, deadline=None)
@given(st.data())
def test_all_pieces_are_the_whole(tokenizers: Tokenizers, kind: str, data: st.DataObject) -> None:
    tokenizer = tokenizers(kind)
    # Ids beyond the vocabulary too: a model's output layer is often longer.
    numbers = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 20), max_size=30))
    assert "".join(pieces_of(tokenizer, numbers)) == tokenizer.decode(numbers)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=20, deadline=None)
@given(st.data())
def test_so_are_those_of_real_text_with_special_tokens_in_it(
    tokenizers: Tokenizers, kind: str, data: st.DataObject
) -> None:
    tokenizer = tokenizers(kind)
    special = st.sampled_from(sorted(tokenizer.special_tokens.values()))
    numbers = []
    for text in data.draw(st.lists(TEXT | st.just(BUSY), max_size=4)):
        numbers += [*tokenizer.encode(text).tolist(), data.draw(special)]
    assert "".join(pieces_of(tokenizer, numbers)) == tokenizer.decode(numbers)


@pytest.mark.parametrize("kind", KINDS)
def test_decode_is_transformers(tokenizers: Tokenizers, kind: str, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    from .jinja_sources import SETTINGS
    from .vocabularies import write_folder

    reference = AutoTokenizer.from_pretrained(write_folder(tmp_path, kind, config=SETTINGS.get(kind)))
    tokenizer = tokenizers(kind)
    numbers = [*tokenizer.encode(BUSY).tolist(), *range(tokenizer.vocab_size)]
    for skip in (True, False):
        assert tokenizer.decode(numbers, skip_special_tokens=skip) == reference.decode(
            numbers, skip_special_tokens=skip
        )


def test_a_character_comes_whole_and_at_once(tokenizers: Tokenizers) -> None:
    tokenizer = tokenizers("chatml")
    numbers = tokenizer.encode("a🙂b").tolist()
    pieces = pieces_of(tokenizer, numbers)
    assert len(numbers) > 3
    assert "🙂" in pieces
    assert "\ufffd" not in "".join(pieces)
    assert pieces[-2:] == ["b", ""]


def test_an_unfinished_character_is_shown_as_such_at_the_end(tokenizers: Tokenizers) -> None:
    tokenizer = tokenizers("chatml")
    numbers = tokenizer.encode("a🙂").tolist()[:-1]
    pieces = pieces_of(tokenizer, numbers)
    assert "".join(pieces) == tokenizer.decode(numbers) == "a\ufffd"
    assert pieces[-1] == "\ufffd"


@pytest.mark.parametrize("kind", ["llama2", "gemma", "chatml", "unigram", "wordpiece"])
def test_text_comes_with_its_token(tokenizers: Tokenizers, kind: str) -> None:
    tokenizer = tokenizers(kind)
    pieces = pieces_of(tokenizer, tokenizer.encode("the fox and the dog").tolist())
    assert pieces[-1] == ""
    assert all(pieces[1:-1])  # all but the first, which may be a mere space that the text does not show


@pytest.mark.parametrize("kind", ["llama2", "chatml", "gemma"])
def test_time_per_token_does_not_grow(tokenizers: Tokenizers, kind: str) -> None:
    tokenizer = tokenizers(kind)
    calls: list[int] = []
    detokenizer = Detokenizer(tokenizer)
    text: Any = detokenizer._stream._text  # type: ignore[attr-defined]
    decode = text.decode

    def counted(ids: list[int]) -> str:
        calls.append(len(ids))
        result: str = decode(ids)
        return result

    text.decode = counted
    try:
        numbers = tokenizer.encode("the   quick brown\n\n fox 🙂🙂 é " * 200).tolist()
        for number in numbers:
            detokenizer.push(number)
    finally:
        del text.decode
    assert sum(calls) <= 4 * len(numbers)


# ---------------------------------------------------------------- stop strings


def reference_cut(text: str, stop: tuple[str, ...]) -> tuple[str, str | None]:
    """The rule, said naively: the first end of any stop string; of several there, the longest."""
    for end in range(1, len(text) + 1):
        complete = [word for word in stop if text[:end].endswith(word)]
        if complete:
            longest = max(complete, key=len)
            return text[: end - len(longest)], longest
    return text, None


STOPS = st.lists(st.text("ab<\n", min_size=1, max_size=4), max_size=4).map(tuple)


@pytest.mark.parametrize("kind", ["chatml", "llama2", "wordpiece"])
@settings(max_examples=40, deadline=None)
@given(text=st.text("ab<\n 你", max_size=30), stop=STOPS, data=st.data())
def test_stop_strings(
    tokenizers: Tokenizers, kind: str, text: str, stop: tuple[str, ...], data: st.DataObject
) -> None:
    tokenizer = tokenizers(kind)
    numbers = tokenizer.encode(text).tolist()
    if data.draw(st.booleans()):  # in other tokens than the tokenizer would take
        numbers = [number for part in text for number in tokenizer.encode(part).tolist()]
    expected, stopped_by = reference_cut(tokenizer.decode(numbers), stop)
    detokenizer = Detokenizer(tokenizer, stop)
    shown = ""
    for number in numbers:
        shown += detokenizer.push(number)
        assert expected.startswith(shown)  # nothing is shown that would have to be taken back
    shown += detokenizer.finish()
    assert shown == expected
    assert detokenizer.stopped == stopped_by
    assert detokenizer.push(numbers[0] if numbers else 0) == "" or stopped_by is None
    assert detokenizer.finish() == "" or stopped_by is None


def test_text_is_held_back_no_longer_than_needed(tokenizers: Tokenizers) -> None:
    tokenizer = tokenizers("chatml")
    detokenizer = Detokenizer(tokenizer, ("abcX",))

    def push(text: str) -> str:
        return "".join(detokenizer.push(number) for number in tokenizer.encode(text).tolist())

    assert push("zab") == "z"
    assert push("c") == ""
    assert push("a") == "abc"
    assert push("q") == "aq"
    assert push("abc") == ""
    assert detokenizer.finish() == "abc"
    assert detokenizer.stopped is None


def test_a_stop_string_inside_one_token_and_over_several(tokenizers: Tokenizers) -> None:
    tokenizer = tokenizers("chatml")
    (token,) = tokenizer.encode(" the").tolist()
    detokenizer = Detokenizer(tokenizer, ("th",))
    assert detokenizer.push(token) == " "
    assert detokenizer.stopped == "th"
    spread = tokenizer.encode("🙂").tolist()
    detokenizer = Detokenizer(tokenizer, ("🙂",))
    assert "".join(detokenizer.push(number) for number in [token, *spread]) == " the"
    assert detokenizer.stopped == "🙂"


def test_a_stop_string_completed_by_the_last_bytes(tokenizers: Tokenizers) -> None:
    tokenizer = tokenizers("llama2")
    numbers = tokenizer.encode("the 🙂").tolist()
    detokenizer = Detokenizer(tokenizer, ("🙂",))
    shown = "".join(detokenizer.push(number) for number in numbers)
    assert detokenizer.stopped is None  # its bytes could still turn out to be wrong
    assert shown + detokenizer.finish() == "the "
    assert detokenizer.stopped == "🙂"


def test_an_empty_stop_string_is_refused(tokenizers: Tokenizers) -> None:
    with pytest.raises(ParameterError) as caught:
        Detokenizer(tokenizers("chatml"), ("x", ""))
    assert caught.value.param == "stop"


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in ("wordpiece", "unigram")])
def test_token_bytes_make_the_text(tokenizers: Tokenizers, kind: str) -> None:
    tokenizer = tokenizers(kind)
    numbers = tokenizer.encode(BUSY).tolist()
    joined = b"".join(tokenizer.token_bytes(number) for number in numbers).decode()
    assert joined.removeprefix(" ") == tokenizer.decode(numbers).removeprefix(" ")


def test_bytes_of_special_byte_and_unknown_tokens(tokenizers: Tokenizers) -> None:
    llama = tokenizers("llama2")
    assert llama.token_bytes(llama.special_tokens["</s>"]) == b"</s>"
    assert llama.token_bytes(llama.encode("🙂").tolist()[-1]) == "🙂".encode()[-1:]
    assert llama.token_bytes(llama.vocab_size) == b""
    wordpiece = tokenizers("wordpiece")
    assert b"".join(map(wordpiece.token_bytes, wordpiece.encode("the dog").tolist())) == b" the dog"


@pytest.mark.model
@settings(max_examples=50, deadline=None)
@given(numbers=st.lists(st.integers(0, 49_200), max_size=40))
def test_default_model(default_tokenizer: HFTokenizer, numbers: list[int]) -> None:
    assert "".join(pieces_of(default_tokenizer, numbers)) == default_tokenizer.decode(numbers)


@pytest.fixture(scope="module")
def default_tokenizer(default_model_path: Path) -> HFTokenizer:
    return HFTokenizer.from_folder(default_model_path, nonce=NONCE)
