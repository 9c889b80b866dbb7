"""What a guard is, and what it may say."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias

from ..compare import Comparison

Opinion: TypeAlias = Literal["passes", "doubts", "refuses"]


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a guard found. ``reason`` names the words; empty where it passes."""

    guard: str
    opinion: Opinion
    reason: str = ""


class Guard(Protocol):
    """One way of being wrong."""

    name: str

    def judge(self, pair: Comparison) -> Verdict: ...


class Named:
    name = ""

    def passes(self) -> Verdict:
        return Verdict(self.name, "passes")

    def doubts(self, reason: str) -> Verdict:
        return Verdict(self.name, "doubts", reason)

    def refuses(self, reason: str) -> Verdict:
        return Verdict(self.name, "refuses", reason)


def listed(words: object) -> str:
    assert isinstance(words, set | frozenset | Counter | list), f"{type(words)} is no collection of words"
    return ", ".join(sorted(map(str, words)))
