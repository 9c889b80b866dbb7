"""From conversations to token ids, going on from where an earlier prompt of the same conversation ended.

A request brings the whole history every time, and nearly all of it was here before. What is remembered of a
prompt is its messages, and the ids of what is settled in it: what every longer prompt begins with, up to a
marker, because what stands between two markers is tokenized by itself. A template that can go on from an
earlier rendering (:class:`~ostinato.prompt.base.GrowingTemplate`) renders only what is new; any other renders
everything, and of its segments those that are as before are not tokenized again. Either way the ids are those
of rendering and tokenizing everything.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
import orjson

from ..types import Conversation, Message, Segment, TokenArray
from .base import GrowingTemplate, Growth, Template
from .conversation import validate
from .kept import KeptAnswers
from .pieces import NO_NEIGHBOUR
from .tokens import HFTokenizer, MarkerEnd, Tail

# What a remembered message, segment and prompt cost besides text and ids: objects and table entries.
_MESSAGE_BYTES = 600
_SEGMENT_BYTES = 200
_PROMPT_BYTES = 1_000

# What a conversation is besides its messages: the scope, and the tools as JSON.
_Root: TypeAlias = tuple[str, bytes]


class _Known(NamedTuple):
    """What is remembered of a prompt.

    Of templates that grow: the settled ``ids``, the kind of the marker they end with, and the ``state`` to go
    on from. Of others: all ``ids`` and ``segments``, and where the markers end. ``num_kept`` of the ids are
    as they were generated. ``before`` is the key of what it grew out of.
    """

    root: _Root
    messages: tuple[Message, ...]
    ids: TokenArray
    left: str
    num_kept: int
    state: object | None
    segments: tuple[Segment, ...]
    ends: list[MarkerEnd]
    text_bytes: int
    before: int | None

    @property
    def size_bytes(self) -> int:
        objects = len(self.messages) * _MESSAGE_BYTES + len(self.segments) * _SEGMENT_BYTES
        return _PROMPT_BYTES + objects + self.text_bytes + self.ids.nbytes


class _Made(NamedTuple):
    """The ids of a prompt, of which ``num_kept`` are as they were generated.

    ``ends`` says where the markers among the rendering's segments end; ``start``, where the marker before
    these segments does.
    """

    ids: TokenArray
    num_kept: int
    ends: list[MarkerEnd]
    start: MarkerEnd


_NO_IDS: TokenArray = np.zeros(0, dtype=np.int32)
_BEGINNING = MarkerEnd(0, 0, NO_NEIGHBOUR, 0)


class Prompt(NamedTuple):
    """A complete prompt. Where answers are kept: ``num_kept`` of its ids are as they were generated, and the
    answer to it goes on from ``tail``."""

    ids: TokenArray
    num_kept: int
    tail: Tail | None


class GrowingPrompts:
    """Makes the prompts of one model; safe to use from several threads.

    Args:
        template: what renders them.
        tokenizer: what makes ids of them.
        kept: answers that come back as history in the ids they were generated in.
        capacity_bytes: what the memory of earlier prompts may take; with 0 nothing is remembered.
    """

    def __init__(
        self,
        template: Template,
        tokenizer: HFTokenizer,
        *,
        kept: KeptAnswers | None = None,
        capacity_bytes: int = 64 * 1024 * 1024,
    ) -> None:
        self._kept = kept
        self._template = template
        self._growing = template if isinstance(template, GrowingTemplate) else None
        self._tokenizer = tokenizer
        self._capacity_bytes = capacity_bytes
        self._size_bytes = 0
        self._prompts: OrderedDict[int, _Known] = OrderedDict()
        self._lock = threading.Lock()

    @property
    def size_bytes(self) -> int:
        return self._size_bytes

    def __len__(self) -> int:
        return len(self._prompts)

    def tokens(self, conversation: Conversation, *, scope: str = "") -> TokenArray:
        """The ids of :meth:`prompt`."""
        return self.prompt(conversation, scope=scope).ids

    def prompt(self, conversation: Conversation, *, scope: str = "") -> Prompt:
        """Check, render and tokenize; a complete prompt, ready for the answer to follow.

        ``scope`` keeps what is remembered apart: a tenant's salt.

        Raises:
            ConversationError: a message breaks a rule; ``index`` says which.
            ParameterError: a tool is not a function in OpenAI's form.
            TemplateError: the template refuses the conversation.
        """
        validate(conversation, roles=self._template.roles)
        root = _root(conversation, scope)
        keys = [] if root is None else list(_keys(root, conversation.messages))
        found, known = self._find(root, conversation.messages, keys)
        growth = self._render(conversation, known)
        made = self._encode(growth, known, scope)
        if root is not None:
            self._remember(root, conversation.messages, keys, growth, made, found, known)
        tail = None
        if self._kept is not None:
            last = made.ends[-1] if made.ends else made.start
            tail = self._tokenizer.tail(growth.segments[last.num_segments :], last.kind, scope=scope)
        return Prompt(made.ids, made.num_kept, tail)

    def _render(self, conversation: Conversation, known: _Known | None) -> Growth:
        if self._growing is None:
            return Growth(self._template.render(conversation).segments)
        return self._growing.render_on(conversation, None if known is None else known.state)

    def _encode(self, growth: Growth, known: _Known | None, scope: str) -> _Made:
        segments, start, ends, before = growth.segments, _BEGINNING, list[MarkerEnd](), _NO_IDS
        if known is not None and growth.goes_on:
            before, start = known.ids, MarkerEnd(0, len(known.ids), known.left, known.num_kept)
        elif known is not None and (num_alike := _num_alike(known.segments, segments)):
            ends = [end for end in known.ends if end.num_segments <= num_alike]
            before = known.ids[: ends[-1].num_ids] if ends else before
        place = ends[-1] if ends else start
        after = self._tokenizer.encode_after(
            place.kind,
            segments[place.num_segments :],
            known=None if self._kept is None else self._kept.known(scope),
            scope=scope,
        )
        ends += [_moved(end, place) for end in after.ends]
        return _Made(np.concatenate([before, after.ids]), place.num_known + after.num_known, ends, start)

    # ------------------------------------------------------------ memory

    def _find(
        self, root: _Root | None, messages: tuple[Message, ...], keys: list[int]
    ) -> tuple[int | None, _Known | None]:
        """What is known of the longest beginning of a conversation, and its key."""
        with self._lock:
            for count in range(len(keys), 0, -1):
                known = self._prompts.get(keys[count - 1])
                # A key is a mere hash, so what it stands for is compared.
                if known is not None and known.root == root and known.messages == messages[:count]:
                    self._prompts.move_to_end(keys[count - 1])
                    return keys[count - 1], known
        return None, None

    def _remember(
        self,
        root: _Root,
        messages: tuple[Message, ...],
        keys: list[int],
        growth: Growth,
        made: _Made,
        found: int | None,
        known: _Known | None,
    ) -> None:
        ids, left, num_kept, segments, ends = made.ids, NO_NEIGHBOUR, 0, growth.segments, made.ends
        if growth.state is not None:
            settled = made.start
            if growth.num_settled:
                settled = next(end for end in ends if end.num_segments == growth.num_settled)
            ids, left, num_kept = ids[: settled.num_ids], settled.kind, settled.num_known
            segments, ends = (), []
        elif growth.goes_on:
            return  # the earlier place is the better one to go on from
        ids = ids.copy()  # the caller's own may change
        ids.flags.writeable = False
        num_old, text_bytes = (0, 0) if known is None else (len(known.messages), known.text_bytes)
        if known is not None:  # the same texts, but one set of objects
            messages = known.messages + messages[num_old:]
        text_bytes += sum(map(_text_bytes, messages[num_old:]))
        self._put(
            keys[len(messages) - 1],
            _Known(root, messages, ids, left, num_kept, growth.state, segments, ends, text_bytes, found),
        )

    def _put(self, key: int, prompt: _Known) -> None:
        if prompt.size_bytes > self._capacity_bytes // 4:  # one giant must not push out everything else
            return
        with self._lock:
            if key in self._prompts:
                return
            self._prompts[key] = prompt
            self._size_bytes += prompt.size_bytes
            # Of one conversation the last two places are kept: an answer may be asked for again.
            parent = None if prompt.before is None else self._prompts.get(prompt.before)
            if parent is not None and parent.before is not None:
                self._forget(parent.before)
            while self._size_bytes > self._capacity_bytes:
                self._forget(next(iter(self._prompts)))

    def _forget(self, key: int) -> None:
        old = self._prompts.pop(key, None)
        if old is not None:
            self._size_bytes -= old.size_bytes


def _root(conversation: Conversation, scope: str) -> _Root | None:
    """``None`` for tools that are no JSON a digest could be made of; then nothing is remembered."""
    if not conversation.tools:
        return scope, b""
    try:
        return scope, orjson.dumps(conversation.tools, default=dict)
    except TypeError:
        return None


def _keys(root: _Root, messages: tuple[Message, ...]) -> Iterator[int]:
    """A key for every beginning of a conversation."""
    key = hash(root)
    for message in messages:
        key = hash((key, message))
        yield key


def _moved(end: MarkerEnd, by: MarkerEnd) -> MarkerEnd:
    """An end that was counted from the end of another marker."""
    return MarkerEnd(
        end.num_segments + by.num_segments,
        end.num_ids + by.num_ids,
        end.kind,
        end.num_known + by.num_known,
    )


def _num_alike(first: Sequence[Segment], second: Sequence[Segment]) -> int:
    """How many segments two prompts begin with that make the same tokens."""
    count = 0
    for one, other in zip(first, second, strict=False):
        if one is not other and (one.text != other.text or one.is_marker is not other.is_marker):
            break
        count += 1
    return count


def _text_bytes(message: Message) -> int:
    texts = [message.content, message.reasoning]
    texts += [call.arguments for call in message.tool_calls]
    return sum(len(text) if text.isascii() else 4 * len(text) for text in texts)
