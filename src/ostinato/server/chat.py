"""``/v1/chat/completions``: the request's fields, and the answer's shape."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Final, Literal

from pydantic import Discriminator, Field, Tag

from ..errors import MessageTypeError, ParameterError
from ..types import Chunk, Conversation, GenerationRequest, Message, TokenLogprob, ToolCall, Usage
from .extras import (
    PromptFields,
    TrimChoice,
    extras_object,
    pinned_messages,
    remarks_object,
    reuse_wanted,
    trim_rules,
)
from .fields import MAX_SHOWN_CHARS, Wire, text_or_list
from .sampling import MAX_LOGPROBS, SamplingFields, check_max_tokens, namespace_salt, unsupported
from .sessions import session_of
from .wire import Collected, Frame, Json, TokenText, finish_fields, finite, usage_object


class ContentPart(Wire):
    type: str
    text: str | None = None
    prompt_cache_breakpoint: Any = None
    cache_control: Any = None
    # Named, so that they are refused as kinds of content and not as unknown fields.
    image_url: Any = None
    input_audio: Any = None
    file: Any = None
    refusal: Any = None


Content = Annotated[
    Annotated[str, Tag("<text>")] | Annotated[list[ContentPart], Tag("<list>")],
    Discriminator(text_or_list),
]


class CalledFunction(Wire):
    name: str
    arguments: str


class WireToolCall(Wire):
    id: str
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = None


class WireMessage(Wire):
    """A message as clients send it, and as they send our own (or OpenAI's) answers back.

    ``pin`` is not OpenAI's: trimming and a KV budget leave what has it.
    """

    role: str
    content: Content | None = None
    name: str | None = None
    tool_calls: list[WireToolCall] | None = None
    tool_call_id: str | None = None
    annotations: Any = None
    refusal: None = None
    audio: None = None
    function_call: None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    pin: bool | None = None


class NamedFunction(Wire):
    name: Annotated[str, Field(min_length=1, max_length=256)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Wire):
    type: Literal["function"]
    function: NamedFunction


# Fields that would change the answer and that we cannot honour, with the values that ask for nothing.
_UNSUPPORTED: Final[Mapping[str, tuple[object, ...]]] = {
    "audio": (),
    "function_call": ("none",),
    "functions": ([],),
    "modalities": (["text"],),
    "moderation": (),
    "reasoning_effort": (),
    "response_format": ({"type": "text"},),
    "store": (False,),
    "tool_choice": ("auto", "none"),
    "verbosity": (),
    "web_search_options": (),
}


class ChatRequest(SamplingFields):
    """The body of a chat completion request. ``prediction`` only ever changes the speed.

    ``trim``, ``prompt`` (a named one), ``continue_final_message`` and ``canonical`` are not OpenAI's.
    """

    messages: list[WireMessage]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    tools: Annotated[list[Tool], Field(max_length=1024)] | None = None
    parallel_tool_calls: bool | None = None
    prediction: Any = None
    trim: TrimChoice | None = None
    prompt: PromptFields | None = None
    continue_final_message: bool | None = None
    canonical: bool | None = None

    audio: Any = None
    function_call: Any = None
    functions: Any = None
    modalities: Any = None
    moderation: Any = None
    reasoning_effort: Any = None
    response_format: Any = None
    store: Any = None
    tool_choice: Any = None
    verbosity: Any = None
    web_search_options: Any = None

    def check(self, *, model_name: str, max_choices: int, max_model_len: int) -> None:
        """Raise what is wrong with the fields taken together, or not supported."""
        self.check_shared(model_name=model_name, max_choices=max_choices)
        for name, harmless in _UNSUPPORTED.items():
            value = getattr(self, name)
            if value is not None and value not in harmless:
                raise unsupported(name)
        if self.max_tokens is not None and self.max_completion_tokens is not None:
            text = "Setting 'max_tokens' and 'max_completion_tokens' at the same time is not supported."
            raise ParameterError(text, param="max_tokens")
        check_max_tokens(self.max_tokens, param="max_tokens", max_model_len=max_model_len)
        check_max_tokens(
            self.max_completion_tokens, param="max_completion_tokens", max_model_len=max_model_len
        )
        if self.top_logprobs is not None and not self.logprobs:
            raise ParameterError("'top_logprobs' needs 'logprobs' to be true.", param="top_logprobs")

    def generation(self, *, request_id: str, key_salt: str) -> GenerationRequest:
        """What the runtime is asked for. Raises :class:`~ostinato.errors.ClientError`."""
        # With "none" the model shall not call anything: it is not told of the tools at all.
        tools = () if self.tool_choice == "none" else _tools(self.tools or [])
        messages = tuple(_message(index, message) for index, message in enumerate(self.messages))
        max_tokens = self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        logprobs = (self.top_logprobs or 0) if self.logprobs else None
        return GenerationRequest(
            prompt=Conversation(messages, tools),
            params=self.sampling(max_tokens=max_tokens, logprobs=logprobs),
            num_choices=self.num_choices,
            salt=namespace_salt(key_salt, self.cache_salt),
            cache_ttl_s=self.cache_ttl,
            deadline_s=self.deadline,
            request_id=request_id,
            trim=trim_rules(self.trim),
            pinned=(
                *pinned_messages(self.trim),
                *(index for index, message in enumerate(self.messages) if message.pin),
            ),
            named_prompt=None if self.prompt is None else self.prompt.use(),
            continue_final_message=bool(self.continue_final_message),
            canonical=self.canonical is not False,
            session=session_of(self.session),
            retention=self.retention_wanted(),
            reuse=reuse_wanted(self.reuse),
        )


def _tools(tools: list[Tool]) -> tuple[Json, ...]:
    """As the template reads them: in one order of keys, so that equal tools make equal prompts."""
    offered: list[Json] = []
    for index, tool in enumerate(tools):
        function = tool.function
        if function.strict:
            raise unsupported(f"tools[{index}].function.strict")
        names = [name for name in ("name", "description", "parameters") if name in function.model_fields_set]
        offered.append({"type": tool.type, "function": {name: getattr(function, name) for name in names}})
    return tuple(offered)


def _message(index: int, message: WireMessage) -> Message:
    if message.content is None and not message.tool_calls:
        raise MessageTypeError(f"messages[{index}] has neither content nor tool calls.", index=index)
    return Message(
        role=message.role,
        content=_text(index, message.content),
        name=message.name,
        tool_calls=tuple(
            ToolCall(call.id, call.function.name, call.function.arguments)
            for call in message.tool_calls or ()
        ),
        tool_call_id=message.tool_call_id,
        reasoning=message.reasoning_content or message.reasoning or "",
    )


def _text(index: int, content: str | list[ContentPart] | None) -> str:
    """Parts are joined by line breaks, as other servers of open models do."""
    if content is None or isinstance(content, str):
        return content or ""
    texts: list[str] = []
    for place, part in enumerate(content):
        path = f"messages[{index}].content[{place}]"
        if part.type != "text":
            shown = part.type[:MAX_SHOWN_CHARS]
            text = f"Invalid value for '{path}.type': '{shown}' is not supported, this server reads text."
            raise ParameterError(text, param=f"{path}.type")
        if part.text is None:
            text = f"Missing required parameter: '{path}.text'."
            raise ParameterError(text, param=f"{path}.text", code="missing_required_parameter")
        texts.append(part.text)
    return "\n".join(texts)


class ChatWriter:
    """An answer as ``chat.completion``, or as ``chat.completion.chunk`` objects.

    ``max_calls`` bounds the tool calls of a choice; those beyond are left out.
    """

    def __init__(
        self,
        frame: Frame,
        tokens: TokenText,
        *,
        logprobs: bool,
        include_usage: bool,
        max_calls: int | None = None,
    ) -> None:
        self._frame = frame
        self._tokens = tokens
        self._logprobs = logprobs
        self._include_usage = include_usage
        self._max_calls = max_calls
        self._num_calls: defaultdict[int, int] = defaultdict(int)
        self._opened: set[int] = set()
        self._choices: defaultdict[int, Collected] = defaultdict(Collected)

    def events(self, prompt_index: int, chunk: Chunk) -> Iterator[Json]:
        assert prompt_index == 0, "a chat has one prompt"
        index = chunk.choice_index
        if index not in self._opened:
            self._opened.add(index)
            yield self._event(index, {"role": "assistant", "content": "", "refusal": None})
        if chunk.reasoning:
            yield self._event(index, {"reasoning_content": chunk.reasoning})
        if chunk.text or chunk.logprobs:
            logprobs = self._logprobs_object(chunk.logprobs)
            yield self._event(index, {"content": chunk.text}, logprobs=logprobs)
        for call in chunk.tool_calls[: self._calls_left(self._num_calls[index])]:
            delta = {"index": self._num_calls[index], **_call_object(call)}
            self._num_calls[index] += 1
            yield self._event(index, {"tool_calls": [delta]})
        if chunk.finish_reason is not None:
            event = self._event(index, {}, **finish_fields(chunk))
            # Not only beside usage, which a stream gives on request: nobody shall lose messages unawares.
            if chunk.usage is not None and (remarks := remarks_object([chunk.usage])):
                event["ostinato"] = remarks
            yield event

    def collect(self, prompt_index: int, chunk: Chunk) -> None:
        assert prompt_index == 0, "a chat has one prompt"
        self._choices[chunk.choice_index].add(chunk)

    def whole(self, usages: Sequence[Usage]) -> Json:
        choices = [self._whole_choice(index, self._choices[index]) for index in sorted(self._choices)]
        whole = self._frame.around("chat.completion", choices)
        return whole | {"usage": usage_object(usages), "ostinato": extras_object(usages)}

    def usage_event(self, usages: Sequence[Usage]) -> Json:
        event = self._frame.around("chat.completion.chunk", [])
        return event | {"usage": usage_object(usages), "ostinato": extras_object(usages)}

    def _event(
        self,
        index: int,
        delta: Json,
        *,
        logprobs: Json | None = None,
        finish_reason: str | None = None,
        **more: object,
    ) -> Json:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
        event = self._frame.around("chat.completion.chunk", [choice | more])
        if self._include_usage:
            event["usage"] = None
        return event

    def _whole_choice(self, index: int, choice: Collected) -> Json:
        assert choice.last is not None, "a choice that never finished"
        message: Json = {"role": "assistant", "content": "".join(choice.text), "refusal": None}
        if choice.reasoning:
            message["reasoning_content"] = "".join(choice.reasoning)
        if choice.tool_calls:
            message["content"] = message["content"] or None
            calls = choice.tool_calls[: self._calls_left(0)]
            message["tool_calls"] = [_call_object(call) for call in calls]
        logprobs = self._logprobs_object(choice.logprobs)
        return {"index": index, "message": message, "logprobs": logprobs, **finish_fields(choice.last)}

    def _calls_left(self, num_calls: int) -> int | None:
        return None if self._max_calls is None else max(0, self._max_calls - num_calls)

    def _logprobs_object(self, logprobs: Sequence[TokenLogprob]) -> Json | None:
        if not self._logprobs:
            return None
        return {"content": [self._token(entry) for entry in logprobs], "refusal": None}

    def _token(self, entry: TokenLogprob) -> Json:
        top = [self._token_object(token_id, logprob) for token_id, logprob in entry.top]
        return self._token_object(entry.token_id, entry.logprob) | {"top_logprobs": top}

    def _token_object(self, token_id: int, logprob: float) -> Json:
        raw = self._tokens.bytes(token_id)
        return {"token": self._tokens.chat(token_id), "logprob": finite(logprob), "bytes": list(raw)}


def _call_object(call: ToolCall) -> Json:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.id, "type": "function", "function": function}
