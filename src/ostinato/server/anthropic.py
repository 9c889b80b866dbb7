"""``/v1/messages``: Anthropic's request as a conversation, and the answer in Anthropic's shape."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Final, Literal

import orjson
from pydantic import Discriminator, Field, Tag

from ..errors import MessageTypeError, ParameterError, UnknownModelError
from ..types import Chunk, Conversation, GenerationRequest, Message, SamplingParams, ToolCall, Usage
from .breakpoints import Breakpoints
from .extras import ReuseChoice, reuse_object, reuse_wanted
from .fields import MAX_SHOWN_CHARS, MAX_STOPS, StopString, Wire, text_or_list
from .sampling import check_max_tokens, namespace_salt, unsupported
from .sessions import SessionGiven, session_of
from .wire import Json

MESSAGES_ROUTE: Final = "/v1/messages"
COUNT_ROUTE: Final = "/v1/messages/count_tokens"
_STOP_REASONS: Final = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


class CacheControl(Wire):
    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None


class ContentBlock(Wire):
    """A block of any kind; which fields it needs is checked where it is read."""

    type: str
    text: str | None = None
    thinking: str | None = None
    signature: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: Any = None
    is_error: bool | None = None
    citations: Any = None
    caller: Any = None
    source: Any = None
    data: str | None = None
    cache_control: CacheControl | None = None


Content = Annotated[
    Annotated[str, Tag("<text>")] | Annotated[list[ContentBlock], Tag("<list>")],
    Discriminator(text_or_list),
]


class AnthropicMessage(Wire):
    role: Literal["user", "assistant", "system"]
    content: Content


class AnthropicTool(Wire):
    name: Annotated[str, Field(min_length=1, max_length=256)]
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    type: str | None = None
    strict: bool | None = None
    cache_control: CacheControl | None = None


class MessagesRequest(Wire):
    """The body of ``/v1/messages``. ``metadata`` to ``diagnostics`` cannot change an answer."""

    model: str
    messages: list[AnthropicMessage]
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    system: Content | None = None
    tools: Annotated[list[AnthropicTool], Field(max_length=1024)] | None = None
    tool_choice: dict[str, Any] | None = None
    stop_sequences: Annotated[list[StopString], Field(max_length=MAX_STOPS)] | None = None
    temperature: Annotated[float, Field(ge=0, le=1)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=0)] | None = None
    stream: bool | None = None
    cache_control: CacheControl | None = None
    thinking: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=1024)] | None = None
    session: SessionGiven | None = None
    reuse: ReuseChoice | None = None

    metadata: Any = None
    service_tier: Any = None
    speed: Any = None
    diagnostics: Any = None

    @property
    def is_prewarm(self) -> bool:
        """Only to write the cache: nothing is to be said."""
        return self.max_tokens == 0

    def check(self, *, model_names: Sequence[str], max_model_len: int, is_counting: bool = False) -> None:
        """Raise what is wrong with the fields taken together, or not supported."""
        if self.model not in model_names:
            shown = self.model[:MAX_SHOWN_CHARS]
            raise UnknownModelError(f"model: {shown}; this server has {model_names[0]}")
        if self.max_tokens is None and not is_counting:
            raise ParameterError(
                "max_tokens: Field required", param="max_tokens", code="missing_required_parameter"
            )
        check_max_tokens(self.max_tokens, param="max_tokens", max_model_len=max_model_len)
        if (kind := (self.thinking or {}).get("type", "disabled")) != "disabled":
            raise ParameterError(
                f"thinking: {str(kind)[:MAX_SHOWN_CHARS]!r} is not supported by this server; models here "
                "think as their template has them",
                param="thinking",
            )
        choice = (self.tool_choice or {}).get("type", "auto")
        if choice not in ("auto", "none"):
            raise unsupported("tool_choice.type")
        if (self.output_config or {}).get("format") is not None:
            raise unsupported("output_config.format")
        if self.is_prewarm and self.stream:
            raise ParameterError("max_tokens: 0 cannot be streamed", param="stream")

    def generation(self, *, request_id: str, key_salt: str) -> GenerationRequest:
        """What the runtime is asked for. Raises :class:`~ostinato.errors.ClientError`."""
        calls_none = (self.tool_choice or {}).get("type") == "none"
        tools = () if calls_none else tuple(map(_tool, self.tools or []))
        messages: list[Message] = []
        if self.system is not None:
            messages.append(Message("system", _joined(self.system, "system")))
        for index, message in enumerate(self.messages):
            messages.extend(_messages(index, message))
        return GenerationRequest(
            prompt=Conversation(tuple(messages), tools),
            params=SamplingParams(
                max_tokens=max(1, self.max_tokens or 1),
                temperature=0.0 if self.top_p == 0 else 1.0 if self.temperature is None else self.temperature,
                top_p=self.top_p or 1.0,
                top_k=self.top_k or 0,
                stop=tuple(self.stop_sequences or ()),
            ),
            salt=namespace_salt(key_salt, self.cache_salt),
            request_id=request_id,
            is_warming=self.is_prewarm,
            session=session_of(self.session),
            reuse=reuse_wanted(self.reuse),
        )


def _tool(tool: AnthropicTool) -> Json:
    """In the form and the order of keys that OpenAI's door gives templates, so that both share KV."""
    if tool.type not in (None, "custom"):
        raise unsupported("tools.type")
    if tool.strict:
        raise unsupported("tools.strict")
    function: Json = {"name": tool.name}
    if tool.description is not None:
        function["description"] = tool.description
    if tool.input_schema is not None:
        function["parameters"] = tool.input_schema
    return {"type": "function", "function": function}


