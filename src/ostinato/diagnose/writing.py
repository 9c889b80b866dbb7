"""Requests as a model sees them: tokens, and what each of them is of."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np

from ..errors import ClientError
from ..prompt.base import Template
from ..prompt.tokens import SpannedTokens
from ..types import Conversation, Message, Rendered, Segment, TokenArray
from .material import Asked

TEMPLATE: Final = "template"
TEXT: Final = "text"


class Words(Protocol):
    """What is needed of a tokenizer."""

    bos_token: str | None

    def encode_spans(self, rendered: Rendered, *, scope: str = "") -> SpannedTokens: ...

    def token_bytes(self, token_id: int) -> bytes: ...


@dataclass(frozen=True, slots=True)
class Written:
    """A request as tokens.

    Attributes:
        owners: for each token an index into ``labels``.
        labels: ``template``, ``tools``, ``messages[2] (user)``, or ``text`` of a prompt that was a text.
        remark: why it is not written by the template that was asked for.
    """

    asked: Asked
    tokens: TokenArray
    owners: TokenArray
    labels: tuple[str, ...]
    words: Words
    remark: str = ""

    def text(self, start: int, end: int) -> str:
        """What the tokens of a range stand for."""
        data = b"".join(self.words.token_bytes(int(token)) for token in self.tokens[max(0, start) : end])
        return data.decode("utf-8", "replace")

    def label(self, place: int) -> str:
        """What the token at a place is of; of what comes last, behind the end."""
        if len(self.tokens) == 0:
            return TEMPLATE
        return self.labels[int(self.owners[min(place, len(self.tokens) - 1)])]

    def message_at(self, place: int) -> int | None:
        """Index of the message that a token is of."""
        label = self.label(place)
        if not label.startswith("messages["):
            return None
        return int(label[len("messages[") : label.index("]")])


class Writer:
    """Writes requests down, with a model's template or plainly.

    Plainly means with all there is to them, in the order it was sent: tools as JSON first, then every message
    with its role. It is what a vendor's cache is thought to see, which keeps its template to itself.
    """

    def __init__(self, words: Words, template: Template | None = None) -> None:
        self._words = words
        self._template = template

    def write(self, asked: Asked) -> Written:
        """A request as tokens; plainly, with a remark, where the template refuses it."""
        remark = ""
        if asked.token_ids is not None:
            tokens = np.array(asked.token_ids, np.int32)
            return Written(asked, tokens, np.zeros(len(tokens), np.int32), (TEXT,), self._words)
        conversation = asked.conversation
        if conversation is None:
            rendered, labels = Rendered((Segment(asked.text or ""),)), [TEXT]
            return self._written(asked, rendered, labels, remark)
        if self._template is not None and conversation.messages:
            try:
                return self._templated(asked, conversation, self._template)
            except ClientError as error:
                remark = f"written plainly, as the template refuses it: {error}"
        segments, labels = [], []
        for segment, label in _plain(conversation):
            segments.append(segment)
            labels.append(label)
        return self._written(asked, Rendered(tuple(segments)), labels, remark)

    def _templated(self, asked: Asked, conversation: Conversation, template: Template) -> Written:
        located = template.locate(conversation)
        labels: list[str] = []
        for segment in located.segments:
            index = segment.message_index
            if index is not None:
                labels.append(_label(index, conversation.messages[index].role))
            elif conversation.tools and '"function"' in segment.text:
                labels.append("tools")
            else:
                labels.append(TEMPLATE)
        return self._written(asked, located, labels, "")

    def _written(self, asked: Asked, rendered: Rendered, labels: Sequence[str], remark: str) -> Written:
        spanned = self._words.encode_spans(rendered, scope="diagnose")
        names = tuple(dict.fromkeys(labels)) or (TEMPLATE,)
        numbers = np.array([names.index(label) for label in labels] or [0], np.int32)
        return Written(asked, spanned.ids, numbers[spanned.segments], names, self._words, remark)


def _label(index: int, role: str) -> str:
    return f"messages[{index}] ({role})"


def _plain(conversation: Conversation) -> Iterator[tuple[Segment, str]]:
    for tool in conversation.tools:
        yield Segment(json.dumps(tool, ensure_ascii=False) + "\n"), "tools"
    for index, message in enumerate(conversation.messages):
        label = _label(index, message.role)
        yield Segment(f"<{message.role}>\n"), label
        yield Segment(_content(message) + "\n"), label


def _content(message: Message) -> str:
    parts = [f"<think>{message.reasoning}</think>"] if message.reasoning else []
    parts += [message.content] if message.content or not message.tool_calls else []
    parts += [f"{call.name}({call.arguments})" for call in message.tool_calls]
    return "\n".join(parts)
