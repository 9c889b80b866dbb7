"""Tasks for ``benchmarks/retention.py``: long prompts with something in them that is asked for at the end.

All are generated under a seed from the standard library's own documentation (real prose) and made facts. The
kinds follow RULER (Hsieh et al., arXiv 2404.06654): one needle, one needle among others of its kind, several
asked at once; and two of our own for conversations: a fact of the first turn that is quiet for the whole
conversation, and facts spread over its turns. Tracing variables and counting words are left out: the default
model does not do them with all of its KV.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

Messages = list[dict[str, Any]]

CITIES = (
    "Lisbon", "Oslo", "Cairo", "Lima", "Hanoi", "Quito", "Dublin", "Nairobi", "Prague", "Havana", "Athens",
    "Bogota", "Seoul", "Vienna", "Tunis", "Manila", "Warsaw", "Riga", "Dakar", "Sofia",
)  # fmt: skip
SYSTEM = "You are a helpful assistant. You answer questions about the text you are given, briefly."
TOPICS = (
    "formatstrings", "compound", "execmodel", "strings", "types", "specialnames", "imports", "expressions",
    "class", "try", "with", "customization", "attribute-access", "typesmapping", "bltin-types", "debugger",
)  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A conversation, and what its answer must contain."""

    task: str
    index: int
    messages: Messages
    wanted: tuple[str, ...]

    def score(self, answer: str) -> float:
        """The part of what was wanted that the answer has."""
        found = set(re.findall(r"\d+", answer))
        return sum(number in found for number in self.wanted) / len(self.wanted)


@dataclass(frozen=True)
class Prose:
    """Sentences of real text, and how long they are."""

    sentences: tuple[str, ...]
    count: Callable[[str], int]

    @classmethod
    def load(cls, count: Callable[[str], int]) -> Prose:
        from pydoc_data.topics import topics

        text = " ".join(topics[name] for name in TOPICS if name in topics)
        sentences = re.split(r"(?<=[.:])\s+", re.sub(r"[*`\\~=\-]{2,}|\s+", " ", text))
        return cls(tuple(s for s in sentences if 30 < len(s) < 300), count)

    def take(self, chance: random.Random, num_tokens: int) -> list[str]:
        """Consecutive sentences of about so many tokens."""
        place, taken, total = chance.randrange(len(self.sentences)), [], 0
        while total < num_tokens:
            taken.append(self.sentences[place % len(self.sentences)])
            total += self.count(taken[-1] + " ")
            place += 1
        return taken

    def texts(self, encode: Callable[[str], Any], num_tokens: int, count: int) -> Iterator[list[int]]:
        """Token ids of consecutive sentences, each text from another place."""
        for index in range(count):
            chance = random.Random(f"text {index}")
            yield encode(" ".join(self.take(chance, num_tokens + 50)))[:num_tokens].tolist()


def _fact(city: str, number: int) -> str:
    return f"The secret number of {city} is {number}."


def _numbers(chance: random.Random, count: int) -> list[tuple[str, int]]:
    return list(zip(chance.sample(CITIES, count), chance.sample(range(10_000, 99_999), count), strict=True))


def _document(chance: random.Random, prose: Prose, length: int, facts: list[str], depths: list[float]) -> str:
    sentences = prose.take(chance, length)
    places = sorted(
        ((int(depth * len(sentences)), fact) for depth, fact in zip(depths, facts, strict=True)), reverse=True
    )
    for place, fact in places:
        sentences.insert(place, fact)
    return " ".join(sentences)


def _asked(document: str, question: str) -> Messages:
    return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": f"{document}\n\n{question}"}]


def needle(chance: random.Random, prose: Prose, length: int, index: int) -> Case:
    """One fact; its depth goes through the whole text as cases go on."""
    ((city, number),) = _numbers(chance, 1)
    document = _document(chance, prose, length, [_fact(city, number)], [(index % 10 + chance.random()) / 10])
    return Case("needle", index, _asked(document, f"What is the secret number of {city}?"), (str(number),))


def multikey(chance: random.Random, prose: Prose, length: int, index: int) -> Case:
    """Four facts of one kind; one is asked for."""
    pairs = _numbers(chance, 4)
    depths = [(place + chance.random()) / 4 for place in range(4)]
    document = _document(chance, prose, length, [_fact(*pair) for pair in pairs], depths)
    city, number = pairs[index % 4]
    return Case("multikey", index, _asked(document, f"What is the secret number of {city}?"), (str(number),))


def multineedle(chance: random.Random, prose: Prose, length: int, index: int) -> Case:
    """Two facts; both are asked for."""
    (one, first), (two, second) = _numbers(chance, 2)
    facts = [_fact(one, first), _fact(two, second)]
    document = _document(chance, prose, length, facts, [chance.random() / 2, (1 + chance.random()) / 2])
    question = f"What is the secret number of {one}, and what is the secret number of {two}?"
    return Case("multineedle", index, _asked(document, question), (str(first), str(second)))


def _chatter(chance: random.Random, prose: Prose, length: int) -> Messages:
    text = " ".join(prose.take(chance, length))
    return [
        {"role": "user", "content": f"Here is something I read: {text}"},
        {"role": "assistant", "content": "Thank you for sharing this."},
    ]


def quiet(chance: random.Random, prose: Prose, length: int, index: int) -> Case:
    """A fact of the first turn, of which nothing is said until the end."""
    ((city, number),) = _numbers(chance, 1)
    messages: Messages = [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": f"Please remember this. {_fact(city, number)}"},
        {"role": "assistant", "content": "I will remember it."},
    ]
    for _ in range(6):
        messages += _chatter(chance, prose, length // 6)
    messages.append({"role": "user", "content": f"What is the secret number of {city}?"})
    return Case("quiet", index, messages, (str(number),))


def turns(chance: random.Random, prose: Prose, length: int, index: int) -> Case:
    """A fact in every other turn; one is asked for."""
    pairs = _numbers(chance, 3)
    messages: Messages = [{"role": "system", "content": SYSTEM}]
    for pair in pairs:
        messages += _chatter(chance, prose, length // 6)
        messages.append({"role": "user", "content": f"Note this. {_fact(*pair)}"})
        messages.append({"role": "assistant", "content": "I have noted it."})
        messages += _chatter(chance, prose, length // 6)
    city, number = pairs[index % 3]
    messages.append({"role": "user", "content": f"What is the secret number of {city}?"})
    return Case("turns", index, messages, (str(number),))


TASKS: dict[str, Callable[[random.Random, Prose, int, int], Case]] = {
    "needle": needle, "multikey": multikey, "multineedle": multineedle, "quiet": quiet, "turns": turns,
}  # fmt: skip


def cases(task: str, prose: Prose, length: int, seed: int = 7) -> Iterator[Case]:
    """Without end; the same case for the same index, whatever came before."""
    index = 0
    while True:
        yield TASKS[task](random.Random(f"{seed} {task} {length} {index}"), prose, length, index)
        index += 1
