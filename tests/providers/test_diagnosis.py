"""Why a cache was not read: every reason, from two prompts and a history."""

from __future__ import annotations

import json
from typing import Any

import pytest

from ostinato.providers.diagnosis import Miss, SentPrompt, explain, shape_of
from ostinato.providers.planner import History
from ostinato.providers.wire_anthropic import bytes_per_token, read_request
from providers.asked import rules_of

MODEL = "claude-opus-5"
COUNT = bytes_per_token(1)
MARK = {"type": "ephemeral"}


def text(value: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": value, **more}


BASE: dict[str, Any] = {
    "model": MODEL,
    "tools": [{"name": "look", "description": "d" * 900, "input_schema": {"type": "object"}}],
    "system": [text("Today is 2026-12-01. " + "s" * 900)],
    "messages": [{"role": "user", "content": [text("m" * 900, cache_control=MARK)]}],
}


def diagnosed(
    body: dict[str, Any],
    *,
    first: dict[str, Any] = BASE,
    gap_s: float = 10.0,
    begun_s: float | None = 1.0,
    shows_text: bool = False,
) -> Miss | None:
    """``first`` is sent, and ``body`` after a while."""
    history = History(rules_of(MODEL))
    before = read_request(first, COUNT)
    asked = history.sent(before, 0.0)
    if begun_s is not None:
        history.begun(asked, begun_s)
    sent = SentPrompt(before, asked.chain, json.dumps(first).encode(), 0.0)
    prompt = read_request(body, COUNT)
    now = history.cache.ask(prompt, gap_s, is_peek=True)
    return explain(sent, json.dumps(body).encode(), prompt, now, history, gap_s, shows_text=shows_text)


def next_turn(**more: Any) -> dict[str, Any]:
    messages = [
        *BASE["messages"],
        {"role": "assistant", "content": "fine"},
        {"role": "user", "content": [text("and now?", cache_control=MARK)]},
    ]
    return {**BASE, "messages": messages, **more}


def test_what_is_read_is_no_miss() -> None:
    assert diagnosed(next_turn()) is None


OTHER = [{"role": "user", "content": [text("other")]}]
SYSTEM = [text("Today is 2026-12-02. " + "s" * 900)]
TOOL = {**BASE["tools"][0], "description": "e" + "d" * 899}


@pytest.mark.parametrize(
    ("change", "reason", "where"),
    [
        ({"system": SYSTEM}, "system_changed", "system.0"),
        ({"tools": [TOOL]}, "tools_changed", "tools.0"),
        ({"tools": [*BASE["tools"], {"name": "more"}]}, "tools_changed", "tools.1"),
        ({"tools": []}, "tools_changed", "system.0"),
        ({"model": "claude-opus-4-8"}, "model_changed", "model"),
        ({"thinking": {"type": "adaptive"}}, "settings_changed", "thinking"),
        ({"tool_choice": {"type": "any"}}, "settings_changed", "tool_choice"),
        ({"speed": "fast"}, "settings_changed", "speed"),
        ({"messages": OTHER}, "messages_changed", "messages.0.content.0"),
        ({"system": SYSTEM, "tool_choice": {"type": "any"}}, "system_changed", "system.0"),
        ({"system": SYSTEM, "speed": "fast"}, "settings_changed", "speed"),
    ],
)  # fmt: skip
def test_the_first_change_is_named(change: dict[str, Any], reason: str, where: str) -> None:
    miss = diagnosed(next_turn(**change))
    assert miss is not None
    assert (miss.reason, miss.where) == (reason, where)
    assert miss.lost_tokens > 900


def test_the_place_is_told_and_the_text_only_when_asked_for() -> None:
    shown = diagnosed(next_turn(system=SYSTEM), shows_text=True)
    assert shown is not None
    assert shown.offset == len("Today is 2026-12-0")
    assert (shown.before[:12], shown.after[:12]) == (" 2026-12-01.", " 2026-12-02.")
    hidden = diagnosed(next_turn(system=SYSTEM))
    assert hidden is not None
    assert hidden.before.startswith(" 0000-00-00. xxx")
    assert not set(hidden.before + hidden.after) & set("126s")
    assert hidden.as_json()["offset"] == shown.offset


def test_shapes_say_nothing_of_what_stood_there() -> None:
    assert (
        shape_of("Anna Müller, +49 (0)30-1234, id=7f3a; ключ_1")
        == "xxxx xxxxxx, +00 (0)00-0000, xx=0x0x; xxxx_0"
    )


@pytest.mark.parametrize(("gap_s", "reason"), [(299.0, None), (301.0, "expired")])
def test_time_alone(gap_s: float, reason: str | None) -> None:
    miss = diagnosed(next_turn(), gap_s=gap_s)
    assert (None if miss is None else miss.reason) == reason


def test_an_answer_that_has_not_begun() -> None:
    miss = diagnosed(next_turn(), begun_s=None)
    assert miss is not None
    assert miss.reason == "being_written"


def test_what_was_never_written() -> None:
    plain = {**BASE, "messages": [{"role": "user", "content": [text("m" * 900)]}]}
    miss = diagnosed(next_turn(), first=plain)
    assert miss is not None
    assert miss.reason == "not_written"
    small = {"model": MODEL, "messages": [{"role": "user", "content": [text("m" * 400, cache_control=MARK)]}]}
    short = {**small, "messages": [*small["messages"], {"role": "user", "content": [text("x")]}]}
    under = diagnosed(short, first=small)
    assert under is not None
    assert under.reason == "under_minimum"


def test_out_of_sight() -> None:
    fill = [{"role": "user", "content": [text(f"f{n}")]} for n in range(25)]
    fill[-1]["content"][0]["cache_control"] = MARK  # type: ignore[index]
    bare = [{"role": "user", "content": [text("m" * 900)]}]
    miss = diagnosed({**BASE, "messages": [*bare, *fill]})
    assert miss is not None
    assert miss.reason == "out_of_sight"