def _messages(index: int, message: AnthropicMessage) -> Iterator[Message]:
    """One message of Anthropic's is several here: tool results are messages of their own."""
    where = f"messages.{index}"
    if isinstance(message.content, str):
        yield Message(message.role, message.content)
        return
    texts: list[str] = []
    calls: list[ToolCall] = []
    thoughts: list[str] = []
    num_results = 0
    for place, block in enumerate(message.content):
        path = f"{where}.content.{place}"
        if block.type == "text":
            texts.append(_needed(block.text, f"{path}.text"))
        elif block.type == "thinking" and message.role == "assistant":
            thoughts.append(block.thinking or "")
        elif block.type == "tool_use" and message.role == "assistant":
            arguments = orjson.dumps(block.input or {}).decode()
            calls.append(
                ToolCall(_needed(block.id, f"{path}.id"), _needed(block.name, f"{path}.name"), arguments)
            )
        elif block.type == "tool_result" and message.role == "user":
            if texts:
                raise MessageTypeError(f"{path}: tool results come before text", index=index)
            num_results += 1
            called = _needed(block.tool_use_id, f"{path}.tool_use_id")
            yield Message("tool", _result_text(block.content, path), tool_call_id=called)
        else:
            shown = block.type[:MAX_SHOWN_CHARS]
            raise ParameterError(
                f"{path}.type: {shown!r} is not supported here, this server reads text", param=f"{path}.type"
            )
    if texts or calls or thoughts or not num_results:
        text = "\n".join(texts)
        yield Message(message.role, text, tool_calls=tuple(calls), reasoning="\n".join(thoughts))


def _needed(value: str | None, path: str) -> str:
    if value is None:
        raise ParameterError(f"{path}: Field required", param=path, code="missing_required_parameter")
    return value


def _joined(content: str | list[ContentBlock], path: str) -> str:
    if isinstance(content, str):
        return content
    texts = []
    for place, block in enumerate(content):
        if block.type != "text":
            raise unsupported(f"{path}.{place}.type")
        texts.append(_needed(block.text, f"{path}.{place}.text"))
    return "\n".join(texts)


