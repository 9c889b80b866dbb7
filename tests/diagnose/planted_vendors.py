"""Logs of calls to a vendor that reads up to breakpoints: with one fault in each, and with none. They have
the shapes that other tools which look into such logs show as their examples."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from diagnose.planted import ANSWERS, DOCUMENTS, QUESTIONS, RULES, SYSTEM, Log, Row, hexes

MODEL = "claude-opus-5"
LONG = SYSTEM + "\n" + "\n".join(DOCUMENTS * 3)
FIRST = "This is what I bought: " + DOCUMENTS[0] + DOCUMENTS[1]


def text(words: str, *, is_marked: bool = False, ttl: str = "") -> Row:
    mark: Row = {"type": "ephemeral", **({"ttl": ttl} if ttl else {})}
    return {"type": "text", "text": words, **({"cache_control": mark} if is_marked else {})}


def ask(
    turns: int,
    at_s: float,
    *,
    system: str = LONG,
    is_system_marked: bool = True,
    is_end_marked: bool = True,
    usage: tuple[int, int, int] | None = None,
    ttl: str = "",
    first: str = FIRST,
) -> Row:
    """A conversation after so many turns. ``usage``: tokens neither read nor written, read, written."""
    questions = [first, *QUESTIONS]
    messages: list[Row] = []
    for n in range(turns):
        messages += [
            {"role": "user", "content": [text(questions[n])]},
            {"role": "assistant", "content": ANSWERS[n]},
        ]
    messages.append({"role": "user", "content": [text(questions[turns], is_marked=is_end_marked, ttl=ttl)]})
    row: Row = {
        "at": 1_764_544_000 + at_s,
        "body": {
            "model": MODEL,
            "max_tokens": 100,
            "system": [text(system, is_marked=is_system_marked, ttl=ttl)],
            "messages": messages,
        },
    }
    if usage is not None:
        row["usage"] = dict(zip(("input_tokens", "cache_read", "cache_write"), usage, strict=True))
    return row


def planted_vendors() -> Iterator[tuple[str, str, Log]]:
    """Name, kind and rows."""
    timed = [f"{LONG}\nNow: 2026-09-20T10:{15 + n}:00Z" for n in range(2)]
    yield (
        "time before the breakpoint, a second apart",
        "timestamp",
        [ask(n, n, system=timed[n], usage=(5, 0, 1600)) for n in range(2)],
    )
    yield (
        "the same and in time, and not read",
        "unexplained",
        [ask(n, n, usage=(5, 0, 1600)) for n in range(2)],
    )
    yield "gone before the next", "ttl_gap", [ask(n, 3600 * n, usage=(5, 0, 1600)) for n in range(2)]
    yield "last breakpoint moved up", "no_breakpoint", [ask(0, 0), ask(1, 200, is_end_marked=False)]
    yield (
        "breakpoint behind what is of one request",
        "no_breakpoint",
        [ask(0, n, first=QUESTIONS[n], is_system_marked=False, usage=(0, 0, 1700)) for n in range(2)],
    )
    steps: list[Any] = [{"role": "user", "content": [text(FIRST)]}]
    steps += [{"role": "assistant", "content": f"step {n}"} for n in range(25)]
    late = ask(0, 100, first=QUESTIONS[0], is_system_marked=False, usage=(5, 0, 1700))
    late["body"]["messages"] = [*steps, *late["body"]["messages"]]
    yield (
        "more blocks in one turn than are looked back",
        "look_back",
        [ask(0, 0, is_system_marked=False, usage=(5, 0, 1700)), late],
    )
    crowded = [ask(0, 60 * n, first=QUESTIONS[n]) for n in range(3)]
    for row in crowded:
        row["body"]["system"] = [text(f"{n}. {LONG[:900]}", is_marked=True) for n in range(5)]
    yield "five breakpoints", "too_many_breakpoints", crowded
    yield (
        "no breakpoint at all",
        "no_breakpoint",
        [
            ask(
                0, 60 * n, first=QUESTIONS[n], is_system_marked=False, is_end_marked=False, usage=(1700, 0, 0)
            )
            for n in range(4)
        ],
    )


def healthy_vendors() -> Iterator[tuple[str, Log]]:
    """Name and rows."""
    yield (
        "a conversation that is read",
        [ask(n, 60 * n, usage=(10, 1600 + 20 * n if n else 0, 20 if n else 1600)) for n in range(3)],
    )
    yield (
        "kept for an hour",
        [ask(n, 1800 * n, ttl="1h", usage=(10, 1600 * n, 20 if n else 1600)) for n in range(2)],
    )
    yield "one long turn, system marked", [ask(0, 0), ask(1, 100)]


def in_the_head(count: int = 40) -> Log:
    """Time, id and mail address in three lines above what is the same for all, for four tenants in turn."""
    rows: Log = []
    for n in range(count):
        tenant = ("Acme", "Borealis", "Cassini", "Dorado")[n % 4]
        rules = "\n".join(f"- {tenant}: {rule}" for rule in RULES)
        head = f"Time: 2026-09-11T08:{n:02}:00Z\nRequest: req_{hexes(n, 10)}\nuser: customer{n}@example.com\n"
        question = f"{QUESTIONS[n % len(QUESTIONS)]} It is order {100_000 + n}."
        rows.append(
            {"messages": [{"role": "system", "content": head + rules}, {"role": "user", "content": question}]}
        )
    return rows
