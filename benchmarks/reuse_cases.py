"""Cases for ``benchmarks/reuse.py``: a conversation that is in the cache, and one that has much of it
elsewhere.

Made under a seed from real prose (the standard library's own documentation) and made facts. Each case is two
conversations; the second is the one that is asked. Conversations go on with text: the user's turns are a
passage each and the assistant's are the next one, so that what really follows is known.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from retention_tasks import CITIES, Prose

Messages = list[dict[str, Any]]

ROLES = (
    "You are a helpful assistant. You continue the text that you are given, in its own style.",
    "You are an experienced technical writer who works for a publisher of books on programming. You continue "
    "the text that you are given so that a reader could not tell where the author ended and you began: in "
    "the same style, with the same words for the same things, and without comments of your own. Be precise.",
    "You continue texts.",
    "As a patient teacher you help people who learn to program. When somebody reads a text to you, go on "
    "with it as its author would have, and take care that every statement in it is true.",
)
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
MONTHS = (
    "January", "February", "March", "April", "May", "June", "July", "August", "September", "October",
    "November", "December",
)  # fmt: skip
PASSAGE_TOKENS = 110
NUM_DOCUMENTS = 6
DOCUMENT_TOKENS = 230


@dataclass(frozen=True)
class Case:
    """``before`` is in the cache, ``after`` is asked; ``follows`` is what its author wrote there, ``wanted``
    what an answer must contain."""

    family: str
    index: int
    before: Messages
    after: Messages
    follows: str = ""
    wanted: str = ""


def _date(chance: random.Random) -> str:
    day, year = chance.randrange(1, 29), chance.randrange(2020, 2030)
    return f"{chance.choice(DAYS)}, {day} {chance.choice(MONTHS)} {year}"


def _talk(prose: Prose, chance: random.Random, num_tokens: int) -> tuple[Messages, str]:
    """Turns of consecutive text, a user's last; and what follows."""
    sentences = prose.take(chance, num_tokens + PASSAGE_TOKENS)
    passages: list[str] = []
    taken: list[str] = []
    for sentence in sentences:
        taken.append(sentence)
        if prose.count(" ".join(taken)) >= PASSAGE_TOKENS:
            passages.append(" ".join(taken))
            taken = []
    if len(passages) % 2:
        passages.pop()
    messages = [
        {"role": ("user", "assistant")[place % 2], "content": passage}
        for place, passage in enumerate(passages[:-1])
    ]
    return messages, passages[-1]


def changed_date(chance: random.Random, prose: Prose, length: int, index: int) -> Case:
    """The date at the top of the system text is another one."""
    talk, follows = _talk(prose, chance, length)
    heads = [f"Today is {_date(chance)}. {ROLES[index % len(ROLES)]}" for _ in range(2)]
    before, after = ([{"role": "system", "content": head}, *talk] for head in heads)
    return Case("changed_date", index, before, after, follows)


def changed_role(chance: random.Random, prose: Prose, length: int, index: int) -> Case:
    """The system text is another one, of another length."""
    talk, follows = _talk(prose, chance, length)
    one, other = chance.sample(ROLES, 2)
    before, after = ([{"role": "system", "content": head}, *talk] for head in (one, other))
    return Case("changed_role", index, before, after, follows)


def different_head(chance: random.Random, prose: Prose, length: int, index: int) -> Case:
    """System text and the first eighth of the conversation are others; the rest is the same."""
    talk, follows = _talk(prose, chance, 7 * length // 8)
    one, other = chance.sample(ROLES, 2)
    heads = []
    for role in (one, other):
        head, last = _talk(prose, random.Random(f"{role} {index}"), length // 8)
        heads.append([{"role": "system", "content": role}, *head, {"role": "assistant", "content": last}])
    return Case("different_head", index, [*heads[0], *talk], [*heads[1], *talk], follows)


def shuffled_docs(chance: random.Random, prose: Prose, length: int, index: int) -> Case:
    """Six documents that came in another order, with another question; one has the answer."""
    cities = chance.sample(CITIES, NUM_DOCUMENTS)
    numbers = chance.sample(range(10_000, 99_999), NUM_DOCUMENTS)
    documents = []
    for city, number in zip(cities, numbers, strict=True):
        sentences = prose.take(chance, length // NUM_DOCUMENTS)
        sentences.insert(chance.randrange(1, len(sentences)), f"The secret number of {city} is {number}.")
        documents.append(f"Document {city}: {' '.join(sentences)}")
    system = {"role": "system", "content": "You answer questions about documents, briefly."}

    def asked(order: list[int], about: int) -> Messages:
        text = "\n\n".join(documents[place] for place in order)
        question = f"What is the secret number of {cities[about]}?"
        return [system, {"role": "user", "content": f"{text}\n\n{question}"}]

    first = list(range(NUM_DOCUMENTS))
    second = first
    while second == first:
        second = chance.sample(first, NUM_DOCUMENTS)
    about = chance.randrange(NUM_DOCUMENTS)
    before = asked(first, chance.randrange(NUM_DOCUMENTS))
    return Case("shuffled_docs", index, before, asked(second, about), wanted=str(numbers[about]))


FAMILIES: dict[str, Callable[[random.Random, Prose, int, int], Case]] = {
    "changed_date": changed_date, "changed_role": changed_role, "different_head": different_head,
    "shuffled_docs": shuffled_docs,
}  # fmt: skip
LENGTHS = (1500, 2000, 2500, 3000)


def cases(family: str, prose: Prose, seed: int = 11) -> Iterator[Case]:
    """Without end; the same case for the same index, whatever came before."""
    index = 0
    while True:
        chance = random.Random(f"{seed} {family} {index}")
        length = (
            NUM_DOCUMENTS * DOCUMENT_TOKENS if family == "shuffled_docs" else LENGTHS[index % len(LENGTHS)]
        )
        yield FAMILIES[family](chance, prose, length, index)
        index += 1
