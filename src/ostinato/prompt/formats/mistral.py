"""Mistral's instruct formats, which differ in little more than spaces.

The system text and the tools stand before the *last* user message in the second and third: so the formats
say, and so the models were trained. It costs a prefix cache everything after the first message of a turn.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from ...errors import TemplateError
from ...types import Conversation, Message, Segment
from .common import (
    Format,
    arguments_json,
    as_json,
    check_alternation,
    marker,
    refuse_tools,
    split_system,
    text,
)

_CALL_ID_LENGTH = 9


def write_v1(conversation: Conversation, add_generation_prompt: bool) -> Iterator[Segment]:
    """``<s> [INST] user [/INST] assistant</s>``: brackets are text here. The end of an instruction is the
    generation prompt."""
    refuse_tools(conversation, "Mistral v1")
    system, messages = split_system(conversation)
    check_alternation(messages, "Mistral v1")
    yield marker("<s>")
    for place, (index, message) in enumerate(messages):
        if message.role == "user":
            lead = f"{system}\n\n" if place == 0 and system is not None else ""
            yield text(f" [INST] {lead}{message.content} [/INST]", index)
        else:
            yield text(f" {message.content}", index)
            yield marker("</s>", index)


def write_v3(conversation: Conversation, add_generation_prompt: bool, *, space: str) -> Iterator[Segment]:
    """Brackets are special tokens. ``space`` follows them in the SentencePiece form and not in Tekken's."""
    system, messages = split_system(conversation)
    check_alternation(messages, "Mistral v3")
    users = [index for index, message in messages if message.role == "user"]
    yield marker("<s>")
    for place, (index, message) in enumerate(messages):
        if message.role == "user":
            if conversation.tools and index == users[-1]:
                yield marker("[AVAILABLE_TOOLS]")
                yield text(space + as_json([dict(tool) for tool in conversation.tools]))
                yield marker("[/AVAILABLE_TOOLS]")
            lead = f"{system}\n\n" if place == len(messages) - 1 and system is not None else ""
            yield marker("[INST]", index)
            yield text(f"{space}{lead}{message.content}", index)
            yield marker("[/INST]", index)
        elif message.tool_calls:
            calls = ", ".join(
                f'{{"name": {as_json(call.name)}, "arguments": {arguments_json(call)}, '
                f'"id": "{_checked(call.id, index)}"}}'
                for call in message.tool_calls
            )
            yield marker("[TOOL_CALLS]", index)
            yield text(f"{space}[{calls}]", index)
            yield marker("</s>", index)
        elif message.role == "tool":
            yield from _result(message, index, space)
        else:
            content = message.content.strip() if space else message.content
            yield text(f"{space}{content}", index)
            yield marker("</s>", index)


def _result(message: Message, index: int, space: str) -> Iterator[Segment]:
    call_id = _checked(message.tool_call_id or "", index)
    yield marker("[TOOL_RESULTS]", index)
    yield text(f'{space}{{"content": {message.content}, "call_id": "{call_id}"}}', index)
    yield marker("[/TOOL_RESULTS]", index)


def _checked(call_id: str, index: int) -> str:
    if len(call_id) != _CALL_ID_LENGTH:
        raise TemplateError(
            f"messages[{index}]: in the Mistral format a tool call's id has {_CALL_ID_LENGTH} characters",
            param=f"messages[{index}]",
        )
    return call_id


def write_v7(conversation: Conversation, add_generation_prompt: bool, *, space: str) -> Iterator[Segment]:
    """As the third, with the system text where it belongs: in ``[SYSTEM_PROMPT]``, wherever it stands."""
    refuse_tools(conversation, "Mistral v7")
    yield marker("<s>")
    for index, message in enumerate(conversation.messages):
        if message.role == "assistant":
            yield text(f"{space}{message.content}", index)
            yield marker("</s>", index)
            continue
        tag = "INST" if message.role == "user" else "SYSTEM_PROMPT"
        yield marker(f"[{tag}]", index)
        yield text(f"{space}{message.content}", index)
        yield marker(f"[/{tag}]", index)


_SOURCE = "https://github.com/mistralai/cookbook/blob/main/concept-deep-dive/tokenization/templates.md"

FORMATS = (
    Format("mistral-v1", 1, write_v1, _SOURCE),
    Format("mistral-v3", 1, partial(write_v3, space=" "), _SOURCE),
    Format("mistral-v3-tekken", 1, partial(write_v3, space=""), _SOURCE),
    Format("mistral-v7", 1, partial(write_v7, space=" "), _SOURCE),
    Format("mistral-v7-tekken", 1, partial(write_v7, space=""), _SOURCE),
)
