"""Prompts that end inside the assistant's last message, for the model to go on with."""

from __future__ import annotations

from dataclasses import replace

from ..errors import ConversationError, TemplateError
from ..types import Conversation, Segment

# Stands at the end of the message to be continued; what the template writes after it is cut off. The space
# tells whether the template trims: then the end of the message is trimmed, too.
_END = "\ue001END OF PREFILL\ue001"
_END_AND_SPACE = _END + " "


def with_end(conversation: Conversation) -> Conversation:
    """The conversation with a mark at the end of its last message.

    Raises:
        ConversationError: the last message is not the assistant's, or makes calls.
    """
    *before, last = conversation.messages
    index = len(before)
    if last.role != "assistant" or last.tool_calls:
        raise ConversationError(
            f"messages[{index}] cannot be continued: only text of the assistant can", index=index
        )
    return replace(conversation, messages=(*before, replace(last, content=last.content + _END_AND_SPACE)))


def cut_at_end(segments: tuple[Segment, ...]) -> tuple[Segment, ...]:
    """The segments up to the mark.

    Raises:
        TemplateError: the template did not write the message as it is.
    """
    for number in range(len(segments) - 1, -1, -1):
        segment = segments[number]
        if segment.is_marker or _END not in segment.text:
            continue
        text, after = segment.text[: segment.text.rindex(_END)], segment.text[segment.text.rindex(_END) :]
        if not after.startswith(_END_AND_SPACE):
            text = text.rstrip()
        return (*segments[:number], *((replace(segment, text=text),) if text else ()))
    raise TemplateError(
        "this chat template does not write the assistant's message as it is: it cannot be continued"
    )
