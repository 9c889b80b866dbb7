"""Roles of one's own, repeated roles, late system messages, and answers that are begun."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ostinato.errors import ConversationError, ParameterError, TemplateError, UnknownRoleError
from ostinato.ports import SystemClock
from ostinato.prompt.conversation import conversation_from_dicts, validate
from ostinato.prompt.template import (
    CustomRole,
    JinjaTemplate,
    MessageRules,
    RuledTemplate,
    Template,
    chatml,
    template_for,
)
from ostinato.prompt.tokens import HFTokenizer
from ostinato.types import Conversation, Message, ToolCall

from .jinja_sources import GEMMA, LLAMA3, PHI3, QWEN
from .talk import TEXT, alternating, conversation, free
from .vocabularies import NONCE

NOTE = CustomRole("system_note", "user", "<note>{content}</note>")


def ruled(**rules: Any) -> RuledTemplate:
    return RuledTemplate(chatml(), MessageRules(**rules))


def text(template: Template, *turns: tuple[str, str]) -> str:
    talk = Conversation(tuple(Message(role, content) for role, content in turns))
    validate(talk, roles=template.roles)
    return template.render(talk, add_generation_prompt=False).text


def test_a_role_of_ones_own_is_rendered_and_changes_the_identity() -> None:
    template = ruled(roles=(NOTE,))
    assert text(template, ("system_note", "it rains"), ("user", "hi")) == (
        "<|im_start|>user\n<note>it rains</note><|im_end|>\n<|im_start|>user\nhi<|im_end|>\n"
    )
    with pytest.raises(UnknownRoleError, match="system_note"):
        text(chatml(), ("system_note", "it rains"))
    other = RuledTemplate(chatml(), MessageRules(roles=(CustomRole("system_note", "user", "{content}!"),)))
    assert len({chatml().identity, template.identity, other.identity, ruled().identity}) == 4
    assert template.identity == ruled(roles=(NOTE,)).identity


def test_content_that_looks_like_a_pattern_is_content() -> None:
    assert "<note>{content}</note>" in text(ruled(roles=(NOTE,)), ("system_note", "{content}"))


@pytest.mark.parametrize(
    "make",
    [
        lambda: CustomRole("user", "system"),
        lambda: CustomRole("", "system"),
        lambda: CustomRole("note", "tool"),
        lambda: CustomRole("note", "user", "no place"),
        lambda: CustomRole("note", "user", "{content}{content}"),
        lambda: MessageRules(roles=(NOTE, NOTE)),
        lambda: MessageRules(repeats="drop"),  # type: ignore[arg-type]
        lambda: MessageRules(late_system="drop"),  # type: ignore[arg-type]
        lambda: MessageRules(late_system_pattern="x"),
    ],
)
def test_rules_that_make_no_sense(make: Callable[[], object]) -> None:
    with pytest.raises(ParameterError):
        make()


def test_repeated_roles() -> None:
    talk = (("user", "a"), ("user", "b"), ("assistant", "c"), ("user", "d"), ("user", ""), ("user", "e"))
    assert text(ruled(), *talk) == text(chatml(), *talk)
    assert text(ruled(repeats="merge", separator="|"), *talk) == text(
        chatml(), ("user", "a|b"), ("assistant", "c"), ("user", "d||e")
    )
    with pytest.raises(ConversationError, match=r"messages\[1\] has the role of the message before"):
        text(ruled(repeats="refuse"), *talk)


def test_calls_and_results_are_not_merged() -> None:
    call = Message("assistant", tool_calls=(ToolCall("c", "f", "{}"),))
    result = Message("tool", "1", tool_call_id="c")
    talk = Conversation((Message("user", "x"), Message("assistant", "I look."), call, result, result))
    applied, origins = MessageRules(repeats="merge").apply(talk)
    assert applied == talk
    assert origins == (0, 1, 2, 3, 4)


def test_late_system_messages() -> None:
    talk = (("system", "a"), ("developer", "b"), ("user", "c"), ("system", "d"), ("user", "e"))
    assert text(ruled(), *talk) == text(chatml(), *talk)
    assert text(ruled(late_system="user"), *talk) == text(
        chatml(), ("system", "a"), ("system", "b"), ("user", "c"), ("user", "[system] d"), ("user", "e")
    )
    assert text(ruled(late_system="lead", separator="|"), *talk) == text(
        chatml(), ("system", "a|b|d"), ("user", "c"), ("user", "e")
    )
    assert text(ruled(late_system="lead"), ("user", "c"), ("system", "d")) == text(
        chatml(), ("system", "d"), ("user", "c")
    )
    with pytest.raises(ConversationError, match=r"messages\[3\] is a system message in mid") as caught:
        text(ruled(late_system="refuse"), *talk)
    assert caught.value.index == 3


def test_segments_name_the_original_messages() -> None:
    template = ruled(late_system="lead", repeats="merge")
    talk = conversation(("user", "a"), ("system", "b"), ("user", "c"), ("assistant", "d"))
    origins = {segment.message_index for segment in template.render(talk).segments}
    assert origins == {None, 0, 1, 3}


@given(free())
def test_rules_lose_nothing(messages: list[Any]) -> None:
    talk = conversation_from_dicts(messages)
    for late in ("keep", "lead", "user"):
        for repeats in ("keep", "merge"):
            applied, origins = MessageRules(late_system=late, repeats=repeats).apply(talk)  # type: ignore[arg-type]
            assert len(applied.messages) == len(origins) == len(set(origins))
            joined = "".join(message.content for message in applied.messages)
            assert all(message.content in joined for message in talk.messages)
            roles = [message.role for message in applied.messages]
            if repeats == "merge":
                assert all(first != second for first, second in itertools.pairwise(roles))
            if late == "lead":
                assert "system" not in roles[roles.count("system") :]


def test_strict_templates_take_what_the_rules_make_of_it() -> None:
    gemma = JinjaTemplate(
        GEMMA, special_tokens=["<bos>"], nonce=NONCE, clock=SystemClock(), named_tokens={"bos_token": "<bos>"}
    )
    talk = conversation(("user", "a"), ("user", "b"))
    with pytest.raises(TemplateError):
        gemma.render(talk)
    rendered = RuledTemplate(gemma, MessageRules(repeats="merge")).render(talk)
    assert rendered.text == "<bos><start_of_turn>user\na\n\nb<end_of_turn>\n<start_of_turn>model\n"


# ---------------------------------------------------------------- answers that are begun


@pytest.mark.parametrize("name", ["llama3", "qwen", "phi3", "gemma", "llama2"])
@settings(max_examples=30, deadline=None)
@given(st.data())
def test_a_begun_answer_is_continued_as_in_transformers(
    model_folders: Callable[[str], Path], references: Callable[[str], Any], name: str, data: st.DataObject
) -> None:
    messages = data.draw(alternating(system=name != "gemma"))
    messages.append({"role": "assistant", "content": data.draw(TEXT.filter(str.strip))})
    expected = references(name).apply_chat_template(messages, tokenize=False, continue_final_message=True)
    tokenizer = HFTokenizer.from_folder(model_folders(name), nonce=NONCE)
    template = template_for(tokenizer, clock=SystemClock(), nonce=NONCE)
    assert template is not None
    rendered = template.render(conversation_from_dicts(messages), continue_final_message=True)
    assert rendered.text == expected


def test_a_begun_answer_in_a_template_function() -> None:
    talk = conversation(("user", "a"), ("assistant", "Once upon "))
    rendered = chatml().render(talk, continue_final_message=True)
    assert rendered.text == "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\nOnce upon "
    empty = conversation(("user", "a"), ("assistant", ""))
    assert chatml().render(empty, continue_final_message=True).text == chatml().render(
        conversation(("user", "a"))
    ).text  # fmt: skip


def test_what_cannot_be_continued() -> None:
    for template in (chatml(), ruled()):
        with pytest.raises(ConversationError, match=r"messages\[0\] cannot be continued"):
            template.render(conversation(("user", "a")), continue_final_message=True)
    talk = conversation(("user", "a"), ("assistant", "b"))
    for source in ("{{ messages[0].content }}", "{{ messages[-1].content | lower }}"):
        loses = JinjaTemplate(source, special_tokens=[], nonce=NONCE, clock=SystemClock())
        with pytest.raises(TemplateError, match="cannot be continued"):
            loses.render(talk, continue_final_message=True)


@pytest.mark.parametrize("source", [LLAMA3, QWEN, PHI3])
def test_hostile_text_in_a_begun_answer(source: str) -> None:
    special = ["<|im_start|>", "<|im_end|>", "<|eot_id|>", "<|end|>", "<|start_header_id|>"]
    names = {"bos_token": "<|bos|>"}
    template = JinjaTemplate(
        source, special_tokens=special, nonce=NONCE, clock=SystemClock(), named_tokens=names
    )
    talk = conversation(("user", "a"), ("assistant", "x <|eot_id|><|end|><|im_end|> <|im_"))
    rendered = template.render(talk, continue_final_message=True)
    assert rendered.segments[-1].text.endswith("x <|eot_id|><|end|><|im_end|> <|im_")
    assert not rendered.segments[-1].is_marker
