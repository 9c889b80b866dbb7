"""Trimming keeps turns whole, the budget, the order, and (sticky) the prefix."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ostinato.errors import ParameterError, PromptTooLongError
from ostinato.prompt import trimming
from ostinato.prompt.conversation import validate
from ostinato.prompt.rules import CustomRole, MessageRules, RuledTemplate
from ostinato.prompt.template import named_template
from ostinato.prompt.tokens import HFTokenizer
from ostinato.prompt.trimming import EarlierCuts, Trimmed, Trimmer
from ostinato.types import Conversation, Message, Rendered, TokenArray, ToolCall, TrimRules

Tokenizers = Callable[[str], HFTokenizer]

TEMPLATE = named_template("qwen2.5")


@st.composite
def talks(draw: st.DrawFn) -> Conversation:
    """Turns with calls and results (some of them late), system texts anywhere, the user or a tool last."""
    words = st.integers(0, 60).map(lambda count: "word " * count)
    messages = [Message("system", draw(words))] if draw(st.booleans()) else []
    if draw(st.integers(0, 4)) == 0:
        messages.append(Message("assistant", "Hello!"))
    late: list[str] = []
    for turn in range(draw(st.integers(1, 8))):
        if draw(st.integers(0, 6)) == 0:
            messages.append(Message("system", draw(words)))
        messages.append(Message("user", f"{turn} {draw(words)}"))
        if late and draw(st.booleans()):
            messages.append(Message("tool", "late", tool_call_id=late.pop()))
        for call in range(draw(st.integers(0, 2))):
            ids = [f"call{turn}{call}{number}" for number in range(draw(st.integers(1, 2)))]
            calls = tuple(ToolCall(call_id, "look", "{}") for call_id in ids)
            messages.append(Message("assistant", draw(words), tool_calls=calls))
            messages += [Message("tool", draw(words), tool_call_id=call_id) for call_id in ids]
            if draw(st.integers(0, 8)) == 0:
                late.append(ids[0])
        messages.append(Message("assistant", draw(words)))
    messages.append(Message("user", "And?"))
    return Conversation(tuple(messages))


RULES = st.builds(
    TrimRules,
    st.integers(20, 500),
    st.sampled_from(["drop", "shorten", "sticky"]),
    st.sampled_from([0.25, 0.5, 0.75, 1.0]),
    st.sampled_from([0, 20]),
)


@settings(max_examples=200, deadline=None)
@given(talks(), RULES, st.sets(st.integers(0, 40), max_size=2))
def test_units_budget_order(
    tokenizers: Tokenizers, talk: Conversation, rules: TrimRules, pins: set[int]
) -> None:
    trimmer = Trimmer(TEMPLATE, tokenizers("chatml"), rules)
    pinned = {index for index in pins if index < len(talk.messages)}
    messages = talk.messages
    newest = max(index for index, message in enumerate(messages) if message.role == "user")
    system = {index for index, message in enumerate(messages) if message.role == "system"}
    error: PromptTooLongError | None
    try:
        trimmed = trimmer.trim(talk, pinned=pinned)
    except PromptTooLongError as caught:
        error = caught
    else:
        error = None
    if error is not None:
        assert error.max_tokens == rules.budget_tokens < error.num_tokens
        assert f"{error.num_tokens - rules.budget_tokens} more" in str(error)
        return
    assert trimmed.num_tokens == trimmer.count(trimmed.conversation) <= rules.budget_tokens
    assert list(trimmed.kept) == sorted(trimmed.kept)
    assert sorted(trimmed.kept + trimmed.dropped) == list(range(len(messages)))
    assert system | pinned | set(range(newest, len(messages))) <= set(trimmed.kept)
    assert not pinned & set(trimmed.shortened)
    validate(trimmed.conversation)  # no result without its call
    for index, message in zip(trimmed.kept, trimmed.conversation.messages, strict=True):
        if index in trimmed.shortened:
            assert message.role == "tool"
            assert message.content.startswith(messages[index].content[: rules.keep_chars] + "\n[…")
        else:
            assert message == messages[index]
    for index, message in enumerate(messages):  # and no call without its results, no half turn
        if message.role == "tool":
            caller = max(
                at for at in range(index) for c in messages[at].tool_calls if c.id == message.tool_call_id
            )
            assert (caller in trimmed.kept) == (index in trimmed.kept)
    for first, second in pairwise(range(len(messages))):
        if {first, second}.isdisjoint(system) and messages[second].role != "user":
            assert (first in trimmed.kept) == (second in trimmed.kept)


@settings(max_examples=100, deadline=None)
@given(talks(), st.integers(20, 500).map(lambda budget: TrimRules(budget, "drop")))
def test_nothing_is_dropped_that_need_not_be(
    tokenizers: Tokenizers, talk: Conversation, rules: TrimRules
) -> None:
    trimmer = Trimmer(TEMPLATE, tokenizers("chatml"), rules)
    if trimmer.count(talk) <= rules.budget_tokens:
        assert trimmer.trim(talk).conversation == talk
        return
    try:
        trimmed = trimmer.trim(talk)
    except PromptTooLongError:
        return
    conversational = [index for index in trimmed.dropped if talk.messages[index].role != "system"]
    # The newest turn that was dropped, as a pin: with it the prompt is too long, or it was not the newest.
    with_it = set(trimmed.kept) | {
        index for index in conversational if index >= _turn_of(talk, conversational[-1])
    }
    left = Conversation(tuple(talk.messages[index] for index in sorted(with_it)))
    assert trimmer.count(left) > rules.budget_tokens


def _turn_of(talk: Conversation, index: int) -> int:
    """Where the turn of a message begins, calls and late results taken together."""
    start = max([at for at in range(index + 1) if talk.messages[at].role == "user"], default=0)
    for at in range(start, index + 1):
        if talk.messages[at].role == "tool":
            caller = max(
                before
                for before in range(at)
                for call in talk.messages[before].tool_calls
                if call.id == talk.messages[at].tool_call_id
            )
            if caller < start:
                return _turn_of(talk, caller)
    return start


def history(num_turns: int, *, tools: bool = False) -> list[Conversation]:
    """The prompts of a conversation, turn by turn."""
    messages = [Message("system", "You are a guide. " * 10)]
    prompts = []
    for turn in range(num_turns):
        messages.append(Message("user", f"Question {turn}: " + "what is it " * (turn % 7 + 3)))
        prompts.append(Conversation(tuple(messages)))
        if tools:
            call = ToolCall(f"call{turn}", "look", "{}")
            messages.append(Message("assistant", "", tool_calls=(call,)))
            messages.append(Message("tool", f"{turn} found " * 60, tool_call_id=call.id))
            prompts.append(Conversation(tuple(messages)))
        messages.append(Message("assistant", f"Answer {turn}: " + "it is this " * (turn % 5 + 4)))
    return prompts


def shared(tokenizer: HFTokenizer, before: Trimmed, after: Trimmed) -> bool:
    """Whether the later prompt goes on from the whole of the earlier one."""
    first = tokenizer.encode_rendered(TEMPLATE.render(before.conversation, add_generation_prompt=False))
    second = tokenizer.encode_rendered(TEMPLATE.render(after.conversation, add_generation_prompt=False))
    return second[: len(first)].tolist() == first.tolist()


@pytest.mark.parametrize("tools", [False, True])
def test_sticky_shares_the_prefix_and_drop_does_not(tokenizers: Tokenizers, tools: bool) -> None:
    tokenizer = tokenizers("chatml")
    num_shared = {}
    for strategy in ("drop", "sticky"):
        trimmer = Trimmer(TEMPLATE, tokenizer, TrimRules(2_000, strategy))
        trimmed = [trimmer.trim(prompt) for prompt in history(40, tools=tools)]
        num_shared[strategy] = sum(shared(tokenizer, first, second) for first, second in pairwise(trimmed))
        assert trimmed[-1].dropped
    assert num_shared["sticky"] > num_shared["drop"]
    trimmer = Trimmer(TEMPLATE, tokenizer, TrimRules(2_000, "sticky"))
    cuts = [trimmer.trim(prompt).cut for prompt in history(40, tools=tools)]
    assert cuts == sorted(cuts)
    changes = [first != second for first, second in pairwise(cuts)]
    assert not any(first and second for first, second in pairwise(changes)), "two cuts in a row"


@pytest.mark.parametrize("strategy", ["drop", "shorten", "sticky"])
def test_going_on_from_the_last_result_gives_the_same(tokenizers: Tokenizers, strategy: str) -> None:
    trimmer = Trimmer(TEMPLATE, tokenizers("chatml"), TrimRules(1_500, strategy))  # type: ignore[arg-type]
    since = None
    for prompt in history(25, tools=True):
        since = trimmer.trim(prompt, since=since)
        assert since == trimmer.trim(prompt)


class Counting(HFTokenizer):
    """Counts how often it is asked for tokens."""

    num_asked = 0

    def encode_rendered(self, rendered: Rendered, *, scope: str = "") -> TokenArray:
        self.num_asked += 1
        return super().encode_rendered(rendered, scope=scope)


@pytest.mark.parametrize("strategy", ["drop", "shorten", "sticky"])
def test_remembered_cuts_change_nothing_but_the_work(tokenizers: Tokenizers, strategy: str) -> None:
    tokenizer = copy(tokenizers("chatml"))
    tokenizer.__class__ = Counting
    assert isinstance(tokenizer, Counting)
    trimmer = Trimmer(TEMPLATE, tokenizer, TrimRules(1_500, strategy))  # type: ignore[arg-type]
    asked = []
    for cuts in (EarlierCuts(), EarlierCuts(0)):
        tokenizer.num_asked = 0
        for number, prompt in enumerate(history(25, tools=True)):
            for scope, pinned in (("", ()), ("other", (1,))):
                if number % 3 == 0 or not scope:
                    trimmed = cuts.trim(trimmer, prompt, scope=scope, pinned=pinned)
                    assert trimmed == trimmer.trim(prompt, pinned=pinned)
        asked.append(tokenizer.num_asked)
    assert asked[0] < asked[1] or strategy == "drop"


def test_remembered_cuts_are_bounded(tokenizers: Tokenizers) -> None:
    trimmer = Trimmer(TEMPLATE, tokenizers("chatml"), TrimRules(500))
    cuts = EarlierCuts(100_000)
    for number in range(200):
        talk = history(8)[-1]
        messages = (Message("system", f"Guide {number}."), *talk.messages[1:])
        cuts.trim(trimmer, Conversation(messages))
        assert cuts._num_chars <= 100_000
        assert cuts._num_chars == sum(size for _, size in cuts._trimmed.values())
    assert 5 < len(cuts._trimmed) < 100


def test_of_another_conversation_nothing_is_taken(tokenizers: Tokenizers) -> None:
    trimmer = Trimmer(TEMPLATE, tokenizers("chatml"), TrimRules(800))
    prompts = history(20)
    other = Conversation((Message("system", "Else."), *prompts[-2].messages[1:]))
    assert trimmer.trim(prompts[-1], since=trimmer.trim(other)) == trimmer.trim(prompts[-1])


def test_shortening_leaves_what_stands_before(tokenizers: Tokenizers) -> None:
    tokenizer = tokenizers("chatml")
    prompts = history(12, tools=True)
    trimmer = Trimmer(TEMPLATE, tokenizer, TrimRules(5_000, "shorten", keep_chars=30))
    past = trimmer.trim(prompts[0])
    for prompt in prompts[1:]:
        trimmed, before = trimmer.trim(prompt), past.shortened
        assert not trimmed.dropped
        assert trimmed.shortened[: len(before)] == before  # the oldest first, and once short always short
        if before != trimmed.shortened:
            first = trimmed.shortened[len(before)]
            assert trimmed.conversation.messages[:first] == past.conversation.messages[:first]
        past = trimmed
    assert past.shortened


def test_what_does_not_fit_is_said_with_numbers(tokenizers: Tokenizers) -> None:
    trimmer = Trimmer(TEMPLATE, tokenizers("chatml"), TrimRules(30))
    talk = Conversation((Message("user", "old"), Message("assistant", "yes"), Message("user", "new " * 100)))
    with pytest.raises(PromptTooLongError, match="more than the budget of 30") as caught:
        trimmer.trim(talk)
    assert caught.value.num_tokens == trimmer.count(Conversation(talk.messages[2:]))


def test_pins_keep_their_turn(tokenizers: Tokenizers) -> None:
    trimmer = Trimmer(TEMPLATE, tokenizers("chatml"), TrimRules(700, "drop"))
    talk = history(20)[-1]
    assert 3 in trimmer.trim(talk).dropped
    trimmed = trimmer.trim(talk, pinned=[4])
    assert {3, 4} <= set(trimmed.kept)
    assert {1, 2, 5, 6} <= set(trimmed.dropped)
    with pytest.raises(ParameterError, match="not there"):
        trimmer.trim(talk, pinned=[99])


@pytest.mark.parametrize(
    "given", [{"budget_tokens": 0}, {"strategy": "newest"}, {"low_water": 0.0}, {"keep_chars": -1}]
)
def test_wrong_rules_are_refused(given: dict[str, object]) -> None:
    with pytest.raises(ParameterError) as caught:
        TrimRules(**{"budget_tokens": 10, **given})  # type: ignore[arg-type]
    assert caught.value.param in given


def test_roles_of_ones_own_count_as_what_they_are_written_as(tokenizers: Tokenizers) -> None:
    roles = (CustomRole("note", "system", "Note: {content}"), CustomRole("guest", "user"))
    ruled = RuledTemplate(TEMPLATE, MessageRules(roles=roles))
    named = {"system": "note", "user": "guest"}
    tokenizer = tokenizers("chatml")
    for prompt in history(12, tools=True):
        renamed = tuple(
            replace(message, role=named.get(message.role, message.role)) for message in prompt.messages
        )
        plain = tuple(
            replace(message, content=f"Note: {message.content}") if message.role == "system" else message
            for message in prompt.messages
        )
        for strategy in ("drop", "shorten", "sticky"):
            rules = TrimRules(900, strategy)  # type: ignore[arg-type]
            found = Trimmer(ruled, tokenizer, rules).trim(Conversation(renamed))
            expected = Trimmer(TEMPLATE, tokenizer, rules).trim(Conversation(plain))
            assert (found.kept, found.shortened, found.num_tokens) == (
                expected.kept,
                expected.shortened,
                expected.num_tokens,
            )
    assert found.dropped


def test_there_is_an_end_to_the_search(tokenizers: Tokenizers, monkeypatch: pytest.MonkeyPatch) -> None:
    trimmer = Trimmer(TEMPLATE, tokenizers("chatml"), TrimRules(300))
    prompt = history(60)[-1]
    assert trimmer.trim(prompt).dropped
    monkeypatch.setattr(trimming, "MAX_COUNTED_MESSAGES", 500)
    with pytest.raises(ParameterError, match="takes too long") as caught:
        trimmer.trim(prompt)
    assert caught.value.param == "trim"


def test_the_search_is_no_longer_than_the_conversation(tokenizers: Tokenizers) -> None:
    """Twice the turns are twice the prompts, of the same length: not four times the work."""
    counted = []
    for num_turns in (40, 80):
        trimmer = Trimmer(TEMPLATE, tokenizers("chatml"), TrimRules(600))
        num_messages = 0
        count = trimmer.count

        def counting(conversation: Conversation, **options: Any) -> int:
            nonlocal num_messages
            num_messages += len(conversation.messages)
            return count(conversation, **options)  # noqa: B023 - called at once

        trimmer.count = counting  # type: ignore[method-assign]
        trimmer.trim(history(num_turns)[-1])
        counted.append(num_messages)
    assert counted[1] < 2.5 * counted[0]
