"""Tool calls in answers: found where the model's format says they stand, and read.

Which format that is shows in what the template makes of a call in the history: the model was taught to write
it the same way. Four are known::

    tagged    text, then <tool_call>{"name": …, "arguments": {…}}</tool_call>, once or more   (Qwen, Hermes)
    json      nothing but {"name": …, "parameters": {…}}                                      (Llama 3.1)
    list      text, then [TOOL_CALLS] [{"name": …, "arguments": {…}}, …]                      (Mistral)
    channels  messages with headers, a call being one to=functions.name                       (gpt-oss)

What is not exactly a call stays what it was, text. A call's arguments are the very JSON text that the model
wrote, so that it comes back in the same tokens where the template writes it as it is. Readers hold back what
may become a call, and give calls when they are complete.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, Final, Protocol

from ..errors import ConversationError, TemplateError
from ..types import Conversation, Message, ToolCall
from .base import Template

_MAX_NAME_CHARS = 256


@dataclass(frozen=True, slots=True)
class ReadCall:
    """A call as the model wrote it. ``arguments`` is a JSON object's text; ``id`` is often empty."""

    name: str
    arguments: str
    id: str = ""


@dataclass(frozen=True, slots=True)
class Piece:
    """What is certain of an answer: its content, its thoughts, and calls that are complete."""

    content: str = ""
    reasoning: str = ""
    calls: tuple[ReadCall, ...] = ()


class CallReader(Protocol):
    """Reads one answer."""

    def push(self, text: str, marker: str = "") -> Piece:
        """More text, and the special token after it if there is one: all that is certain now."""

    def finish(self, *, is_whole: bool) -> Piece:
        """No more of it: the rest. ``is_whole``: the model ended it by itself."""


@dataclass(frozen=True, slots=True)
class CallSyntax:
    """How a format writes calls.

    ``markers`` are the special tokens a reader must be told of, where the model has them as such.
    ``id_chars`` is how long an id must be, 0 for any length. ``always``: the reader is needed even where no
    tools are offered, because more than calls is written in this way.
    """

    name: str
    markers: frozenset[str]
    reader: Callable[[Collection[str], Collection[str]], CallReader]
    id_chars: int = 0
    always: bool = False

    def read(self, tool_names: Collection[str], special_tokens: Collection[str]) -> CallReader:
        """A fresh reader for an answer by a model that knows these tools and special tokens."""
        return self.reader(tool_names, self.markers.intersection(special_tokens))


# ---------------------------------------------------------------- JSON with the places of its values


def _refuse_constant(text: str) -> Any:
    raise ValueError(f"{text} is no JSON")


_DECODER: Final = json.JSONDecoder(parse_constant=_refuse_constant)
_SPACE = re.compile(r"[ \t\r\n]*")


def _after_space(text: str, at: int) -> int:
    match = _SPACE.match(text, at)
    assert match is not None, "the pattern matches anywhere"
    return match.end()


def _expect(text: str, at: int, character: str) -> int:
    at = _after_space(text, at)
    if text[at : at + 1] != character:
        raise ValueError(f"expected {character!r} at {at}")
    return at + 1


def _members(text: str, at: int) -> tuple[dict[str, tuple[Any, str]], int]:
    """The members of the object at ``at``, each as value and text, and where it ends."""
    members: dict[str, tuple[Any, str]] = {}
    at = _after_space(text, _expect(text, at, "{"))
    if text[at : at + 1] == "}":
        return members, at + 1
    while True:
        key, at = _DECODER.raw_decode(text, _after_space(text, at))
        if not isinstance(key, str) or key in members:
            raise ValueError("a key is no text, or there twice")
        start = _after_space(text, _expect(text, at, ":"))
        value, at = _DECODER.raw_decode(text, start)
        members[key] = value, text[start:at]
        at = _after_space(text, at)
        if text[at : at + 1] == "}":
            return members, at + 1
        at = _expect(text, at, ",")


def _call_at(text: str, at: int, arguments_key: str) -> tuple[ReadCall, int]:
    """The call at ``at`` and where it ends. Raises ValueError where there is none."""
    members, end = _members(text, at)
    name, _ = members.get("name", (None, ""))
    if not isinstance(name, str) or not 0 < len(name) <= _MAX_NAME_CHARS or not name.isprintable():
        raise ValueError("a call needs a name")
    arguments, written = members.get(arguments_key, ({}, "{}"))
    if not isinstance(arguments, dict):
        raise ValueError("arguments are an object")
    call_id, _ = members.get("id", ("", ""))
    return ReadCall(name, written, call_id if isinstance(call_id, str) else ""), end


def _calls(text: str, read: Callable[[str], tuple[ReadCall, ...]]) -> tuple[ReadCall, ...]:
    """What ``read`` finds; nothing where the text is no call."""
    try:
        return read(text)
    except (ValueError, RecursionError):
        return ()


