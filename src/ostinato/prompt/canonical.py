"""One form for what means the same, so that two prompts do not differ by accident. Opt-in, rule by rule.

Text is changed only outside of what must not change: code (fenced, indented, or between backticks),
indentation, and quoted strings. A rule whose result would move the border of any of these leaves that text
as it is. Rules are applied until nothing changes any more, so the canonical form of a canonical form is
itself, and every change is reported.

This changes what the model reads: it is the user's decision, never a default.
"""

from __future__ import annotations

import json
import re
import tomllib
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal, TypeAlias

from ..errors import ParameterError
from ..types import Change, Conversation, Message, ToolCall
from .protected import protected_spans

UnicodeForm: TypeAlias = Literal["NFC", "NFKC"]

_MAX_PASSES = 50

_LINE_END = re.compile(r"\r\n?")
_GAP = re.compile(r"(?<=[^\s])[ \t]{2,}(?=[^\s])|(?<=[^\s])\t(?=[^\s])")
_LINE_TAIL = re.compile(r"(?<![ \t])[ \t]+(?=[\r\n])")
_BLANK_LINES = re.compile(r"(\r\n|\r(?!\n)|\n)(?:\r\n|\r(?!\n)|\n){2,}")
# Names with two underscores on either side are Python's, not emphasis.
_STRONG = re.compile(r"(?<![\w*\\])__(?![\s_])(?!\w+__)([^_*\r\n]*[^\s_*])__(?![\w*])")
_EMPHASIS = re.compile(r"(?<![\w*\\])_(?![\s_])([^_*\r\n]*[^\s_*])_(?![\w*])")


@dataclass(frozen=True, slots=True)
class Replacement:
    """The user's own rule: what ``pattern`` finds outside of code becomes ``by``, as in :func:`re.sub`."""

    pattern: str
    by: str

    def __post_init__(self) -> None:
        try:
            re.sub(self.pattern, self.by, "")
        except (re.error, IndexError) as error:
            raise ParameterError(
                f"{self.pattern!r} → {self.by!r} is no replacement: {error}", param="replacements"
            ) from error


@dataclass(frozen=True, slots=True)
class CanonicalRules:
    """What to bring into one form. Every rule is off until asked for.

    Args:
        line_ends: ``\\r\\n`` and ``\\r`` become ``\\n``.
        whitespace: spaces at the ends of lines go, gaps inside a line become one space, blank lines in a row
            one blank line. (Two spaces at the end of a line are a line break in Markdown; they go, too.)
        unicode: the Unicode form.
        emphasis: ``__strong__`` and ``_emphasised_`` become ``**strong**`` and ``*emphasised*``.
        tools: tools in the order of their names; the keys of their schemas, and the names under ``required``,
            in alphabetical order.
        arguments: the JSON of tool calls with sorted keys and without spaces. It then differs from what the
            model wrote, and parts from the KV of its answer.
        replacements: more rules, in order.
        roles: the messages whose text is changed.
    """

    line_ends: bool = False
    whitespace: bool = False
    unicode: UnicodeForm | None = None
    emphasis: bool = False
    tools: bool = False
    arguments: bool = False
    replacements: tuple[Replacement, ...] = ()
    roles: tuple[str, ...] = ("system", "developer", "user")

    def __post_init__(self) -> None:
        for name in ("line_ends", "whitespace", "emphasis", "tools", "arguments"):
            if not isinstance(getattr(self, name), bool):
                raise ParameterError(f"{name} must be true or false", param=name, code="invalid_type")
        if self.unicode not in (None, "NFC", "NFKC"):
            raise ParameterError("unicode must be NFC or NFKC", param="unicode")


