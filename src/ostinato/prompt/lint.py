"""What makes prompts differ that need not: variables before stable text, and what changes by itself.

Two looks. A named prompt shows where its variables stand. A log of real requests shows what changed from one
request to another of the same kind though the text around it stayed: times, ids, numbers in another form,
lists in another order, and other content that stands before long text which is always the same. Only
differences after which the text goes on alike count: a new question at the end is none.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Final

from ..types import Message
from .registry import NamedPrompt, Part, parts_of

CountTokens = Callable[[str], int]

_BLOCK = re.compile(r"(?:(?!\n[ \t]*\n).)+(?:\n[ \t]*\n\s*|$)|\s+", re.DOTALL)

_MONTH: Final = r"(?:Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec)[a-z]*\.?"
_CLOCK: Final = (
    r"\d{1,2}:\d{2}(?::\d{2}(?:[.,]\d+)?)?(?: ?[AaPp]\.?[Mm]\.?)?(?: ?(?:Z|UTC|GMT|[+-]\d{2}:?\d{2}))?"
)
_DATE: Final = (
    rf"(?:\d{{4}}[-/.]\d{{1,2}}[-/.]\d{{1,2}}|\d{{1,2}}[-/.]\d{{1,2}}[-/.]\d{{2,4}}"
    rf"|{_MONTH} \d{{1,2}}(?:st|nd|rd|th)?,? \d{{4}}|\d{{1,2}}\.? {_MONTH},? \d{{4}})"
)
_LABELLED: Final = r"[A-Za-z]{2,16}[-_](?=[A-Za-z_-]{0,63}\d)[A-Za-z0-9_-]{6,64}"
_EPOCH: Final = r"\b1[5-9]\d{8}(?:\d{3}){0,2}\b"
# In the order in which they are tried; a number is only a finding when it is the same number.
_KINDS: Final = (
    ("uuid", re.compile(r"\b[0-9a-f]{8}-(?:[0-9a-f]{4}-){3}[0-9a-f]{12}\b", re.IGNORECASE)),
    ("timestamp", re.compile(rf"{_DATE}(?:(?:[T,]? ?|T| at ){_CLOCK})?|\b{_CLOCK}|{_EPOCH}")),
    ("id", re.compile(rf"\b(?:[0-9a-f]{{16,64}}|{_LABELLED})\b")),
    ("number format", re.compile(r"\d(?:[\d.,'’\u00a0\u202f ]*\d)?")),
)  # fmt: skip
_WORD = re.compile(r"\w+")
_LIST = re.compile(r"[,;|]")
_MAX_LINES = 200
_REACH = 80
_ALIKE_CHARS = 24
# Content that changes is worth a word only before so much text that does not.
_LONG_ALIKE_CHARS = 200
_MIN_LINE_CHARS = 20


@dataclass(frozen=True, slots=True)
class OrderAdvice:
    """Where a named prompt loses tokens.

    ``variables`` stand before stable text. Of ``stable_tokens`` only the first ``shared_tokens`` are the same
    in every call; in the order of ``proposal`` it would be ``lost_tokens`` more. Tokens are those of the
    contents, each by itself.
    """

    prompt: str
    variables: tuple[str, ...]
    stable_tokens: int
    shared_tokens: int
    lost_tokens: int
    proposal: tuple[Message, ...]


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that changes in text that stays.

    ``kind`` is ``timestamp``, ``uuid``, ``id``, ``number format``, ``order`` or ``content``. ``before`` is
    the text it stands behind. ``lost_tokens`` counts the tokens behind it that stayed the same and yet could
    not be found in a cache, per request on average.
    """

    kind: str
    before: str
    examples: tuple[str, ...]
    num_requests: int
    lost_tokens: int