def _one_call(text: str, arguments_key: str) -> tuple[ReadCall, ...]:
    call, end = _call_at(text, _after_space(text, 0), arguments_key)
    if _after_space(text, end) != len(text):
        raise ValueError("there is more than a call")
    return (call,)


def _list_of_calls(text: str) -> tuple[ReadCall, ...]:
    calls: list[ReadCall] = []
    at = _expect(text, 0, "[")
    while True:
        call, at = _call_at(text, _after_space(text, at), "arguments")
        calls.append(call)
        at = _after_space(text, at)
        if text[at : at + 1] == "]":
            break
        at = _expect(text, at, ",")
    if _after_space(text, at + 1) != len(text):
        raise ValueError("there is more than a list of calls")
    return tuple(calls)


# ---------------------------------------------------------------- readers


class TaggedReader:
    """``<tool_call>{…}</tool_call>``. One line break before a tag belongs to the format, not to the text."""

    _OPEN, _CLOSE = "<tool_call>", "</tool_call>"

    def __init__(self, tool_names: Collection[str], special: Collection[str]) -> None:
        # Where the tags are special tokens, text that spells them is no tag.
        self._open = "" if self._OPEN in special else self._OPEN
        self._close = "" if self._CLOSE in special else self._CLOSE
        self._held = ""
        self._is_inside = False
        self._searched = 0
        self._has_called = False
        self._lead = ""

    def push(self, text: str, marker: str = "") -> Piece:
        self._held += text
        content, calls = "", list[ReadCall]()
        while (tag := self._next_tag()) is not None:
            before, self._held = self._held[: tag[0]], self._held[tag[1] :]
            content += self._at_tag(before, calls)
        if marker == (self._CLOSE if self._is_inside else self._OPEN):
            before, self._held = self._held, ""
            content += self._at_tag(before, calls)
        elif not self._is_inside:
            certain = self._certain()
            content += self._held[:certain]
            self._held, self._searched = self._held[certain:], 0
        return Piece(content, calls=tuple(calls))

    def finish(self, *, is_whole: bool) -> Piece:
        rest, self._held = self._held, ""
        if self._is_inside:
            return Piece(f"{self._lead}{self._OPEN}{rest}")
        return Piece("" if self._has_called and not rest.strip() else rest)

    def _next_tag(self) -> tuple[int, int] | None:
        tag = self._close if self._is_inside else self._open
        place = self._held.find(tag, self._searched) if tag else -1
        if place >= 0:
            return place, place + len(tag)
        self._searched = max(0, len(self._held) - len(tag) + 1)
        return None

    def _at_tag(self, before: str, calls: list[ReadCall]) -> str:
        """Go over a tag; what stood before it, as far as it is content."""
        self._searched = 0
        self._is_inside = not self._is_inside
        if self._is_inside:
            text = before.removesuffix("\n")
            self._lead = before[len(text) :]
            return text
        found = _calls(before, lambda text: _one_call(text, "arguments"))
        calls.extend(found)
        self._has_called |= bool(found)
        return "" if found else f"{self._lead}{self._OPEN}{before}{self._CLOSE}"

    def _certain(self) -> int:
        """How much of the held text is content, whatever comes."""
        held = self._held
        for length in range(min(len(held), len(self._open) - 1), 0, -1):
            if self._open.startswith(held[-length:]):
                break
        else:
            length = 0
        certain = len(held) - length
        if self._has_called and not held[:certain].strip():
            return 0  # white space between calls, unless there is more text
        return certain - held[:certain].endswith("\n")


class JsonReader:
    """An answer that is a call of an offered tool from beginning to end, or none."""

    def __init__(self, tool_names: Collection[str], special: Collection[str]) -> None:
        self._tool_names = frozenset(tool_names)
        self._held: list[str] = []
        self._may_call: bool | None = None

    def push(self, text: str, marker: str = "") -> Piece:
        if self._may_call is None and text.strip():
            self._may_call = text.lstrip().startswith("{")
        self._held.append(text)
        return Piece() if self._may_call is not False else self._rest()

    def finish(self, *, is_whole: bool) -> Piece:
        rest = self._rest()
        if not is_whole or not self._may_call:
            return rest
        calls = _calls(rest.content, lambda text: _one_call(text, "parameters"))
        return Piece(calls=calls) if calls and calls[0].name in self._tool_names else rest

    def _rest(self) -> Piece:
        text = "".join(self._held)
        self._held.clear()
        return Piece(text)


