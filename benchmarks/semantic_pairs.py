"""Pairs of questions, and of conversations, out of the files in ``semantic_data``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

DATA = Path(__file__).parent / "semantic_data"
REWORDED, TRAP = "reworded", "trap"


@dataclass(frozen=True, slots=True)
class Pair:
    """``kind``: "reworded", another way of saying the same, or the kind of trap; ``group``: of one block."""

    one: str
    other: str
    is_same: bool
    kind: str
    group: int


@dataclass(frozen=True, slots=True)
class Chats:
    """Two conversations: turns of user and assistant in turn, the last the user's."""

    one: tuple[str, ...]
    other: tuple[str, ...]
    is_same: bool
    kind: str
    group: int


@dataclass(frozen=True, slots=True)
class Block:
    """One question, others that ask the same, and traps with their kinds."""

    question: str
    same: tuple[str, ...]
    traps: tuple[tuple[str, str], ...]


def read_blocks(name: str) -> list[Block]:
    """The blocks of a file in ``semantic_data``."""
    blocks: list[Block] = []
    lines = (DATA / name).read_text("utf-8").splitlines()
    for line in lines:
        if not line.strip() or line.startswith("#"):
            continue
        if line.startswith("= "):
            last = blocks[-1]
            blocks[-1] = Block(last.question, (*last.same, line[2:]), last.traps)
        elif line.startswith("! "):
            kind, _, text = line[2:].partition(": ")
            last = blocks[-1]
            blocks[-1] = Block(last.question, last.same, (*last.traps, (kind, text)))
        else:
            blocks.append(Block(line, (), ()))
    return blocks


def pairs_of(blocks: list[Block], *, crossed: bool = False) -> Iterator[Pair]:
    """Each question with what belongs to it; ``crossed``: also what belongs to it with one another."""
    for group, block in enumerate(blocks):
        for text in block.same:
            yield Pair(block.question, text, True, REWORDED, group)
        for kind, text in block.traps:
            yield Pair(block.question, text, False, kind, group)
        if crossed:
            for one, other in combinations(block.same, 2):
                yield Pair(one, other, True, REWORDED, group)
            for text in block.same:
                for kind, trap in block.traps:
                    yield Pair(text, trap, False, kind, group)


def chats_of(blocks: list[Block]) -> Iterator[Chats]:
    """The same of a file of conversations."""
    for group, block in enumerate(blocks):
        turns = _turns(block.question)
        for text in block.same:
            yield Chats(turns, _turns(text), True, REWORDED, group)
        for kind, text in block.traps:
            yield Chats(turns, _turns(text), False, kind, group)


def _turns(line: str) -> tuple[str, ...]:
    turns = tuple(part.strip() for part in line.split(" | "))
    assert len(turns) % 2 == 1, f"a conversation that does not end with its user: {line}"
    return turns
