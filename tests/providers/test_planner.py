"""Plans: legal always, and worth it where the traffic says so."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ostinato.providers.accounting import TokenUse
from ostinato.providers.keep_alive import keep_alive
from ostinato.providers.planner import History, Plan, plan, relative_cost
from ostinato.providers.shape import Block, Prompt
from ostinato.providers.simulator import VendorCache, with_markers
from providers.asked import block, prompt, rules_of

MODEL = "claude-opus-4-8"


def history_of(model: str = MODEL, vendor: str = "anthropic") -> History:
    return History(rules_of(model, vendor))


def drive(
    history: History, asked: Prompt, now_s: float, *, begun_s: float | None = None
) -> tuple[Plan, TokenUse]:
    decided = plan(asked, history, now_s)
    sent = replace(with_markers(asked, decided.markers), is_explicit=decided.is_explicit)
    outcome = history.sent(sent, now_s)
    history.begun(outcome, now_s + 1.0 if begun_s is None else begun_s)
    return decided, outcome.use


def turns(name: str, num_turns: int, *, shared: tuple[Block, ...] = (), tokens: int = 800) -> list[Prompt]:
    blocks, made = list(shared), []
    for turn in range(num_turns):
        blocks.append(block(f"{name} q{turn}", tokens))
        made.append(prompt(*blocks, model=MODEL))
        blocks.append(block(f"{name} a{turn}", 200, role="assistant"))
    return made


SHARED = (block("tools", 3000, level="tools", kind="tool"), block("system", 2000, level="system"))


def test_a_conversation_pays_for_new_tokens_only() -> None:
    history, now_s = history_of(), 0.0
    for number in range(8):
        for asked in turns(f"c{number}", 6, shared=SHARED):
            decided, use = drive(history, asked, now_s)
            assert len(decided.markers) <= 4
            now_s += 30.0
    assert use.read > 0.8 * use.input
    assert use.uncached == 0
    assert history.saved > 0.7 * history.without


def test_what_never_comes_back_is_not_written_for_long() -> None:
    history = history_of()
    cost = sum(
        relative_cost(
            drive(history, prompt(block(f"one {n}", 2000), model=MODEL), n * 20.0)[1], history.rules
        )
        for n in range(300)
    )
    assert cost <= 1.02 * 300 * 2000


def test_a_shared_beginning_is_marked_and_what_varies_is_not() -> None:
    history, now_s = history_of(), 0.0
    document = block("document", 9000, ends=False)
    for number in range(40):
        decided, use = drive(history, prompt(document, block(f"q{number}", 60), model=MODEL), now_s)
        now_s += 25.0
    assert decided.markers == {0: "5m"}
    assert use == TokenUse(60, {}, 9000)


def test_new_documents_are_written_at_once_when_such_beginnings_come_back() -> None:
    history, now_s = history_of(), 0.0
    for number in range(8):
        document = block(f"document {number}", 9000, ends=False)
        for question in range(10):
            drive(history, prompt(document, block(f"{number} {question}", 60), model=MODEL), now_s)
            now_s += 25.0
    fresh = block("a new one", 9000, ends=False)
    decided, use = drive(history, prompt(fresh, block("q", 60), model=MODEL), now_s)
    assert 0 in decided.markers
    assert use.written == {"5m": 9000}


def test_an_hour_is_chosen_where_requests_come_every_quarter_of_an_hour() -> None:
    history, now_s = history_of(), 0.0
    for number in range(30):
        decided, use = drive(history, prompt(*SHARED, block(f"q{number}", 200), model=MODEL), now_s)
        now_s += 900.0
    assert set(decided.markers.values()) == {"1h"}
    assert use.read == 5000


def test_five_minutes_are_chosen_where_they_are_enough() -> None:
    history, now_s = history_of(), 0.0
    for number in range(6):
        for asked in turns(f"c{number}", 8, shared=SHARED):
            decided, _ = drive(history, asked, now_s)
            now_s += 20.0
    assert set(decided.markers.values()) == {"5m"}


@pytest.mark.parametrize("num_calls", [5, 12, 30])
def test_a_long_tool_loop_stays_in_sight(num_calls: int) -> None:
    """Text between the calls: nothing collapses, and one turn is longer than a window."""
    history, now_s, before = history_of(), 0.0, 0
    blocks = [*SHARED, block("task", 1500)]
    for step in range(12):
        _, use = drive(history, prompt(*blocks, model=MODEL), now_s)
        if step >= 3:
            assert use.read >= before, "what was written a moment ago is out of sight"
        before = use.input
        for call in range(num_calls):
            blocks.append(block(f"{step} t{call}", 30, role="assistant"))
            blocks.append(block(f"{step} c{call}", 60, kind="tool_use", role="assistant"))
        blocks += [block(f"{step} r{call}", 200, kind="tool_result") for call in range(num_calls)]
        now_s += 10.0


def test_fan_outs_wait_for_the_first_token_of_the_first() -> None:
    history = history_of()
    for number in range(3):
        drive(history, prompt(*SHARED, block(f"warm {number}", 60), model=MODEL), number * 10.0)
    later = 10_000.0
    first = prompt(*SHARED, block("a", 60), model=MODEL)
    decided = plan(first, history, later)
    outcome = history.sent(with_markers(first, decided.markers), later)
    second = prompt(*SHARED, block("b", 60), model=MODEL)
    waiting = plan(second, history, later + 0.1)
    assert waiting.wait_for in outcome.chain.digests
    history.begun(outcome, later + 1.0)
    after = plan(second, history, later + 1.0)
    assert after.wait_for is None
    assert after.expected.read == 5000


def test_a_failed_request_is_not_waited_for() -> None:
    history = history_of()
    for number in range(3):
        drive(history, prompt(*SHARED, block(f"warm {number}", 60), model=MODEL), number * 10.0)
    first = prompt(*SHARED, block("a", 60), model=MODEL)
    outcome = history.sent(with_markers(first, plan(first, history, 10_000.0).markers), 10_000.0)
    history.failed(outcome)
    assert plan(prompt(*SHARED, block("b", 60), model=MODEL), history, 10_000.1).wait_for is None
    assert history.writing == {}


def test_under_the_minimum_nothing_is_marked() -> None:
    decided = plan(prompt(block("a", 1023), model=MODEL), history_of(), 0.0)
    assert decided.markers == {}
    assert "minimum" in decided.reasons[0]


def test_newer_openai_models_get_an_explicit_breakpoint_before_what_varies() -> None:
    history, now_s = history_of("gpt-5.6", "openai"), 0.0
    document = block("document", 9000, ends=False)
    for number in range(60):
        asked = prompt(document, block(f"q{number}", 60), model="gpt-5.6", vendor="openai")
        decided, use = drive(history, asked, now_s)
        now_s += 25.0
    assert decided.is_explicit
    assert decided.markers == {0: "30m"}
    assert use == TokenUse(60, {}, 9000)


def test_newer_openai_models_write_nothing_where_nothing_comes_back() -> None:
    """Their own breakpoint would write everything, for a quarter more, and nobody would read it."""
    history, cost, total = history_of("gpt-5.6", "openai"), 0.0, 0
    for number in range(100):
        asked = prompt(block(f"once {number}", 3000), model="gpt-5.6", vendor="openai")
        _, use = drive(history, asked, number * 100.0)
        cost += relative_cost(use, history.rules)
        total += use.input
    assert cost <= 1.02 * total


def test_newer_openai_models_write_the_shared_beginning_beside_their_own() -> None:
    history, reads = history_of("gpt-5.6", "openai"), []
    system = block("system", 6000, level="system")
    for number in range(30):
        asked = prompt(system, block(f"look {number}", 600), model="gpt-5.6", vendor="openai")
        reads.append(drive(history, asked, number * 700.0)[1].read)
    assert reads.count(6000) >= 20  # an entry lives for half an hour, read or not


def test_older_openai_models_get_a_key_that_stays() -> None:
    history = history_of("gpt-5", "openai")
    system = block("system", 3000, level="system")
    keys = set()
    for number in range(10):
        asked = prompt(system, block(f"q{number}", 60), model="gpt-5", vendor="openai")
        keys.add(drive(history, asked, number * 30.0)[0].cache_key)
    assert len(keys) == 1
    assert None not in keys
    other = prompt(block("another", 3000, level="system"), block("q", 60), model="gpt-5", vendor="openai")
    assert plan(other, history, 999.0).cache_key not in keys


def test_busy_keys_are_divided_by_conversation() -> None:
    history, keys = history_of("gpt-5", "openai"), set()
    system = block("system", 3000, level="system")
    for number in range(400):
        asked = prompt(system, block(f"q{number % 40}", 60), model="gpt-5", vendor="openai")
        decided, _ = drive(history, asked, number * 0.2)
        if number >= 360:
            keys.add(decided.cache_key)
    assert 8 < len(keys) <= 40
    again = {plan(asked, history, 90.0).cache_key for _ in range(3)}
    assert len(again) == 1


def test_to_keep_alive_pays_where_people_come_back_after_ten_minutes() -> None:
    history, now_s = history_of(), 0.0
    asked = prompt(*SHARED, block("q", 200), model=MODEL)
    for _ in range(20):
        outcome = history.sent(with_markers(asked, {1: "5m"}), now_s)
        history.begun(outcome, now_s + 1.0)
        last_s, now_s = now_s, now_s + 450.0
    advice = keep_alive(history, outcome.chain, 1, last_s + 200.0)
    assert advice is not None
    assert advice.pays
    assert advice.at_s == last_s + 290.0
    assert keep_alive(history, outcome.chain, 0, last_s + 200.0) is None  # no entry ends there
    # Where little stands behind what lives longer, or much behind what would be read, it does not.
    for markers, tail in (({0: "1h", 1: "5m"}, 10), ({1: "5m"}, 9000)):
        other = prompt(SHARED[0], replace(SHARED[1], num_tokens=300), block("t", tail), model=MODEL)
        history, now_s = history_of(), 0.0
        for _ in range(20):
            outcome = history.sent(with_markers(other, markers), now_s)
            history.begun(outcome, now_s + 1.0)
            last_s, now_s = now_s, now_s + 450.0
        advice = keep_alive(history, outcome.chain, 1, last_s + 200.0)
        assert advice is not None
        assert advice.chance > 0.5
        assert not advice.pays


# ---------------------------------------------------------------- always

KINDS = ("text", "text", "tool_use", "tool_result", "thinking", "image")


@st.composite
def prompts(draw: Any) -> Prompt:
    chance = random.Random(draw(st.integers(0, 1 << 30)))
    names = [f"n{chance.randint(0, 3)}" for _ in range(chance.randint(0, 40))]
    levels = ["tools"] * chance.randint(0, 2) + ["system"] * chance.randint(0, 2)
    blocks: list[Block] = []
    room = 4
    shortest = 3600
    for at, name in enumerate(names):
        level = levels[at] if at < len(levels) else "messages"
        kind = chance.choice(KINDS) if level == "messages" else "text"
        made = block(f"{name} {at}", chance.choice([0, 10, 700, 4000]), level=level, kind=kind)
        made = replace(made, can_mark=made.num_tokens > 0)
        if room and made.can_mark and kind != "thinking" and chance.random() < 0.1:
            ttl = chance.choice(["5m", "1h"] if shortest == 3600 else ["5m"])
            shortest = min(shortest, 300 if ttl == "5m" else 3600)
            made, room = replace(made, ttl=ttl), room - 1
        blocks.append(made)
    automatic = "5m" if room and chance.random() < 0.2 else None
    if automatic and any(made.ttl == "1h" for made in blocks):
        automatic = None  # it may end on the last of them, with another time
    return prompt(*blocks, model=MODEL, automatic=automatic)


@given(st.lists(st.tuples(prompts(), st.floats(0, 4000)), max_size=12))
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_plans_are_always_legal_and_never_take_anything_away(given_: list[tuple[Prompt, float]]) -> None:
    history, vendor, now_s = history_of(), VendorCache(rules_of(MODEL)), 0.0
    for asked, gap_s in given_:
        now_s += gap_s
        decided = plan(asked, history, now_s)
        assert not decided.markers.keys() & asked.markers.keys()
        marked = with_markers(asked, decided.markers)
        assert asked.markers.items() <= marked.markers.items()
        ours = history.sent(marked, now_s)  # raises where the vendor would refuse it
        theirs = vendor.ask(marked, now_s)
        assert decided.expected == ours.use == theirs.use
        assert theirs.use.input == sum(made.num_tokens for made in asked.blocks)
        history.begun(ours, now_s)
        vendor.commit(theirs, now_s)


def test_a_plan_changes_nothing() -> None:
    history = history_of()
    asked = turns("c", 3, shared=SHARED)
    for number, one in enumerate(asked):
        drive(history, one, number * 10.0)
    first = plan(asked[-1], history, 100.0)
    assert all(plan(asked[-1], history, 100.0) == first for _ in range(5))
