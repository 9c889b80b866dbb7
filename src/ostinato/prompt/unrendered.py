"""What a template leaves out of the prompt without a word.

Templates drop what their model was never taught: the names of speakers, most of what the assistant thought in
earlier turns, sometimes its words beside a tool call. None of that is an error, and none of it is to be seen
in the prompt. So the fields in question are replaced by marks, the conversation is rendered once more, and
the marks that are not there name what was left out. That holds for formats written as code and for any Jinja
template alike. A conversation without such fields is not rendered again.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final

from ..errors import ConversationError, TemplateError
from ..types import Conversation, Message, ToolCall, Unrendered
from .base import Template

FIELDS: Final = ("name", "reasoning", "content")


def unrendered(
    conversation: Conversation, template: Template, *, continue_final_message: bool = False
) -> tuple[Unrendered, ...]:
    """The fields of this conversation that ``template`` does not write down, in the order of :data:`FIELDS`.

    ``content`` counts beside tool calls only: everywhere else it is what every template writes.
    """
    marked = {
        (field, index): _mark(field, index)
        for index, message in enumerate(conversation.messages)
        for field in _fields(message)
    }
    if not marked:
        return ()
    messages = tuple(
        _marked(message, {field: marked[field, index] for field in _fields(message)})
        for index, message in enumerate(conversation.messages)
    )
    try:
        text = template.render(
            replace(conversation, messages=messages),
            add_generation_prompt=not continue_final_message,
            continue_final_message=continue_final_message,
        ).text
    except (TemplateError, ConversationError):
        return ()  # it looks at these fields so closely that it refuses others
    missing: dict[str, list[int]] = {}
    for (field, index), mark in marked.items():
        if mark not in text:
            missing.setdefault(field, []).append(index)
    return tuple(Unrendered(field, tuple(missing[field])) for field in FIELDS if field in missing)


def _fields(message: Message) -> Iterator[str]:
    if message.name is not None:
        yield "name"
    if message.reasoning:
        yield "reasoning"
    if message.tool_calls and message.content.strip():
        yield "content"


def _marked(message: Message, marks: dict[str, str]) -> Message:
    return replace(
        message,
        name=marks.get("name", message.name),
        reasoning=marks.get("reasoning", message.reasoning),
        content=marks.get("content", message.content),
    )


def _mark(field: str, index: int) -> str:
    """No white space, no letter that a filter could change, no beginning that another one has."""
    return f"\ue002{FIELDS.index(field)}\ue002{index}\ue002"


# ---------------------------------------------------------------- what a template knows


@dataclass(frozen=True, slots=True)
class Knowledge:
    """What a template does with the parts of conversations that not every format has a place for.

    Each is a word or two: ``written``, ``left out``, ``refused``, or where it is written.
    """

    name: str
    reasoning: str
    tools: str
    text_beside_calls: str
    several_calls: str
    late_system: str
    repeated_roles: str


_TOOL: Final = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Look.",
        "parameters": {"type": "object", "properties": {"at": {"type": "string"}}},
    },
}
# Nine characters: Mistral's templates refuse ids of any other length.
_CALLS: Final = (
    ToolCall("look12345", "look", '{"at": "sky"}'),
    ToolCall("look67890", "look", '{"at": "sea"}'),
)
_ASK: Final = Message("user", "Question.")
_ANSWER: Final = Message("assistant", "Answer.")


def knowledge(template: Template) -> Knowledge:
    """Try ``template`` with small conversations."""
    call = Message("assistant", "", tool_calls=_CALLS[:1])
    result = Message("tool", "Blue.", tool_call_id=_CALLS[0].id)
    after_result = (_ASK, call, result)
    return Knowledge(
        name=_fate(template, (replace(_ASK, name="Ada"),)),
        reasoning=_reasoning(template, after_result),
        tools=_renders(template, after_result, tools=True),
        text_beside_calls=_fate(template, (_ASK, replace(call, content="Let me look."), result)),
        several_calls=_renders(
            template,
            (_ASK, replace(call, tool_calls=_CALLS), result, replace(result, tool_call_id=_CALLS[1].id)),
            tools=True,
        ),
        late_system=_late_system(template),
        repeated_roles=_renders(template, (_ASK, _ASK, _ANSWER, _ANSWER, _ASK)),
    )


def _fate(template: Template, messages: tuple[Message, ...]) -> str:
    conversation = Conversation(messages, (_TOOL,) if any(m.tool_calls for m in messages) else ())
    try:
        template.render(conversation)
    except (TemplateError, ConversationError):
        return "refused"
    return "left out" if unrendered(conversation, template) else "written"


def _renders(template: Template, messages: tuple[Message, ...], *, tools: bool = False) -> str:
    try:
        template.render(Conversation(messages, (_TOOL,) if tools else ()))
    except (TemplateError, ConversationError):
        return "refused"
    return "written"


def _reasoning(template: Template, after_result: tuple[Message, ...]) -> str:
    ask, call, result = after_result
    thinking = replace(_ANSWER, reasoning="Thought.")
    thinking_call = replace(call, reasoning="Thought.")
    cases = {
        "of all turns": (ask, thinking, ask),
        "of calls until they are answered": (ask, thinking_call, result),
    }
    written = [words for words, messages in cases.items() if _fate(template, messages) == "written"]
    return written[0] if written else "left out"


def _late_system(template: Template) -> str:
    late = Message("system", "\ue002late\ue002")
    try:
        text = template.render(Conversation((_ASK, _ANSWER, late, _ASK))).text
    except (TemplateError, ConversationError):
        return "refused"
    if late.content not in text:
        return "left out"
    return (
        "written in place" if text.index(late.content) > text.index(_ANSWER.content) else "moved to the front"
    )
