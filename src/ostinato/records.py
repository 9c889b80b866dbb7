"""What there is to say of a request once it has ended, text aside: digests, parts, and where matching
stopped.

Everything is a digest under a secret key: who has the records cannot try out what a prompt was, and who has
records made with another key cannot compare the two.

Why a look-up stopped is told from what was asked before. :class:`SeenPrompts` remembers the beginnings of a
bounded number of prompts, as digests: a beginning that is in there and was not found has been given up, and
one whose prompt had not ended when this one arrived was still being computed.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
from blake3 import blake3

from .events import (
    BlocksEvicted,
    EvictionReason,
    MatchStop,
    PromptSegment,
    RequestFinished,
    RequestPattern,
    RequestRecord,
    RequestServed,
    StopReason,
)
from .types import Conversation, GenerationRequest, TokenArray

_KEY_CONTEXT: Final = "ostinato request log key v1"
_ID_BITS: Final = 53
"""What every reader of JSON keeps. Among a million prefixes two share an id with a chance of 1 to 18,000."""

MAX_SEEN_BLOCKS: Final = 200_000
MAX_SEGMENTS: Final = 512
_MIN_SEGMENT_TOKENS: Final = 4
_PATTERN_CHARS: Final = 16_384
_MIN_DOCUMENTS: Final = 2
_DOCUMENT = re.compile(
    r"^[ \t]*(?:<(?:document|doc|passage|context|source)\b[^>\n]*>|\[(?:\d{1,3}|doc\w*)\]"
    r"|#{0,3} ?(?:document|passage|source|context|excerpt|chunk) ?#?\d*:)",
    re.IGNORECASE | re.MULTILINE,
)


def log_key(secret: str) -> bytes:
    """The 32 bytes that digests are keyed with, from an operator's secret of any length."""
    return blake3(secret.encode("utf-8", "surrogatepass"), derive_key_context=_KEY_CONTEXT).digest()


def block_ids(key: bytes, namespace: str, tokens: TokenArray, block_tokens: int) -> list[int]:
    """An id for the end of each block of ``tokens``, also of the last one where it is not full.

    Equal ids mean equal tokens from the first one on, in namespaces of equal digest, under equal keys.
    """
    data = tokens.astype("<i4", copy=False).tobytes()
    parent = blake3(namespace.encode(), key=key).digest()
    ids: list[int] = []
    for at in range(0, len(data), 4 * block_tokens):
        parent = blake3(parent + data[at : at + 4 * block_tokens], key=key).digest()
        ids.append(_id(parent))
    return ids


def segments_of(
    key: bytes, namespace: str, tokens: TokenArray, marker_ids: TokenArray
) -> tuple[PromptSegment, ...]:
    """A prompt from marker to marker, each part with a digest of its own tokens.

    Of markers that follow one another closely the last one begins a part: that depends on what is near alone,
    so that a part is cut alike wherever it stands. Of more than 512 parts the last one is all the rest.
    """
    places = np.flatnonzero(np.isin(tokens, marker_ids))
    begins = places[np.append(np.diff(places) >= _MIN_SEGMENT_TOKENS, True)] if len(places) else places
    starts = [0, *begins[begins > 0][: MAX_SEGMENTS - 1].tolist()]
    space = b"segment" + namespace.encode()
    data = tokens.astype("<i4", copy=False).tobytes()
    ends = [*starts[1:], len(tokens)]
    return tuple(
        PromptSegment(end - start, _id(blake3(space + data[4 * start : 4 * end], key=key).digest()))
        for start, end in zip(starts, ends, strict=True)
    )


def pattern_of(request: GenerationRequest) -> RequestPattern:
    """What kind of request this is, by its shape: tools make an agent, documents make RAG, turns make a
    chat."""
    prompt = request.prompt
    if not isinstance(prompt, Conversation):
        return "completion"
    if prompt.tools or any(m.role == "tool" or m.tool_calls for m in prompt.messages):
        return "agent"
    asked = [message for message in prompt.messages if message.role != "assistant"]
    text = "\n".join(message.content[:_PATTERN_CHARS] for message in asked[:3])
    if len(_DOCUMENT.findall(text[:_PATTERN_CHARS])) >= _MIN_DOCUMENTS:
        return "rag"
    if len(asked) < len(prompt.messages) or sum(message.role == "user" for message in asked) > 1:
        return "chat"
    return "one_shot"


@dataclass(slots=True)
class _Seen:
    """A beginning that was asked for: ``ended_s`` is when its prompt's KV was there."""

    ended_s: float
    goes_on: bool = False


