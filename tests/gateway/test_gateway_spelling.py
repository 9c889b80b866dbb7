"""What the gateway writes into bodies changes nothing else in them, whatever stands there."""

from __future__ import annotations

import copy
import json
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ostinato.gateway.spelling import loads, rewritten

texts = st.text(st.characters(codec="utf-8"), max_size=8)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | texts,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4),
    max_leaves=20,
)
objects = st.dictionaries(texts, values, max_size=5)


@st.composite
def changes(draw: st.DrawFn) -> tuple[Any, Any]:
    """A value, and the same with something added or replaced at a few places."""
    before = draw(objects)
    after = copy.deepcopy(before)
    for _ in range(draw(st.integers(0, 4))):
        at: Any = after
        while True:
            inner = list(at.values()) if isinstance(at, dict) else list(at)
            holders = [item for item in inner if isinstance(item, dict | list)]
            if not holders or draw(st.booleans()):
                break
            at = draw(st.sampled_from(holders))
        if isinstance(at, dict):
            at[draw(texts)] = draw(values)
        elif at and draw(st.booleans()):
            at[draw(st.integers(0, len(at) - 1))] = draw(values)
        else:
            at.append(draw(values))
    return before, after


def can_be_written(value: Any) -> bool:
    try:
        orjson.dumps(value)
    except TypeError:
        return False
    return True


def loses_a_key(before: Any, after: Any) -> bool:
    """Whether an object that stays has fewer keys: one may be put in another's place."""
    if isinstance(before, dict) and isinstance(after, dict):
        return bool(before.keys() - after.keys()) or any(loses_a_key(before[k], after[k]) for k in before)
    if isinstance(before, list) and isinstance(after, list) and len(before) <= len(after):
        return any(map(loses_a_key, before, after))
    return False


@given(changes(), st.sampled_from([None, 1]), st.booleans())
def test_it_says_what_it_should(change: tuple[Any, Any], indent: int | None, is_ascii: bool) -> None:
    before, after = change
    body = json.dumps(before, indent=indent, ensure_ascii=is_ascii).encode()
    try:
        made = rewritten(body, before, after)
    except (TypeError, ValueError):
        assert not can_be_written(after) or loses_a_key(before, after)
        return
    assert not loses_a_key(before, after)
    assert json.loads(made) == after
    if before == after:
        assert made == body


def test_all_else_stays_byte_for_byte() -> None:
    body = (
        b' {"n" : 123456789012345678901234567890,"a":1,\t"a": [ 1.50,{"t":"\\u00e9\\/\\ud83d", "big":1e400} ]'
        b',"f":0.10000000000000000000001, "e":{ }, "l":[ ]}\n'
    )
    before = loads(body)
    after = loads(body)
    after["a"][1]["mark"] = {"x": 1}
    after["a"].append("new")
    after["e"]["k"] = None
    after["l"].append(2)
    after["z"] = True
    assert rewritten(body, before, after) == (
        b' {"n" : 123456789012345678901234567890,"a":1,\t"a": [ 1.50,{"t":"\\u00e9\\/\\ud83d", "big":1e400,'
        b'"mark":{"x":1}},"new" ],"f":0.10000000000000000000001, "e":{"k":null }, "l":[2 ],"z":true}\n'
    )


@pytest.mark.parametrize(
    "data",
    [
        b'{"a":"\\ud83d"}',
        b'{"a":"\\udc00x"}',
        b'{"a":1e400}',
        b"[-1E999]",
        b"[NaN]",
        b"[" + b"9" * 400 + b".0]",
    ],
)
def test_what_some_write_is_read(data: bytes) -> None:
    loads(data)


@pytest.mark.parametrize("data", [b"", b"{", b'{"a":"\\ud8', b"\xff", b"[1e400", b"[" * 5000 + b"1e400"])
def test_what_is_no_json_is_none(data: bytes) -> None:
    with pytest.raises(ValueError):
        loads(data)
