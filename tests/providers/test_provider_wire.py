"""Bodies in, bodies out: what is read of them, where breakpoints go, what is repaired, the command line."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ostinato.cli import main
from ostinato.errors import ParameterError
from ostinato.providers import wire_anthropic, wire_openai
from ostinato.providers.repair import RepairRules, append_suffix, repair
from ostinato.providers.wire_anthropic import bytes_per_token

COUNT = bytes_per_token(4)


def test_breakpoints_go_where_the_plan_says_and_nothing_else_changes() -> None:
    body: dict[str, Any] = {
        "zebra": 1,
        "model": "claude-opus-5",
        "system": "be brief",
        "tools": [{"name": "look", "input_schema": {}}],
        "messages": [{"role": "user", "content": [{"type": "text", "text": "hi", "x": 1}]}],
    }
    before = wire_anthropic.read_request(body, COUNT)
    wire_anthropic.place_markers(
        body, {("tools", 0): "1h", ("system",): "1h", ("messages", 0, "content", 0): "5m"}
    )
    assert list(body) == ["zebra", "model", "system", "tools", "messages"]
    assert body["system"] == [
        {"type": "text", "text": "be brief", "cache_control": {"type": "ephemeral", "ttl": "1h"}}
    ]
    assert body["tools"][0]["cache_control"] == {"type": "ephemeral", "ttl": "1h"}
    assert body["messages"][0]["content"][0] == {
        "type": "text", "text": "hi", "x": 1, "cache_control": {"type": "ephemeral"},
    }  # fmt: skip
    after = wire_anthropic.read_request(body, COUNT)
    assert [block.digest for block in after.blocks] == [block.digest for block in before.blocks]
    assert list(after.markers.values()) == ["1h", "1h", "5m"]


def test_openai_breakpoints_in_both_apis() -> None:
    chat: dict[str, Any] = {"model": "gpt-5.6", "messages": [{"role": "user", "content": "hi"}]}
    (block,) = wire_openai.read_request(chat, COUNT).blocks
    wire_openai.place_markers(chat, {block.path: "30m"}, is_explicit=True)
    marker = {"mode": "explicit"}
    assert chat["messages"][0]["content"] == [
        {"type": "text", "text": "hi", "prompt_cache_breakpoint": marker}
    ]
    assert chat["prompt_cache_options"] == {"mode": "explicit"}
    assert wire_openai.read_request(chat, COUNT).is_explicit
    responses: dict[str, Any] = {"model": "gpt-5.6", "input": "hi", "instructions": "be brief"}
    blocks = wire_openai.read_request(responses, COUNT).blocks
    assert [block.can_mark for block in blocks] == [False, True]
    wire_openai.place_markers(responses, {blocks[1].path: "30m"}, is_explicit=False)
    assert responses["input"][0]["content"][0]["type"] == "input_text"
    assert "prompt_cache_options" not in responses


def test_a_system_message_later_is_a_message() -> None:
    body = {
        "model": "gpt-5.6",
        "messages": [
            {"role": "developer", "content": "a"},
            {"role": "user", "content": "b"},
            {"role": "system", "content": "c"},
        ],
    }
    assert [block.level for block in wire_openai.read_request(body, COUNT).blocks] == [
        "system",
        "messages",
        "messages",
    ]


@pytest.mark.parametrize(
    "body",
    [
        {"messages": 7},
        {"messages": ["x"]},
        {"messages": [{"role": "user", "content": 7}]},
        {"messages": [{"role": "user", "content": ["x"]}]},
        {"tools": "x"},
        {"system": 5},
        {"messages": [], "cache_control": "yes"},
    ],
)
def test_bodies_without_form_are_refused_by_name(body: dict[str, Any]) -> None:
    with pytest.raises(ParameterError) as caught:
        wire_anthropic.read_request(body, COUNT)
    assert caught.value.param


KEYS = st.sampled_from(["messages", "system", "tools", "content", "role", "type", "text", "input", "model"])
LEAVES = st.sampled_from([None, True, 0, -1.5, "", "user", "tool_result", "\x00é"])
OBJECTS = st.dictionaries(KEYS, LEAVES | st.lists(LEAVES | st.dictionaries(KEYS, LEAVES), max_size=3))
BODIES = st.dictionaries(KEYS, LEAVES | st.lists(LEAVES | OBJECTS, max_size=3), max_size=6)


@settings(suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(BODIES)
def test_any_json_is_read_or_refused(body: dict[str, Any]) -> None:
    for module in (wire_anthropic, wire_openai):
        with suppress(ParameterError):
            assert module.read_request(body, COUNT).num_tokens >= 0


def test_tools_and_keys_in_one_order() -> None:
    shuffled: dict[str, Any] = {
        "tools": [
            {"name": "b", "input_schema": {"z": 1, "a": {"y": 1, "x": [3, 1]}}},
            {"name": "a", "cache_control": {"type": "ephemeral"}},
        ],
        "messages": [
            {"role": "assistant", "content": [{"type": "tool_use", "id": "1", "input": {"b": 1, "a": 2}}]}
        ],
    }
    kept = json.dumps(shuffled)
    made = repair(shuffled, RepairRules(tool_order=True, key_order=True))
    assert json.dumps(shuffled) == kept, "the given body stays"
    assert json.dumps(made.body["tools"]) == json.dumps(
        [
            {"name": "a"},
            {
                "name": "b",
                "input_schema": {"a": {"x": [3, 1], "y": 1}, "z": 1},
                "cache_control": {"type": "ephemeral"},
            },
        ]
    )
    assert json.dumps(made.body["messages"][0]["content"][0]["input"]) == '{"a": 2, "b": 1}'
    assert len(made.repairs) == 3
    assert repair(made.body, RepairRules(tool_order=True, key_order=True)).repairs == ()
    assert repair(shuffled, RepairRules()).body == shuffled


def test_lines_that_change_go_behind_the_last_message() -> None:
    body: dict[str, Any] = {
        "system": "You are helpful.\nToday is 2026-12-01T10:00:00Z.\nAnswer briefly.",
        "messages": [{"role": "user", "content": "hi"}],
    }
    made = repair(body, RepairRules(volatile=True))
    assert made.body["system"] == "You are helpful.\nAnswer briefly."
    begun = {**body, "messages": [*body["messages"], {"role": "assistant", "content": "I"}]}
    assert repair(begun, RepairRules(volatile=True)).suffix == ""  # it would be a part of the answer
    append_suffix(made.body, made.suffix)
    assert made.body["messages"][-1]["content"] == [
        {"type": "text", "text": "hi"},
        {"type": "text", "text": "Today is 2026-12-01T10:00:00Z.\n"},
    ]
    assert body["messages"] == [{"role": "user", "content": "hi"}]


# ---------------------------------------------------------------- the command line


def test_plan_reads_requests_logs_and_sessions(tmp_path: Path) -> None:
    words = "word " * 4000
    request = {"model": "claude-opus-5", "system": words, "messages": [{"role": "user", "content": "hi"}]}
    one = tmp_path / "one.json"
    one.write_text(json.dumps(request))
    shown = CliRunner().invoke(main, ["plan", str(one), "--on", "2026-12-01"])
    assert shown.exit_code == 0, shown.output
    assert "breakpoint on" in shown.output

    log = tmp_path / "log.jsonl"
    lines = [
        {"timestamp": 1000 + 20 * n, "body": {**request, "messages": [{"role": "user", "content": f"{n}"}]}}
        for n in range(20)
    ]
    log.write_text("\n".join(map(json.dumps, lines)))
    shown = CliRunner().invoke(main, ["plan", str(log), "--json", "--on", "2026-12-01"])
    assert shown.exit_code == 0, shown.output
    dollars = json.loads(shown.output.splitlines()[-1])["dollars"]
    assert float(dollars["planned"]) < 0.3 * float(dollars["without_cache"])
    assert float(dollars["as_sent"]) == float(dollars["without_cache"])
    whole = CliRunner().invoke(main, ["plan", str(tmp_path), "--json", "--on", "2026-12-01"])
    rows = [json.loads(line) for line in whole.output.splitlines()[:-1]]
    assert sum(row.get("num_requests", 0) for row in rows) == 21

    session = tmp_path / "session.jsonl"
    text = ""
    rows = []
    for turn in range(12):
        text += f"turn {turn} " * 800
        rows.append({"timestamp": 1.76e15 + turn * 1e7, "input": text, "output": "", "session_id": "s"})
    session.write_text("\n".join(map(json.dumps, rows)))
    shown = CliRunner().invoke(main, ["plan", str(session), "--json", "--on", "2026-12-01"])
    assert shown.exit_code == 0, shown.output
    row = json.loads(shown.output.splitlines()[0])
    assert row["planned"]["read"] > row["as_sent"]["read"] == 0


def test_plan_repairs_where_that_is_allowed(tmp_path: Path) -> None:
    """A time in the system text loses everything behind it; moved, the rest is read."""
    log = tmp_path / "log.jsonl"
    tools = [{"name": name, "input_schema": {"type": "object"}} for name in ("look", "ask")]
    lines = [
        {"timestamp": 1000 + 20 * n, "body": {
            "model": "claude-opus-5",
            "tools": tools if n % 2 else tools[::-1],
            "system": f"Now: 2026-12-01T10:00:{n:02}Z\n" + "word " * 4000,
            "messages": [{"role": "user", "content": f"{n}"}],
        }}
        for n in range(20)
    ]  # fmt: skip
    log.write_text("\n".join(map(json.dumps, lines)))
    reads = []
    for more in ([], ["--repair", "volatile", "--repair", "tool_order"]):
        shown = CliRunner().invoke(main, ["plan", str(log), "--json", "--on", "2026-12-01", *more])
        assert shown.exit_code == 0, shown.output
        rows = [json.loads(line) for line in shown.output.splitlines()[:-1]]
        reads.append(sum(row["planned"]["read"] for row in rows))
    assert reads[0] == 0
    assert reads[1] > 17 * 4000


def test_plan_says_what_the_vendor_would_refuse_and_where_a_line_is_bad(tmp_path: Path) -> None:
    mark = {"type": "ephemeral"}
    bad = tmp_path / "five.json"
    parts = [{"type": "text", "text": "x", "cache_control": mark} for _ in range(5)]
    bad.write_text(json.dumps({"model": "claude-opus-5", "messages": [{"role": "user", "content": parts}]}))
    shown = CliRunner().invoke(main, ["plan", str(bad)])
    assert shown.exit_code == 0
    assert "maximum of 4" in shown.output
    broken = tmp_path / "broken.jsonl"
    broken.write_text('{"messages": []}\n{nonsense\n')
    shown = CliRunner().invoke(main, ["plan", str(broken)])
    assert shown.exit_code != 0
    assert "line 2" in shown.output


def test_provider_rules_are_printed_with_their_source() -> None:
    shown = CliRunner().invoke(main, ["providers", "rules", "anthropic"])
    assert shown.exit_code == 0
    assert "Claude Docs: Prompt caching" in shown.output
    assert "conflict" in shown.output
    one = CliRunner().invoke(main, ["providers", "rules", "--model", "claude-haiku-4-5", "--json"])
    assert json.loads(one.output)["min_tokens"] == 4096
    lines = CliRunner().invoke(main, ["providers", "rules", "--json"]).output.splitlines()
    assert all(json.loads(line)["read"] for line in lines)
    assert CliRunner().invoke(main, ["providers", "rules", "nobody"]).exit_code != 0
