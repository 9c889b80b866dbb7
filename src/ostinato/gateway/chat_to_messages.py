"""OpenAI's Chat Completions for upstreams that speak Anthropic's Messages."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping
from typing import Any, Final

import orjson

from ..errors import ParameterError
from .translation import (
    Json,
    Target,
    Translation,
    arguments_of,
    chat_usage,
    check_fields,
    listed,
    message_in,
    only,
    openai_error,
    refused,
    text_of,
    unreadable,
)

# Those with a meaning there; those that ask for nothing at these values; those without a part in answers.
_SAID: Final = frozenset(
    {
        "model", "messages", "max_tokens", "max_completion_tokens", "temperature", "top_p", "stop", "stream",
        "stream_options", "tools", "tool_choice", "parallel_tool_calls", "response_format",
        "reasoning_effort", "user", "safety_identifier",
    }
)  # fmt: skip
_NEUTRAL: Final[Mapping[str, tuple[Any, ...]]] = {
    "n": (1,),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "logit_bias": ({},),
    "modalities": (["text"],),
    "store": (False,),
    "service_tier": ("auto", "default"),
    "verbosity": ("medium",),
    "functions": ([],),
    "function_call": ("none", "auto"),
}
_WITHOUT_PART: Final = frozenset(
    {"metadata", "prediction", "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention"}
)
_MESSAGE_FIELDS: Final = frozenset(
    {"role", "content", "tool_calls", "tool_call_id", "refusal", "annotations", "name"}
)
_EFFORTS: Final = ("low", "medium", "high")
_DATA_URL: Final = re.compile(r"data:([\w.+-]+/[\w.+-]+);base64,(.*)", re.DOTALL)
_FINISHED: Final = {
    "end_turn": "stop",
    "stop_sequence": "stop",
    "max_tokens": "length",
    "model_context_window_exceeded": "length",
    "tool_use": "tool_calls",
    "refusal": "content_filter",
}


def messages_request(body: Mapping[str, Any], target: Target) -> Json:
    """The body of a message. Raises :class:`~ostinato.errors.ParameterError` for what has none."""
    check_fields(body, _SAID | _NEUTRAL.keys() | _WITHOUT_PART)
    for name, harmless in _NEUTRAL.items():
        only(body, name, harmless)
    made: Json = {"model": body.get("model"), "max_tokens": _max_tokens(body, target)}
    system, messages = _messages(listed(body.get("messages"), "messages"))
    if system:
        made["system"] = system
    made["messages"] = messages
    if (temperature := body.get("temperature")) is not None:
        if not isinstance(temperature, int | float) or temperature > 1:
            raise refused("temperature", "it goes up to 1 there")
        made["temperature"] = temperature
    if body.get("top_p") is not None:
        made["top_p"] = body["top_p"]
    if stops := body.get("stop"):
        made["stop_sequences"] = [stops] if isinstance(stops, str) else stops
    _tools(body, made)
    output: Json = {}
    if (effort := body.get("reasoning_effort")) is not None:
        if effort not in _EFFORTS:
            raise refused("reasoning_effort", "only low, medium and high have a counterpart")
        output["effort"] = effort
    if (form := body.get("response_format")) is not None and form != {"type": "text"}:
        schema = form.get("json_schema") if isinstance(form, Mapping) else None
        if not isinstance(schema, Mapping) or form.get("type") != "json_schema":
            raise refused("response_format", "only json_schema has a counterpart")
        output["format"] = {"type": "json_schema", "schema": schema.get("schema")}
    if output:
        made["output_config"] = output
    if isinstance(user := body.get("safety_identifier") or body.get("user"), str):
        made["metadata"] = {"user_id": user}
    if body.get("stream") is True:
        made["stream"] = True
    return made


def _max_tokens(body: Mapping[str, Any], target: Target) -> Any:
    limit = body.get("max_completion_tokens") or body.get("max_tokens") or target.max_tokens
    if not limit:
        raise ParameterError(
            "max_completion_tokens: this model's vendor has to be told how long an answer may be; or set "
            "max_tokens for the upstream.",
            param="max_completion_tokens",
            code="missing_required_parameter",
        )
    return limit


def _tools(body: Mapping[str, Any], made: Json) -> None:
    tools = []
    for index, tool in enumerate(listed(body.get("tools"), "tools")):
        function = tool.get("function")
        if tool.get("type") != "function" or not isinstance(function, Mapping):
            raise refused(f"tools.{index}.type", "only functions have a counterpart")
        check_fields(
            function, frozenset({"name", "description", "parameters", "strict"}), f"tools.{index}.function."
        )
        made_tool: Json = {"name": function.get("name")}
        for name in ("description", "strict"):
            if function.get(name) is not None:
                made_tool[name] = function[name]
        made_tool["input_schema"] = function.get("parameters") or {"type": "object", "properties": {}}
        tools.append(made_tool)
    if tools:
        made["tools"] = tools
    choice = body.get("tool_choice")
    said: Json | None = None
    if isinstance(choice, str):
        kind = {"auto": "auto", "none": "none", "required": "any"}.get(choice)
        said = {"type": kind} if kind else None
    elif isinstance(choice, Mapping) and choice.get("type") == "function":
        said = {"type": "tool", "name": (choice.get("function") or {}).get("name")}
    if choice is not None and said is None:
        raise refused("tool_choice", "no counterpart")
    if body.get("parallel_tool_calls") is False and tools and (said is None or said["type"] != "none"):
        said = {**(said or {"type": "auto"}), "disable_parallel_tool_use": True}
    if said is not None and tools:
        made["tool_choice"] = said


# ---------------------------------------------------------------- messages


def _messages(given: list[Mapping[str, Any]]) -> tuple[list[Json], list[Json]]:
    """The system's text, which comes first there, and the rest; results of one group are one message."""
    system: list[Json] = []
    made: list[Json] = []
    is_group_open = False
    for index, message in enumerate(given):
        where = f"messages.{index}"
        role = message.get("role")
        check_fields(message, _MESSAGE_FIELDS, f"{where}.")
        if message.get("name") is not None:
            raise refused(f"{where}.name", "no counterpart")
        if role in ("system", "developer"):
            parts = _parts(message.get("content"), f"{where}.content")
            if made:
                made.append({"role": "system", "content": parts})
            else:
                system += parts
            is_group_open = False
        elif role == "user":
            made.append({"role": "user", "content": _parts(message.get("content"), f"{where}.content")})
            is_group_open = False
        elif role == "assistant":
            made.append({"role": "assistant", "content": _assistant(message, where)})
            is_group_open = False
        elif role == "tool":
            result = {
                "type": "tool_result",
                "tool_use_id": message.get("tool_call_id"),
                "content": _parts(message.get("content"), f"{where}.content"),
            }
            if is_group_open:
                made[-1]["content"].append(result)
            else:
                made.append({"role": "user", "content": [result]})
            is_group_open = True
        else:
            raise refused(f"{where}.role", "no counterpart")
    return system, made


