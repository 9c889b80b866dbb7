"""Who says what: sessions that run side by side, their texts made here or taken from recorded agents.

A text is plain English about instruments, made from a seed and measured with the model's own tokenizer. Each
workload and repetition begins its texts differently, so that nothing computed for one helps another. Nothing
is computed ahead: the first request of a workload finds its shared text cold.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

from tokenizers import Tokenizer

from assembly import sessions as recorded_sessions

Message = dict[str, str]

SYSTEM_TOKENS = 1_500
PREFIX_TOKENS = 3_500
AGENT_TOKENS = 3_500

INSTRUMENTS = ("serpent", "lute", "viol", "cornett", "shawm", "sackbut", "rebec", "dulcian", "crumhorn")
PLACES = ("harbour", "mill", "tower", "orchard", "library", "bridge", "market", "cellar", "chapel")
PEOPLE = ("keeper", "teacher", "sailor", "widow", "baker", "clerk", "shepherd", "mason", "weaver")
DEEDS = ("repaired", "borrowed", "painted", "buried", "sold", "tuned", "copied", "carried", "hid")


@dataclass(frozen=True, slots=True)
class Conversation:
    """A system text and questions; between them stands what the server itself answered."""

    opening: str
    questions: tuple[str, ...]

    @property
    def num_requests(self) -> int:
        return len(self.questions)

    def messages(self, turn: int, answers: Sequence[str]) -> list[Message]:
        told = [{"role": "system", "content": self.opening}] if self.opening else []
        for question, answer in zip(self.questions[:turn], answers, strict=True):
            told += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        return [*told, {"role": "user", "content": self.questions[turn]}]


@dataclass(frozen=True, slots=True)
class Recorded:
    """Prompts as they were asked, whatever this model would have answered."""

    prompts: tuple[list[Message], ...]

    @property
    def num_requests(self) -> int:
        return len(self.prompts)

    def messages(self, turn: int, answers: Sequence[str]) -> list[Message]:
        return self.prompts[turn]


class Session(Protocol):
    """Requests that follow each other, each when the one before it is answered."""

    @property
    def num_requests(self) -> int: ...
    def messages(self, turn: int, answers: Sequence[str]) -> list[Message]:
        """The request of this turn, counted from 0, after these answers to the turns before it."""


@dataclass(frozen=True, slots=True)
class Workload:
    """Sessions, of which ``concurrency`` run at a time; every answer has ``answer_tokens``."""

    name: str
    what: str
    sessions: tuple[Session, ...]
    concurrency: int
    answer_tokens: int


class Author:
    """Writes text of a given length in tokens, the same for the same seed."""

    def __init__(self, tokenizer: Tokenizer, seed: str) -> None:
        self._tokenizer = tokenizer
        self._chance = random.Random(seed)

    def handbook(self, title: str, num_tokens: int) -> str:
        text = (
            f"Handbook {self._chance.randrange(10**6)} of the museum, part {title}. Answer in full sentences."
        )
        rule = 0
        while len(self._tokenizer.encode(text).ids) < num_tokens:
            rule += 1
            text += f" {rule}. {self.sentence()}"
        return text

    def sentence(self) -> str:
        pick = self._chance.choice
        return (
            f"The {pick(PEOPLE)} of the {pick(PLACES)} {pick(DEEDS)} a {pick(INSTRUMENTS)} in "
            f"{self._chance.randrange(1400, 1900)}, and the {pick(PEOPLE)} {pick(DEEDS)} it again."
        )

    def question(self) -> str:
        pick = self._chance.choice
        return (
            f"{self.sentence()} Tell me a long and detailed story about the {pick(INSTRUMENTS)} in the "
            f"{pick(PLACES)}, and what the {pick(PEOPLE)} thought of it."
        )


def workloads(tokenizer: Tokenizer, repetition: int, is_quick: bool, agents: Path | None) -> list[Workload]:
    """All of them, for one repetition; ``agents`` is a folder of recorded sessions, if there is one."""
    made = [conversations(tokenizer, repetition, count) for count in (1, 8, 32)]
    made += [shared_prefix(tokenizer, repetition, 8 if is_quick else 24)]
    made += [short(tokenizer, repetition, 16 if is_quick else 24)]
    if agents is not None:
        made += [agent_sessions(tokenizer, agents, num_requests=2 if is_quick else 3)]
    return made


def conversations(tokenizer: Tokenizer, repetition: int, count: int) -> Workload:
    # An odd number: of two turns, one cold and one warm, the median would be neither.
    turns = 3
    author = Author(tokenizer, f"conversations {count} {repetition}")
    system = author.handbook(f"{count}-{repetition}", SYSTEM_TOKENS)
    talks = [Conversation(system, tuple(author.question() for _ in range(turns))) for _ in range(count)]
    what = f"{count} at once, {turns} turns, one system text of {SYSTEM_TOKENS:,} tokens"
    return Workload(f"conversations-{count}", what, tuple(talks), count, 24 if count < 32 else 16)


def shared_prefix(tokenizer: Tokenizer, repetition: int, count: int) -> Workload:
    author = Author(tokenizer, f"prefix {repetition}")
    text = author.handbook(f"prefix-{repetition}", PREFIX_TOKENS)
    talks = [Conversation(text, (author.question(),)) for _ in range(count)]
    what = f"{count} questions behind one text of {PREFIX_TOKENS:,} tokens, 8 at once"
    return Workload("shared-prefix", what, tuple(talks), 8, 24)


def short(tokenizer: Tokenizer, repetition: int, count: int) -> Workload:
    """Nothing is shared: not even the template's own system text, since each has one of its own."""
    author = Author(tokenizer, f"short {repetition}")
    talks = [Conversation(author.sentence(), (author.question(),)) for _ in range(count)]
    return Workload("short", f"{count} questions that share nothing, 8 at once", tuple(talks), 8, 24)


def agent_sessions(tokenizer: Tokenizer, folder: Path, num_requests: int) -> Workload:
    """From each kind of agent the first sessions that have enough requests of a length that fits."""
    kinds = sorted({file.parent for file in folder.rglob("*.jsonl")})
    fitting = [prompts for kind in kinds for prompts in islice(_fitting(tokenizer, kind, num_requests), 2)]
    found = tuple(Recorded(tuple(prompts)) for prompts in fitting)
    what = f"{len(found)} agent sessions of {num_requests} requests up to {AGENT_TOKENS:,} tokens, 4 at once"
    return Workload("agents", what, found, 4, 24)


def _fitting(tokenizer: Tokenizer, kind: Path, num_requests: int) -> Iterator[list[list[Message]]]:
    for prompts in recorded_sessions(kind):
        fit = [p for p in prompts if p and _num_tokens(tokenizer, p) <= AGENT_TOKENS]
        if len(fit) >= num_requests:
            yield fit[:num_requests]


def _num_tokens(tokenizer: Tokenizer, messages: list[dict[str, Any]]) -> int:
    return sum(len(tokenizer.encode(message["content"]).ids) for message in messages)