def lint_prompt(prompt: NamedPrompt, count: CountTokens) -> OrderAdvice:
    """Look where the variables of a prompt stand, and propose the order with the variables last.

    Paragraphs are moved whole, in their order: those with variables to the end of the last message that is
    not the assistant's. What the assistant says stays where it is.
    """
    parts = [part for message in prompt.messages for part in parts_of(message.content)]
    last_stable = max(
        (number for number, part in enumerate(parts) if not part.is_variable and part.text.strip()),
        default=-1,
    )
    early = dict.fromkeys(part.text for part in parts[: last_stable + 1] if part.is_variable)
    proposal = _variables_last(prompt.messages)
    shared = _shared_tokens(prompt.messages, count)
    lost = max(0, _shared_tokens(proposal, count) - shared)
    return OrderAdvice(
        prompt.name,
        tuple(early),
        sum(count(part.text) for part in parts if not part.is_variable),
        shared,
        lost,
        proposal if lost else prompt.messages,
    )


def _variables_last(messages: tuple[Message, ...]) -> tuple[Message, ...]:
    target = max((at for at, message in enumerate(messages) if message.role != "assistant"), default=-1)
    proposed: list[Message] = []
    moving: list[str] = []
    for at, message in enumerate(messages):
        if message.role == "assistant":
            proposed.append(message)
            continue
        blocks = [match[0] for match in _BLOCK.finditer(message.content)]
        stable = [block for block in blocks if not _has_variable(block)]
        moved = [block for block in blocks if _has_variable(block)]
        if not moved and at != target:
            proposed.append(message)
            continue
        moving = [*(f"{block.rstrip()}\n\n" for block in moving), *moved]
        if at == target:
            if stable and moving and not stable[-1].endswith("\n\n"):
                stable[-1] = stable[-1].rstrip("\n") + "\n\n"
            if moving and (stable or len(moving) > len(moved)):
                moving[-1] = moving[-1].rstrip("\n")
            stable += moving
        elif stable:
            stable[-1] = stable[-1].rstrip("\n")
        if stable:
            proposed.append(replace(message, content="".join(stable)))
    return tuple(proposed)


def _has_variable(text: str) -> bool:
    return any(part.is_variable for part in parts_of(text))


def _shared_tokens(messages: tuple[Message, ...], count: CountTokens) -> int:
    """Tokens of the contents up to the first variable."""
    total = 0
    for message in messages:
        first: Part | None = next(parts_of(message.content), None)
        if first is None:
            continue
        if first.is_variable:
            break
        total += count(first.text)
        if first.text != message.content:
            break
    return total


# ---------------------------------------------------------------- real requests


def lint_requests(requests: Iterable[str], count: CountTokens) -> tuple[Finding, ...]:
    """Compare every request with the one before it that begins alike; the costliest findings first."""
    latest: dict[tuple[str, ...], str] = {}
    examples: dict[tuple[str, str], dict[str, None]] = {}
    lost: dict[tuple[str, str], list[int]] = {}
    for request in requests:
        key = _kin(request)
        before = latest.get(key)
        latest[key] = request
        if before is None or before == request:
            continue
        for kind, context, pair, text in _differences(before, request):
            place = (kind, context)
            examples.setdefault(place, {}).update(dict.fromkeys(pair))
            lost.setdefault(place, []).append(count(text))
    findings = [
        Finding(
            kind, context, tuple(examples[kind, context])[:4], len(tokens), round(sum(tokens) / len(tokens))
        )
        for (kind, context), tokens in lost.items()
    ]
    return tuple(sorted(findings, key=lambda f: (-f.lost_tokens * f.num_requests, f.kind, f.before)))


def _kin(request: str) -> tuple[str, ...]:
    """What requests of one kind have in common: the words of the first line, without what may change."""
    line = request.lstrip().partition("\n")[0][:400]
    for _, pattern in _KINDS:
        line = pattern.sub("0", line)
    return tuple(sorted(_WORD.findall(line)))


def _differences(first: str, second: str) -> Iterator[tuple[str, str, tuple[str, str], str]]:
    """Kind, text before, both versions, and the text after it that stayed, up to the next difference."""
    a = b = 0
    found: tuple[str, str, tuple[str, str]] | None = None
    while True:
        common = _common_length(first, second, a, b)
        if found is not None:
            if common < min(_ALIKE_CHARS, len(second) - b) or not _WORD.search(second, b, b + common):
                return
            yield (*found, second[b : b + common])
        a, b = a + common, b + common
        if a >= len(first) or b >= len(second):
            return
        step = (
            _volatile(first, second, a, b)
            or _reordered(first, second, a, b)
            or _other_content(first, second, a, b)
        )
        if step is None:
            return
        kind, (start, a), (start_b, end_b) = step
        line = second[:start_b].rpartition("\n")[2] or second[max(0, start_b - 30) : start_b]
        found = (kind, _masked(line[-30:]), (first[start:a], second[start_b:end_b]))
        b = end_b