def read_canonical_rules(file: Path) -> CanonicalRules:
    """Rules out of a TOML file: the fields of :class:`CanonicalRules`, ``replacements`` being tables with
    ``pattern`` and ``by``.

    Raises:
        ParameterError: it cannot be read, or a rule makes no sense; the message names the file.
    """
    try:
        with file.open("rb") as opened:
            given: dict[str, Any] = tomllib.load(opened)
    except (OSError, ValueError) as error:  # a fault in TOML or in its encoding is a ValueError
        raise ParameterError(f"{file} cannot be read: {error}", param="canonical") from error
    if unknown := given.keys() - {item.name for item in fields(CanonicalRules)}:
        raise ParameterError(f"{file}: there is no rule {min(unknown)!r}", param="canonical")
    replacements, roles = given.pop("replacements", []), given.pop("roles", None)
    if not isinstance(replacements, list) or not all(
        isinstance(item, dict) and item.keys() == {"pattern", "by"} and all(map(_is_text, item.values()))
        for item in replacements
    ):
        raise ParameterError(f"{file}: replacements are tables with pattern and by", param="canonical")
    if roles is not None and not (isinstance(roles, list) and all(map(_is_text, roles))):
        raise ParameterError(f"{file}: roles are a list of names", param="canonical")
    try:
        rules = CanonicalRules(replacements=tuple(Replacement(**item) for item in replacements), **given)
    except ParameterError as error:
        raise ParameterError(f"{file}: {error}", param="canonical") from error
    return rules if roles is None else replace(rules, roles=tuple(roles))


def _is_text(value: object) -> bool:
    return isinstance(value, str)


@dataclass(frozen=True, slots=True)
class Canonical:
    """A conversation in canonical form, and what that took."""

    conversation: Conversation
    changes: tuple[Change, ...]


@dataclass(frozen=True, slots=True)
class Document:
    """A text that goes into a prompt beside others. ``score`` says how well it fits; more is better."""

    id: str
    text: str
    score: float = 0.0


def in_order(documents: Iterable[Document], by: Literal["id", "score"] = "id") -> tuple[Document, ...]:
    """Documents in an order that does not depend on how they were found.

    By ``id``, the same documents always stand in the same order. By ``score`` (then by id) the best come
    first, and a score that changes a little may change the order.

    Raises:
        ParameterError: two have the same id, or ``by`` is neither.
    """
    given = tuple(documents)
    if len({document.id for document in given}) < len(given):
        raise ParameterError("two documents have the same id", param="documents")
    if by not in ("id", "score"):
        raise ParameterError("documents are ordered by id or by score", param="by")
    return tuple(
        sorted(given, key=lambda d: (0.0 if by == "id" else -d.score, d.id))  # no ties: ids differ
    )


def canonical(conversation: Conversation, rules: CanonicalRules) -> Canonical:
    """The conversation in the form that ``rules`` say.

    Raises:
        ParameterError: the replacements go round in circles, or make ever more text.
    """
    changes: dict[Change, None] = {}
    messages = []
    steps = list(_steps(rules))
    for index, message in enumerate(conversation.messages):
        where = f"messages[{index}]"
        if message.role in rules.roles:
            content, used = _canonical_text(message.content, steps)
            changes.update((Change(rule, where), None) for rule in used)
            message = replace(message, content=content)
        if rules.arguments and message.tool_calls:
            message = _with_canonical_calls(message, where, changes)
        messages.append(message)
    tools = conversation.tools
    if rules.tools:
        tools = tuple(sorted(map(_canonical_tool, tools), key=_tool_order))
        if json.dumps(tools) != json.dumps([_plain(tool) for tool in conversation.tools]):
            changes[Change("tools", "tools")] = None
    return Canonical(Conversation(tuple(messages), tools), tuple(changes))


def canonical_text(text: str, rules: CanonicalRules) -> str:
    """One text in the form that ``rules`` say, whatever its role.

    Raises:
        ParameterError: the replacements go round in circles, or make ever more text.
    """
    return _canonical_text(text, list(_steps(rules)))[0]


# ---------------------------------------------------------------- text

_Step: TypeAlias = tuple[str, Callable[[str, bool], str]]


def _steps(rules: CanonicalRules) -> Iterator[_Step]:
    """The rules in force: their names, and what they make of a text outside of code (at the end or not)."""
    if (form := rules.unicode) is not None:
        yield "unicode", lambda text, is_last: unicodedata.normalize(form, text)
    if rules.line_ends:
        yield "line_ends", lambda text, is_last: _LINE_END.sub("\n", text)
    if rules.emphasis:
        yield "emphasis", lambda text, is_last: _EMPHASIS.sub(r"*\1*", _STRONG.sub(r"**\1**", text))
    for rule in rules.replacements:
        yield f"replace {rule.pattern}", _substitution(re.compile(rule.pattern), rule.by)
    if rules.whitespace:
        yield "whitespace", _without_loose_space