def _result_text(content: Any, path: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    texts: list[str] = []
    for place, part in enumerate(content if isinstance(content, list) else [content]):
        text = part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None
        if not isinstance(text, str):
            where = f"{path}.content.{place}"
            raise ParameterError(f"{where}: only text is supported here", param=where)
        texts.append(text)
    return "\n".join(texts)


# ---------------------------------------------------------------- the answer


def message_event(item: Json) -> bytes:
    """One event of a stream: clients go by its name."""
    kind: str = item["type"]
    return b"event: " + kind.encode() + b"\ndata: " + orjson.dumps(item) + b"\n\n"


class MessageWriter:
    """An answer as a ``message``, or as the events of its stream.

    What the prompt cost stands in the last event's usage; at the start only what rules alone decide.
    """

    def __init__(self, message_id: str, model: str, breakpoints: Breakpoints, *, is_prewarm: bool) -> None:
        self._id = message_id
        self._model = model
        self._breakpoints = breakpoints
        self._is_prewarm = is_prewarm
        self._is_started = False
        self._num_blocks = 0
        self._open: str | None = None
        self._blocks: list[Json] = []
        self._last: Chunk | None = None

    def events(self, prompt_index: int, chunk: Chunk) -> Iterator[Json]:
        assert prompt_index == 0, "a conversation has one prompt"
        if not self._is_started:
            self._is_started = True
            self._breakpoints.begun()
            yield {"type": "message_start", "message": self._message([], None, self._breakpoints.expected())}
        if chunk.reasoning:
            yield from self._piece("thinking", {"type": "thinking_delta", "thinking": chunk.reasoning})
        if chunk.text:
            yield from self._piece("text", {"type": "text_delta", "text": chunk.text})
        for call in chunk.tool_calls:
            yield from self._close()
            block = {"type": "tool_use", "id": call.id, "name": call.name, "input": {}}
            yield from self._begin("tool_use", block)
            delta = {"type": "input_json_delta", "partial_json": call.arguments}
            yield {"type": "content_block_delta", "index": self._num_blocks - 1, "delta": delta}
            yield from self._close()
        if chunk.finish_reason is not None:
            assert chunk.usage is not None, "the last piece of one choice has usage"
            yield from self._close()
            usage = self._usage_object(chunk.usage)
            yield {"type": "message_delta", "delta": _stop_fields(chunk), "usage": usage}
            yield {"type": "message_stop"}

    def collect(self, prompt_index: int, chunk: Chunk) -> None:
        assert prompt_index == 0, "a conversation has one prompt"
        if not self._is_started:
            self._is_started = True
            self._breakpoints.begun()
        for kind, text in (("thinking", chunk.reasoning), ("text", chunk.text)):
            if not text:
                continue
            if self._blocks and self._blocks[-1]["type"] == kind:
                self._blocks[-1][kind] += text
            else:
                self._blocks.append({"type": kind, kind: text} | _extra(kind))
        for call in chunk.tool_calls:
            self._blocks.append(
                {"type": "tool_use", "id": call.id, "name": call.name, "input": _arguments(call)}
            )
        if chunk.finish_reason is not None:
            self._last = chunk

    def whole(self, usages: Sequence[Usage]) -> Json:
        assert self._last is not None, "an answer that never finished"
        usage = self._usage_object(usages[0])
        if self._is_prewarm:
            usage["output_tokens"] = 0
            return self._message([], "max_tokens", usage)
        fields = _stop_fields(self._last)
        return self._message(self._blocks, None, usage) | fields

    def usage_event(self, usages: Sequence[Usage]) -> Json:
        raise AssertionError("the usage of a message stands in its last events")

    def _usage_object(self, usage: Usage) -> Json:
        """Anthropic's, and beside it where moved KV was used."""
        said = self._breakpoints.usage_object(usage)
        if usage.reuse is not None:
            said["reuse"] = reuse_object(usage.reuse, usage.cached_tokens)
        return said

    def _message(self, content: list[Json], stop_reason: str | None, usage: Json) -> Json:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": content,
            "stop_reason": stop_reason,
            "stop_sequence": None,
            "usage": usage,
        }

    def _piece(self, kind: str, delta: Json) -> Iterator[Json]:
        if self._open != kind:
            yield from self._close()
            yield from self._begin(kind, {"type": kind, kind: ""} | _extra(kind))
        yield {"type": "content_block_delta", "index": self._num_blocks - 1, "delta": delta}

    def _begin(self, kind: str, block: Json) -> Iterator[Json]:
        self._open = kind
        self._num_blocks += 1
        yield {"type": "content_block_start", "index": self._num_blocks - 1, "content_block": block}

    def _close(self) -> Iterator[Json]:
        if self._open is not None:
            self._open = None
            yield {"type": "content_block_stop", "index": self._num_blocks - 1}


def _extra(kind: str) -> Json:
    return {"signature": ""} if kind == "thinking" else {"citations": None}


def _stop_fields(chunk: Chunk) -> Json:
    assert chunk.finish_reason is not None
    if chunk.finish_reason == "stop" and isinstance(chunk.stop_reason, str):
        return {"stop_reason": "stop_sequence", "stop_sequence": chunk.stop_reason}
    return {"stop_reason": _STOP_REASONS.get(chunk.finish_reason, "end_turn"), "stop_sequence": None}


def _arguments(call: ToolCall) -> Any:
    """A model may write arguments that are no JSON object; then there is text, under one key."""
    try:
        value = orjson.loads(call.arguments or "{}")
    except orjson.JSONDecodeError:
        return {"arguments": call.arguments}
    return value if isinstance(value, dict) else {"arguments": value}
