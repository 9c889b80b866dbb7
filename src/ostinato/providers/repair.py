"""Requests that mean the same and are written differently, in one form. Opt-in, rule by rule.

A vendor's cache compares what it renders: tools in another order, keys in another order (some languages
shuffle them on every run), or a date at the top of the system text are another prompt. Repairs are reported.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from ..prompt.lint import is_volatile

_LINE: Final = re.compile(r"[^\n]*\n?")
MAX_VOLATILE_CHARS: Final = 400


@dataclass(frozen=True, slots=True)
class RepairRules:
    """What may be repaired.

    Args:
        tool_order: tools by name. The model reads them in another order.
        key_order: the keys of schemas and of calls' arguments by name.
        volatile: short lines of the system text with a time or an id go to the end of the last message.
    """

    tool_order: bool = False
    key_order: bool = False
    volatile: bool = False


@dataclass(frozen=True, slots=True)
class Repaired:
    """A body in one form; ``suffix`` has to go behind the last message once breakpoints are placed."""

    body: dict[str, Any]
    suffix: str
    repairs: tuple[str, ...]


def repair(body: Mapping[str, Any], rules: RepairRules) -> Repaired:
    """A new body; the given one stays as it is. Works on Anthropic's requests and on OpenAI's."""
    made = dict(body)
    repairs: list[str] = []
    tools = made.get("tools")
    if isinstance(tools, list) and tools:
        tools = list(tools)
        if rules.tool_order:
            ordered = _in_order(tools)
            if ordered != tools:
                tools = ordered
                repairs.append("tools: by name")
        if rules.key_order:
            sorted_tools = [_sorted_schema(tool) for tool in tools]
            if _written(sorted_tools) != _written(tools):
                tools = sorted_tools
                repairs.append("tools: keys by name")
        made["tools"] = tools
    if rules.key_order and isinstance(messages := made.get("messages"), list):
        sorted_messages = [_sorted_calls(message) for message in messages]
        if _written(sorted_messages) != _written(messages):
            made["messages"] = sorted_messages
            repairs.append("messages: keys of arguments by name")
    suffix = ""
    if rules.volatile and "system" in made and _ends_with_user(made.get("messages")):
        made["system"], suffix = _without_volatile(made["system"])
        if suffix:
            repairs.append(f"system: {len(suffix.splitlines())} lines that change go last")
    return Repaired(made, suffix, tuple(repairs))


def _ends_with_user(messages: Any) -> bool:
    """Whether text can go last: behind an answer that is begun it would be the answer's."""
    last = messages[-1] if isinstance(messages, list) and messages else None
    return isinstance(last, Mapping) and last.get("role") == "user"


def append_suffix(body: dict[str, Any], suffix: str) -> None:
    """Put text behind the last message, the user's, as a block of its own; ``body`` is changed."""
    messages = body.get("messages")
    if not suffix or not isinstance(messages, list) or not messages:
        return
    last = messages[-1]
    content = last.get("content")
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else list(content or [])
    body["messages"] = [*messages[:-1], {**last, "content": [*blocks, {"type": "text", "text": suffix}]}]


# ---------------------------------------------------------------- tools


def _name(tool: Any) -> str:
    if not isinstance(tool, Mapping):
        return ""
    function = tool.get("function")
    named = function if isinstance(function, Mapping) else tool
    return str(named.get("name", ""))


def _in_order(tools: list[Any]) -> list[Any]:
    """By name. A breakpoint stays in its place: it ends so many tools, not this one."""
    markers = [tool.get("cache_control") if isinstance(tool, Mapping) else None for tool in tools]
    bare = [_without_marker(tool) for tool in tools]
    ordered = sorted(bare, key=_name)
    if ordered == bare:
        return tools
    return [
        tool if marker is None else {**tool, "cache_control": marker}
        for tool, marker in zip(ordered, markers, strict=True)
    ]


def _without_marker(tool: Any) -> Any:
    if not isinstance(tool, Mapping):
        return tool
    return {key: value for key, value in tool.items() if key != "cache_control"}


def _sorted_schema(tool: Any) -> Any:
    if not isinstance(tool, Mapping):
        return tool
    if isinstance(function := tool.get("function"), Mapping):
        return {**tool, "function": _with_sorted(function, "parameters")}
    return _with_sorted(_with_sorted(tool, "input_schema"), "parameters")


def _with_sorted(holder: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    return {**holder, key: sorted_keys(holder[key])} if key in holder else holder


def sorted_keys(value: Any) -> Any:
    """Objects with their keys in order, at any depth; lists as they are."""
    if isinstance(value, Mapping):
        return {key: sorted_keys(value[key]) for key in sorted(value)}
    if isinstance(value, list):
        return [sorted_keys(item) for item in value]
    return value


def _sorted_calls(message: Any) -> Any:
    content = message.get("content") if isinstance(message, Mapping) else None
    if not isinstance(content, list):
        return message
    parts = [
        {**part, "input": sorted_keys(part["input"])}
        if isinstance(part, Mapping) and part.get("type") == "tool_use" and "input" in part
        else part
        for part in content
    ]
    return {**message, "content": parts}


def _written(value: Any) -> str:
    """Equal only if written the same, order of keys included."""
    return repr(value)


# ---------------------------------------------------------------- lines that change


def _without_volatile(system: Any) -> tuple[Any, str]:
    if isinstance(system, str):
        kept, moved = _split(system)
        return (kept, moved) if kept.strip() else (system, "")
    if not isinstance(system, list):
        return system, ""
    parts: list[Any] = []
    suffix = ""
    for part in system:
        text = part.get("text") if isinstance(part, Mapping) else None
        if not isinstance(text, str):
            parts.append(part)
            continue
        kept, moved = _split(text)
        if not kept.strip():  # a whole block goes only if it carries no breakpoint
            if "cache_control" in part:
                parts.append(part)
            else:
                suffix += moved
            continue
        parts.append({**part, "text": kept})
        suffix += moved
    return (parts, suffix) if parts else (system, "")


def _split(text: str) -> tuple[str, str]:
    kept: list[str] = []
    moved: list[str] = []
    for line in _lines(text):
        (moved if len(line) <= MAX_VOLATILE_CHARS and is_volatile(line) else kept).append(line)
    return "".join(kept), "".join(moved)


def _lines(text: str) -> Iterator[str]:
    return (match[0] for match in _LINE.finditer(text) if match[0])
