"""What the chat formats share."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from ...errors import TemplateError
from ...types import Conversation, Message, Segment, ToolCall

Writer: TypeAlias = Callable[..., Iterator[Segment]]
Numbered: TypeAlias = tuple[int, Message]


@dataclass(frozen=True, slots=True)
class Format:
    """A chat format as code.

    ``write(conversation, add_generation_prompt, **options)`` gives the segments; ``options`` are the ones it
    knows, with their defaults. ``source`` says where the format is documented. ``version`` is part of the
    identity: raise it with every change of what ``write`` gives.
    """

    name: str
    version: int
    write: Writer
    source: str
    options: Mapping[str, Any] = field(default_factory=dict)


def marker(text: str, index: int | None = None) -> Segment:
    """A special token."""
    return Segment(text, is_marker=True, message_index=index)


def text(content: str, index: int | None = None) -> Segment:
    """Text, whatever it spells."""
    return Segment(content, message_index=index)


def refuse_tools(conversation: Conversation, format_name: str) -> None:
    """What the format cannot say is refused, not dropped."""
    if conversation.tools:
        raise TemplateError(f"the {format_name} format knows no tools", param="tools")
    for index, message in enumerate(conversation.messages):
        if message.tool_calls or message.role == "tool":
            raise TemplateError(
                f"messages[{index}] is about tools, which the {format_name} format does not know",
                param=f"messages[{index}]",
            )


def native_role(message: Message) -> str:
    """The role, for formats that have no developer: to them it is the system."""
    return "system" if message.role == "developer" else message.role


def split_system(conversation: Conversation) -> tuple[str | None, list[Numbered]]:
    """The text of a system message at the beginning, and the messages after it, numbered."""
    numbered = list(enumerate(conversation.messages))
    if native_role(conversation.messages[0]) == "system":
        return conversation.messages[0].content, numbered[1:]
    return None, numbered


def check_alternation(messages: Sequence[Numbered], format_name: str) -> None:
    """User and assistant in turns, the user first; tool calls and results between them do not count."""
    turn = 0
    for index, message in messages:
        if message.role == "tool" or message.tool_calls:
            continue
        if message.role != ("assistant" if turn % 2 else "user"):
            raise TemplateError(
                f"messages[{index}]: in the {format_name} format user and assistant must alternate after an "
                "optional system message, beginning with the user",
                param=f"messages[{index}]",
            )
        turn += 1


def as_json(value: Any, *, indent: int | None = None) -> str:
    """JSON as chat templates print it."""
    return json.dumps(value, ensure_ascii=False, indent=indent)


def arguments_json(call: ToolCall) -> str:
    """The arguments of a call as a template prints them that reads them first."""
    try:
        printed = as_json(json.loads(call.arguments))
        printed.encode()  # an escape may stand for half a character, which is no text
    except (ValueError, RecursionError):
        return as_json(call.arguments)
    return printed