def _parts(content: Any, where: str) -> list[Json]:
    if isinstance(content, str):
        # Anthropic takes no empty text; a message without any is one with no blocks.
        return [{"type": "text", "text": content}] if content else []
    return [_part(part, f"{where}.{at}") for at, part in enumerate(listed(content, where))]


def _part(part: Mapping[str, Any], where: str) -> Json:
    kind = part.get("type")
    if kind in ("text", "refusal"):
        made: Json = {"type": "text", "text": text_of(part.get(str(kind)), f"{where}.{kind}")}
    elif kind == "image_url":
        image = part.get("image_url")
        image = image if isinstance(image, Mapping) else {}
        if image.get("detail") not in (None, "auto"):
            raise refused(f"{where}.image_url.detail", "no counterpart")
        url = text_of(image.get("url"), f"{where}.image_url.url")
        inside = _DATA_URL.fullmatch(url)
        source = (
            {"type": "base64", "media_type": inside[1], "data": inside[2]}
            if inside is not None
            else {"type": "url", "url": url}
        )
        made = {"type": "image", "source": source}
    else:
        raise refused(f"{where}.type", f"{str(kind)[:40]!r} has no counterpart")
    if part.get("prompt_cache_breakpoint"):
        made["cache_control"] = {"type": "ephemeral"}
    return made


def _assistant(message: Mapping[str, Any], where: str) -> list[Json]:
    content = message.get("content")
    blocks = [] if content is None else _parts(content, f"{where}.content")
    if isinstance(refusal := message.get("refusal"), str) and refusal:
        blocks.append({"type": "text", "text": refusal})
    for at, call in enumerate(listed(message.get("tool_calls"), f"{where}.tool_calls")):
        place = f"{where}.tool_calls.{at}"
        function = call.get("function")
        if call.get("type", "function") != "function" or not isinstance(function, Mapping):
            raise refused(f"{place}.type", "only calls of functions have a counterpart")
        try:
            arguments = arguments_of(function.get("arguments"), f"{place}.function.arguments")
        except ValueError as error:
            raise refused(f"{place}.function.arguments", str(error)) from error
        blocks.append(
            {"type": "tool_use", "id": call.get("id"), "name": function.get("name"), "input": arguments}
        )
    return blocks


# ---------------------------------------------------------------- answers


