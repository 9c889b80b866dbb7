"""The rules a conversation keeps, checked where it enters, and its reading from OpenAI-shaped dicts."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from ..errors import (
    ConversationError,
    EmptyConversationError,
    MessageTypeError,
    OrphanToolResultError,
    ParameterError,
    UnknownRoleError,
)
from ..types import Conversation, Message, ToolCall

ROLES = ("system", "developer", "user", "assistant", "tool")

# Parts of one message are separate paragraphs to the clients that send them; without a separator the
# words at their borders would grow together.
PART_SEPARATOR = "\n"

MAX_JSON_DEPTH = 64

_MESSAGE_KEYS = (
    "role",
    "content",
    "name",
    "tool_calls",
    "tool_call_id",
    "reasoning_content",
    "reasoning",
)
_PLAIN_KEYS = frozenset({"role", "content"})


# ---------------------------------------------------------------- rules


def validate(conversation: Conversation, *, roles: Collection[str] = ROLES) -> None:
    """Check every rule a template may rely on.

    Args:
        conversation: what is to be rendered.
        roles: the roles that are known here.

    Raises:
        EmptyConversationError: there are no messages.
        UnknownRoleError: a role is not in ``roles``.
        MessageTypeError: a field has the wrong type or is not Unicode text.
        OrphanToolResultError: a tool message answers no call before it.
        ConversationError: a field stands on a message whose role cannot have it, or a call id twice.
        ParameterError: a tool is not a function in OpenAI's form.

    All but the last name the message by ``index``.
    """
    if not isinstance(conversation, Conversation):
        raise MessageTypeError(f"expected a Conversation, got {_kind(conversation)}")
    if not isinstance(conversation.messages, tuple):
        raise MessageTypeError(f"messages must be a tuple, got {_kind(conversation.messages)}")
    if not conversation.messages:
        raise EmptyConversationError("the conversation is empty: give at least one message")
    call_ids: set[str] = set()
    for index, message in enumerate(conversation.messages):
        if _is_plain(message) and message.role in roles:
            continue
        _check_message(message, index, roles)
        _check_calls(message, index, call_ids)
    if not isinstance(conversation.tools, tuple):
        raise ParameterError(f"tools must be a tuple, got {_kind(conversation.tools)}", param="tools")
    for index, tool in enumerate(conversation.tools):
        _check_tool(tool, f"tools[{index}]")


def _is_plain(message: Message) -> bool:
    """Whether there is nothing to check but the role: only text, in ASCII. True of most messages."""
    return (
        type(message) is Message
        and type(message.content) is str
        and message.content.isascii()
        and type(message.role) is str
        and message.role != "tool"
        and message.name is message.tool_call_id is None
        and message.tool_calls == ()
        and message.reasoning == ""
    )


def _check_message(message: Message, index: int, roles: Collection[str]) -> None:
    if not isinstance(message, Message):
        raise MessageTypeError(f"messages[{index}] must be a Message, got {_kind(message)}", index=index)
    _check_text(message.role, "role", index)
    if message.role not in roles:
        known = ", ".join(roles)
        raise UnknownRoleError(
            f"messages[{index}] has the unknown role {_excerpt(message.role)}; known are {known}", index=index
        )
    _check_text(message.content, "content", index)
    _check_text(message.reasoning, "reasoning", index)
    if message.name is not None:
        _check_text(message.name, "name", index)
    if message.reasoning and message.role != "assistant":
        raise ConversationError(
            f"messages[{index}] has reasoning, but its role is {message.role!r}: only an assistant reasons",
            index=index,
        )


def _check_calls(message: Message, index: int, call_ids: set[str]) -> None:
    """The calls of ``message`` and the call it answers; ``call_ids``, all made so far, is added to."""
    if not isinstance(message.tool_calls, tuple):
        raise MessageTypeError(
            f"messages[{index}].tool_calls must be a tuple, got {_kind(message.tool_calls)}", index=index
        )
    if message.tool_calls and message.role != "assistant":
        raise ConversationError(
            f"messages[{index}] has tool_calls, but its role is {message.role!r}: only an assistant calls",
            index=index,
        )
    own_ids: set[str] = set()
    for number, call in enumerate(message.tool_calls):
        where = f"tool_calls[{number}]"
        if not isinstance(call, ToolCall):
            raise MessageTypeError(
                f"messages[{index}].{where} must be a ToolCall, got {_kind(call)}", index=index
            )
        _check_text(call.id, f"{where}.id", index)
        _check_text(call.name, f"{where}.name", index)
        _check_text(call.arguments, f"{where}.arguments", index)
        if not call.id or not call.name:
            raise ConversationError(f"messages[{index}].{where} needs an id and a function name", index=index)
        if call.id in own_ids:
            raise ConversationError(
                f"messages[{index}] makes two calls with the id {_excerpt(call.id)}", index=index
            )
        own_ids.add(call.id)
    if message.role == "tool":
        _check_result(message, index, call_ids)
    elif message.tool_call_id is not None:
        raise ConversationError(
            f"messages[{index}] has a tool_call_id, but its role is {message.role!r}, not 'tool'", index=index
        )
    call_ids |= own_ids


def _check_result(message: Message, index: int, call_ids: Collection[str]) -> None:
    if message.tool_call_id is None:
        raise OrphanToolResultError(
            f"messages[{index}] is a tool result without tool_call_id: name the call it answers", index=index
        )
    _check_text(message.tool_call_id, "tool_call_id", index)
    if message.tool_call_id not in call_ids:
        raise OrphanToolResultError(
            f"messages[{index}] answers the call {_excerpt(message.tool_call_id)}, "
            "which no assistant message before it makes",
            index=index,
        )


def _check_tool(tool: Any, where: str) -> None:
    if not isinstance(tool, Mapping):
        raise ParameterError(f"{where} must be an object, got {_kind(tool)}", param=where)
    if tool.get("type") != "function":
        raise ParameterError(f'{where}.type must be "function"', param=f"{where}.type")
    function = tool.get("function")
    if not isinstance(function, Mapping):
        raise ParameterError(f"{where}.function must be an object", param=f"{where}.function")
    name = function.get("name")
    if not isinstance(name, str) or not name:
        raise ParameterError(f"{where}.function.name must be a name", param=f"{where}.function.name")
    _check_json(tool, where, MAX_JSON_DEPTH)


def _check_json(value: Any, where: str, depth_left: int) -> None:
    """JSON values only: what a template prints of them is then the same everywhere."""
    if depth_left == 0:
        raise ParameterError(f"{where} is nested more than {MAX_JSON_DEPTH} deep", param=where)
    if isinstance(value, str):
        if (fault := _unicode_fault(value)) is not None:
            raise ParameterError(f"{where} is not Unicode text: {fault}", param=where)
    elif isinstance(value, Mapping):
        for key, item in value.items():
            if not isinstance(key, str):
                raise ParameterError(f"{where} has a key that is {_kind(key)}, not a string", param=where)
            _check_json(key, where, depth_left - 1)
            _check_json(item, f"{where}.{key}"[:200], depth_left - 1)
    elif isinstance(value, list | tuple):
        for number, item in enumerate(value):
            _check_json(item, f"{where}[{number}]", depth_left - 1)
    elif isinstance(value, float):
        if not math.isfinite(value):
            raise ParameterError(f"{where} is {value}, which JSON cannot say", param=where)
    elif value is not None and not isinstance(value, bool | int):
        raise ParameterError(f"{where} is {_kind(value)}, which JSON cannot say", param=where)


def _check_text(value: Any, field: str, index: int) -> None:
    if not isinstance(value, str):
        raise MessageTypeError(f"messages[{index}].{field} must be text, got {_kind(value)}", index=index)
    if (fault := _unicode_fault(value)) is not None:
        raise MessageTypeError(f"messages[{index}].{field} is not Unicode text: {fault}", index=index)


def _unicode_fault(text: str) -> str | None:
    if text.isascii():
        return None
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return f"lone surrogate U+{ord(text[error.start]):04X} at character {error.start}"
    return None


def _excerpt(text: str) -> str:
    return repr(text if len(text) <= 64 else text[:61] + "...")


def _kind(value: Any) -> str:
    return "null" if value is None else type(value).__name__


# ---------------------------------------------------------------- reading


def conversation_from_dicts(
    messages: Sequence[Mapping[str, Any] | Message],
    tools: Sequence[Mapping[str, Any]] | None = None,
    *,
    roles: Collection[str] = ROLES,
) -> Conversation:
    """Read messages and tools in OpenAI's form, and :func:`validate` them. A :class:`Message` stays one.

    ``content`` is text, ``null`` (no text), or a list of text parts, which become lines of one text. A
    ``null`` under any key counts as its absence, as in what the official client returns.

    Raises:
        MessageTypeError: a key that is not known here, a value of the wrong type, or a part that is not
            text, with the message's ``index``.
        ParameterError: ``tools`` is not a list of functions.
        ConversationError: what :func:`validate` finds.
    """
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Sequence):
        raise MessageTypeError(f"messages must be a list, got {_kind(messages)}")
    if tools is not None and (isinstance(tools, str | bytes | Mapping) or not isinstance(tools, Sequence)):
        raise ParameterError(f"tools must be a list, got {_kind(tools)}", param="tools")
    conversation = Conversation(
        tuple(_read_message(message, index) for index, message in enumerate(messages)), tuple(tools or ())
    )
    validate(conversation, roles=roles)
    return conversation


def message_as_dict(message: Message) -> dict[str, Any]:
    """A message in OpenAI's form; what is empty is left out. :func:`conversation_from_dicts` reads it."""
    calls = [
        {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for call in message.tool_calls
    ]
    given = {
        "role": message.role,
        "content": message.content,
        "name": message.name,
        "tool_calls": calls,
        "tool_call_id": message.tool_call_id,
        "reasoning": message.reasoning,
    }
    return {key: value for key, value in given.items() if key in ("role", "content") or value}


def _read_message(message: Any, index: int) -> Message:
    if type(message) is dict and message.keys() == _PLAIN_KEYS and type(message["content"]) is str:
        return Message(message["role"], message["content"])  # nearly always
    if isinstance(message, Message):
        return message
    if not isinstance(message, Mapping):
        raise MessageTypeError(f"messages[{index}] must be an object, got {_kind(message)}", index=index)
    given = {key: value for key, value in message.items() if value is not None}
    # The official client adds this to every answer that has none; an empty list says nothing.
    if given.get("annotations") == []:
        del given["annotations"]
    for key in given:
        if key not in _MESSAGE_KEYS:
            raise MessageTypeError(
                f"messages[{index}] has the unknown field {_excerpt(str(key))}", index=index
            )
    if "role" not in given:
        raise MessageTypeError(f"messages[{index}] has no role", index=index)
    return Message(
        role=given["role"],
        content=_read_content(given.get("content", ""), index),
        name=given.get("name"),
        tool_calls=_read_calls(given.get("tool_calls", ()), index),
        tool_call_id=given.get("tool_call_id"),
        reasoning=given.get("reasoning_content", given.get("reasoning", "")),
    )


def _read_content(content: Any, index: int) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list | tuple):
        raise MessageTypeError(
            f"messages[{index}].content must be text or a list of text parts, got {_kind(content)}",
            index=index,
        )
    texts = []
    for number, part in enumerate(content):
        where = f"messages[{index}].content[{number}]"
        if not isinstance(part, Mapping):
            raise MessageTypeError(f"{where} must be an object, got {_kind(part)}", index=index)
        kind = part.get("type")
        if kind != "text":
            raise MessageTypeError(
                f"{where} has type {_excerpt(str(kind))}: only text parts are supported", index=index
            )
        _refuse_unknown(part, ("type", "text"), where, index)
        if not isinstance(part.get("text"), str):
            raise MessageTypeError(f"{where}.text must be text, got {_kind(part.get('text'))}", index=index)
        texts.append(part["text"])
    return PART_SEPARATOR.join(texts)


