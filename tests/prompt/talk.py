"""Conversations for the tests: ordinary ones by hypothesis, and hostile texts."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import strategies as st

from ostinato.prompt.conversation import conversation_from_dicts
from ostinato.types import Conversation

# Text as people write it, and as they should not: all of Unicode, white space of every kind.
ANY_TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)
WORDS = st.text(alphabet=" \t\n\rabcXYZ019.,:;!?'\"|<>[]{}/_-äé你🙂\u00a0\u2003\u0301", max_size=40)
TEXT = st.one_of(WORDS, ANY_TEXT, st.sampled_from(["", " ", "\n", "  two  ", "\n\nlines\n\n", "a" * 200]))


@st.composite
def alternating(draw: st.DrawFn, *, system: bool = True, texts: st.SearchStrategy[str] = TEXT) -> list[Any]:
    """A system message or not, then user and assistant in turns, the user last."""
    messages = []
    if system and draw(st.booleans()):
        messages.append({"role": "system", "content": draw(texts)})
    for turn in range(2 * draw(st.integers(0, 3)) + 1):
        role = "assistant" if turn % 2 else "user"
        messages.append({"role": role, "content": draw(texts)})
    return messages


@st.composite
def free(draw: st.DrawFn, *, texts: st.SearchStrategy[str] = TEXT) -> list[Any]:
    """Any roles in any order."""
    roles = st.sampled_from(["system", "user", "assistant"])
    count = draw(st.integers(1, 6))
    return [{"role": draw(roles), "content": draw(texts)} for _ in range(count)]


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 99) | st.sampled_from([0.5, 1e21]) | WORDS,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(WORDS, inner, max_size=2),
    max_leaves=4,
)


@st.composite
def with_tools(draw: st.DrawFn, *, texts: st.SearchStrategy[str] = WORDS) -> tuple[list[Any], list[Any]]:
    """A conversation in which tools are offered, called and answered, and the tools."""
    tools = [
        {
            "type": "function",
            "function": {
                "name": f"tool_{number}",
                "description": draw(texts),
                "parameters": {
                    "type": "object",
                    "properties": {"city": {"type": "string", "description": draw(texts)}},
                    "required": ["city"],
                },
            },
        }
        for number in range(draw(st.integers(1, 2)))
    ]
    messages: list[Any] = []
    if draw(st.booleans()):
        messages.append({"role": "system", "content": draw(texts)})
    for turn in range(draw(st.integers(1, 2))):
        arguments = json.dumps(draw(st.dictionaries(WORDS, JSON_VALUES, max_size=2)), ensure_ascii=False)
        call = {"id": f"call{turn:05}", "type": "function"}
        call["function"] = {"name": "tool_0", "arguments": arguments}  # type: ignore[assignment]
        messages += [
            {"role": "user", "content": draw(texts)},
            {"role": "assistant", "content": draw(st.sampled_from(["", "I look."])), "tool_calls": [call]},
            {"role": "tool", "tool_call_id": call["id"], "content": draw(texts)},
            {"role": "assistant", "content": draw(texts)},
        ]
    messages.append({"role": "user", "content": draw(texts)})
    return messages, tools


def conversation(*turns: tuple[str, str]) -> Conversation:
    return conversation_from_dicts([{"role": role, "content": content} for role, content in turns])
