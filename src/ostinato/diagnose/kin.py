"""Which requests of a log are alike: with which earlier ones to compare one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Final

from ..prompt.lint import volatile_spans
from .diff import Diff
from .material import Asked
from .writing import Written

_BLOCK: Final = 16
_HEAD_CHARS: Final = 20_000
_LINE_CHARS: Final = 24


def space_of(asked: Asked) -> str:
    return f"{asked.salt}\0{asked.model}"


class Kin:
    """Which earlier requests to compare one with: the last of its session, of its kind, and any; the one with
    which it has the longest beginning in common; and those that had most of its lines last."""

    def __init__(self, written: Sequence[Written]) -> None:
        self._written = written
        self._chains = [_chain(each) for each in written]
        self._counts = Counter(block for chain in self._chains for block in set(chain))
        self._last: dict[tuple[str, str], int] = {}
        self._beginnings: dict[int, int] = {}
        self._lines: dict[str, int] = {}

    def of(self, number: int) -> Iterator[int]:
        each = self._written[number]
        places = [self._last[key] for key in self._keys(each) if key in self._last]
        for block in reversed(self._chains[number]):
            if block in self._beginnings:
                places.insert(1, self._beginnings[block])
                break
        votes: Counter[int] = Counter()
        for line in _lines_of(each.asked):
            if line in self._lines:
                votes[self._lines[line]] += len(line)
        places += [place for place, _ in votes.most_common(2)]
        yield from dict.fromkeys(places)

    def add(self, number: int) -> None:
        each = self._written[number]
        for key in self._keys(each):
            self._last[key] = number
        for block in self._chains[number]:
            self._beginnings[block] = number
        for line in _lines_of(each.asked):
            self._lines[line] = number

    def recurs(self, number: int, place: int) -> bool:
        """Whether other requests begin with the same tokens, up to a little behind a place."""
        chain = self._chains[number]
        block = place // _BLOCK + 1
        return block < len(chain) and self._counts[chain[block]] > 1

    def _keys(self, each: Written) -> Iterator[tuple[str, str]]:
        if each.asked.session:
            yield "session", each.asked.session
        yield "kind", _kind_of(each.asked)
        yield "any", ""


def _lines_of(asked: Asked) -> list[str]:
    """The longer lines of a prompt's beginning."""
    talk = asked.conversation
    text = asked.text or ""
    if talk is not None:
        text = "\n".join(message.content for message in talk.messages[:2])
    return [line for line in text[:_HEAD_CHARS].splitlines() if len(line) >= _LINE_CHARS]


def _chain(each: Written) -> list[int]:
    """A number for the end of each block of a prompt; equal beginnings have equal ones."""
    chain: list[int] = []
    above = hash(space_of(each.asked))
    for start in range(0, len(each.tokens) - _BLOCK + 1, _BLOCK):
        above = hash((above, each.tokens[start : start + _BLOCK].tobytes()))
        chain.append(above)
    return chain


def _kind_of(asked: Asked) -> str:
    """The words of a prompt's first line, without what may change, in any order."""
    talk = asked.conversation
    text = asked.text or (talk.messages[0].content if talk is not None and talk.messages else "")
    line = text.lstrip().partition("\n")[0][:400]
    for _, start, end in reversed(volatile_spans(line)):
        line = line[:start] + line[end:]
    return " ".join(sorted(line.split()))


def are_strangers(one: Asked, other: Asked) -> bool:
    """Whether two requests have tools and none in common: programs of different kinds."""
    names = [
        {str(tool.get("function", {}).get("name")) for tool in asked.conversation.tools}
        for asked in (one, other)
        if asked.conversation is not None
    ]
    return len(names) == 2 and all(names) and names[0].isdisjoint(names[1])


def alike(diff: Diff) -> int:
    """Tokens of ``b`` that are in ``a``, in order."""
    return sum(run.length for run in diff.runs)
