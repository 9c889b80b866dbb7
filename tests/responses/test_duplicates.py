"""What a log is said to repeat."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from click.testing import CliRunner

from ostinato.cli import main
from ostinato.responses.duplicates import Duplicates, Group, find_duplicates

LONG = (
    "Please tell me how the serpent, that long leather-covered instrument of the sixteenth century, came to "
    "be played in the churches of France, who made it, and why it was given up in favour of the ophicleide."
)


def body(text: str, **fields: Any) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": "user", "content": text}]} | fields


def lines(*rows: Any) -> list[bytes]:
    return [row if isinstance(row, bytes) else json.dumps(row).encode() for row in rows]


def count(*rows: Any, **options: Any) -> Duplicates:
    return find_duplicates(lines(*rows), **options)


def test_the_three_degrees() -> None:
    one = body("What is it?", temperature=0)
    found = count(
        one,
        one,  # identical
        {name: one[name] for name in reversed(one)},  # another order of keys
        one | {"stream": True, "user": "anna"},  # what cannot matter
        body("What was it?", temperature=0),
        body("What is it?"),  # drawn
        body("What is it?"),
    )
    assert (found.requests, found.identical, found.canonical, found.greedy) == (7, 2, 4, 3)
    assert found.groups == (Group(1, 4), Group(6, 2))


def test_near_is_one_text_and_nothing_else() -> None:
    near = LONG.replace("leather-covered", "leather-clad").upper()
    assert count(body(LONG), body(near)).near == 1
    assert count(body(LONG), body(near, temperature=0)).near == 0
    assert count(body(LONG), body(near), near=0.99).near == 0
    assert (
        count(body(LONG), body("How do I bake bread with rye, and how long does it have to rest?")).near == 0
    )
    assert count(body(LONG), body(LONG + " And then?" * 3)).near == 0  # it goes on
    system = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": near}]
    assert count(body(LONG), body("", messages=system)).near == 0
    parts = [{"type": "text", "text": near}]
    assert count(body(LONG), body("", messages=[{"role": "user", "content": parts}])).near == 1
    assert count({"prompt": LONG}, {"prompt": near}).near == 1
    assert count(*[body(f"{LONG} {number}") for number in range(50)]).near == 49


def test_lines_of_every_kind() -> None:
    found = count(
        {"timestamp": 1_764_544_000_000, "id": "a", "body": body("x"), "usage": {"completion_tokens": 7}},
        {"timestamp": 1_764_544_060_000, "id": "b", "body": body("x"), "usage": {"completion_tokens": 7}},
        {"timestamp": 1_764_544_090_000, "id": "c", "request": body("x"), "output_length": 5},
        {"timestamp": 1_764_544_000_000_000, "session_id": "s", "input": "a prompt", "output": "b"},
        {"timestamp": 1_764_544_002_000_000, "session_id": "t", "input": "a prompt", "output": "c"},
        {"timestamp": 3, "id": "d", "key": "k", "hash_ids": [1, 2], "input_length": 20, "choices": 1},
        {"timestamp": 4, "id": "e", "key": "k", "hash_ids": [1, 2], "input_length": 20, "choices": 1},
        {"timestamp": 5, "id": "f", "key": "l", "hash_ids": [1, 2], "input_length": 20, "choices": 1},
        b"",
        b"not json",
        b"[1]",
        {"nothing": "here"},
        {"body": {"messages": "\ud800"}},
    )
    assert (found.requests, found.unusable) == (8, 4)
    assert found.canonical == 4
    assert found.digests_only == 3
    assert (found.repeated_tokens, found.output_tokens) == (12, 19)
    assert found.median_gap_s is not None
    assert 1 <= found.median_gap_s <= 60


def test_two_tenants_repeat_nothing() -> None:
    rows = [{"request": body("x"), "salt": salt} for salt in ("anna", "bob", "anna")]
    assert count(*rows).canonical == 1


def test_from_the_command_line(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b"\n".join(lines(body("x", temperature=0), body("y"))))
    (tmp_path / "b.jsonl").write_bytes(b"\n".join(lines(body("x", temperature=0))))
    result = CliRunner().invoke(main, ["duplicates", str(tmp_path), "--json"])
    assert json.loads(result.stdout)["greedy"] == 1
    shown = CliRunner().invoke(main, ["duplicates", str(tmp_path)]).stdout
    assert "3 requests" in shown
    assert "33.3%" in shown
    (tmp_path / "b.jsonl").write_bytes(b"{}\n")
    (tmp_path / "a.jsonl").unlink()
    nothing = CliRunner().invoke(main, ["duplicates", str(tmp_path)])
    assert nothing.exit_code != 0
    assert "there is no request" in nothing.stderr
