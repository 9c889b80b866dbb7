"""What makes two requests one: every field has a say, but for those that are named."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ostinato.responses.digest import (
    BODY_NO_INFLUENCE,
    REQUEST_NO_INFLUENCE,
    body_key,
    canonical_body,
    request_key,
)
from ostinato.server.chat import ChatRequest
from ostinato.server.completions import CompletionRequest
from ostinato.server.fields import decode, validate
from ostinato.types import (
    CacheControl,
    Conversation,
    GenerationRequest,
    Message,
    PromptUse,
    Retention,
    Reuse,
    SamplingParams,
    Session,
    ToolCall,
    TrimRules,
)

IDENTITY = {"model": "m"}
CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "temperature": 0}
COMPLETION = {"model": "m", "prompt": "hi", "temperature": 0}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}

# Every documented parameter of the two APIs, with another value than it has when it is left out.
CHANGES: dict[str, Any] = {
    "temperature": 0.5,
    "top_p": 0.5,
    "n": 2,
    "best_of": 2,
    "max_tokens": 7,
    "max_completion_tokens": 7,
    "stop": ["x"],
    "seed": 3,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.5,
    "logit_bias": {"5": 1.0},
    "top_k": 4,
    "min_p": 0.1,
    "repetition_penalty": 1.5,
    "stop_token_ids": [3],
    "ignore_eos": True,
    "cache_salt": "s",
    "logprobs": True,
    "top_logprobs": 2,
    "messages": [{"role": "user", "content": "ho"}],
    "prompt": "ho",
    "tools": [TOOL],
    "trim": "drop",
    "continue_final_message": True,
    "canonical": False,
    "kv_budget": 64,
    "retention": "window",
    "entities": True,
    "pinned_text": ["x"],
    "renumber": True,
    "reuse": "moved",
}
# What a parameter needs beside it.
NEEDED: dict[str, dict[str, Any]] = {
    "top_logprobs": {"logprobs": True},
    "continue_final_message": {"messages": [*CHAT["messages"], {"role": "assistant", "content": "so"}]},
    "retention": {"kv_budget": 64},
    "entities": {"kv_budget": 64},
    "pinned_text": {"kv_budget": 64},
    "renumber": {"kv_budget": 64},
}
# Those that change nothing of what is generated: they are how it is sent, written, waited for or kept.
NO_INFLUENCE = {
    *("stream", "stream_options", "cache_ttl", "deadline", "session", "cache_answer"),
    *("metadata", "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention"),
    *("safety_identifier", "service_tier", "user", "prediction"),
    *("parallel_tool_calls", "echo"),  # left out of what is written, not of what is kept
    "model",  # any other is refused: a key is of one model's content
}
# Those that can only have the value that asks for nothing.
REFUSED = {
    *(
        "audio",
        "function_call",
        "functions",
        "modalities",
        "moderation",
        "reasoning_effort",
        "response_format",
    ),
    *("store", "tool_choice", "verbosity", "web_search_options", "suffix"),
}


def chat_key(**changes: Any) -> bytes:
    body = CHAT | changes
    request = validate(ChatRequest, decode(json.dumps(body).encode()))
    return request_key(IDENTITY, request.generation(request_id="r", key_salt=""))


def completion_key(**changes: Any) -> bytes:
    request = validate(CompletionRequest, decode(json.dumps(COMPLETION | changes).encode()))
    (generation,) = request.generations(request_id="r", key_salt="")
    return request_key(IDENTITY, generation)


def test_every_documented_parameter_is_known_here() -> None:
    """A new field has to say on which side it is."""
    documented = set(ChatRequest.model_fields) | set(CompletionRequest.model_fields)
    assert documented == set(CHANGES) | NO_INFLUENCE | REFUSED


@pytest.mark.parametrize("name", sorted(CHANGES))
def test_a_changed_parameter_is_another_request(name: str) -> None:
    needed = NEEDED.get(name, {})
    if name in ChatRequest.model_fields:
        value = {"name": "p"} if name == "prompt" else CHANGES[name]
        assert chat_key(**needed) != chat_key(**needed | {name: value})
    if name in CompletionRequest.model_fields:
        value = 2 if name == "logprobs" else CHANGES[name]
        assert completion_key(**needed) != completion_key(**needed | {name: value})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("stream", True),
        ("cache_ttl", 60.0),
        ("deadline", 5.0),
        ("session", "chat-7"),
        ("cache_answer", True),
        ("metadata", {"a": 1}),
        ("prompt_cache_key", "k"),
        ("safety_identifier", "u"),
        ("service_tier", "flex"),
        ("user", "anna"),
        ("temperature", 0.0),
        ("top_p", None),
    ],
)
def test_what_cannot_matter_makes_no_difference(name: str, value: Any) -> None:
    assert chat_key() == chat_key(**{name: value})
    assert completion_key() == completion_key(**{name: value})


REQUEST = GenerationRequest(
    Conversation((Message("user", "hi"),)), SamplingParams(temperature=0.0), request_id="r"
)
# One other value for every field of what flows; a new field fails the test below until it stands here.
OTHERS: dict[type, dict[str, Any]] = {
    GenerationRequest: {
        "prompt": "hi",
        "params": SamplingParams(temperature=0.5),
        "num_choices": 2,
        "best_of": 2,
        "salt": "s",
        "request_id": "q",
        "trim": TrimRules(),
        "pinned": (0,),
        "named_prompt": PromptUse("p"),
        "continue_final_message": True,
        "canonical": False,
        "is_warming": True,
        "session": Session("s"),
        "cache_ttl_s": 5.0,
        "deadline_s": 5.0,
        "cache_control": CacheControl(read=False),
        "retention": Retention(64),
        "reuse": Reuse(),
    },
    SamplingParams: {
        "max_tokens": 3,
        "temperature": 0.5,
        "top_p": 0.5,
        "top_k": 5,
        "min_p": 0.5,
        "repetition_penalty": 1.5,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.5,
        "seed": 5,
        "stop": ("x",),
        "stop_token_ids": (5,),
        "ignore_eos": True,
        "logprobs": 3,
        "logit_bias": {3: 1.0},
    },
    Message: {
        "role": "system",
        "content": "ho",
        "name": "anna",
        "tool_calls": (ToolCall("i", "f", "{}"),),
        "tool_call_id": "i",
        "reasoning": "hm",
    },
    ToolCall: {"id": "j", "name": "g", "arguments": "[]"},
    TrimRules: {"budget_tokens": 5, "strategy": "drop", "low_water": 0.25, "keep_chars": 5},
    PromptUse: {"name": "q", "variables": {"a": "b"}},
    Retention: {
        "budget": "50%",
        "method": "window",
        "entities": True,
        "pinned_text": ("x",),
        "renumber": True,
    },
    Reuse: {"mode": "verify", "repair": "first:8", "max_deviation": 0.5},
}


def holding(value: object) -> GenerationRequest:
    """A request with this value somewhere in it."""
    match value:
        case GenerationRequest():
            return value
        case SamplingParams():
            return replace(REQUEST, params=value)
        case Message():
            return replace(REQUEST, prompt=Conversation((value,)))
        case ToolCall():
            return holding(Message("assistant", tool_calls=(value,)))
        case TrimRules():
            return replace(REQUEST, trim=value)
        case PromptUse():
            return replace(REQUEST, named_prompt=value)
        case Retention():
            return replace(REQUEST, retention=value)
        case Reuse():
            return replace(REQUEST, reuse=value)
    raise AssertionError(value)


@pytest.mark.parametrize("kind", OTHERS, ids=lambda kind: kind.__name__)
def test_every_field_of_what_flows_has_a_say(kind: type) -> None:
    bases = {
        GenerationRequest: REQUEST,
        SamplingParams: REQUEST.params,
        Message: Message("user", "hi"),
        ToolCall: ToolCall("i", "f", "{}"),
        TrimRules: TrimRules(),
        PromptUse: PromptUse("p"),
        Retention: Retention(64),
        Reuse: Reuse(),
    }
    base: Any = bases[kind]
    assert {item.name for item in fields(kind)} == set(OTHERS[kind])
    keys = {request_key(IDENTITY, holding(base))}
    for name, value in OTHERS[kind].items():
        key = request_key(IDENTITY, holding(replace(base, **{name: value})))
        is_silent = kind is GenerationRequest and name in REQUEST_NO_INFLUENCE
        assert (key in keys) == is_silent, name
        keys.add(key)


def test_tenants_models_and_what_else_there_is_never_share() -> None:
    assert request_key({"model": "n"}, REQUEST) != request_key(IDENTITY, REQUEST)
    assert request_key(IDENTITY | {"revision": ""}, REQUEST) != request_key(IDENTITY, REQUEST)
    assert request_key(IDENTITY, REQUEST, b"today") != request_key(IDENTITY, REQUEST)
    assert request_key(IDENTITY, REQUEST, b"a", b"b") != request_key(IDENTITY, REQUEST, b"ab")
    one = ChatRequest(**CHAT).generation(request_id="", key_salt="anna")
    two = ChatRequest(**CHAT).generation(request_id="", key_salt="bob")
    assert request_key(IDENTITY, one) != request_key(IDENTITY, two)


def test_the_order_of_a_tools_keys_shows_in_the_prompt_and_so_has_a_say() -> None:
    one = {"type": "function", "function": {"name": "f", "parameters": {"a": 1, "b": 2}}}
    two = {"type": "function", "function": {"name": "f", "parameters": {"b": 2, "a": 1}}}
    assert chat_key(tools=[one]) != chat_key(tools=[two])


def test_true_is_not_one() -> None:
    one = replace(REQUEST, params=SamplingParams(temperature=1))
    true = replace(REQUEST, params=SamplingParams(temperature=True))
    assert request_key(IDENTITY, one) != request_key(IDENTITY, true)


def test_what_has_no_name_is_said_to_have_none() -> None:
    for text in ("\ud800", "a\udfffb"):
        with pytest.raises(ValueError):
            request_key(IDENTITY, replace(REQUEST, prompt=text))
    with pytest.raises(ValueError):
        request_key(IDENTITY, replace(REQUEST, params=SamplingParams(seed=2**70)))


# ---------------------------------------------------------------- bodies

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.floats(-2, 2) | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)
BODY = {
    "model": "m",
    "messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}],
    "tools": [TOOL],
    "temperature": 0,
}


def same(one: Any, other: Any) -> bool:
    return json.dumps(one) == json.dumps(other)


@settings(max_examples=200)
@given(st.text(min_size=1, max_size=12), VALUES)
def test_any_field_has_a_say_in_a_body_the_unknown_ones_too(name: str, value: Any) -> None:
    changed = BODY | {name: value}
    is_silent = name in BODY_NO_INFLUENCE or (name in BODY and same(BODY[name], value))
    assert (body_key(IDENTITY, "/v1/x", BODY) == body_key(IDENTITY, "/v1/x", changed)) == is_silent


@settings(max_examples=100)
@given(VALUES, VALUES)
def test_two_values_of_a_field_are_two_bodies(one: Any, other: Any) -> None:
    keys = [canonical_body(BODY | {"unheard_of": value}) for value in (one, other)]
    assert (keys[0] == keys[1]) == same(one, other)


def test_bodies_that_are_written_otherwise_are_one() -> None:
    order = {name: BODY[name] for name in reversed(BODY)}
    order["messages"] = [{"content": BODY["messages"][0]["content"], "role": "user"}]  # type: ignore[index]
    assert canonical_body(order) == canonical_body(BODY)
    again = json.loads(json.dumps(BODY, indent=3, ensure_ascii=True))
    assert canonical_body(again) == canonical_body(BODY)
    assert canonical_body(BODY | {"stream": True, "user": "anna"}) == canonical_body(BODY)
    assert body_key(IDENTITY, "/v1/messages", BODY) != body_key(IDENTITY, "/v1/chat/completions", BODY)


def test_markers_of_prompt_caches_do_not_matter_where_they_are_markers() -> None:
    mark = {"cache_control": {"type": "ephemeral"}}
    part = {"type": "text", "text": "hi"}
    marked = BODY | {"messages": [{"role": "user", "content": [part | mark]}], "tools": [TOOL | mark], **mark}
    assert canonical_body(marked) == canonical_body(BODY)
    assert canonical_body({"system": [part | mark]}) == canonical_body({"system": [part]})
    # A tool's parameter may have that name.
    properties = {"properties": {"cache_control": {"type": "string"}}}
    named = {"type": "function", "function": {"name": "f", "parameters": properties}}
    plain = {"type": "function", "function": {"name": "f", "parameters": {"properties": {}}}}
    assert canonical_body({"tools": [named]}) != canonical_body({"tools": [plain]})
    block = {"type": "tool_use", "input": {"cache_control": 1}}
    assert canonical_body({"messages": [{"content": [block]}]}) != canonical_body(
        {"messages": [{"content": [{"type": "tool_use", "input": {}}]}]}
    )
