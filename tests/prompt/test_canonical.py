"""The canonical form: idempotent, rule by rule, and never inside code, indentation or quotes."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ostinato.errors import ParameterError
from ostinato.prompt.canonical import (
    CanonicalRules,
    Change,
    Document,
    Replacement,
    canonical,
    canonical_text,
    in_order,
)
from ostinato.types import Conversation, Message, ToolCall

PIECES = st.sampled_from(
    [
        *["a", "b c", "_", "__", "_x_", "*", "**", "`", "```", "~~~", " ", "\n", '"', "'", "“", "”"],
        *["«", "»", "＂", "ﬁ", "don't", "  ", "\t", "\r", "\n\n\n", "e\u0301", "\u00a0", "\u2003", "\\"],
        *["\u037e", "\u1fef", "\x0b", "\x85", "\u2028", "\n```py\n", "\n```\n", "    code", "SKU:42"],
        *["`x  y`", "__x y__", "\r\n"],
    ]
)  # fmt: skip
TEXTS = st.one_of(st.lists(PIECES, max_size=24).map("".join), st.text(max_size=30))
RULES = st.builds(
    CanonicalRules,
    st.booleans(),
    st.booleans(),
    st.sampled_from([None, "NFC", "NFKC"]),
    st.booleans(),
    st.booleans(),
    st.booleans(),
    st.sampled_from(
        [(), (Replacement(r"SKU:\w+", "SKU"),), (Replacement("a", "  b"), Replacement("b c", "_"))]
    ),
)
ALL = CanonicalRules(True, True, "NFKC", True, True, True)


@settings(max_examples=1_000, deadline=None)
@given(TEXTS, RULES)
@example('＂ and "quoted  string"  x', ALL)
@example("a\r    code  x\n", ALL)
def test_idempotent(text: str, rules: CanonicalRules) -> None:
    once = canonical_text(text, rules)
    assert canonical_text(once, rules) == once


PROTECTED = [
    "```python\nif  a:\r\n    b  =  __init__  \n\n\n\n```",
    "~~~\n_a_  b  \n~~~",
    "    indented  code _x_  ",
    "\tindented  code",
    "`inline  __x y__ code`",
    "``with ` tick  s``",
    '"quoted  _string_ ﬁ"',
    "'single  quoted'",
    "“curly  _quoted_”",
    "«à  la  française»",
]


@settings(max_examples=300, deadline=None)
@given(
    st.lists(
        st.sampled_from(["a  b", "_x_ ", "ﬁ  ne", "", "two\r\nlines  \n", "__x y__"]), min_size=2, max_size=2
    ),
    st.sampled_from(PROTECTED),
)
def test_code_and_quotes_are_never_touched(around: list[str], protected: str) -> None:
    is_line = protected[0] in "`~ \t" and not protected.startswith(("`i", "``w"))
    space = "\n" if is_line else " "
    assert protected in canonical_text(f"{around[0]}{space}{protected}{space}{around[1]}", ALL)


def test_indentation_stays() -> None:
    text = "list:\n  - one  two\n   three\n"
    assert canonical_text(text, ALL) == "list:\n  - one two\n   three\n"


@pytest.mark.parametrize(
    ("rules", "given_text", "expected"),
    [
        ({"line_ends": True}, "a\r\nb\rc\n", "a\nb\nc\n"),
        ({"whitespace": True}, "a  b\t c  \n\n\n\nd  ", "a b c\n\nd"),
        ({"whitespace": True}, "a  \r\n\r\n\r\nb", "a\r\n\r\nb"),
        ({"unicode": "NFC"}, "e\u0301 ﬁ", "é ﬁ"),
        ({"unicode": "NFKC"}, "e\u0301 ﬁ", "é fi"),
        ({"emphasis": True}, "_so_ __so it__ a_b_c __init__", "*so* **so it** a_b_c __init__"),
        ({"replacements": (Replacement(r"SKU:\w+", "SKU"),)}, 'SKU:4 "SKU:5" `SKU:6`', 'SKU "SKU:5" `SKU:6`'),
        ({}, "a  \r\n_b_ e\u0301", "a  \r\n_b_ e\u0301"),
    ],
)  # fmt: skip
def test_each_rule_alone(rules: dict[str, Any], given_text: str, expected: str) -> None:
    assert canonical_text(given_text, CanonicalRules(**rules)) == expected


def test_what_changed_is_reported_and_other_roles_stay() -> None:
    call = ToolCall("c1", "look", '{ "b": 1, "a": [1.5, null] }')
    strange = ToolCall("c2", "look", '{"a": 1.50, "b":  2}')
    tools: tuple[dict[str, Any], ...] = tuple(
        {
            "type": "function",
            "function": {
                "name": name,
                "parameters": {"type": "object", "required": ["y", "x"], "enum": [2, 1]},
            },
        }
        for name in ("zebra", "ant")
    )
    talk = Conversation(
        (
            Message("system", "a  b"),
            Message("user", "fine"),
            Message("assistant", "c  d", tool_calls=(call, strange)),
            Message("tool", "e  f", tool_call_id="c1"),
        ),
        tools,
    )
    result = canonical(talk, ALL)
    assert set(result.changes) == {
        Change("whitespace", "messages[0]"),
        Change("arguments", "messages[2].tool_calls[0]"),
        Change("tools", "tools"),
    }
    messages = result.conversation.messages
    assert [message.content for message in messages] == ["a b", "fine", "c  d", "e  f"]
    assert messages[2].tool_calls[0].arguments == '{"a":[1.5,null],"b":1}'
    assert messages[2].tool_calls[1] == strange  # 1.50 would become 1.5
    functions = [tool["function"] for tool in result.conversation.tools]
    assert [function["name"] for function in functions] == ["ant", "zebra"]
    assert list(functions[0]["parameters"]) == ["enum", "required", "type"]
    assert functions[0]["parameters"]["required"] == ["x", "y"]
    assert functions[0]["parameters"]["enum"] == [2, 1]
    assert canonical(result.conversation, ALL).changes == ()


def test_nothing_is_on_by_default() -> None:
    talk = Conversation((Message("user", "a  \r\n_b_ e\u0301"),), ({"type": "function", "function": {}},))
    assert canonical(talk, CanonicalRules()).conversation == talk


@pytest.mark.parametrize("rule", [Replacement("a", "aa"), Replacement("x", "ax")])
def test_a_replacement_that_never_ends_is_named(rule: Replacement) -> None:
    rules = CanonicalRules(replacements=(rule, Replacement("a$", "x")))
    with pytest.raises(ParameterError, match=f"do not settle.*replace {rule.pattern}"):
        canonical_text("x a", rules)


@pytest.mark.parametrize("wrong", [("(", ""), ("a", r"\1"), ("a", r"\g<name>")])
def test_a_wrong_pattern_is_refused(wrong: tuple[str, str]) -> None:
    with pytest.raises(ParameterError):
        Replacement(*wrong)


def test_documents_in_order() -> None:
    found = [Document("b", "B", 0.5), Document("a", "A", 0.1), Document("c", "C", 0.5)]
    assert [document.id for document in in_order(found)] == ["a", "b", "c"]
    assert [document.id for document in in_order(found, "score")] == ["b", "c", "a"]
    assert in_order(found, "score") == in_order(reversed(found), "score")
    with pytest.raises(ParameterError, match="same id"):
        in_order([found[0], found[0]])
