"""Anthropic's Messages requests as prompts, and breakpoints put into them.

Nothing is validated here beyond what is needed: a gateway passes on what it does not know.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from dataclasses import replace
from typing import Any, Final, TypeAlias

import orjson

from ..errors import ParameterError
from .shape import Block, Path, Prompt, digest_of

CountTokens: TypeAlias = Callable[[bytes], int]
Json: TypeAlias = Mapping[str, Any]

DEFAULT_EFFORT: Final = "high"  # to say it is the same as to leave it out
SERVER_TOOLS: Final = ("web_search",)
# Prompt-affecting, though the documentation does not say from where on.
_SETTINGS: Final = ("context_management", "output_format", "container", "mcp_servers")


def bytes_per_token(ratio: float) -> CountTokens:
    """Counts tokens by the bytes of their JSON: good for shares, not for bills."""
    return lambda data: math.ceil(len(data) / ratio)


def read_request(
    body: Json, count: CountTokens, *, vendor: str = "anthropic", scope: str = "", betas: str = ""
) -> Prompt:
    """A request's body as the cache sees it.

    Raises:
        ParameterError: it has no form in which blocks could be told.
    """
    blocks: list[Block] = []
    searches: list[bytes] = []
    for index, tool in enumerate(_list(body, "tools")):
        block = _block("tools", "tool", tool, ("tools", index), count)
        if str(tool.get("type") or "").startswith(SERVER_TOOLS) and (blocks or block.ttl is None):
            # Switching it leaves what is cached of the tools; a breakpoint on it ends them all the same.
            searches.append(_dump(_bare(tool)))
            if block.ttl is not None:
                blocks[-1] = replace(blocks[-1], ttl=blocks[-1].ttl or block.ttl)
            continue
        blocks.append(block)
    blocks += _content_blocks(body.get("system"), "system", ("system",), "", count)
    for index, message in enumerate(_list(body, "messages")):
        if not isinstance(message, Mapping):
            raise ParameterError(f"messages.{index} is not an object", param=f"messages.{index}")
        role = str(message.get("role", ""))
        path: Path = ("messages", index, "content")
        blocks += _content_blocks(message.get("content"), "messages", path, role, count)
    settings = _settings(body, searches, betas)
    automatic = body.get("cache_control")
    return Prompt(
        vendor=vendor,
        model=str(body.get("model", "")),
        blocks=tuple(blocks),
        settings=settings,
        automatic=_ttl(automatic, "cache_control"),
        scope=scope,
    )


def _settings(body: Json, searches: list[bytes], betas: str) -> dict[str, str]:
    output = body.get("output_config")
    output = output if isinstance(output, Mapping) else {}
    images = [part for part in _parts(body) if isinstance(part, Mapping) and part.get("type") == "image"]
    citing = [
        part
        for part in _parts(body)
        if isinstance(part, Mapping)
        and isinstance(part.get("citations"), Mapping)
        and part["citations"].get("enabled")
    ]
    more = {name: body[name] for name in _SETTINGS if body.get(name) is not None}
    more |= {key: value for key, value in output.items() if key != "effort"}
    return {
        "web_search": b"|".join(searches).decode("utf-8", "replace"),
        "citations": "on" if citing else "",
        "speed": str(body.get("speed") or "standard"),
        "tool_choice": _text(body.get("tool_choice")),
        "images": str(len(images)),
        "thinking": _text(body.get("thinking")),
        "effort": str(output.get("effort") or DEFAULT_EFFORT),
        "settings": _text([more, betas] if more or betas else None),
    }


def _parts(body: Json) -> Iterator[Any]:
    """All blocks of messages, and those inside tool results."""
    for message in _list(body, "messages"):
        content = message.get("content") if isinstance(message, Mapping) else None
        for part in content if isinstance(content, list) else ():
            yield part
            inner = part.get("content") if isinstance(part, Mapping) else None
            if isinstance(inner, list):
                yield from inner


def _content_blocks(content: Any, level: Any, path: Path, role: str, count: CountTokens) -> list[Block]:
    if content is None:
        return []
    if isinstance(content, str):
        part = {"type": "text", "text": content}
        return [_block(level, "text", part, path, count, role=role, is_last=True)]
    if not isinstance(content, list):
        where = ".".join(map(str, path))
        raise ParameterError(f"{where} is neither text nor a list of blocks", param=where)
    last = len(content) - 1
    return [
        _block(level, _kind(part), part, (*path, index), count, role=role, is_last=index == last)
        for index, part in enumerate(content)
    ]


def _kind(part: Any) -> str:
    return str(part.get("type", "text")) if isinstance(part, Mapping) else "text"


def _block(
    level: Any, kind: str, part: Any, path: Path, count: CountTokens, *, role: str = "", is_last: bool = False
) -> Block:
    if not isinstance(part, Mapping):
        where = ".".join(map(str, path))
        raise ParameterError(f"{where} is not an object", param=where)
    data = _dump(_bare(part))
    is_empty = kind == "text" and not str(part.get("text", ""))
    return Block(
        level=level,
        kind=kind,
        digest=digest_of(data),
        num_tokens=0 if is_empty else count(data),
        path=path,
        can_mark=not is_empty,
        ttl=_ttl(part.get("cache_control"), ".".join(map(str, path))),
        role=role,
        ends_message=is_last,
    )


def _bare(part: Json) -> Json:
    """Without the marker: the same content with and without one is the same content."""
    return {key: value for key, value in part.items() if key != "cache_control"}


def _ttl(control: Any, where: str) -> str | None:
    if control is None:
        return None
    if not isinstance(control, Mapping) or control.get("type") != "ephemeral":
        raise ParameterError(f'{where}: cache_control has to be {{"type": "ephemeral"}}', param=where)
    return str(control.get("ttl") or "5m")


def _list(body: Json, name: str) -> list[Any]:
    value = body.get(name)
    if value is None:
        return []
    if not isinstance(value, list):
        raise ParameterError(f"{name} is not a list", param=name)
    return value


def _dump(value: Any) -> bytes:
    # In the order of keys that the request has: another order is another prompt to a vendor.
    return orjson.dumps(value, default=str)


def _text(value: Any) -> str:
    return "" if value is None else _dump(value).decode("utf-8", "replace")


# ---------------------------------------------------------------- putting breakpoints in


def place_markers(body: MutableMapping[str, Any], markers: Mapping[Path, str]) -> None:
    """Put breakpoints into a request's body, which is changed; the order of its keys stays.

    A text that was a string becomes a list of one text block: another spelling of the same prompt.
    """
    for path, ttl in markers.items():
        control = {"type": "ephemeral"} if ttl == "5m" else {"type": "ephemeral", "ttl": ttl}
        holder: Any = body
        for step in path[:-1]:
            holder = holder[step]
        value = holder[path[-1]]
        if isinstance(value, str):
            holder[path[-1]] = [{"type": "text", "text": value, "cache_control": control}]
        else:
            holder[path[-1]] = {**value, "cache_control": control}
