"""Which message each token of a prompt is of, also where a Jinja template wrote the prompt."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ostinato.errors import OstinatoError
from ostinato.prompt.conversation import conversation_from_dicts
from ostinato.prompt.origins import is_same_prompt
from ostinato.prompt.rules import MessageRules, RuledTemplate
from ostinato.prompt.template import Template, named_template
from ostinato.prompt.tokens import HFTokenizer
from ostinato.types import Conversation, Message, Segment

from .jinja_sources import PAIRS
from .talk import TEXT, alternating, conversation, free, with_tools
from .test_trust import hostile, jinja
from .vocabularies import NONCE

Tokenizers = Callable[[str], HFTokenizer]

SYSTEM, ASK, ANSWER, MORE = "Be kind to all.", "Where is Bonn?", "On the Rhine.", "Which river was that?"
TALK = conversation(("system", SYSTEM), ("user", ASK), ("assistant", ANSWER), ("user", MORE))


@pytest.fixture(scope="module")
def models(model_folders: Callable[[str], Path]) -> dict[str, tuple[Template, HFTokenizer]]:
    made = {}
    for name in PAIRS:
        tokenizer = HFTokenizer.from_folder(model_folders(name), nonce=NONCE)
        assert tokenizer.chat_template is not None
        made[name] = jinja(tokenizer.chat_template, tokenizer), tokenizer
    return made


def texts_by_message(template: Template, tokenizer: HFTokenizer, talk: Conversation) -> dict[Any, str]:
    """What the tokens of every message decode to."""
    located = template.locate(talk)
    spanned = tokenizer.encode_spans(located)
    assert spanned.ids.tolist() == tokenizer.encode_rendered(template.render(talk)).tolist()
    ids: dict[Any, list[int]] = {}
    for number, segment in zip(spanned.ids.tolist(), spanned.segments.tolist(), strict=True):
        ids.setdefault(located.segments[segment].message_index, []).append(number)
    return {index: tokenizer.decode(own, skip_special_tokens=False) for index, own in ids.items()}


@pytest.mark.parametrize("name", PAIRS)
def test_models_templates(models: dict[str, tuple[Template, HFTokenizer]], name: str) -> None:
    talk = TALK if name != "gemma" else Conversation(TALK.messages[1:])
    found = texts_by_message(*models[name], talk)
    for index, message in enumerate(talk.messages):
        assert message.content in found[index]
        for other, text in found.items():
            assert other == index or message.content not in text


def test_to_the_letter(models: dict[str, tuple[Template, HFTokenizer]]) -> None:
    assert texts_by_message(*models["llama3"], TALK)[2] == (
        f"<|start_header_id|>assistant<|end_header_id|>\n\n{ANSWER}<|eot_id|>"
    )
    # Here the system text stands inside the user's turn, and is of another message all the same.
    found = texts_by_message(*models["llama2"], TALK)
    assert found[0].strip() == SYSTEM
    assert found[1] == f"<s> [INST] <<SYS>>\n\n<</SYS>>\n\n{ASK} [/INST]"
    # The tools, which no message brought, are of none.
    tools = [{"type": "function", "function": {"name": "look_up", "description": "Look it up."}}]
    found = texts_by_message(*models["qwen"], Conversation(TALK.messages, tuple(tools)))
    assert SYSTEM in found[0]
    assert "Look it up." in found[None]


@pytest.mark.parametrize("name", PAIRS)
@settings(max_examples=40, deadline=None)
@given(st.data())
def test_it_is_always_the_same_prompt(
    models: dict[str, tuple[Template, HFTokenizer]], name: str, data: st.DataObject
) -> None:
    template, tokenizer = models[name]
    texts = TEXT | hostile(sorted(tokenizer.special_tokens))
    messages, tools = data.draw(
        st.tuples(alternating(system=name != "gemma", texts=texts) | free(texts=texts), st.none())
        | with_tools(texts=texts)
    )
    talk = conversation_from_dicts(messages, tools)
    goes_on = data.draw(st.booleans())
    if data.draw(st.booleans()):
        template = RuledTemplate(template, MessageRules(repeats="merge", late_system="lead"))
    try:
        rendered = template.render(talk, add_generation_prompt=not goes_on, continue_final_message=goes_on)
    except OstinatoError as error:
        with pytest.raises(type(error)):
            template.locate(talk, add_generation_prompt=not goes_on, continue_final_message=goes_on)
        return
    located = template.locate(talk, add_generation_prompt=not goes_on, continue_final_message=goes_on)
    assert is_same_prompt(located.segments, rendered.segments)
    ids = tokenizer.encode_spans(located).ids.tolist()
    assert ids == tokenizer.encode_rendered(rendered).tolist()
    for segment in located.segments:
        assert segment.message_index is None or 0 <= segment.message_index < len(talk.messages)


def test_rules_name_the_messages_as_given(tokenizers: Tokenizers) -> None:
    tokenizer = tokenizers("chatml")
    source = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>{% endfor %}"
    ruled = RuledTemplate(jinja(source, tokenizer), MessageRules(repeats="merge"))
    talk = conversation(("user", ASK), ("user", MORE), ("assistant", ANSWER))
    found = texts_by_message(ruled, tokenizer, talk)
    assert set(found) == {0, 2}
    assert ANSWER in found[2]


def test_a_template_that_looks_too_closely(tokenizers: Tokenizers) -> None:
    tokenizer = tokenizers("chatml")
    source = "{% if messages[0].content == '" + ASK + "' %}<|im_start|>{% endif %}{{ messages[0].content }}"
    template = jinja(source, tokenizer)
    talk = conversation(("user", ASK))
    assert template.locate(talk).segments == template.render(talk).segments
    assert {segment.message_index for segment in template.locate(talk).segments} == {None}
    other = conversation(("user", ANSWER))
    assert template.locate(other).segments == (Segment(ANSWER, message_index=0),)


def test_formats_as_code_say_it_themselves() -> None:
    template = named_template("chatml")
    assert template.locate(TALK) == template.render(TALK)


def test_hostile_names_of_marks(tokenizers: Tokenizers) -> None:
    """Who knew the escape would only lose the origins."""
    tokenizer = tokenizers("chatml")
    template = jinja("{% for m in messages %}{{ m.content }}{% endfor %}", tokenizer)
    for text in (template._disguise.mark(1), template._disguise.escape_for(()), "\ue000\ue001"):
        talk = Conversation((Message("user", f"before {text} after"),))
        assert is_same_prompt(template.locate(talk).segments, template.render(talk).segments)