class ListReader:
    """``[TOOL_CALLS] [{…}, …]`` to the end of the answer."""

    _TAG = "[TOOL_CALLS]"

    def __init__(self, tool_names: Collection[str], special: Collection[str]) -> None:
        self._tag = "" if self._TAG in special else self._TAG
        self._held = ""
        self._is_inside = False

    def push(self, text: str, marker: str = "") -> Piece:
        self._held += text
        if self._is_inside:
            return Piece()
        content = ""
        place = self._held.find(self._tag) if self._tag else -1
        if place >= 0:
            content, self._held = self._held[:place], self._held[place + len(self._tag) :]
            self._is_inside = True
        elif marker == self._TAG:
            content, self._held = self._held, ""
            self._is_inside = True
        else:
            keep = next(
                (n for n in range(len(self._tag) - 1, 0, -1) if self._held.endswith(self._tag[:n])), 0
            )
            content, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return Piece(content)

    def finish(self, *, is_whole: bool) -> Piece:
        text, self._held = self._held, ""
        calls = _calls(text, _list_of_calls) if self._is_inside and is_whole else ()
        return Piece(calls=calls) if calls else Piece(f"{self._tag}{text}" if self._is_inside else text)


class ChannelReader:
    """Harmony's messages: the final channel is content, analysis is thought, ``to=functions.…`` is a call."""

    _RECIPIENT = re.compile(r"to=functions\.([^\s<]+)")
    _CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")

    def __init__(self, tool_names: Collection[str], special: Collection[str]) -> None:
        self._offers_tools = bool(tool_names)
        self._header = ""
        self._body: str | None = None
        self._name = ""
        self._is_thought = False

    def push(self, text: str, marker: str = "") -> Piece:
        piece = self._text(text)
        if marker in ("<|channel|>", "<|constrain|>") and self._body is None:
            self._header += marker
        elif marker == "<|message|>" and self._body is None:
            self._begin()
        elif marker in ("<|start|>", "<|end|>", "<|call|>", "<|return|>"):
            ended = self._end(is_whole=True)
            piece = Piece(piece.content + ended.content, piece.reasoning, ended.calls)
        return piece

    def finish(self, *, is_whole: bool) -> Piece:
        if self._body is None and self._header and "<|channel|>" not in self._header:
            return Piece(self._header)  # it never began a message: it is text
        return self._end(is_whole=is_whole)

    def _text(self, text: str) -> Piece:
        if self._body is None:
            self._header += text
        elif self._name:
            self._body += text
        elif self._is_thought:
            return Piece(reasoning=text)
        else:
            return Piece(text)
        return Piece()

    def _begin(self) -> None:
        recipient = self._RECIPIENT.search(self._header)
        channel = self._CHANNEL.search(self._header)
        self._name = recipient[1] if recipient and self._offers_tools else ""
        self._is_thought = not self._name and channel is not None and channel[1] == "analysis"
        self._body = ""

    def _end(self, *, is_whole: bool) -> Piece:
        name, body = self._name, self._body or ""
        self._header, self._body, self._name, self._is_thought = "", None, "", False
        if not name:
            return Piece()
        # Read as the arguments of a call, for the same checks.
        wrapped = f'{{"name": {json.dumps(name)}, "arguments": {body}}}'
        calls = _calls(wrapped, lambda text: _one_call(text, "arguments")) if is_whole else ()
        return Piece(calls=calls) if calls else Piece(body)


_TAGGED: Final = CallSyntax("tagged", frozenset({"<tool_call>", "</tool_call>"}), TaggedReader)
_JSON: Final = CallSyntax("json", frozenset(), JsonReader)
_LIST: Final = CallSyntax("list", frozenset({"[TOOL_CALLS]"}), ListReader, id_chars=9)
_CHANNELS: Final = CallSyntax(
    "channels",
    frozenset(
        {"<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>"}
    ),
    ChannelReader,
    always=True,
)

# What the sample call looks like in each, wherever a template puts the keys of its object.
_LOOKS: Final = (
    (re.compile(r"<tool_call>\s*\{[^<]*\"look\"[^<]*\}\s*</tool_call>"), _TAGGED),
    (re.compile(r"\[TOOL_CALLS\]\s*\[\{\"name\": ?\"look\", ?\"arguments\""), _LIST),
    (re.compile(r"to=functions\.look\b"), _CHANNELS),
    (re.compile(r"\{\"name\": ?\"look\", ?\"parameters\": ?\{\"at\""), _JSON),
)


def call_syntax(template: Template) -> CallSyntax | None:
    """How the model of this template writes calls; ``None`` where it knows none, or writes others."""
    call = ToolCall("look12345", "look", '{"at": "sky"}')
    tool = {"type": "function", "function": {"name": "look", "description": "Look.", "parameters": {}}}
    messages = (
        Message("user", "Question."),
        Message("assistant", "", tool_calls=(call,)),
        Message("tool", "Blue.", tool_call_id=call.id),
    )
    try:
        text = template.render(Conversation(messages, (tool,))).text
    except (ConversationError, TemplateError):
        return None
    return next((syntax for look, syntax in _LOOKS if look.search(text)), None)
