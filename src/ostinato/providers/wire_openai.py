"""OpenAI's Chat Completions and Responses requests as prompts, and breakpoints put into them."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from typing import Any, Final

import orjson

from ..errors import ParameterError
from .rules import Level
from .shape import Block, Path, Prompt, digest_of
from .wire_anthropic import CountTokens, Json

# Whose change alters the rendered prefix.
_SETTINGS: Final = (
    "response_format", "text", "reasoning_effort", "verbosity", "parallel_tool_calls", "service_tier",
    "prompt_cache_key",
)  # fmt: skip
_SYSTEM_ROLES: Final = ("system", "developer")
_MARKABLE: Final = frozenset(
    {"text", "image_url", "input_audio", "file", "refusal", "input_text", "input_image", "input_file"}
)


def read_request(body: Json, count: CountTokens, *, vendor: str = "openai", scope: str = "") -> Prompt:
    """A request's body, of either API, as the cache sees it.

    Raises:
        ParameterError: it has no form in which blocks could be told.
    """
    blocks: list[Block] = []
    for index, tool in enumerate(_list(body.get("tools"), "tools")):
        blocks.append(_block("tools", "tool", tool, ("tools", index), count, can_mark=False))
    if isinstance(instructions := body.get("instructions"), str):
        blocks.append(_block("system", "text", instructions, ("instructions",), count, can_mark=False))
    name = "messages" if "messages" in body else "input"
    given = body.get(name)
    if isinstance(given, str):
        given = [{"role": "user", "content": given}]
    is_start = True
    for index, message in enumerate(_list(given, name)):
        if not isinstance(message, Mapping):
            raise ParameterError(f"{name}[{index}] is not an object", param=f"{name}[{index}]")
        role = str(message.get("role", ""))
        is_start = is_start and role in _SYSTEM_ROLES
        blocks += _message_blocks(message, role, "system" if is_start else "messages", (name, index), count)
    options = body.get("prompt_cache_options")
    options = options if isinstance(options, Mapping) else {}
    reasoning = body.get("reasoning")
    effort = reasoning.get("effort") if isinstance(reasoning, Mapping) else None
    settings = {key: body[key] for key in _SETTINGS if body.get(key) is not None} | (
        {"effort": effort} if effort else {}
    )
    return Prompt(
        vendor=vendor,
        model=str(body.get("model", "")),
        blocks=tuple(blocks),
        settings={"settings": _dump(settings).decode() if settings else ""},
        automatic=str(options["ttl"]) if options.get("ttl") else None,
        is_explicit=options.get("mode") == "explicit",
        scope=scope,
    )


def _message_blocks(message: Json, role: str, level: Level, path: Path, count: CountTokens) -> list[Block]:
    kind = "tool_result" if role == "tool" or message.get("type") == "function_call_output" else "text"
    content = message.get("content")
    blocks: list[Block] = []
    if isinstance(content, str) and content:
        blocks.append(_block(level, kind, content, (*path, "content"), count, role=role))
    elif isinstance(content, list):
        for index, part in enumerate(content):
            part_kind = str(part.get("type", "text")) if isinstance(part, Mapping) else "text"
            can_mark = part_kind in _MARKABLE
            place = (*path, "content", index)
            shown = kind if kind == "tool_result" else part_kind
            blocks.append(_block(level, shown, part, place, count, role=role, can_mark=can_mark))
    rest = {key: value for key, value in message.items() if key not in ("content", "role")}
    if rest or not blocks:
        called = "tool_use" if "tool_calls" in rest or message.get("type") == "function_call" else kind
        # A tool's answer is one block, with the id of its call; so is a message that is no text at all.
        if called == "tool_result" and blocks:
            blocks[-1] = _block(level, called, message, blocks[-1].path, count, role=role)
        else:
            blocks.append(_block(level, called, rest, path, count, role=role, can_mark=False))
    last = blocks[-1]
    blocks[-1] = Block(
        last.level, last.kind, last.digest, last.num_tokens, last.path, last.can_mark, last.ttl, role, True
    )
    return blocks


def _block(
    level: Level,
    kind: str,
    part: Any,
    path: Path,
    count: CountTokens,
    *,
    role: str = "",
    can_mark: bool = True,
) -> Block:
    marker = part.get("prompt_cache_breakpoint") if isinstance(part, Mapping) else None
    bare = (
        {key: value for key, value in part.items() if key != "prompt_cache_breakpoint"}
        if isinstance(part, Mapping)
        else part
    )
    data = _dump(bare)
    ttl = None
    if isinstance(marker, Mapping):
        ttl = str(marker.get("ttl") or "30m")
    can_mark = can_mark and role != "assistant"
    return Block(level, kind, digest_of(data), count(data), path, can_mark, ttl, role)


def _list(value: Any, name: str) -> list[Any]:
    if value is None:
        return []
    if not isinstance(value, list):
        raise ParameterError(f"{name} is not a list", param=name)
    return value


def _dump(value: Any) -> bytes:
    return orjson.dumps(value, default=str)


def place_markers(body: MutableMapping[str, Any], markers: Mapping[Path, str], *, is_explicit: bool) -> None:
    """Put breakpoints into a request's body, in place; ``is_explicit``: and let there be no others."""
    is_responses = "messages" not in body
    if is_responses and isinstance(body.get("input"), str) and markers:
        body["input"] = [{"role": "user", "content": body["input"]}]
    for path in markers:
        holder: Any = body
        for step in path[:-1]:
            holder = holder[step]
        value = holder[path[-1]]
        marked = {"prompt_cache_breakpoint": {"mode": "explicit"}}
        if isinstance(value, str):
            kind = "input_text" if is_responses else "text"
            holder[path[-1]] = [{"type": kind, "text": value, **marked}]
        else:
            holder[path[-1]] = {**value, **marked}
    if is_explicit:
        options = body.get("prompt_cache_options")
        body["prompt_cache_options"] = {**(options if isinstance(options, dict) else {}), "mode": "explicit"}