def completion_of(message: Mapping[str, Any]) -> Json:
    """A whole message as a completion. Raises :class:`~ostinato.errors.UpstreamError`."""
    content = message.get("content")
    if not isinstance(content, list):
        raise unreadable("it has no content")
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[Json] = []
    for block in content:
        kind = block.get("type")
        if kind == "text":
            texts.append(str(block.get("text", "")))
        elif kind == "thinking":
            thoughts.append(str(block.get("thinking", "")))
        elif kind == "tool_use":
            function = {
                "name": block.get("name"),
                "arguments": orjson.dumps(block.get("input") or {}).decode(),
            }
            calls.append({"id": block.get("id"), "type": "function", "function": function})
        elif kind != "redacted_thinking":
            raise unreadable(f"a block of type {str(kind)[:40]!r}")
    made: Json = {"role": "assistant", "content": "".join(texts) if texts or not calls else None}
    made["refusal"] = None
    if thoughts:
        made["reasoning_content"] = "\n".join(thoughts)
    if calls:
        made["tool_calls"] = calls
    choice = {"index": 0, "message": made, "logprobs": None, "finish_reason": _finish(message)}
    return {
        "id": message.get("id"),
        "object": "chat.completion",
        "created": int(time.time()),
        "model": message.get("model"),
        "choices": [choice],
        "usage": chat_usage(message.get("usage")),
    }


def _finish(holder: Mapping[str, Any]) -> str:
    return _FINISHED.get(str(holder.get("stop_reason")), "stop")


class CompletionChunks:
    """A message's events as chunks of a completion."""

    def __init__(self, asked: Mapping[str, Any]) -> None:
        options = asked.get("stream_options")
        self._tells_usage = isinstance(options, Mapping) and options.get("include_usage") is True
        self._frame: Json = {}
        self._usage: Json = {}
        self._kind = ""
        self._num_calls = 0
        self._has_arguments = False
        self._is_finished = False

    def feed(self, item: Mapping[str, Any]) -> Iterator[bytes]:
        kind = item.get("type")
        if kind == "message_start":
            message = item.get("message") or {}
            self._usage |= message.get("usage") or {}
            self._frame = {"id": message.get("id"), "object": "chat.completion.chunk"}
            self._frame |= {"created": int(time.time()), "model": message.get("model")}
            yield self._chunk({"role": "assistant", "content": ""})
        elif kind == "content_block_start":
            yield from self._begin(item.get("content_block") or {})
        elif kind == "content_block_delta":
            yield from self._delta(item.get("delta") or {})
        elif kind == "content_block_stop":
            if self._kind == "tool_use" and not self._has_arguments:
                yield self._arguments("{}")
            self._kind = ""
        elif kind == "message_delta":
            self._usage |= {
                key: value for key, value in (item.get("usage") or {}).items() if value is not None
            }
            if (item.get("delta") or {}).get("stop_reason") is not None:
                self._is_finished = True
                yield self._chunk({}, _finish(item["delta"]))
        elif kind == "error":
            error = {"message": message_in(item), "type": "server_error", "param": None}
            theirs = item.get("error")
            code = theirs.get("type") if isinstance(theirs, Mapping) else None
            yield _data({"error": error | {"code": code}})

    def _begin(self, block: Mapping[str, Any]) -> Iterator[bytes]:
        self._kind = str(block.get("type"))
        if self._kind == "tool_use":
            self._num_calls += 1
            self._has_arguments = False
            function = {"name": block.get("name"), "arguments": ""}
            call = {
                "index": self._num_calls - 1,
                "id": block.get("id"),
                "type": "function",
                "function": function,
            }
            yield self._chunk({"tool_calls": [call]})
            if block.get("input"):
                yield self._arguments(orjson.dumps(block["input"]).decode())
        elif self._kind == "text":
            if block.get("text"):
                yield self._chunk({"content": block["text"]})
        elif self._kind not in ("thinking", "redacted_thinking"):
            raise unreadable(f"a block of type {self._kind[:40]!r}")

    def _delta(self, delta: Mapping[str, Any]) -> Iterator[bytes]:
        kind = delta.get("type")
        if kind == "text_delta":
            yield self._chunk({"content": delta.get("text", "")})
        elif kind == "thinking_delta":
            yield self._chunk({"reasoning_content": delta.get("thinking", "")})
        elif kind == "input_json_delta" and delta.get("partial_json"):
            yield self._arguments(delta["partial_json"])

    def _arguments(self, text: str) -> bytes:
        self._has_arguments = True
        call = {"index": self._num_calls - 1, "function": {"arguments": text}}
        return self._chunk({"tool_calls": [call]})

    def finish(self) -> Iterator[bytes]:
        if not self._is_finished:
            raise unreadable("it ended without a reason")
        if self._tells_usage:
            yield _data({**self._frame, "choices": [], "usage": chat_usage(self._usage)})
        yield b"data: [DONE]\n\n"

    def _chunk(self, delta: Json, finish_reason: str | None = None) -> bytes:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
        return _data({**self._frame, "choices": [choice]})


def _data(item: Json) -> bytes:
    return b"data: " + orjson.dumps(item) + b"\n\n"


CHAT_TO_MESSAGES: Final = Translation(
    path="/v1/messages",
    headers_dropped="openai-",
    request=messages_request,
    answer=completion_of,
    stream=CompletionChunks,
    error=openai_error,
)
