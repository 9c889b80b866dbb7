"""Anthropic's Messages for upstreams that speak OpenAI's Chat Completions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

import orjson

from .translation import (
    Json,
    Target,
    Translation,
    anthropic_error,
    arguments_of,
    check_fields,
    listed,
    message_in,
    messages_usage,
    only,
    refused,
    text_of,
    unreadable,
)

_KNOWN: Final = frozenset(
    {
        "model", "messages", "system", "max_tokens", "tools", "tool_choice", "stop_sequences", "temperature",
        "top_p", "top_k", "stream", "metadata", "thinking", "output_config", "cache_control", "diagnostics",
        "service_tier", "speed",
    }
)  # fmt: skip
_TOOL_FIELDS: Final = frozenset({"type", "name", "description", "input_schema", "strict", "cache_control"})
_EFFORTS: Final = ("low", "medium", "high")
_FINISHED: Final = {
    "stop": "end_turn",
    "length": "max_tokens",
    "tool_calls": "tool_use",
    "content_filter": "refusal",
}


def chat_request(body: Mapping[str, Any], target: Target) -> Json:
    """The body of a chat completion. Raises :class:`~ostinato.errors.ParameterError` for what has none."""
    check_fields(body, _KNOWN)
    only(body, "speed", ("standard",))
    only(body, "service_tier", ("auto",))
    if (body.get("thinking") or {}).get("type", "disabled") != "disabled":
        raise refused("thinking", "no counterpart (an effort under output_config has one)")
    made: Json = {"model": body.get("model")}
    messages: list[Json] = []
    if body.get("system") is not None:
        messages.append({"role": "system", "content": _content(body["system"], "system", target)})
    for index, message in enumerate(listed(body.get("messages"), "messages")):
        messages += _messages(message, f"messages.{index}", target)
    if messages and messages[-1]["role"] == "assistant":
        raise refused("messages", "an answer that is begun cannot be gone on with")
    made["messages"] = messages
    _limits(body, made, target)
    _tools(body, made)
    output = body.get("output_config") or {}
    check_fields(output, frozenset({"effort", "format"}), "output_config.")
    if (effort := output.get("effort")) is not None:
        if effort not in _EFFORTS:
            raise refused("output_config.effort", "only low, medium and high have a counterpart")
        made["reasoning_effort"] = effort
    if (form := output.get("format")) is not None:
        if form.get("type") != "json_schema":
            raise refused("output_config.format", "only json_schema has a counterpart")
        schema = {"name": "answer", "schema": form.get("schema"), "strict": True}
        made["response_format"] = {"type": "json_schema", "json_schema": schema}
    if isinstance(user := (body.get("metadata") or {}).get("user_id"), str):
        made["user"] = user
    if body.get("stream") is True:
        made |= {"stream": True, "stream_options": {"include_usage": True}}
    return made


def _limits(body: Mapping[str, Any], made: Json, target: Target) -> None:
    if (limit := body.get("max_tokens")) is not None:
        if limit == 0:
            raise refused("max_tokens", "an answer of no tokens (prewarming)")
        made["max_completion_tokens" if target.vendor == "openai" else "max_tokens"] = limit
    for name in ("temperature", "top_p"):
        if body.get(name) is not None:
            made[name] = body[name]
    if body.get("top_k") is not None:
        if target.vendor:
            raise refused("top_k", "no counterpart")
        made["top_k"] = body["top_k"]
    if stops := body.get("stop_sequences"):
        made["stop"] = stops


def _tools(body: Mapping[str, Any], made: Json) -> None:
    tools = []
    for index, tool in enumerate(listed(body.get("tools"), "tools")):
        where = f"tools.{index}"
        if tool.get("type") not in (None, "custom"):
            raise refused(f"{where}.type", "a tool that the vendor runs itself")
        check_fields(tool, _TOOL_FIELDS, f"{where}.")
        function = {"name": tool.get("name")}
        for theirs, ours in (
            ("description", "description"),
            ("input_schema", "parameters"),
            ("strict", "strict"),
        ):
            if tool.get(theirs) is not None:
                function[ours] = tool[theirs]
        tools.append({"type": "function", "function": function})
    if tools:
        made["tools"] = tools
    choice = body.get("tool_choice")
    if choice is None:
        return
    kind = choice.get("type") if isinstance(choice, Mapping) else None
    named = {"type": "function", "function": {"name": choice.get("name")}} if kind == "tool" else None
    said = {"auto": "auto", "none": "none", "any": "required", "tool": named}.get(str(kind))
    if said is None:
        raise refused("tool_choice.type", "no counterpart")
    made["tool_choice"] = said
    if choice.get("disable_parallel_tool_use"):
        made["parallel_tool_calls"] = False


# ---------------------------------------------------------------- messages


def _content(content: Any, where: str, target: Target) -> str | list[Json]:
    """Text and images as parts; one text is a string."""
    if isinstance(content, str):
        return content
    parts = [_part(block, f"{where}.{at}", target) for at, block in enumerate(listed(content, where))]
    if len(parts) == 1 and parts[0].keys() == {"type", "text"}:
        return str(parts[0]["text"])
    return parts


def _part(block: Mapping[str, Any], where: str, target: Target) -> Json:
    kind = block.get("type")
    if kind == "text":
        if block.get("citations"):
            raise refused(f"{where}.citations", "no counterpart")
        part: Json = {"type": "text", "text": text_of(block.get("text"), f"{where}.text")}
    elif kind == "image":
        source = block.get("source")
        source = source if isinstance(source, Mapping) else {}
        if source.get("type") == "base64":
            url = f"data:{source.get('media_type')};base64,{source.get('data')}"
        elif source.get("type") == "url":
            url = text_of(source.get("url"), f"{where}.source.url")
        else:
            raise refused(f"{where}.source", "only base64 and url have a counterpart")
        part = {"type": "image_url", "image_url": {"url": url}}
    else:
        raise refused(f"{where}.type", f"{str(kind)[:40]!r} has no counterpart")
    if target.has_breakpoints and block.get("cache_control"):
        part["prompt_cache_breakpoint"] = {"mode": "explicit"}
    return part


def _messages(message: Mapping[str, Any], where: str, target: Target) -> Iterator[Json]:
    """One message of Anthropic's is several of OpenAI's: tools' results are messages of their own."""
    role, content = message.get("role"), message.get("content")
    check_fields(message, frozenset({"role", "content"}), f"{where}.")
    if role not in ("user", "assistant", "system"):
        raise refused(f"{where}.role", "no counterpart")
    if isinstance(content, str):
        yield {"role": role, "content": content}
        return
    blocks = listed(content, f"{where}.content")
    if role == "assistant":
        yield _assistant(blocks, f"{where}.content")
        return
    rest: list[Json] = []
    for at, block in enumerate(blocks):
        place = f"{where}.content.{at}"
        if block.get("type") != "tool_result":
            rest.append(_part(block, place, target))
        elif rest:
            raise refused(place, "a tool's result behind other content")
        else:
            yield _result(block, place)
    if rest:
        is_text = len(rest) == 1 and rest[0].keys() == {"type", "text"}
        yield {"role": role, "content": rest[0]["text"] if is_text else rest}


