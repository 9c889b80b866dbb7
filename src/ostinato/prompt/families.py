"""Chat formats as code: one small function each.

A function writes a conversation as segments. What it passes to :func:`marker` becomes exactly that token;
everything else is text. The identity of a format holds its ``version``: raise it with every change of what a
function writes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from ..errors import TemplateError
from ..types import Conversation, Message, Segment

Writer: TypeAlias = Callable[..., Iterator[Segment]]


@dataclass(frozen=True, slots=True)
class Family:
    """A chat format.

    ``write(conversation, add_generation_prompt, **options)`` gives the segments; ``options`` are the ones it
    knows, with their defaults. ``source`` says where the format is documented.
    """

    name: str
    version: int
    write: Writer
    source: str
    options: Mapping[str, Any] = field(default_factory=dict)


def marker(text: str, index: int | None = None) -> Segment:
    return Segment(text, is_marker=True, message_index=index)


def _refuse_tools(conversation: Conversation, format_name: str) -> None:
    """What the format cannot say is refused, not dropped."""
    if conversation.tools:
        raise TemplateError(f"the {format_name} format knows no tools", param="tools")
    for index, message in enumerate(conversation.messages):
        if message.tool_calls:
            raise TemplateError(
                f"messages[{index}] calls tools, which the {format_name} format does not know",
                param=f"messages[{index}]",
            )


def _native_role(message: Message) -> str:
    return "system" if message.role == "developer" else message.role


# ---------------------------------------------------------------- ChatML


def write_chatml(
    conversation: Conversation, add_generation_prompt: bool, *, default_system: str | None
) -> Iterator[Segment]:
    """``<|im_start|>role⏎content<|im_end|>⏎``, and ``default_system`` where no system message comes first."""
    _refuse_tools(conversation, "ChatML")
    if default_system is not None and _native_role(conversation.messages[0]) != "system":
        yield marker("<|im_start|>")
        yield Segment(f"system\n{default_system}")
        yield marker("<|im_end|>")
        yield Segment("\n")
    for index, message in enumerate(conversation.messages):
        yield marker("<|im_start|>", index)
        yield Segment(f"{_native_role(message)}\n{message.content}", message_index=index)
        yield marker("<|im_end|>", index)
        yield Segment("\n", message_index=index)
    if add_generation_prompt:
        yield marker("<|im_start|>")
        yield Segment("assistant\n")


FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (
        Family(
            "chatml",
            1,
            write_chatml,
            "https://github.com/openai/openai-python/blob/release-v0.28.0/chatml.md",
            {"default_system": None},
        ),
    )
}
