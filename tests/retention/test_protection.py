"""What looks like an entity, and which tokens that is."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ostinato.retention.protection import entity_spans, flags_of, occurrences


@pytest.mark.parametrize(
    ("text", "entities"),
    [
        ("The code is 48213.", ["48213"]),
        ("On 2024-05-17 at 10:30 we met Ada Lovelace.", ["2024-05-17", "10:30", "Ada Lovelace"]),
        ("Call max_tokens or parseHeader of HTTPServer v1.2.3.", ["max_tokens", "parseHeader", "v1.2.3"]),
        ('He said "blue heron" twice.', ['"blue heron"']),
        ("Write to ada@example.org or see https://example.org/a?b=1 now.", ["ada@example.org", "https://example.org/a?b=1"]),
        ("She went. They came.", []),
        ("Mary Shelley wrote it.", ["Shelley"]),
        ("order A-1002/b was late", ["A-1002/b"]),
    ],
)  # fmt: skip
def test_entities(text: str, entities: list[str]) -> None:
    found = [text[start:end] for start, end in entity_spans(text)]
    assert [name for name in found if name not in ("HTTPServer",)] == entities


@given(st.text(max_size=200))
def test_spans_are_in_order_and_inside(text: str) -> None:
    end = 0
    for start, stop in entity_spans(text):
        assert end <= start < stop <= len(text)
        end = stop


@given(st.text(alphabet="aé€😀 1", max_size=30), st.data())
def test_flags_are_of_the_tokens_that_spell_the_span(text: str, data: st.DataObject) -> None:
    raw = text.encode()
    cuts = sorted(data.draw(st.sets(st.integers(1, max(1, len(raw) - 1)), max_size=8)))
    pieces = [raw[a:b] for a, b in zip([0, *cuts], [*cuts, len(raw)], strict=True)]
    start = data.draw(st.integers(0, len(text)))
    end = data.draw(st.integers(start, len(text)))
    if start == end:
        return
    first, last = len(text[:start].encode()), len(text[:end].encode())
    place, expected = 0, []
    for piece in pieces:
        expected.append(place < last and place + len(piece) > first)
        place += len(piece)
    assert flags_of(pieces, text, [(start, end)]).tolist() == expected


def test_occurrences_are_literal() -> None:
    assert occurrences("a.b a.b axb", "a.b") == [(0, 3), (4, 7)]
    assert occurrences("abc", "") == []


def test_long_hostile_texts_take_no_time() -> None:
    for text in ('"' * 100_000, "A" * 100_000, "1" * 100_000, "A b" * 50_000, "a_" * 50_000, "`\n" * 50_000):
        for start, end in entity_spans(text):
            assert start < end