def _read_calls(calls: Any, index: int) -> tuple[ToolCall, ...]:
    if not isinstance(calls, list | tuple):
        raise MessageTypeError(
            f"messages[{index}].tool_calls must be a list, got {_kind(calls)}", index=index
        )
    read = []
    for number, call in enumerate(calls):
        where = f"messages[{index}].tool_calls[{number}]"
        if not isinstance(call, Mapping):
            raise MessageTypeError(f"{where} must be an object, got {_kind(call)}", index=index)
        _refuse_unknown(call, ("id", "type", "function"), where, index)
        if call.get("type", "function") != "function":
            raise MessageTypeError(f'{where}.type must be "function"', index=index)
        function = call.get("function")
        if not isinstance(function, Mapping):
            raise MessageTypeError(f"{where}.function must be an object, got {_kind(function)}", index=index)
        _refuse_unknown(function, ("name", "arguments"), f"{where}.function", index)
        arguments = function.get("arguments")
        if not isinstance(arguments, str):
            raise MessageTypeError(
                f"{where}.function.arguments must be text (the JSON the model wrote), got {_kind(arguments)}",
                index=index,
            )
        for key, value in (("id", call.get("id")), ("function.name", function.get("name"))):
            if not isinstance(value, str):
                raise MessageTypeError(f"{where}.{key} must be text, got {_kind(value)}", index=index)
        read.append(ToolCall(call["id"], function["name"], arguments))
    return tuple(read)


def _refuse_unknown(given: Mapping[str, Any], known: Sequence[str], where: str, index: int) -> None:
    for key, value in given.items():
        if key not in known and value is not None:
            raise MessageTypeError(f"{where} has the unknown field {_excerpt(str(key))}", index=index)
