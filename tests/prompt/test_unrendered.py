"""What a template leaves out is named, exactly and for every kind of template."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ostinato.errors import ConversationError, TemplateError
from ostinato.ports import SystemClock
from ostinato.prompt.formats import FORMATS
from ostinato.prompt.template import JinjaTemplate, named_template
from ostinato.prompt.unrendered import knowledge, unrendered
from ostinato.types import Conversation, Message, ToolCall, Unrendered

from .vocabularies import NONCE

WITH_NAMES = (
    "{% for m in messages %}<|im_start|>{{ m.role }}{% if m.name is defined and m.role == 'user' %} "
    "{{ m.name | upper }}{% endif %}\n{{ m.content | trim }}<|im_end|>\n{% endfor %}"
)


def jinja(source: str) -> JinjaTemplate:
    special = ("<|im_start|>", "<|im_end|>")
    return JinjaTemplate(source, special_tokens=special, nonce=NONCE, clock=SystemClock())


def test_a_conversation_without_such_fields_is_not_rendered_again() -> None:
    class NoTemplate:
        def render(self, *args: object, **options: object) -> None:
            raise AssertionError("rendered for nothing")

    talk = Conversation((Message("system", "a"), Message("user", "b"), Message("assistant", "c")))
    assert unrendered(talk, NoTemplate()) == ()  # type: ignore[arg-type]


def test_names_are_found_by_message() -> None:
    talk = Conversation(
        (
            Message("user", "Hello", name="ada"),
            Message("assistant", "Hi", name="bot"),
            Message("user", "And?", name="ben"),
        )
    )
    assert unrendered(talk, named_template("chatml")) == (Unrendered("name", (0, 1, 2)),)
    assert unrendered(talk, jinja(WITH_NAMES)) == (Unrendered("name", (1,)),)


CALL = (ToolCall("call12345", "look", "{}"),)
TOOL = {"type": "function", "function": {"name": "look", "description": "", "parameters": {}}}


def test_reasoning_is_written_where_the_format_says() -> None:
    talk = Conversation(
        (
            Message("user", "Look!"),
            Message("assistant", "", tool_calls=CALL, reasoning="Old thought."),
            Message("tool", "Blue.", tool_call_id="call12345"),
            Message("assistant", "Blue.", reasoning="Older thought."),
            Message("user", "Again!"),
            Message("assistant", "I look.", tool_calls=CALL, reasoning="New thought."),
            Message("tool", "Blue.", tool_call_id="call12345"),
        ),
        (TOOL,),
    )
    assert unrendered(talk, named_template("qwen3")) == (Unrendered("reasoning", (1, 3)),)
    assert unrendered(talk, named_template("qwen2.5")) == (Unrendered("reasoning", (1, 3, 5)),)
    assert unrendered(talk, named_template("llama3.1")) == (
        Unrendered("reasoning", (1, 3, 5)),
        Unrendered("content", (5,)),
    )


TEXTS = st.text(alphabet="ab \n<|}{\ue002\ue0010", max_size=12)


@given(
    st.sampled_from([named_template(name) for name in FORMATS] + [jinja(WITH_NAMES)]),
    st.lists(st.tuples(TEXTS, st.none() | TEXTS, TEXTS), min_size=1, max_size=5),
)
def test_named_is_what_is_not_there(
    template: JinjaTemplate, given: list[tuple[str, str | None, str]]
) -> None:
    """A field that is named could be taken away, and the prompt would be the same."""
    messages = [
        Message(
            "assistant" if index % 2 else "user", content, name=name, reasoning=thought if index % 2 else ""
        )
        for index, (content, name, thought) in enumerate(given[: len(given) - 1 + len(given) % 2])
    ]
    talk = Conversation(tuple(messages))
    try:
        rendered = template.render(talk)
    except (TemplateError, ConversationError):
        return
    named = {(item.field, index) for item in unrendered(talk, template) for index in item.messages}
    for index, message in enumerate(messages):
        if ("name", index) in named:
            messages[index] = message = Message(message.role, message.content, reasoning=message.reasoning)
        if ("reasoning", index) in named:
            messages[index] = Message(message.role, message.content, name=message.name)
    assert template.render(Conversation(tuple(messages))) == rendered


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_is_known_in_words(name: str) -> None:
    known = knowledge(named_template(name))
    assert known.name == "left out"  # no format of those there are writes names
    assert known.tools in ("written", "refused")
    assert known.late_system in ("written in place", "moved to the front", "refused")


def test_a_template_of_ones_own_is_known_too() -> None:
    known = knowledge(jinja(WITH_NAMES))
    assert known.name == "written"
    assert known.reasoning == "left out"
    assert known.tools == "refused"
    assert known.repeated_roles == "written"