def _result(block: Mapping[str, Any], where: str) -> Json:
    content = block.get("content")
    if isinstance(content, list):
        texts = []
        for at, part in enumerate(listed(content, f"{where}.content")):
            if part.get("type") != "text":
                raise refused(f"{where}.content.{at}", "only text has a counterpart in a tool's result")
            texts.append(text_of(part.get("text"), f"{where}.content.{at}.text"))
        content = "\n".join(texts)
    text = text_of("" if content is None else content, f"{where}.content")
    if block.get("is_error") is True:  # there is no field for it, and the model has to know
        text = f"Error: {text}"
    return {"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": text}


def _assistant(blocks: list[Mapping[str, Any]], where: str) -> Json:
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[Json] = []
    for at, block in enumerate(blocks):
        place, kind = f"{where}.{at}", block.get("type")
        if kind == "text" and not calls:
            texts.append(text_of(block.get("text"), f"{place}.text"))
        elif kind == "tool_use":
            function = {
                "name": block.get("name"),
                "arguments": orjson.dumps(block.get("input") or {}).decode(),
            }
            calls.append({"id": block.get("id"), "type": "function", "function": function})
        elif kind == "thinking" and not block.get("signature"):  # what we made of an answer's reasoning
            thoughts.append(text_of(block.get("thinking"), f"{place}.thinking"))
        else:
            why = "text behind a call" if kind == "text" else f"{str(kind)[:40]!r} has no counterpart"
            raise refused(f"{place}.type", why)
    made: Json = {"role": "assistant", "content": "".join(texts) if texts or not calls else None}
    if thoughts:
        made["reasoning_content"] = "\n".join(thoughts)
    if calls:
        made["tool_calls"] = calls
    return made


# ---------------------------------------------------------------- answers


def message_of(completion: Mapping[str, Any]) -> Json:
    """A whole completion as a message. Raises :class:`~ostinato.errors.UpstreamError`."""
    choices = completion.get("choices")
    choice = choices[0] if isinstance(choices, list) and choices else None
    given = choice.get("message") if isinstance(choice, Mapping) else None
    if not isinstance(choice, Mapping) or not isinstance(given, Mapping):
        raise unreadable("it has no choice")
    blocks: list[Json] = []
    if thought := given.get("reasoning_content") or given.get("reasoning"):
        blocks.append({"type": "thinking", "thinking": str(thought), "signature": ""})
    text = given.get("content")
    if isinstance(text, list):
        text = "".join(str(part.get("text", "")) for part in text if isinstance(part, Mapping))
    if text or given.get("refusal"):
        blocks.append({"type": "text", "text": str(text or given["refusal"]), "citations": None})
    for call in given.get("tool_calls") or []:
        function = call.get("function") or {}
        try:
            arguments = arguments_of(function.get("arguments"), "a call's arguments")
        except ValueError as error:
            raise unreadable(str(error)) from error
        blocks.append(
            {"type": "tool_use", "id": call.get("id"), "name": function.get("name"), "input": arguments}
        )
    return {
        "id": completion.get("id"),
        "type": "message",
        "role": "assistant",
        "model": completion.get("model"),
        "content": blocks,
        **_stop(choice, bool(given.get("refusal"))),
        "usage": messages_usage(completion.get("usage")),
    }