def _substitution(pattern: re.Pattern[str], by: str) -> Callable[[str, bool], str]:
    return lambda text, is_last: pattern.sub(by, text)


def _without_loose_space(text: str, is_last: bool) -> str:
    text = _LINE_TAIL.sub("", text)
    if is_last:
        text = text.rstrip(" \t")
    return _BLANK_LINES.sub(r"\1\1", _GAP.sub(" ", text))


def _canonical_text(text: str, steps: Sequence[_Step]) -> tuple[str, list[str]]:
    """The text, and the names of the rules that changed it."""
    used: dict[str, None] = {}
    max_chars = 2 * len(text) + 1_000_000
    spans = list(_spans(text))
    for _ in range(_MAX_PASSES):
        before = text
        for name, change in steps:
            changed = _outside_code(spans, change)
            if changed == text:
                continue
            changed_spans = list(_spans(changed))
            if _protected(changed_spans) == _protected(spans):
                used[name], text, spans = None, changed, changed_spans
        if text == before:
            return text, list(used)
        if len(text) > max_chars:
            break
    raise ParameterError(
        f"the rules do not settle on one text ({', '.join(used)}): what a replacement puts in must not be "
        "found by it again",
        param="replacements",
    )


_Span: TypeAlias = tuple[str, bool]


def _outside_code(spans: Sequence[_Span], change: Callable[[str, bool], str]) -> str:
    last = len(spans) - 1
    return "".join(
        span if is_protected else change(span, number == last)
        for number, (span, is_protected) in enumerate(spans)
    )


def _protected(spans: Sequence[_Span]) -> list[str]:
    return [span for span, is_protected in spans if is_protected]


def _spans(text: str) -> Iterator[_Span]:
    """The text in parts, and for each whether it must stay as it is."""
    end = 0
    for start, stop in protected_spans(text):
        if start > end:
            yield text[end:start], False
        yield text[start:stop], True
        end = stop
    if end < len(text):
        yield text[end:], False


# ---------------------------------------------------------------- tools


def _tool_order(tool: Mapping[str, Any]) -> tuple[str, str]:
    function = tool.get("function")
    name = function.get("name") if isinstance(function, Mapping) else None
    return name if isinstance(name, str) else "", json.dumps(tool)


def _canonical_tool(value: Any, key: str = "") -> Any:
    if isinstance(value, Mapping):
        return {name: _canonical_tool(value[name], name) for name in sorted(value)}
    if isinstance(value, list | tuple):
        items = [_canonical_tool(item) for item in value]
        is_names = key == "required" and all(isinstance(item, str) for item in items)
        return sorted(items) if is_names else items
    return value


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value


def _with_canonical_calls(message: Message, where: str, changes: dict[Change, None]) -> Message:
    calls = []
    for number, call in enumerate(message.tool_calls):
        arguments = _canonical_json(call.arguments)
        if arguments != call.arguments:
            changes[Change("arguments", f"{where}.tool_calls[{number}]")] = None
        calls.append(ToolCall(call.id, call.name, arguments))
    return replace(message, tool_calls=tuple(calls))


class _NotTheSameError(ValueError):
    """JSON that would not mean the same, or not be written the same, after it was read."""


def _canonical_json(text: str) -> str:
    try:
        value = json.loads(
            text, parse_float=_float, parse_constant=_refuse, object_pairs_hook=_object_without_doubles
        )
        return json.dumps(value, ensure_ascii=False, sort_keys=True, separators=(",", ":"))
    except (ValueError, RecursionError):
        return text


def _float(literal: str) -> float:
    number = float(literal)
    if repr(number) != literal:
        raise _NotTheSameError(literal)
    return number


def _refuse(literal: str) -> Any:
    raise _NotTheSameError(literal)


def _object_without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(dict(pairs)) < len(pairs):
        raise _NotTheSameError("a key stands twice")
    return dict(pairs)