class SeenPrompts:
    """The beginnings of the prompts of late, by the ids of their blocks. Not for several threads.

    Prompts have to come in the order in which they ended.
    """

    def __init__(self, max_blocks: int = MAX_SEEN_BLOCKS) -> None:
        self._blocks: OrderedDict[int, _Seen] = OrderedDict()
        self._max_blocks = max_blocks
        self._has_forgotten = False

    def stop_of(
        self, ids: list[int], num_tokens: int, num_found: int, block_tokens: int, arrived_s: float
    ) -> MatchStop:
        """Where and why the look-up of a prompt stopped that found ``num_found`` of its ``num_tokens``."""
        known = 0
        for block in ids:
            if block not in self._blocks:
                break
            known += 1
        num_known = min(known * block_tokens, num_tokens)
        if num_found >= num_tokens - 1:
            return MatchStop(num_found, "whole", num_known)
        if num_known >= num_found + block_tokens:
            ended_s = self._blocks[ids[known - 1]].ended_s
            reached = self._blocks[ids[num_found // block_tokens]].ended_s
            reason: StopReason = "pending" if reached > arrived_s else "gone"
            return MatchStop(num_found, reason, num_known, round(arrived_s - ended_s, 3))
        if known:
            goes_on = self._blocks[ids[known - 1]].goes_on
            return MatchStop(num_found, "parts" if goes_on else "end", num_known)
        # What was found and is not known was asked for before these records began.
        return MatchStop(num_found, "unknown" if num_found or self._has_forgotten else "unseen")

    def add(self, ids: list[int], ended_s: float, *, is_last_full: bool) -> None:
        """A prompt has been computed, with the ids of its blocks; the last one counts only where it is
        full."""
        if not is_last_full:
            ids = ids[:-1]
        for place, block in enumerate(ids):
            seen = self._blocks.get(block)
            if seen is None:
                seen = self._blocks[block] = _Seen(ended_s)
            seen.goes_on |= place + 1 < len(ids)
        for block in reversed(ids):  # so that what is forgotten first is nobody's beginning
            self._blocks.move_to_end(block)
        while len(self._blocks) > self._max_blocks:
            self._blocks.popitem(last=False)
            self._has_forgotten = True


class RecordMaker:
    """Makes records of what ended, in the order in which it did. Not for several threads.

    Args:
        key: 32 bytes that digests are made with.
        block_tokens: tokens of a block.
        marker_ids: the tokens that part a prompt: the model's special ones.
    """

    def __init__(self, key: bytes, block_tokens: int, marker_ids: Iterable[int] = ()) -> None:
        assert block_tokens >= 1, f"blocks of {block_tokens} tokens"
        assert len(key) == 32, f"a key of {len(key)} bytes"
        self.key_name = blake3(b"name", key=key).hexdigest(length=4)
        self.block_tokens = block_tokens
        self._key = key
        self._marker_ids = np.fromiter(sorted(set(marker_ids)), np.int32)
        self._seen = SeenPrompts()

    def make(
        self,
        event: RequestFinished | RequestServed,
        arrived_s: float,
        *,
        evicted: Mapping[EvictionReason, int] | None = None,
        num_unrecorded: int = 0,
    ) -> RequestRecord | None:
        """The record of a request that arrived then; ``None`` where the event does not say what was asked."""
        request, usage = event.request, event.usage
        if request is None:
            return None
        namespace, tokens = event.namespace, None
        ids: list[int] = []
        segments: tuple[PromptSegment, ...] = ()
        stop = MatchStop(usage.cached_tokens, "whole")
        if isinstance(event, RequestFinished):
            tokens = event.tokens
            if tokens is None:
                return None
            size = self.block_tokens
            ids = block_ids(self._key, namespace, tokens, size)
            segments = segments_of(self._key, namespace, tokens, self._marker_ids)
            stop = self._seen.stop_of(ids, len(tokens), usage.cached_tokens, size, arrived_s)
            if usage.completion_tokens:  # its prompt has been computed: that is known from its first token on
                self._seen.add(ids, arrived_s + usage.ttft_s, is_last_full=len(tokens) % size == 0)
        session = None
        if request.session is not None:
            name = request.session.id.encode("utf-8", "surrogatepass")
            session = _id(blake3(b"session" + namespace.encode() + name, key=self._key).digest())
        return RequestRecord(
            request.request_id,
            arrived_s,
            event.finish_reason,
            usage,
            namespace,
            self.block_tokens,
            tuple(ids),
            segments,
            stop,
            pattern_of(request),
            session,
            dict(evicted or {}),
            num_unrecorded,
            request,
            tokens,
        )


class EvictionTally:
    """Tokens given up since somebody last asked. ``add`` and ``take`` in the same thread, or under a lock."""

    def __init__(self) -> None:
        self._counts: dict[EvictionReason, int] = {}

    def add(self, event: BlocksEvicted) -> None:
        self._counts[event.reason] = self._counts.get(event.reason, 0) + event.num_tokens

    def take(self) -> dict[EvictionReason, int]:
        counts, self._counts = self._counts, {}
        return counts


def _id(digest: bytes) -> int:
    return int.from_bytes(digest[:8], "little") >> (64 - _ID_BITS)
