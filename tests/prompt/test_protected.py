"""What canonical form leaves alone: as one pattern says it, and in one pass."""

from __future__ import annotations

import re

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ostinato.prompt import canonical, lint, sandbox
from ostinato.prompt.canonical import CanonicalRules, canonical_text
from ostinato.prompt.protected import protected_spans

# The same, said by one pattern: clear, but it looks for the end of every quote anew.
PATTERN = re.compile(
    r"""
    (?<![^\r\n])[ \t]*(?P<fence>```+|~~~+)[^\r\n]*(?:(?:\r\n?|\n)(?![ \t]*(?P=fence))[^\r\n]*)*
        (?:(?:\r\n?|\n)[ \t]*(?P=fence)[`~]*[ \t]*(?![^\r\n]))?
    | (?<![^\r\n])(?:[ ]{4}|[ ]{0,3}\t)[ \t]*[^\s][^\r\n]*
    | (?<![^\r\n])[ \t]+(?=[^\s])
    | (?P<ticks>`+)(?!`)[^\r\n]*?[^`\r\n](?P=ticks)(?!`)
    | "[^"\r\n]*" | “[^”\r\n]*” | „[^“”\r\n]*[“”] | «[^»\r\n]*» | (?<!\w)'[^'\r\n]*'(?!\w) | ‘[^’\r\n]*’(?!\w)
    """,
    re.VERBOSE,
)
TEXTS = st.lists(
    st.sampled_from(
        [
            *"abc_~`'\"“”„«»‘’ \t\n\r\x0b\u2028é",
            "``",
            "```",
            "````",
            "\n```",
            "\n~~~\n",
            "\n    x",
            " '",
            "' ",
        ]
    ),
    max_size=40,
).map("".join)


@settings(max_examples=800, deadline=None)
@given(TEXTS)
@example("```a`` b ` c")
@example("‘a‘b’c’ d’")
@example("„a“b”c“")
@example(" ``a``` `b`` c`")
def test_one_pass_finds_what_the_pattern_says(text: str) -> None:
    assert list(protected_spans(text)) == [match.span() for match in PATTERN.finditer(text)]


NUM_CHARS = 100_000
RULES = CanonicalRules(line_ends=True, whitespace=True, unicode="NFC", emphasis=True)


def runs_of_every_length() -> str:
    """Runs of backticks none of which another one closes."""
    lengths, total = [], 0
    while total < NUM_CHARS:
        lengths.append(len(lengths) + 1)
        total += len(lengths) + 1
    return "x".join("`" * length for length in lengths)


HOSTILE = {
    "apostrophes": "'" * NUM_CHARS,
    "apostrophes in words": " 'a" * (NUM_CHARS // 3),
    "backticks": "`" * NUM_CHARS,
    "backticks of every length": runs_of_every_length(),
    "opening quotes": "“" * NUM_CHARS,
    "opening low quotes": "„" * NUM_CHARS,
    "opening angle quotes": "«" * NUM_CHARS,
    "opening single quotes": "‘" * NUM_CHARS,
    "opening single quotes, and one in a word": "‘" * NUM_CHARS + "’a",
    "spaces": "a" + " " * NUM_CHARS + "b",
    "tabs": "a" + "\t" * NUM_CHARS + "b",
    "spaces in a line of their own": "a\n" + " " * NUM_CHARS + "\n```",
    "blank lines": "\n \n" * (NUM_CHARS // 3),
    "fences": "```\n" * (NUM_CHARS // 4),
    "braces": "{" * NUM_CHARS,
    "underscores": "_" * NUM_CHARS,
    "names": "__" + "a_" * (NUM_CHARS // 2),
    "emphasis that is not closed": " _a" * (NUM_CHARS // 3),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_text_ends(name: str) -> None:
    """Of every beginning that has no end, looked for anew each time, this would be 10^10 steps and more."""
    text = HOSTILE[name]
    assert canonical_text(canonical_text(text, RULES), RULES) == canonical_text(text, RULES)


def test_other_patterns_end() -> None:
    wide = sandbox._WIDE
    assert wide.search("{" + ":" * NUM_CHARS) is None
    assert wide.search("{a:b:{") is not None
    assert wide.search("{:1000000}") is not None
    assert canonical._LINE_TAIL.sub("", "a" + " " * NUM_CHARS + "b  \n") == "a" + " " * NUM_CHARS + "b\n"
    ids = dict(lint._KINDS)["id"]
    assert ids.search("ab-" * (NUM_CHARS // 3)) is None
    assert ids.search("see req-abcdef42 there") is not None
