"""OpenAI's harmony, the format of gpt-oss: channels, and tools as TypeScript."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ...errors import TemplateError
from ...types import Conversation, Message, Segment
from .common import Format, arguments_json, as_json, marker, native_role, split_system, text

_SYSTEM = (
    "You are ChatGPT, a large language model trained by OpenAI.\nKnowledge cutoff: 2024-06\n"
    "Current date: {date}\n\nReasoning: {reasoning_effort}\n\n"
    "# Valid channels: analysis, commentary, final. Channel must be included for every message."
)
_TOOL_CHANNEL = "\nCalls to these tools must go to the commentary channel: 'functions'."


def write_harmony(
    conversation: Conversation, add_generation_prompt: bool, *, date: str, reasoning_effort: str
) -> Iterator[Segment]:
    """``<|start|>role<|channel|>channel<|message|>content<|end|>``.

    The system message is the format's own; the conversation's is the developer's instructions. ``date`` is
    fixed, so that it does not change the prompt's beginning from day to day. Of the model's thoughts only
    those before calls are written, and only until its answer follows.
    """
    system, messages = split_system(conversation)
    tools_note = _TOOL_CHANNEL if conversation.tools else ""
    about = _SYSTEM.format(date=date, reasoning_effort=reasoning_effort)
    yield from _message("system", about + tools_note)
    instructions = f"# Instructions\n\n{system}\n\n" if system else ""
    if conversation.tools:
        instructions += f"# Tools\n\n{_namespace(conversation.tools)}"
    if instructions:
        yield from _message("developer", instructions, None if system is None else 0)
    answers = [index for index, message in messages if message.role == "assistant" and not message.tool_calls]
    names = {call.id: call.name for _, message in messages for call in message.tool_calls}
    for index, message in messages:
        if message.tool_calls:
            yield from _calls(message, index, is_answered=bool(answers) and answers[-1] > index)
        elif message.role == "assistant":
            yield from _message("assistant", message.content, index, channel="final")
        elif message.role == "tool":
            name = names[message.tool_call_id or ""]
            role = f"functions.{name} to=assistant"
            yield from _message(role, as_json(message.content), index, channel="commentary")
        else:
            yield from _message(
                "developer" if native_role(message) == "system" else message.role, message.content, index
            )
    if add_generation_prompt:
        yield marker("<|start|>")
        yield text("assistant")


def _message(
    role: str, content: str, index: int | None = None, channel: str | None = None
) -> Iterator[Segment]:
    yield marker("<|start|>", index)
    yield text(role, index)
    if channel is not None:
        yield marker("<|channel|>", index)
        yield text(channel, index)
    yield marker("<|message|>", index)
    if content:
        yield text(content, index)
    yield marker("<|end|>", index)


def _calls(message: Message, index: int, *, is_answered: bool) -> Iterator[Segment]:
    if len(message.tool_calls) > 1:
        raise TemplateError(
            f"messages[{index}] makes several calls: the harmony format has room for one",
            param=f"messages[{index}]",
        )
    if message.content and message.reasoning:
        raise TemplateError(
            f"messages[{index}] calls with both text and reasoning: the harmony format has room for one",
            param=f"messages[{index}]",
        )
    thought = message.content or message.reasoning
    if thought and not is_answered:
        yield from _message("assistant", thought, index, channel="analysis")
    (call,) = message.tool_calls
    yield marker("<|start|>", index)
    yield text(f"assistant to=functions.{call.name}", index)
    yield marker("<|channel|>", index)
    yield text("commentary json", index)
    yield marker("<|message|>", index)
    yield text(arguments_json(call), index)
    yield marker("<|call|>", index)


# ---------------------------------------------------------------- tools as TypeScript


def _namespace(tools: tuple[Mapping[str, Any], ...]) -> str:
    body = "".join(_declaration(tool["function"]) for tool in tools)
    return f"## functions\n\nnamespace functions {{\n\n{body}}} // namespace functions"


def _declaration(function: Mapping[str, Any]) -> str:
    lines = f"// {function.get('description', '')}\ntype {function['name']} = "
    parameters = function.get("parameters") or {}
    if not parameters.get("properties"):
        return f"{lines}() => any;\n\n"
    required = parameters.get("required") or []
    lines += "(_: {\n"
    for name, schema in parameters["properties"].items():
        if schema.get("description"):
            lines += f"// {schema['description']}\n"
        lines += f"{name}{'' if name in required else '?'}: {_type(schema)}"
        if "default" in schema:
            default = schema["default"] if schema.get("enum") else as_json(schema["default"])
            lines += f", // default: {default}"
        lines += ",\n"
    return f"{lines}}}) => any;\n\n"


def _type(schema: Mapping[str, Any]) -> str:
    kind = schema.get("type")
    null = " | null" if schema.get("nullable") else ""
    if kind == "array":
        return f"{_type(schema['items'])}[]{null}" if schema.get("items") else f"any[]{null}"
    if isinstance(kind, list):
        return " | ".join(kind)
    if kind == "string" and schema.get("enum"):
        return '"' + '" | "'.join(map(str, schema["enum"])) + '"'
    if kind == "string":
        return f"string{null}"
    if kind in ("number", "integer"):
        return "number"
    if kind == "boolean":
        return "boolean"
    if kind == "object" and schema.get("properties"):
        required = schema.get("required") or []
        inner = ", ".join(
            f"{name}{'' if name in required else '?'}: {_type(part)}"
            for name, part in schema["properties"].items()
        )
        return f"{{\n{inner}}}"
    return "object" if kind == "object" else "any"


FORMATS = (
    Format(
        "harmony",
        1,
        write_harmony,
        "https://github.com/openai/harmony/blob/main/docs/format.md",
        {"date": "2025-06-28", "reasoning_effort": "medium"},
    ),
)