_Span = tuple[int, int]


def _volatile(first: str, second: str, a: int, b: int) -> tuple[str, _Span, _Span] | None:
    """The times, ids or numbers in which both texts part here."""
    for kind, pattern in _KINDS:
        one, other = _around(pattern, first, a), _around(pattern, second, b)
        if one is None or other is None or a - one[0] != b - other[0]:
            continue
        if kind == "number format":
            texts = first[slice(*one)], second[slice(*other)]
            if re.sub(r"\D", "", texts[0]) != re.sub(r"\D", "", texts[1]):
                continue
        return kind, one, other
    return None


def _around(pattern: re.Pattern[str], text: str, place: int) -> _Span | None:
    """Where ``pattern`` matches around ``place``; what the texts part in may be its very end."""
    window = max(0, place - _REACH)
    for match in pattern.finditer(text, window, place + _REACH):
        if match.start() <= place <= match.end() and match.end() > match.start():
            return match.span()
    return None


def _reordered(first: str, second: str, a: int, b: int) -> tuple[str, _Span, _Span] | None:
    """The lines, or the items of one line, that are the same here in another order."""
    start_a, start_b = first.rfind("\n", 0, a) + 1, second.rfind("\n", 0, b) + 1
    lines_a = first[start_a:].splitlines(keepends=True)[:_MAX_LINES]
    lines_b = second[start_b:].splitlines(keepends=True)[:_MAX_LINES]
    one, other = "".join(lines_a[:1]), "".join(lines_b[:1])
    if _LIST.search(one) and one != other and sorted(_WORD.findall(one)) == sorted(_WORD.findall(other)):
        return "order", (start_a, start_a + len(one)), (start_b, start_b + len(other))
    for number in range(2, min(len(lines_a), len(lines_b)) + 1):
        if sorted(map(str.strip, lines_a[:number])) == sorted(map(str.strip, lines_b[:number])):
            end_a = start_a + sum(map(len, lines_a[:number]))
            end_b = start_b + sum(map(len, lines_b[:number]))
            return "order", (start_a, end_a), (start_b, end_b)
    return None


def _other_content(first: str, second: str, a: int, b: int) -> tuple[str, _Span, _Span] | None:
    """Any text here, if long text follows it that is the same in both."""
    places: dict[str, int] = {}
    place = a
    for line in first[a:].splitlines(keepends=True):
        if len(line) >= _MIN_LINE_CHARS and place > a:
            places.setdefault(line, place)
        place += len(line)
    place = b
    for line in second[b:].splitlines(keepends=True):
        at = places.get(line) if place > b else None
        if at is not None and _common_length(first, second, at, place) >= _LONG_ALIKE_CHARS:
            return "content", (a, at), (b, place)
        place += len(line)
    return None


def _masked(context: str) -> str:
    for _, pattern in _KINDS:
        context = pattern.sub("…", context)
    return context


def _common_length(first: str, second: str, a: int, b: int) -> int:
    low, high = 0, min(len(first) - a, len(second) - b)
    while low < high:
        middle = (low + high + 1) // 2
        if first[a + low : a + middle] == second[b + low : b + middle]:
            low = middle
        else:
            high = middle - 1
    return low


def is_volatile(text: str) -> bool:
    """Whether there is a time, a uuid or an id in it: what is likely to be another one next time."""
    return any(pattern.search(text) for name, pattern in _KINDS if name != "number format")


def volatile_spans(text: str) -> list[tuple[str, int, int]]:
    """The times, uuids and ids in a text, in order: kind, start and end. None lies in another."""
    found: list[tuple[str, int, int]] = []
    for name, pattern in _KINDS:
        if name == "number format":
            continue
        for match in pattern.finditer(text):
            if not any(start < match.end() and match.start() < end for _, start, end in found):
                found.append((name, *match.span()))
    return sorted(found, key=lambda item: item[1])