def _stop(choice: Mapping[str, Any], is_refusal: bool = False) -> Json:
    reason = "refusal" if is_refusal else _FINISHED.get(str(choice.get("finish_reason")), "end_turn")
    stop = choice.get("stop_reason")  # vLLM and its like name the stop string
    if reason == "end_turn" and isinstance(stop, str):
        return {"stop_reason": "stop_sequence", "stop_sequence": stop}
    return {"stop_reason": reason, "stop_sequence": None}


def _event(item: Json) -> bytes:
    return b"event: " + str(item["type"]).encode() + b"\ndata: " + orjson.dumps(item) + b"\n\n"


class MessageEvents:
    """Chunks of a completion as a message's events. What was used stands in the last ones."""

    def __init__(self, _asked: Mapping[str, Any]) -> None:
        self._is_started = False
        self._open: str | None = None
        self._num_blocks = 0
        self._call: int | None = None
        self._stop: Json | None = None
        self._is_refusal = False
        self._usage: Any = None

    def feed(self, item: Mapping[str, Any]) -> Iterator[bytes]:
        if "error" in item:
            error = {"type": "api_error", "message": message_in(item)}
            yield _event({"type": "error", "error": error})
            return
        if not self._is_started:
            self._is_started = True
            message = {
                "id": item.get("id"),
                "type": "message",
                "role": "assistant",
                "model": item.get("model"),
            }
            message |= {"content": [], "stop_reason": None, "stop_sequence": None}
            yield _event({"type": "message_start", "message": message | {"usage": messages_usage(None)}})
        self._usage = item.get("usage") or self._usage
        for choice in item.get("choices") or []:
            if choice.get("index", 0) != 0:
                raise unreadable("it has a second choice")
            yield from self._delta(choice.get("delta") or {})
            if choice.get("finish_reason") is not None:
                self._stop = _stop(choice, self._is_refusal)

    def _delta(self, delta: Mapping[str, Any]) -> Iterator[bytes]:
        if thought := delta.get("reasoning_content") or delta.get("reasoning"):
            yield from self._piece("thinking", {"type": "thinking_delta", "thinking": thought})
        if delta.get("refusal"):
            self._is_refusal = True
        if text := delta.get("content") or delta.get("refusal"):
            yield from self._piece("text", {"type": "text_delta", "text": text})
        for call in delta.get("tool_calls") or []:
            yield from self._called(call)

    def _called(self, call: Mapping[str, Any]) -> Iterator[bytes]:
        number, function = call.get("index", 0), call.get("function") or {}
        if number != self._call:
            if self._call is not None and number < self._call:
                raise unreadable("its calls come mixed")
            yield from self._close()
            self._call = number
            block: Json = {
                "type": "tool_use",
                "id": call.get("id"),
                "name": function.get("name"),
                "input": {},
            }
            yield from self._begin("tool_use", block)
        if arguments := function.get("arguments"):
            yield self._delta_event({"type": "input_json_delta", "partial_json": arguments})

    def finish(self) -> Iterator[bytes]:
        if self._stop is None:
            raise unreadable("it ended without a reason")
        yield from self._close()
        yield _event({"type": "message_delta", "delta": self._stop, "usage": messages_usage(self._usage)})
        yield _event({"type": "message_stop"})

    def _piece(self, kind: str, delta: Json) -> Iterator[bytes]:
        if self._open != kind:
            yield from self._close()
            extra: Json = {"signature": ""} if kind == "thinking" else {"citations": None}
            yield from self._begin(kind, {"type": kind, kind: ""} | extra)
        yield self._delta_event(delta)

    def _delta_event(self, delta: Json) -> bytes:
        return _event({"type": "content_block_delta", "index": self._num_blocks - 1, "delta": delta})

    def _begin(self, kind: str, block: Json) -> Iterator[bytes]:
        self._open = kind
        self._num_blocks += 1
        yield _event({"type": "content_block_start", "index": self._num_blocks - 1, "content_block": block})

    def _close(self) -> Iterator[bytes]:
        if self._open is not None:
            self._open = None
            yield _event({"type": "content_block_stop", "index": self._num_blocks - 1})


MESSAGES_TO_CHAT: Final = Translation(
    path="/v1/chat/completions",
    headers_dropped="anthropic-",
    request=chat_request,
    answer=message_of,
    stream=MessageEvents,
    error=anthropic_error,
)
