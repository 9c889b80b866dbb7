"""A log as it would be with its faults mended: to be replayed, so that what a fix is worth is counted.

Nothing is left out of a prompt: what changes is moved behind what stays, as the fix says.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from typing import Any, Final

from ..prompt.lint import volatile_spans
from ..types import Message
from .material import Asked

Repair = Callable[[Sequence[Asked]], list[Asked]]

_MOVED_KINDS: Final = frozenset({"timestamp", "uuid", "id"})
_RARE: Final = 0.1


def repaired(requests: Sequence[Asked], kinds: Collection[str], roles: Collection[str]) -> list[Asked]:
    """The requests with faults of these kinds mended; of kinds for which nothing can be done here they stay.

    ``roles``: whose messages are at fault, ``text`` for prompts that are texts.
    """
    asked = list(requests)
    for kind, mend in _MENDS.items():
        if kind in kinds:
            asked = mend(asked)
    if moved := _MOVED_KINDS & set(kinds):
        asked = [_with_volatile_last(each, moved, roles) for each in asked]
    if {"user_data", "system_text", "content"} & set(kinds):
        asked = _with_rare_lines_last(asked, roles, with_questions="content" in kinds)
    return asked


# ---------------------------------------------------------------- texts


def _each_text(asked: Asked, change: Callable[[str, str], str]) -> Asked:
    """With every text changed: ``change(role, text)``."""
    if asked.conversation is None:
        return asked if asked.text is None else replace(asked, text=change("text", asked.text))
    messages = tuple(replace(m, content=change(m.role, m.content)) for m in asked.conversation.messages)
    return replace(asked, conversation=replace(asked.conversation, messages=messages))


def _texts(asked: Asked) -> Iterator[tuple[str, str]]:
    """Every text with its role."""
    if asked.text is not None:
        yield "text", asked.text
    for message in asked.conversation.messages if asked.conversation is not None else ():
        yield message.role, message.content


def _with_end(asked: Asked, moved: Sequence[str]) -> Asked:
    """With what was moved at the end of the newest message that is not an answer."""
    if not moved:
        return asked
    tail = "\n" + "\n".join(moved)
    if asked.conversation is None:
        return replace(asked, text=(asked.text or "") + tail)
    messages = list(asked.conversation.messages)
    for number in range(len(messages) - 1, -1, -1):
        if messages[number].role not in ("assistant", "system", "developer"):
            messages[number] = replace(messages[number], content=messages[number].content + tail)
            break
    else:
        messages.append(Message("user", tail.lstrip()))
    return replace(asked, conversation=replace(asked.conversation, messages=tuple(messages)))


def _with_volatile_last(asked: Asked, kinds: Collection[str], roles: Collection[str]) -> Asked:
    moved: list[str] = []

    def change(role: str, text: str) -> str:
        if role not in roles:
            return text
        for kind, start, end in reversed(volatile_spans(text)):
            if kind in kinds:
                moved.insert(0, text[start:end])
                text = text[:start] + text[end:]
        return text

    if "tools" in roles and asked.conversation is not None:
        tools = [json.loads(change("tools", json.dumps(tool))) for tool in asked.conversation.tools]
        asked = replace(asked, conversation=replace(asked.conversation, tools=tuple(tools)))
    return _with_end(_each_text(asked, change), moved)


def _with_rare_lines_last(
    requests: Sequence[Asked], roles: Collection[str], *, with_questions: bool
) -> list[Asked]:
    """With the lines that hardly any other request has at the end; of the system's text, or of texts.

    ``with_questions``: of messages of the user, too, where nobody has more than one.
    """
    roles = set(roles) & {"system", "developer", "text"} or {"system", "text"}
    if with_questions and all(_num_questions(asked) <= 1 for asked in requests):
        roles.add("user")
    counts: Counter[str] = Counter()
    for asked in requests:
        counts.update({line for role, text in _texts(asked) if role in roles for line in text.splitlines()})
    found: list[Asked] = []
    for asked in requests:
        moved: list[str] = []

        def change(role: str, text: str, moved: list[str] = moved) -> str:
            if role not in roles:
                return text
            kept: list[str] = []
            for line in text.splitlines():
                (kept if counts[line] > max(1, _RARE * len(requests)) or not line.strip() else moved).append(
                    line
                )
            return "\n".join(kept)

        changed = _each_text(asked, change)
        found.append(_with_end(changed, moved))
    return found


def _num_questions(asked: Asked) -> int:
    talk = asked.conversation
    return 0 if talk is None else sum(message.role == "user" for message in talk.messages)


def _one_case(requests: Sequence[Asked]) -> list[Asked]:
    """With every line written as it was first."""
    first: dict[str, str] = {}

    def change(_role: str, text: str) -> str:
        return "\n".join(first.setdefault(line.casefold(), line) for line in text.split("\n"))

    return [_each_text(asked, change) for asked in requests]


def _spaced(requests: Sequence[Asked]) -> list[Asked]:
    def change(_role: str, text: str) -> str:
        lines = (re.sub(r"[ \t\u00a0]+", " ", line).strip() for line in text.splitlines())
        return re.sub(r"\n{2,}", "\n\n", "\n".join(lines)).strip()

    return [_each_text(asked, change) for asked in requests]


def _plain_numbers(requests: Sequence[Asked]) -> list[Asked]:
    def change(_role: str, text: str) -> str:
        return re.sub(r"(?<=\d)[.,'’\u00a0\u202f ](?=\d{3}(?!\d))", "", text)

    return [_each_text(asked, change) for asked in requests]


def _composed(requests: Sequence[Asked]) -> list[Asked]:
    return [_each_text(asked, lambda _, text: unicodedata.normalize("NFKC", text)) for asked in requests]


def _sorted_texts(requests: Sequence[Asked]) -> list[Asked]:
    """With paragraphs, lines and items of a line in one order."""

    def change(role: str, text: str) -> str:
        if role == "assistant":
            return text
        blocks = [_sorted_lines(block) for block in re.split(r"\n[ \t]*\n", text)]
        return "\n\n".join(sorted(blocks) if len(blocks) > 2 else blocks)

    return [_each_text(asked, change) for asked in requests]


def _sorted_lines(block: str) -> str:
    lines = [
        ", ".join(sorted(re.split(r", ?", line))) if "," in line else line for line in block.splitlines()
    ]
    return "\n".join(sorted(lines))


# ---------------------------------------------------------------- structure


def _with_tools(requests: Sequence[Asked], change: Callable[[Sequence[Any]], Sequence[Any]]) -> list[Asked]:
    return [
        asked
        if asked.conversation is None
        else replace(
            asked, conversation=replace(asked.conversation, tools=tuple(change(asked.conversation.tools)))
        )
        for asked in requests
    ]


def _tools_by_name(requests: Sequence[Asked]) -> list[Asked]:
    return _with_tools(
        requests, lambda tools: sorted(tools, key=lambda tool: json.dumps(tool, sort_keys=True))
    )


def _keys_sorted(requests: Sequence[Asked]) -> list[Asked]:
    found = _with_tools(requests, lambda tools: [json.loads(json.dumps(t, sort_keys=True)) for t in tools])
    found = [_each_text(asked, lambda _, text: _json_sorted(text)) for asked in found]
    return [_calls_sorted(asked) for asked in found]


def _calls_sorted(asked: Asked) -> Asked:
    if asked.conversation is None:
        return asked
    messages = tuple(
        replace(m, tool_calls=tuple(replace(c, arguments=_json_sorted(c.arguments)) for c in m.tool_calls))
        for m in asked.conversation.messages
    )
    return replace(asked, conversation=replace(asked.conversation, messages=messages))


def _json_sorted(text: str) -> str:
    """A text with the JSON that it is, or that its lines are, in one order of keys."""
    try:
        value = json.loads(text)
    except ValueError:
        if "\n" not in text or "{" not in text:
            return _embedded_sorted(text)
        return "\n".join(_json_sorted(line) for line in text.split("\n"))
    return json.dumps(value, sort_keys=True, ensure_ascii=False) if isinstance(value, dict | list) else text


def _embedded_sorted(line: str) -> str:
    start = line.find("{")
    if start < 0:
        return line
    try:
        value, end = json.JSONDecoder().raw_decode(line, start)
    except ValueError:
        return line
    return line[:start] + json.dumps(value, sort_keys=True, ensure_ascii=False) + line[end:]


def _same_tools(requests: Sequence[Asked]) -> list[Asked]:
    """All tools that any request has, in every one."""
    known: dict[str, Any] = {}
    for asked in requests:
        for tool in asked.conversation.tools if asked.conversation is not None else ():
            known.setdefault(json.dumps(tool, sort_keys=True), tool)
    return _with_tools(requests, lambda tools: list(known.values()))


def _same_system(requests: Sequence[Asked]) -> list[Asked]:
    counts = Counter(
        asked.conversation.messages[0]
        for asked in requests
        if asked.conversation is not None and asked.conversation.messages
        and asked.conversation.messages[0].role in ("system", "developer")
    )  # fmt: skip
    if not counts:
        return list(requests)
    common = counts.most_common(1)[0][0]
    found: list[Asked] = []
    for asked in requests:
        talk = asked.conversation
        if talk is not None and talk.messages and talk.messages[0].role not in ("system", "developer"):
            asked = replace(asked, conversation=replace(talk, messages=(common, *talk.messages)))
        found.append(asked)
    return found


def _same_parameters(requests: Sequence[Asked]) -> list[Asked]:
    common = Counter(json.dumps(dict(asked.parameters), sort_keys=True, default=str) for asked in requests)
    values = json.loads(common.most_common(1)[0][0]) if common else {}
    return [replace(asked, parameters=values) for asked in requests]


def _same_model(requests: Sequence[Asked]) -> list[Asked]:
    common = Counter(asked.model for asked in requests).most_common(1)[0][0]
    return [replace(asked, body={**asked.body, "model": common}) for asked in requests]


def _same_salt(requests: Sequence[Asked]) -> list[Asked]:
    return [replace(asked, salt="") for asked in requests]


def _history_kept(requests: Sequence[Asked]) -> list[Asked]:
    """Every conversation with all it had before, as it was sent first."""
    kept: dict[tuple[str, str], list[Message]] = {}
    found: list[Asked] = []
    for asked in requests:
        talk = asked.conversation
        if talk is None or not talk.messages:
            found.append(asked)
            continue
        head = talk.messages[0].content if talk.messages[0].role in ("system", "developer") else ""
        session = asked.session or f"\0{head}"
        history = kept.get((session, head), [])
        messages = _goes_on(history, talk.messages)
        kept[session, head] = messages
        found.append(replace(asked, conversation=replace(talk, messages=tuple(messages))))
    return found


def _goes_on(history: Sequence[Message], messages: Sequence[Message]) -> list[Message]:
    """``history`` and those of ``messages`` that come after its end; ``messages`` where they are of
    another."""
    for number in range(len(history) - 1, 0, -1):
        for place in range(len(messages) - 1, 0, -1):
            if messages[place] == history[number] and messages[place].role != "system":
                return [*history[: number + 1], *messages[place + 1 :]]
    return list(messages)


_MENDS: Final[dict[str, Repair]] = {
    "tool_order": _tools_by_name,
    "key_order": _keys_sorted,
    "tools_changed": _same_tools,
    "default_system": _same_system,
    "parameter": _same_parameters,
    "model": _same_model,
    "salt": _same_salt,
    "history_dropped": _history_kept,
    "history_edited": _history_kept,
    "reasoning_dropped": _history_kept,
    "whitespace": _spaced,
    "unicode": _composed,
    "case": _one_case,
    "number_format": _plain_numbers,
    "order": _sorted_texts,
}
MENDED: Final = frozenset(_MENDS) | _MOVED_KINDS | {"user_data", "system_text", "content"}
"""Kinds that a log can be repaired of here."""
