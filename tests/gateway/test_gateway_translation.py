"""Requests in one API to upstreams with the other, by both official clients over sockets."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import anthropic
import openai
import pytest
from anthropic import Anthropic
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from openai import OpenAI

from gateway.gateways import gateway
from gateway.raw_upstream import STREAM_HEAD, RawUpstream, whole
from ostinato.errors import ParameterError, UpstreamError
from ostinato.gateway import Upstream
from ostinato.gateway.chat_to_messages import CHAT_TO_MESSAGES
from ostinato.gateway.messages_to_chat import MESSAGES_TO_CHAT
from ostinato.gateway.passing import guarded, translated, translated_answer
from ostinato.gateway.translation import Target, Translation
from server.conftest import Running, start_server

HELLO: Any = [{"role": "user", "content": "hello thére"}]
TOOLS: Any = [{"name": "look", "description": "looks", "input_schema": {"type": "object"}}]
FUNCTIONS: Any = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]


@pytest.fixture(scope="module")
def upstream() -> Iterator[Running]:
    running = start_server({"anthropic_rules": "claude-opus-5"}, {})
    yield running
    running.stop()


@pytest.fixture(scope="module")
def url(upstream: Running) -> Iterator[str]:
    with gateway(
        Upstream("claude", upstream.url, "anthropic", ("claude-opus-5",), max_tokens=100),
        Upstream("echo", upstream.url, "openai", ("echo",)),
    ) as made:
        yield made


@pytest.fixture
def claude(url: str) -> Iterator[Anthropic]:
    with Anthropic(base_url=url, api_key="k", max_retries=0) as made:
        yield made


@pytest.fixture
def gpt(url: str) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{url}/v1", api_key="k", max_retries=0) as made:
        yield made


# ---------------------------------------------------------------- against a real server


def test_messages_to_a_chat_upstream(claude: Anthropic) -> None:
    plain = claude.messages.create(model="echo", max_tokens=50, messages=HELLO, system="be brief")
    assert plain.content[0].text == "hello thére"  # type: ignore[union-attr]
    assert (plain.type, plain.role, plain.stop_reason) == ("message", "assistant", "end_turn")
    assert plain.usage.input_tokens + (plain.usage.cache_creation_input_tokens or 0) > 0
    assert plain.usage.output_tokens == len("hello thére".encode())
    cut = claude.messages.create(model="echo", max_tokens=3, messages=HELLO)
    assert cut.stop_reason == "max_tokens"
    stopped = claude.messages.create(
        model="echo",
        max_tokens=50,
        messages=[{"role": "user", "content": "abc STOP"}],
        stop_sequences=["STOP"],
    )
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "STOP")
    with claude.messages.stream(model="echo", max_tokens=50, messages=HELLO) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == "hello thére" == final.content[0].text  # type: ignore[union-attr]
    assert final.stop_reason == "end_turn"
    total = final.usage.input_tokens + (final.usage.cache_read_input_tokens or 0)
    assert total + (final.usage.cache_creation_input_tokens or 0) > 0
    assert final.usage.output_tokens == len("hello thére".encode())


def test_chat_to_a_messages_upstream(gpt: OpenAI) -> None:
    system: Any = [{"role": "system", "content": "be brief"}]
    plain = gpt.chat.completions.create(model="claude-opus-5", messages=system + HELLO)
    assert plain.choices[0].message.content == "hello thére"
    assert plain.choices[0].finish_reason == "stop"
    assert plain.usage is not None
    assert plain.usage.total_tokens == plain.usage.prompt_tokens + plain.usage.completion_tokens
    cut = gpt.chat.completions.create(model="claude-opus-5", messages=HELLO, max_tokens=3)
    assert cut.choices[0].finish_reason == "length"
    parts = list(
        gpt.chat.completions.create(
            model="claude-opus-5", messages=HELLO, stream=True, stream_options={"include_usage": True}
        )
    )
    text = "".join(part.choices[0].delta.content or "" for part in parts if part.choices)
    assert text == "hello thére"
    assert [part.choices[0].finish_reason for part in parts if part.choices][-1] == "stop"
    assert parts[-1].usage is not None
    assert parts[-1].usage.completion_tokens == len("hello thére".encode())
    silent = list(gpt.chat.completions.create(model="claude-opus-5", messages=HELLO, stream=True))
    assert all(part.usage is None for part in silent)


def test_a_tool_loop_goes_both_ways(claude: Anthropic, gpt: OpenAI) -> None:
    said = claude.messages.create(
        model="echo",
        max_tokens=50,
        tools=TOOLS,
        messages=[
            {"role": "user", "content": "look!"},
            {"role": "assistant", "content": [
                {"type": "text", "text": "I look."},
                {"type": "tool_use", "id": "t1", "name": "look", "input": {"x": 1}},
            ]},
            {"role": "user", "content": [
                {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "a tree"}]},
                {"type": "text", "text": "and now?"},
            ]},
        ],
    )  # fmt: skip
    assert said.content[0].text == "and now?"  # type: ignore[union-attr]
    call: Any = {"id": "t1", "type": "function", "function": {"name": "look", "arguments": '{"x": 1}'}}
    messages: Any = [
        {"role": "user", "content": "look!"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "t1", "content": "a tree"},
        {"role": "user", "content": "and then?"},
    ]
    answered = gpt.chat.completions.create(model="claude-opus-5", messages=messages, tools=FUNCTIONS)
    assert answered.choices[0].message.content == "and then?"


def test_errors_have_the_shape_of_the_clients_api(claude: Anthropic, gpt: OpenAI) -> None:
    with pytest.raises(anthropic.BadRequestError) as refused:
        claude.messages.create(model="echo", max_tokens=20_000, messages=HELLO)
    body: Any = refused.value.body
    assert body["type"] == "error"
    assert "max_tokens" in body["error"]["message"]
    with pytest.raises(openai.BadRequestError) as other:
        gpt.chat.completions.create(model="claude-opus-5", messages=HELLO, max_tokens=10**9)
    assert "max_tokens" in str(other.value.body["message"])  # type: ignore[index]
    with pytest.raises(openai.APIError):
        list(gpt.chat.completions.create(
            model="claude-opus-5", messages=[{"role": "user", "content": "!fail-late"}], stream=True
        ))  # fmt: skip
    with (
        pytest.raises(anthropic.APIStatusError),
        claude.messages.stream(
            model="echo", max_tokens=9, messages=[{"role": "user", "content": "!fail-late"}]
        ) as stream,
    ):
        stream.get_final_message()


# ---------------------------------------------------------------- what no local model answers

CHUNKS: list[Any] = [
    {"role": "assistant", "content": ""},
    {"reasoning_content": "hm"},
    {"content": "I look."},
    {
        "tool_calls": [
            {"index": 0, "id": "c0", "type": "function", "function": {"name": "look", "arguments": ""}}
        ]
    },
    {"tool_calls": [{"index": 0, "function": {"arguments": '{"x"'}}]},
    {"tool_calls": [{"index": 0, "function": {"arguments": ":1}"}}]},
    {"tool_calls": [{"index": 1, "id": "c1", "function": {"name": "look", "arguments": "{}"}}]},
]
USAGE = {"prompt_tokens": 50, "completion_tokens": 9, "total_tokens": 59}
USAGE_READ = USAGE | {"prompt_tokens_details": {"cached_tokens": 30, "cache_write_tokens": 15}}


def chat_events(*deltas: Any, finish: str | None = "tool_calls", is_done: bool = True) -> list[bytes]:
    frame = {"id": "chatcmpl-7", "object": "chat.completion.chunk", "created": 1, "model": "m"}
    items: list[Any] = [frame | {"choices": [{"index": 0, "delta": delta}]} for delta in deltas]
    if finish is not None:
        items.append(frame | {"choices": [{"index": 0, "delta": {}, "finish_reason": finish}]})
        items.append(frame | {"choices": [], "usage": USAGE_READ})
    events = [b"data: " + json.dumps(item).encode() + b"\n\n" for item in items]
    return [*events, b"data: [DONE]\n\n"] if is_done else events


def up(raw: RawUpstream, protocol: Any, **more: Any) -> Upstream:
    return Upstream("raw", raw.url, protocol, **{"idle_timeout_s": 0.5, "max_tokens": 100} | more)


def test_calls_and_thoughts_of_a_chat_stream_become_blocks() -> None:
    with (
        RawUpstream([[STREAM_HEAD, *chat_events(*CHUNKS)]]) as raw,
        gateway(up(raw, "openai")) as url,
        Anthropic(base_url=url, api_key="mine", max_retries=0) as client,
    ):
        with client.messages.stream(model="m", max_tokens=9, messages=HELLO, tools=TOOLS) as stream:
            message = stream.get_final_message()
        kinds = [block.type for block in message.content]
        assert kinds == ["thinking", "text", "tool_use", "tool_use"]
        calls = [block for block in message.content if block.type == "tool_use"]
        assert [(call.id, call.name, call.input) for call in calls] == [
            ("c0", "look", {"x": 1}),
            ("c1", "look", {}),
        ]
        assert message.stop_reason == "tool_use"
        usage = message.usage
        assert (usage.input_tokens, usage.cache_read_input_tokens, usage.cache_creation_input_tokens) == (
            5,
            30,
            15,
        )
        sent = json.loads(raw.seen[0].body)
        assert sent["stream_options"] == {"include_usage": True}
        assert raw.seen[0].header("authorization") == "Bearer mine"
        assert raw.seen[0].header("x-api-key") is None
        assert raw.seen[0].header("anthropic-version") is None


MESSAGE: Any = {
    "id": "msg_1", "type": "message", "role": "assistant", "model": "claude-x", "stop_reason": "tool_use",
    "stop_sequence": None, "usage": {"input_tokens": 3, "cache_read_input_tokens": 40, "output_tokens": 7},
    "content": [
        {"type": "thinking", "thinking": "hm", "signature": "s"},
        {"type": "text", "text": "I look."},
        {"type": "tool_use", "id": "t0", "name": "look", "input": {"x": [1, "é"]}},
        {"type": "tool_use", "id": "t1", "name": "look", "input": {}},
    ],
}  # fmt: skip


def message_events() -> list[bytes]:
    items: list[Any] = [{"type": "message_start", "message": MESSAGE | {"content": [], "stop_reason": None}}]
    deltas: list[list[Any]] = [
        [{"type": "thinking_delta", "thinking": "hm"}, {"type": "signature_delta", "signature": "s"}],
        [{"type": "text_delta", "text": "I "}, {"type": "text_delta", "text": "look."}],
        [{"type": "input_json_delta", "partial_json": '{"x":[1,'},
         {"type": "input_json_delta", "partial_json": '"é"]}'}],
        [],
    ]  # fmt: skip
    for index, (block, parts) in enumerate(zip(MESSAGE["content"], deltas, strict=True)):
        begun = {**block, "input": {}} if block["type"] == "tool_use" else {**block, block["type"]: ""}
        items.append({"type": "content_block_start", "index": index, "content_block": begun})
        items += [{"type": "content_block_delta", "index": index, "delta": part} for part in parts]
        items += [{"type": "content_block_stop", "index": index}, {"type": "ping"}]
    items.append(
        {"type": "message_delta", "delta": {"stop_reason": "tool_use"}, "usage": {"output_tokens": 7}}
    )
    items.append({"type": "message_stop"})
    return [f"event: {item['type']}\ndata: {json.dumps(item)}\n\n".encode() for item in items]


@pytest.mark.parametrize("is_stream", [False, True])
def test_blocks_become_calls_of_a_completion(is_stream: bool) -> None:
    reply = [STREAM_HEAD, *message_events()] if is_stream else whole(json.dumps(MESSAGE).encode())
    with (
        RawUpstream([reply]) as raw,
        gateway(up(raw, "anthropic")) as url,
        OpenAI(base_url=f"{url}/v1", api_key="mine", max_retries=0) as client,
    ):
        if is_stream:
            with client.chat.completions.stream(
                model="claude-x", messages=HELLO, tools=FUNCTIONS, stream_options={"include_usage": True}
            ) as stream:
                completion: Any = stream.get_final_completion()
        else:
            completion = client.chat.completions.create(model="claude-x", messages=HELLO, tools=FUNCTIONS)
        choice = completion.choices[0]
        assert choice.finish_reason == "tool_calls"
        assert choice.message.content == "I look."
        calls = [(call.id, json.loads(call.function.arguments)) for call in choice.message.tool_calls]
        assert calls == [("t0", {"x": [1, "é"]}), ("t1", {})]
        assert completion.usage.prompt_tokens == 43
        assert completion.usage.prompt_tokens_details.cached_tokens == 40
        assert raw.seen[0].header("x-api-key") == "mine"
        assert raw.seen[0].header("authorization") is None
        assert raw.seen[0].header("anthropic-version") == "2023-06-01"


def test_images_and_schemas_are_said_in_the_others_words() -> None:
    with (
        RawUpstream([whole(json.dumps(MESSAGE).encode())]) as raw,
        gateway(up(raw, "anthropic")) as url,
        OpenAI(base_url=f"{url}/v1", api_key="k", max_retries=0) as client,
    ):
        schema: Any = {"type": "object", "properties": {}}
        client.chat.completions.create(
            model="claude-x",
            messages=[
                {"role": "developer", "content": "brief"},
                {"role": "user", "content": [
                    {"type": "text", "text": "what?"},
                    {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}},
                    {"type": "image_url", "image_url": {"url": "https://example.org/a.png"}},
                ]},
            ],
            response_format={"type": "json_schema", "json_schema": {"name": "n", "schema": schema}},
            stop="END", reasoning_effort="low", tools=FUNCTIONS, tool_choice="required", user="anna",
            parallel_tool_calls=False, temperature=0.5, max_completion_tokens=77,
        )  # fmt: skip
        assert json.loads(raw.seen[0].body) == {
            "model": "claude-x",
            "max_tokens": 77,
            "system": [{"type": "text", "text": "brief"}],
            "messages": [{"role": "user", "content": [
                {"type": "text", "text": "what?"},
                {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}},
                {"type": "image", "source": {"type": "url", "url": "https://example.org/a.png"}},
            ]}],
            "temperature": 0.5,
            "stop_sequences": ["END"],
            "tools": [{"name": "look", "input_schema": {"type": "object"}}],
            "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
            "output_config": {"effort": "low", "format": {"type": "json_schema", "schema": schema}},
            "metadata": {"user_id": "anna"},
        }  # fmt: skip


TEXT = {"type": "text", "text": "x"}
REFUSED_MESSAGES: list[tuple[dict[str, Any], str]] = [
    ({"surprise": 1}, "surprise"),
    ({"thinking": {"type": "enabled", "budget_tokens": 9}}, "thinking"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"speed": "fast"}, "speed"),
    ({"container": "c"}, "container"),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools.0.type"),
    ({"output_config": {"effort": "max"}}, "output_config.effort"),
    ({"messages": [*HELLO, {"role": "assistant", "content": "I beg"}]}, "messages"),
    ({"messages": [{"role": "user", "content": [{"type": "document"}]}]}, "messages.0.content.0.type"),
    ({"messages": [{"role": "user", "content": [TEXT, {"type": "tool_result"}]}]}, "messages.0.content.1"),
    (
        {
            "messages": [
                {"role": "assistant", "content": [{"type": "thinking", "thinking": "x", "signature": "s"}]}
            ]
        },
        "messages.0.content.0.type",
    ),
    (
        {
            "messages": [
                {"role": "user", "content": [{"type": "tool_result", "content": [{"type": "image"}]}]}
            ]
        },
        "messages.0.content.0.content.0",
    ),
]
REFUSED_CHATS: list[tuple[dict[str, Any], str]] = [
    ({"surprise": 1}, "surprise"),
    ({"n": 2}, "n"),
    ({"temperature": 1.5}, "temperature"),
    ({"logprobs": True}, "logprobs"),
    ({"frequency_penalty": 0.5}, "frequency_penalty"),
    ({"seed": 1}, "seed"),
    ({"modalities": ["text", "audio"]}, "modalities"),
    ({"response_format": {"type": "json_object"}}, "response_format"),
    ({"reasoning_effort": "minimal"}, "reasoning_effort"),
    ({"tools": [{"type": "custom", "custom": {"name": "x"}}]}, "tools.0.type"),
    ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice"),
    ({"messages": [{"role": "user", "content": "x", "name": "bob"}]}, "messages.0.name"),
    ({"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]}, "messages.0.content.0.type"),
    (
        {"messages": [{"role": "assistant", "tool_calls": [
            {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{"}}]}]},
        "messages.0.tool_calls.0.function.arguments",
    ),
]  # fmt: skip


@pytest.mark.parametrize(
    ("translation", "change", "param"),
    [(MESSAGES_TO_CHAT, *case) for case in REFUSED_MESSAGES]
    + [(CHAT_TO_MESSAGES, *case) for case in REFUSED_CHATS],
)
def test_what_cannot_be_said_is_refused_by_name(
    translation: Translation, change: dict[str, Any], param: str
) -> None:
    body = {"model": "m", "max_tokens": 9, "messages": HELLO} | change
    with pytest.raises(ParameterError) as refused:
        translated(translation, body, Target())
    assert refused.value.param == param
    assert refused.value.code == "not_translatable"


def test_an_answers_length_has_to_be_known_where_the_vendor_asks_for_it() -> None:
    body = {"model": "m", "messages": HELLO}
    assert translated(CHAT_TO_MESSAGES, body, Target(max_tokens=7))["max_tokens"] == 7
    with pytest.raises(ParameterError, match="max_completion_tokens"):
        translated(CHAT_TO_MESSAGES, body, Target())


def test_breakpoints_are_kept_where_both_know_them() -> None:
    marked = {"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}}
    body = {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": [marked]}]}
    new = translated(MESSAGES_TO_CHAT, body, Target("openai", has_breakpoints=True))
    assert new["messages"][0]["content"][0]["prompt_cache_breakpoint"] == {"mode": "explicit"}
    assert translated(MESSAGES_TO_CHAT, body, Target())["messages"][0]["content"] == "x"
    back = translated(CHAT_TO_MESSAGES, {**new, "max_tokens": 9}, Target())
    assert back["messages"][0]["content"] == [marked]


# ---------------------------------------------------------------- upstreams that misbehave

BROKEN_CHATS = {
    "no reason": chat_events({"content": "a"}, finish=None),
    "cut": chat_events({"content": "a"}, is_done=False),
    "a second choice": [b'data: {"choices":[{"index":1,"delta":{"content":"b"}}]}\n\n', b"data: [DONE]\n\n"],
    "not objects": [b'data: {"choices":[7]}\n\n', b"data: [DONE]\n\n"],
    "calls mixed": chat_events(CHUNKS[3], CHUNKS[6], CHUNKS[4]),
}


@pytest.mark.parametrize("what", BROKEN_CHATS)
def test_broken_chat_streams_end_in_one_error_of_anthropics(what: str) -> None:
    with (
        RawUpstream([[STREAM_HEAD, *BROKEN_CHATS[what]]]) as raw,
        gateway(up(raw, "openai")) as url,
        Anthropic(base_url=url, api_key="k", max_retries=0) as client,
        pytest.raises(anthropic.APIStatusError) as caught,
        client.messages.stream(model="m", max_tokens=9, messages=HELLO) as stream,
    ):
        stream.get_final_message()
    assert "upstream" in str(caught.value).lower()


@pytest.mark.parametrize(
    "answer",
    [b"[]", b"{}", b'{"choices":[]}', b'{"choices":[7]}', b'{"choices":[{"message":{"tool_calls":[5]}}]}',
     b'{"choices":[{"message":{"tool_calls":[{"function":{"arguments":"{"}}]}}]}'],
)  # fmt: skip
def test_whole_answers_without_form_are_502(answer: bytes) -> None:
    with (
        RawUpstream([whole(answer)]) as raw,
        gateway(up(raw, "openai")) as url,
        Anthropic(base_url=url, api_key="k", max_retries=0) as client,
    ):
        with pytest.raises(anthropic.InternalServerError) as caught:
            client.messages.create(model="m", max_tokens=9, messages=HELLO)
        assert caught.value.status_code == 502


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(
        st.sampled_from(["type", "role", "content", "text", "source", "url", "tool_calls", "function",
                         "input", "arguments", "name", "index", "delta", "message", "choices", "format"]),
        inner, max_size=4,
    ),
    max_leaves=12,
)  # fmt: skip
FIELDS = st.sampled_from(
    ["messages", "system", "tools", "tool_choice", "thinking", "output_config", "metadata", "response_format",
     "stop", "temperature", "stream_options", "max_tokens", "top_k"]
)  # fmt: skip


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(body=st.dictionaries(FIELDS, JSON, max_size=4), item=JSON)
def test_any_json_is_translated_or_refused(body: dict[str, Any], item: Any) -> None:
    for translation in (MESSAGES_TO_CHAT, CHAT_TO_MESSAGES):
        with suppress(ParameterError):
            json.dumps(translated(translation, {"model": "m"} | body, Target()))
        with suppress(UpstreamError):
            json.loads(translated_answer(translation, item))
        if isinstance(item, dict):
            stream = translation.stream(body)
            with suppress(UpstreamError):
                list(guarded(stream.feed(item)))
                list(guarded(stream.finish()))
