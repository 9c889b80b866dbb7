"""Every rule of a conversation, with the index of the message that breaks it."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ostinato.errors import (
    ClientError,
    ConversationError,
    EmptyConversationError,
    MessageTypeError,
    OrphanToolResultError,
    ParameterError,
    UnknownRoleError,
)
from ostinato.prompt.conversation import conversation_from_dicts, validate
from ostinato.types import Conversation, Message, ToolCall

from .talk import with_tools

USER = {"role": "user", "content": "hi"}
CALL = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
CALLING = {"role": "assistant", "content": None, "tool_calls": [CALL]}
RESULT = {"role": "tool", "tool_call_id": "c1", "content": "42"}
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}


def test_an_ordinary_conversation_is_read() -> None:
    messages = [{"role": "system", "content": "Be kind."}, USER, CALLING, RESULT]
    read = conversation_from_dicts(messages, [TOOL])
    assert read == Conversation(
        (
            Message("system", "Be kind."),
            Message("user", "hi"),
            Message("assistant", "", tool_calls=(ToolCall("c1", "look", "{}"),)),
            Message("tool", "42", tool_call_id="c1"),
        ),
        (TOOL,),
    )


def test_text_parts_become_lines() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    assert conversation_from_dicts([{"role": "user", "content": parts}]).messages[0].content == "one\ntwo"
    assert conversation_from_dicts([{"role": "user", "content": []}]).messages[0].content == ""


def test_what_the_official_client_returns_can_be_sent_back() -> None:
    answer = {
        "role": "assistant",
        "content": "Yes.",
        "refusal": None,
        "annotations": [],
        "audio": None,
        "function_call": None,
        "tool_calls": None,
    }
    assert conversation_from_dicts([USER, answer]).messages[1] == Message("assistant", "Yes.")


@pytest.mark.parametrize("key", ["reasoning_content", "reasoning"])
def test_reasoning(key: str) -> None:
    message = {"role": "assistant", "content": "Yes.", key: "hm"}
    assert conversation_from_dicts([USER, message]).messages[1].reasoning == "hm"


@pytest.mark.parametrize(
    ("messages", "error", "index", "says"),
    [
        ([], EmptyConversationError, None, "empty"),
        ("hello", MessageTypeError, None, "must be a list"),
        ({"role": "user"}, MessageTypeError, None, "must be a list"),
        (None, MessageTypeError, None, "must be a list, got null"),
        ([USER, "hello"], MessageTypeError, 1, "must be an object"),
        ([USER, {"content": "x"}], MessageTypeError, 1, "has no role"),
        ([{"role": "wizard", "content": "x"}], UnknownRoleError, 0, "unknown role 'wizard'"),
        ([{"role": "function", "content": "x"}], UnknownRoleError, 0, "known are system, developer"),
        ([{"role": 7, "content": "x"}], MessageTypeError, 0, "role must be text, got int"),
        ([{"role": ["user"], "content": "x"}], MessageTypeError, 0, "role must be text"),
        ([USER, {"role": "user", "content": 7}], MessageTypeError, 1, "content must be text or a list"),
        ([{"role": "user", "content": ["x"]}], MessageTypeError, 0, r"content\[0\] must be an object"),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
            MessageTypeError,
            0,
            r"content\[0\] has type 'image_url': only text",
        ),
        (
            [{"role": "user", "content": [{"type": "text"}]}],
            MessageTypeError,
            0,
            "text must be text, got null",
        ),
        (
            [{"role": "user", "content": [{"type": "text", "text": 1}]}],
            MessageTypeError,
            0,
            "text must be text",
        ),
        (
            [{"role": "user", "content": [{"type": "text", "text": "x", "color": "red"}]}],
            MessageTypeError,
            0,
            r"content\[0\] has the unknown field 'color'",
        ),
        ([USER, {**USER, "colour": "red"}], MessageTypeError, 1, "unknown field 'colour'"),
        ([{**USER, "function_call": {"name": "x"}}], MessageTypeError, 0, "unknown field 'function_call'"),
        ([{**USER, "name": 5}], MessageTypeError, 0, "name must be text"),
        (
            [{"role": "user", "content": "a\ud800b"}],
            MessageTypeError,
            0,
            r"lone surrogate U\+D800 at character 1",
        ),
        ([{**USER, "name": "\udfff"}], MessageTypeError, 0, "name is not Unicode"),
        ([{"role": "\ud800", "content": "x"}], MessageTypeError, 0, "role is not Unicode"),
        ([USER, {**USER, "reasoning_content": "hm"}], ConversationError, 1, "only an assistant reasons"),
        ([RESULT], OrphanToolResultError, 0, "'c1', which no assistant message before it makes"),
        ([RESULT, CALLING], OrphanToolResultError, 0, "no assistant message before"),
        ([USER, CALLING, {**RESULT, "tool_call_id": "c2"}], OrphanToolResultError, 2, "'c2'"),
        ([USER, CALLING, {"role": "tool", "content": "x"}], OrphanToolResultError, 2, "without tool_call_id"),
        ([USER, CALLING, {**RESULT, "tool_call_id": 1}], MessageTypeError, 2, "tool_call_id must be text"),
        ([{**USER, "tool_call_id": "c1"}], ConversationError, 0, "not 'tool'"),
        ([{**CALLING, "role": "user"}], ConversationError, 0, "only an assistant calls"),
        ([{**CALLING, "tool_calls": [CALL, CALL]}], ConversationError, 0, "two calls with the id 'c1'"),
        ([{**CALLING, "tool_calls": {"id": "c1"}}], MessageTypeError, 0, "tool_calls must be a list"),
        ([{**CALLING, "tool_calls": ["c1"]}], MessageTypeError, 0, r"tool_calls\[0\] must be an object"),
        ([{**CALLING, "tool_calls": [{**CALL, "type": "mcp"}]}], MessageTypeError, 0, 'must be "function"'),
        ([{**CALLING, "tool_calls": [{**CALL, "color": 1}]}], MessageTypeError, 0, "unknown field 'color'"),
        ([{**CALLING, "tool_calls": [{"id": "c1"}]}], MessageTypeError, 0, "function must be an object"),
        (
            [{**CALLING, "tool_calls": [{**CALL, "id": None}]}],
            MessageTypeError,
            0,
            "id must be text, got null",
        ),
        ([{**CALLING, "tool_calls": [{**CALL, "id": ""}]}], ConversationError, 0, "needs an id"),
        (
            [{**CALLING, "tool_calls": [{**CALL, "function": {"name": "f", "arguments": {"a": 1}}}]}],
            MessageTypeError,
            0,
            "arguments must be text .* got dict",
        ),
        (
            [{**CALLING, "tool_calls": [{**CALL, "function": {"name": "f", "arguments": "{}", "x": 1}}]}],
            MessageTypeError,
            0,
            "function has the unknown field 'x'",
        ),
    ],
)
def test_refused(messages: Any, error: type[ConversationError], index: int | None, says: str) -> None:
    with pytest.raises(error, match=says) as caught:
        conversation_from_dicts(messages)
    assert type(caught.value) is error
    assert caught.value.index == index
    assert caught.value.param == ("messages" if index is None else f"messages[{index}]")


def nested(depth: int) -> dict[str, Any]:
    return {"items": nested(depth - 1)} if depth else {}


@pytest.mark.parametrize(
    ("tools", "param", "says"),
    [
        ("look", "tools", "must be a list"),
        (["look"], "tools[0]", "must be an object"),
        ([TOOL, {"type": "retrieval"}], "tools[1].type", 'must be "function"'),
        ([{"type": "function"}], "tools[0].function", "must be an object"),
        ([{"type": "function", "function": {"name": ""}}], "tools[0].function.name", "must be a name"),
        ([{**TOOL, "x": float("nan")}], "tools[0].x", "JSON cannot say"),
        ([{**TOOL, "x": [1, {2}]}], "tools[0].x[1]", "is set, which JSON cannot say"),
        ([{**TOOL, "x": {1: 2}}], "tools[0].x", "a key that is int"),
        ([{**TOOL, "x": "\ud800"}], "tools[0].x", "lone surrogate"),
        ([{**TOOL, "x": nested(100)}], None, "nested more than 64 deep"),
    ],
)
def test_refused_tools(tools: Any, param: str | None, says: str) -> None:
    with pytest.raises(ParameterError, match=says) as caught:
        conversation_from_dicts([USER], tools)
    if param is not None:
        assert caught.value.param == param


@pytest.mark.parametrize(
    ("conversation", "error", "index"),
    [
        ([Message("user")], MessageTypeError, None),
        (Conversation([Message("user")]), MessageTypeError, None),  # type: ignore[arg-type]
        (Conversation((Message("user"), {"role": "user"})), MessageTypeError, 1),  # type: ignore[arg-type]
        (Conversation((Message("user", None),)), MessageTypeError, 0),  # type: ignore[arg-type]
        (Conversation((Message("user", b"x"),)), MessageTypeError, 0),  # type: ignore[arg-type]
        (Conversation((Message("assistant", tool_calls=[]),)), MessageTypeError, 0),  # type: ignore[arg-type]
        (
            Conversation((Message("assistant", tool_calls=(ToolCall("a", "b", 1),)),)),  # type: ignore[arg-type]
            MessageTypeError,
            0,
        ),
    ],
)
def test_wrong_types_in_values(conversation: Any, error: type[ConversationError], index: int | None) -> None:
    with pytest.raises(error) as caught:
        validate(conversation)
    assert caught.value.index == index


def test_a_call_may_be_answered_twice_and_ids_may_come_again() -> None:
    conversation_from_dicts([USER, CALLING, RESULT, RESULT, USER, CALLING, RESULT])


def test_a_long_offending_text_is_cut_in_the_message() -> None:
    with pytest.raises(UnknownRoleError) as caught:
        conversation_from_dicts([{"role": "x" * 10_000, "content": ""}])
    assert len(str(caught.value)) < 300


def test_more_roles_can_be_known() -> None:
    roles = ("system", "user", "assistant", "note")
    assert conversation_from_dicts([{"role": "note", "content": "x"}], roles=roles).messages[0].role == "note"


@given(with_tools())
def test_conversations_with_tools_are_valid(talk: tuple[list[Any], list[Any]]) -> None:
    messages, tools = talk
    read = conversation_from_dicts(messages, tools)
    assert [message.role for message in read.messages] == [message["role"] for message in messages]


# Whatever JSON a client sends, it is read or refused by name.
WILD = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["role", "content", "type", "text", "tool_calls", "function", "id", "arguments"])
            | st.text(max_size=3),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)


@given(st.lists(WILD, max_size=3) | WILD, st.none() | st.lists(WILD, max_size=2) | WILD)
def test_no_other_error_comes_out(messages: Any, tools: Any) -> None:
    with contextlib.suppress(ClientError):
        conversation_from_dicts(messages, tools)
