"""The rules, case by case: every row of the invalidation table, minimums, times, positions."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ostinato.errors import ParameterError
from ostinato.providers.accounting import TokenUse
from ostinato.providers.shape import Block, Prompt
from ostinato.providers.simulator import VendorCache
from ostinato.providers.wire_anthropic import bytes_per_token, read_request
from providers.asked import block, prompt, rules_of

SONNET = "claude-sonnet-4-5"


def cache_of(model: str = SONNET, vendor: str = "anthropic") -> VendorCache:
    return VendorCache(rules_of(model, vendor))


def send(
    cache: VendorCache, asked: Prompt, now_s: float = 0.0, *, readable_s: float | None = None
) -> TokenUse:
    outcome = cache.ask(asked, now_s)
    cache.commit(outcome, now_s if readable_s is None else readable_s)
    return outcome.use


# ---------------------------------------------------------------- invalidation

TOOL = {"name": "look", "description": "d" * 4000, "input_schema": {"type": "object"}}
BASE: dict[str, Any] = {
    "model": "claude-opus-5",
    "tools": [{**TOOL, "cache_control": {"type": "ephemeral"}}],
    "system": [{"type": "text", "text": "s" * 4000, "cache_control": {"type": "ephemeral"}}],
    "messages": [
        {
            "role": "user",
            "content": [{"type": "text", "text": "m" * 4000, "cache_control": {"type": "ephemeral"}}],
        }
    ],
}
IMAGE = {"type": "image", "source": {"type": "url", "url": "https://example.org/a.png"}}
MESSAGE = BASE["messages"][0]
CHANGES: list[tuple[str, dict[str, Any], set[str]]] = [
    ("nothing", {}, {"tools", "system", "messages"}),
    ("effort as by default", {"output_config": {"effort": "high"}}, {"tools", "system", "messages"}),
    ("max_tokens", {"max_tokens": 7, "temperature": 0.5}, {"tools", "system", "messages"}),
    ("a tool's description", {"tools": [{**BASE["tools"][0], "description": "e" * 4000}]}, set()),
    ("a tool's name", {"tools": [{**BASE["tools"][0], "name": "see"}]}, set()),
    ("a tool before", {"tools": [{**TOOL, "name": "new"}, *BASE["tools"]]}, set()),
    (
        "the order of a tool's keys",
        {"tools": [dict(reversed(BASE["tools"][0].items()))]},
        set(),
    ),
    ("model", {"model": "claude-opus-4-8"}, set()),
    (
        "web search",
        {"tools": [*BASE["tools"], {"type": "web_search_20250305", "name": "web_search"}]},
        {"tools"},
    ),
    ("speed", {"speed": "fast"}, {"tools"}),
    (
        "citations",
        {
            "messages": [
                MESSAGE,
                {"role": "user", "content": [{"type": "document", "citations": {"enabled": True}}]},
            ]
        },
        {"tools"},
    ),
    ("system text", {"system": [{**BASE["system"][0], "text": "t" * 4000}]}, {"tools"}),
    ("tool_choice", {"tool_choice": {"type": "any"}}, {"tools", "system"}),
    ("an image", {"messages": [MESSAGE, {"role": "user", "content": [IMAGE]}]}, {"tools", "system"}),
    ("thinking", {"thinking": {"type": "enabled", "budget_tokens": 2000}}, set()),
    ("effort", {"output_config": {"effort": "low"}}, set()),
    ("output format", {"output_config": {"format": {"type": "json_schema"}}}, set()),
    ("context management", {"context_management": {"edits": []}}, set()),
]


@pytest.mark.parametrize(("what", "change", "kept"), CHANGES, ids=[what for what, _, _ in CHANGES])
def test_every_row_of_the_invalidation_table(what: str, change: dict[str, Any], kept: set[str]) -> None:
    count = bytes_per_token(1)
    before, after = read_request(BASE, count), read_request({**BASE, **change}, count)
    cache = VendorCache(rules_of("claude-opus-5"))
    send(cache, before)
    read = cache.ask(after, 1.0).use.read
    tokens = {
        level: sum(b.num_tokens for b in before.blocks if b.level == level)
        for level in ("tools", "system", "messages")
    }
    assert read == sum(tokens[level] for level in kept)


def test_betas_are_prompt_affecting() -> None:
    count = bytes_per_token(1)
    cache = VendorCache(rules_of("claude-opus-5"))
    send(cache, read_request(BASE, count))
    assert cache.ask(read_request(BASE, count, betas="x-2026"), 1.0).use.read == 0


def test_scopes_share_nothing() -> None:
    cache = cache_of()
    send(cache, prompt(block("a", 2000, ttl="5m"), scope="one"))
    assert cache.ask(prompt(block("a", 2000, ttl="5m"), scope="two"), 1.0).use.read == 0


@pytest.mark.parametrize(
    ("model", "is_kept"),
    [("claude-haiku-4-5", False), ("claude-opus-4-5", True), ("claude-sonnet-4-6", True)],
)
def test_a_users_own_words_strip_thinking_in_older_models(model: str, is_kept: bool) -> None:
    turns = [
        block("question", 5000),
        block("thought", 300, kind="thinking", role="assistant", ends=False),
        block("call", 100, kind="tool_use", role="assistant"),
    ]
    result = block("result", 500, kind="tool_result", ttl="5m")
    cache = cache_of(model)
    send(cache, prompt(*turns, result, model=model))
    answered = [*turns, replace(result, ttl=None), block("done", 50, role="assistant")]
    more = cache.ask(prompt(*answered, block("thanks", 50, ttl="5m"), model=model), 1.0)
    assert (more.use.read == 5900) is is_kept
    # Another tool's result strips nothing, in any model.
    looped = cache.ask(
        prompt(
            *turns, replace(result, ttl=None), block("again", 9, kind="tool_use", role="assistant"),
            block("second", 9, kind="tool_result", ttl="5m"), model=model,
        ),
        1.0,
    )  # fmt: skip
    assert looped.use.read == 5900


# ---------------------------------------------------------------- minimums, times, order


@pytest.mark.parametrize("model", ["claude-opus-5", SONNET, "claude-opus-4-7", "claude-haiku-4-5"])
def test_under_the_minimum_nothing_is_cached_and_nothing_says_so(model: str) -> None:
    minimum = rules_of(model).min_tokens
    for tokens, written in ((minimum - 1, {}), (minimum, {"5m": minimum})):
        cache = cache_of(model)
        use = send(cache, prompt(block("a", tokens, ttl="5m"), model=model))
        assert use.written == written
        assert cache.ask(prompt(block("a", tokens, ttl="5m"), model=model), 1.0).use.read == sum(
            written.values()
        )


@pytest.mark.parametrize(("ttl", "seconds"), [("5m", 300.0), ("1h", 3600.0)])
def test_time_runs_from_the_request_and_begins_anew_when_read(ttl: str, seconds: float) -> None:
    asked = prompt(block("a", 2000, ttl=ttl))
    cache = cache_of()
    send(cache, asked, 0.0, readable_s=100.0)
    assert cache.ask(asked, seconds, is_peek=True).use.read == 0
    assert send(cache, asked, seconds - 1).read == 2000
    assert send(cache, asked, 2 * seconds - 2).read == 2000
    assert cache.ask(asked, 3 * seconds - 2).use.read == 0


def test_an_entry_keeps_its_time_whatever_it_is_asked_for() -> None:
    cache = cache_of()
    send(cache, prompt(block("a", 2000, ttl="5m")))
    assert send(cache, prompt(block("a", 2000, ttl="1h")), 10.0) == TokenUse(0, {}, 2000)
    assert cache.ask(prompt(block("a", 2000, ttl="1h")), 400.0).use.read == 0


def test_an_entry_is_readable_only_when_the_response_has_begun() -> None:
    cache, asked = cache_of(), prompt(block("a", 2000, ttl="5m"))
    first = cache.ask(asked, 0.0)
    second = cache.ask(asked, 0.5)
    assert second.use.written == first.use.written == {"5m": 2000}
    cache.commit(first, 1.0)
    assert cache.ask(asked, 0.9).use.read == 0
    assert cache.ask(asked, 1.0).use.read == 2000


def test_mixed_times_are_billed_by_the_three_positions() -> None:
    """A: the longest hit. B: the last 1h breakpoint behind it. C: the last breakpoint."""
    cache = cache_of()
    blocks = [
        block("tools", 1500, level="tools", ttl="1h"),
        block("system", 700, level="system", ttl="1h"),
        block("question", 900, ttl="5m"),
        block("rest", 60),
    ]
    assert send(cache, prompt(*blocks)) == TokenUse(60, {"1h": 2200, "5m": 900}, 0)
    changed = [*blocks[:1], block("other", 700, level="system", ttl="1h"), *blocks[2:]]
    assert send(cache, prompt(*changed), 10.0) == TokenUse(60, {"1h": 700, "5m": 900}, 1500)
    # An hour is for all up to that breakpoint, five minutes only for what stands behind.
    assert send(cache, prompt(*blocks), 400.0) == TokenUse(60, {"5m": 900}, 2200)


@pytest.mark.parametrize(
    ("blocks", "more", "says"),
    [
        ([block("a", 2000, ttl="5m"), block("b", 10, ttl="1h")], {}, "must not come after"),
        ([block(str(i), 2000, ttl="5m") for i in range(5)], {}, "maximum of 4"),
        (
            [block(str(i), 2000, ttl="5m") for i in range(4)] + [block("x")],
            {"automatic": "5m"},
            "all are taken",
        ),
        ([block("a", 2000, ttl="5m")], {"automatic": "1h"}, "has cache_control"),
        ([block("t", 2000, kind="thinking", role="assistant", ttl="5m")], {}, "cannot be set"),
        ([replace(block("e", 0, ttl="5m"), can_mark=False)], {}, "cannot be set"),
        ([block("a", 2000, ttl="7m")], {}, "no time to live"),
    ],
)
def test_what_the_vendor_refuses(blocks: list[Block], more: dict[str, Any], says: str) -> None:
    with pytest.raises(ParameterError, match=says):
        cache_of().ask(prompt(*blocks, **more), 0.0)


def test_automatic_marks_the_last_block_that_can_be_marked() -> None:
    cache = cache_of()
    thought = block("t", 50, kind="thinking", role="assistant")
    assert send(cache, prompt(block("a", 2000), thought, automatic="5m")) == TokenUse(50, {"5m": 2000}, 0)
    same = prompt(block("b", 2000, ttl="5m"), automatic="5m")
    assert send(cache, same) == TokenUse(0, {"5m": 2000}, 0)
    four = prompt(*[block(f"m{i}", 2000, ttl="5m") for i in range(4)], automatic="5m")
    assert send(cache, four).written == {"5m": 8000}  # the last one is marked already: nothing to do


# ---------------------------------------------------------------- positions


@pytest.mark.parametrize(("between", "is_found"), [(18, True), (19, True), (20, False), (21, False)])
def test_looking_back_sees_twenty_positions_itself_included(between: int, is_found: bool) -> None:
    cache = cache_of()
    send(cache, prompt(block("start", 2000, ttl="5m")))
    fill = [block(f"f{i}", 10, role="assistant" if i % 2 else "user") for i in range(between - 1)]
    use = cache.ask(prompt(block("start", 2000), *fill, block("end", 10, ttl="5m")), 1.0).use
    assert (use.read == 2000) is is_found


@pytest.mark.parametrize("num_calls", [1, 19, 20, 40])
def test_a_run_of_calls_or_of_results_is_one_position(num_calls: int) -> None:
    cache = cache_of()
    send(cache, prompt(block("start", 2000, ttl="5m")))
    calls = [block(f"c{i}", 10, kind="tool_use", role="assistant") for i in range(num_calls)]
    results = [block(f"r{i}", 10, kind="tool_result") for i in range(num_calls)]
    blocks = [block("start", 2000), *calls, *results[:-1], replace(results[-1], ttl="5m")]
    assert cache.ask(prompt(*blocks), 1.0).use.read == 2000


def test_text_between_calls_ends_a_run() -> None:
    cache = cache_of()
    send(cache, prompt(block("start", 2000, ttl="5m")))
    pairs = [
        made
        for i in range(10)
        for made in (
            block(f"t{i}", 10, role="assistant"),
            block(f"c{i}", 10, kind="tool_use", role="assistant"),
        )
    ]
    found = cache.ask(prompt(block("start", 2000), *pairs[:-2], block("end", 10, ttl="5m")), 1.0).use.read
    lost = cache.ask(prompt(block("start", 2000), *pairs, block("end", 10, ttl="5m")), 1.0).use.read
    assert (found, lost) == (2000, 0)


def test_every_breakpoint_opens_its_own_window() -> None:
    cache = cache_of()
    send(cache, prompt(block("start", 2000, ttl="5m")))
    fill = [block(f"f{i}", 100) for i in range(60)]
    marked = [replace(one, ttl="5m") if at in (15, 59) else one for at, one in enumerate(fill)]
    assert cache.ask(prompt(block("start", 2000), *marked), 1.0).use.read == 2000


# ---------------------------------------------------------------- other vendors


def chat(*blocks: Block, **more: Any) -> Prompt:
    return prompt(*blocks, vendor="openai", model="gpt-5.6", **more)


def test_newer_openai_models_write_the_end_and_find_it_again() -> None:
    cache = cache_of("gpt-5.6", "openai")
    system = block("s", 1500, level="system")
    assert send(cache, chat(system, block("q", 100))) == TokenUse(0, {"30m": 1600}, 0)
    more = chat(system, block("q", 100), block("a", 50, role="assistant"), block("q2", 10))
    assert send(cache, more, 10.0) == TokenUse(0, {"30m": 60}, 1600)
    assert cache.ask(chat(system, block("other", 100)), 20.0).use.read == 0


def test_the_implicit_breakpoint_does_not_share_a_beginning_and_an_explicit_one_does() -> None:
    cache = cache_of("gpt-5.6", "openai")
    document = block("d", 3000, ends=False)
    for number in range(3):  # everything is written every time, and never read
        use = send(cache, chat(document, block(f"q{number}", 50)), float(number))
        assert use == TokenUse(0, {"30m": 3050}, 0)
    marked = replace(document, ttl="30m")
    first = send(cache, chat(marked, block("q4", 50), is_explicit=True), 10.0)
    second = send(cache, chat(marked, block("q5", 50), is_explicit=True), 11.0)
    assert (first, second) == (TokenUse(50, {"30m": 3000}, 0), TokenUse(50, {}, 3000))


def test_four_writes_of_which_the_implicit_one_is_one() -> None:
    cache = cache_of("gpt-5.6", "openai")
    blocks = [block(f"b{i}", 2000, ttl="30m", ends=False) for i in range(6)]
    asked = cache.ask(chat(*blocks, block("end", 10)), 0.0)
    assert sorted(asked.writes) == [3, 4, 5, 6]


def test_older_openai_models_read_whole_steps() -> None:
    cache = cache_of("gpt-4o", "openai")
    asked = prompt(block("a", 1500), block("b", 20), vendor="openai", model="gpt-4o")
    assert send(cache, asked) == TokenUse(1520, {}, 0)
    assert send(cache, asked, 1.0) == TokenUse(112, {}, 1408)
    assert cache.ask(asked, 400.0).use.read == 0
    small = prompt(block("c", 1023), vendor="openai", model="gpt-4o")
    send(cache, small, 500.0)
    assert cache.ask(small, 501.0).use.read == 0


def test_deepseek_keeps_units_and_finds_what_two_had_in_common() -> None:
    cache = cache_of("deepseek-v4-flash", "deepseek")

    def asked(*names: str) -> Prompt:
        blocks = [block(name, 640) for name in names]
        return prompt(*blocks, vendor="deepseek", model="deepseek-v4-flash")

    assert send(cache, asked("a", "b"), 0.0).read == 0
    assert send(cache, asked("a", "c"), 1.0).read == 0  # A+B, then A+C: no unit ends at A yet
    assert send(cache, asked("a", "d"), 2.0).read == 640
    assert send(cache, asked("a", "b", "e"), 3.0).read == 1280
