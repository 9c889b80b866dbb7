"""Logs in the forms they come in."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from diagnose.conftest import DAY
from ostinato.diagnose.doctor import examine
from ostinato.diagnose.material import Asked, read_requests
from ostinato.diagnose.measured import measured_of
from ostinato.diagnose.writing import Writer
from ostinato.errors import TraceError


def read(rows: list[Any], folder: Path) -> list[Asked]:
    path = folder / "log.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return read_requests(path)


def told(asked: Asked) -> list[tuple[str, str]]:
    assert asked.conversation is not None
    return [(message.role, message.content) for message in asked.conversation.messages]


def test_bodies_of_both_vendors_become_the_same_conversation(tmp_path: Path) -> None:
    tool = {"name": "f", "description": "d", "parameters": {"type": "object"}}
    openai = {
        "model": "gpt-5",
        "messages": [
            {"role": "system", "content": "be"},
            {"role": "user", "content": [{"type": "text", "text": "do"}]},
            {"role": "assistant", "content": None,
             "tool_calls": [{"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}]},
            {"role": "tool", "tool_call_id": "c", "content": "done"},
        ],
        "tools": [{"type": "function", "function": tool}],
    }  # fmt: skip
    anthropic = {
        "model": "claude-sonnet-4-5",
        "system": [{"type": "text", "text": "be", "cache_control": {"type": "ephemeral"}}],
        "messages": [
            {"role": "user", "content": "do"},
            {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "f", "input": {}}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": "done"}]},
        ],
        "tools": [{"name": "f", "description": "d", "input_schema": {"type": "object"}}],
    }
    one, other = read([{"body": openai}, {"request": anthropic, "timestamp": 1764544000123}], tmp_path)
    assert one.conversation == other.conversation
    assert one.model == "gpt-5"
    assert other.at_s == pytest.approx(1764544000.123)


def test_other_forms(tmp_path: Path) -> None:
    texts = read(
        [
            {"prompt": "once"},
            {"prompt": [1, 2, 3]},
            {"input": "twice", "output": "x", "session_id": "s", "timestamp": 1760428503399051},
            {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"},
                               {"from": "human", "value": "c"}]},
            {"v": 1, "hash_ids": [1], "input_length": 9},
            {"nothing": True},
        ],
        tmp_path,
    )  # fmt: skip
    assert texts[0].text == "once"
    assert texts[1].token_ids == (1, 2, 3)
    assert (texts[2].text, texts[2].session, texts[2].at_s) == ("twice", "s", 1760428503.399051)
    assert [told(each) for each in texts[3:5]] == [
        [("user", "a")],
        [("user", "a"), ("assistant", "b"), ("user", "c")],
    ]
    assert not texts[5].has_content
    assert len(texts) == 6


def test_requests_come_in_order_of_time_and_a_torn_line_spoils_nothing(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    rows = [{"prompt": str(n), "timestamp": 1764544000 - n} for n in range(3)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"v":1,"prom\n')
    assert [asked.text for asked in read_requests(path)] == ["2", "1", "0"]
    (tmp_path / "whole.json").write_text(json.dumps(rows))
    assert len(read_requests(tmp_path / "whole.json")) == 3


def test_what_vendors_measured(tmp_path: Path) -> None:
    usages = [
        ({"prompt_tokens": 100, "prompt_tokens_details": {"cached_tokens": 60}}, (100, 60)),
        ({"input_tokens": 100, "input_tokens_details": {"cached_tokens": 60}}, (100, 60)),
        ({"input_tokens": 30, "cache_read_input_tokens": 60, "cache_creation_input_tokens": 10}, (100, 60)),
        ({"prompt_tokens": 100}, None),
    ]
    for usage, wanted in usages:
        for row in ({"prompt": "x", "usage": usage}, {"prompt": "x", "response": {"usage": usage}}):
            found = measured_of(read([row], tmp_path)[0])
            assert (None if found is None else (found.prompt_tokens, found.cached_tokens)) == wanted
    own = {"prompt": "x", "v": 1, "input_length": 9, "cached_tokens": 4, "stop": {"at": 4, "why": "gone"}}
    found = measured_of(read([own], tmp_path)[0])
    assert found is not None
    assert (found.prompt_tokens, found.cached_tokens, found.why) == (9, 4, "gone")


NAMES = [
    "messages",
    "role",
    "content",
    "tools",
    "prompt",
    "input",
    "system",
    "model",
    "tool_calls",
    "function",
    "usage",
    "request",
    "body",
    "type",
    "text",
    "cache_control",
    "salt",
    "session",
    "timestamp",
    "hash_ids",
    "segments",
    "stop",
    "evicted",
    "cached_tokens",
    "input_length",
    "conversations",
    "from",
    "value",
    "served",
    "arguments",
    "name",
    "thinking",
    "reasoning",
    "v",
]
WORDS = ["user", "assistant", "system", "tool_use", "tool_result", "claude-sonnet-4-5", "exact"]
numbers = st.integers(-9, 2**60) | st.floats(allow_nan=False)
values = st.recursive(
    st.none() | st.booleans() | numbers | st.text(max_size=9) | st.sampled_from(WORDS),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(NAMES), inner, max_size=4),
    max_leaves=25,
)
odd = st.dictionaries(st.sampled_from(NAMES), values, min_size=1, max_size=6)
lines = st.builds(
    lambda row, more: {**row, **more},
    odd,
    st.fixed_dictionaries(
        {}, optional={"messages": st.lists(odd), "tools": st.lists(odd), "hash_ids": values}
    ),
)


@pytest.mark.model
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rows=st.lists(lines, min_size=1, max_size=4))
def test_no_log_is_too_odd_to_be_looked_into(rows: list[Any], writer: Writer, tmp_path: Path) -> None:
    try:
        requests = read(rows, tmp_path)
    except TraceError:
        return
    report = examine(requests, writer, on=DAY)
    assert report.hit_tokens <= report.prompt_tokens
    json.dumps(report.as_dict())
