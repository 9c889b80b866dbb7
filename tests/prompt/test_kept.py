"""Generated ids come back for the answer they spelled, and for nothing else."""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import given, settings
from hypothesis import strategies as st

from ostinato.prompt.kept import KeptAnswers
from ostinato.prompt.template import chatml, named_template
from ostinato.prompt.tokens import HFTokenizer
from ostinato.types import Rendered, Segment

from .talk import TEXT, conversation

Tokenizers = Callable[[str], HFTokenizer]

QUESTION = ("user", "Which animal jumps?")


def spelled(tokenizer: HFTokenizer, text: str) -> list[int]:
    """``text`` in as many tokens as it has characters: not what the tokenizer would take."""
    return [number for char in text for number in tokenizer.encode(char).tolist()]


def test_a_kept_answer_comes_back_in_its_own_tokens(tokenizers: Tokenizers) -> None:
    tokenizer = tokenizers("chatml")
    kept = KeptAnswers(tokenizer)
    prompt = chatml().render(conversation(QUESTION))
    tail = tokenizer.tail(prompt.segments)
    generated = spelled(tokenizer, "The fox, of course.")
    end = tokenizer.special_tokens["<|im_end|>"]
    assert kept.keep(tail, [*generated, end, 5, 6])
    history = conversation(QUESTION, ("assistant", "The fox, of course."), ("user", "Why?"))
    rendered = chatml().render(history)
    before = tokenizer.encode_rendered(prompt).tolist()
    ids = kept.encode(rendered).tolist()
    assert ids[: len(before) + len(generated) + 1] == [*before, *generated, end]
    assert tokenizer.decode(ids, skip_special_tokens=False) == rendered.text
    assert ids != tokenizer.encode_rendered(rendered).tolist()
    # Not for another text, not for another tenant, and not without asking.
    changed = chatml().render(conversation(QUESTION, ("assistant", "The fox, of course!"), ("user", "Why?")))
    assert kept.encode(changed).tolist() == tokenizer.encode_rendered(changed).tolist()
    assert kept.encode(rendered, scope="other").tolist() == tokenizer.encode_rendered(rendered).tolist()


@settings(max_examples=80, deadline=None)
@given(answer=TEXT, data=st.data())
def test_the_text_is_always_the_same(tokenizers: Tokenizers, answer: str, data: st.DataObject) -> None:
    kind, name = data.draw(st.sampled_from([("chatml", "chatml"), ("llama3", "llama3"), ("gemma", "gemma")]))
    tokenizer = tokenizers(kind)
    template = named_template(name)
    kept = KeptAnswers(tokenizer)
    prompt = template.render(conversation(QUESTION))
    generated = data.draw(st.sampled_from([spelled(tokenizer, answer), tokenizer.encode(answer).tolist()]))
    kept.keep(tokenizer.tail(prompt.segments), generated)
    rendered = template.render(conversation(QUESTION, ("assistant", answer), ("user", "Why?")))
    ids = kept.encode(rendered).tolist()
    plain = tokenizer.encode_rendered(rendered).tolist()
    special = set(tokenizer.special_tokens.values())
    assert [number for number in ids if number in special] == [
        number for number in plain if number in special
    ]
    assert tokenizer.decode(ids, skip_special_tokens=False) == tokenizer.decode(
        plain, skip_special_tokens=False
    )


def test_what_is_not_kept(tokenizers: Tokenizers) -> None:
    tokenizer = tokenizers("chatml")
    kept = KeptAnswers(tokenizer)
    prompt = tokenizer.tail(chatml().render(conversation(QUESTION)).segments)
    assert not kept.keep(prompt, [])
    assert not kept.keep(prompt, [tokenizer.special_tokens["<|im_end|>"]])
    assert not kept.keep(prompt, tokenizer.encode("🙂").tolist()[:-1])
    assert not kept.keep(prompt, [tokenizer.vocab_size + 3])


def test_markers_that_take_white_space_away(tokenizers: Tokenizers) -> None:
    tokenizer = tokenizers("stripping-bytes")
    kept = KeptAnswers(tokenizer)
    tail = tokenizer.tail((Segment("<|none|>", True), Segment("say:")))
    assert kept.keep(tail, spelled(tokenizer, "the dog "))
    for after, takes in (("<|none|>", False), ("<|right|>", False), ("<|left|>", True), ("<|both|>", True)):
        rendered = Rendered((Segment("<|none|>", True), Segment("say:the dog "), Segment(after, True)))
        plain = tokenizer.encode_rendered(rendered).tolist()
        assert (kept.encode(rendered).tolist() == plain) == takes
