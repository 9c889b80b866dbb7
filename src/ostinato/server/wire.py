"""What both completion APIs write: the frame of every object, usage, tokens as text."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Final, Protocol, TypeAlias

import orjson

from ..ports import Tokenizer
from ..types import Chunk, GenerationRequest, TokenLogprob, ToolCall, Usage

Json: TypeAlias = dict[str, Any]

# OpenAI's own way to say "so unlikely that there is no number for it"; JSON has no infinity.
UNLIKELY: Final = -9999.0


def event(data: bytes) -> bytes:
    """One server-sent event. JSON has no raw line break, so one line is enough."""
    return b"data: " + data + b"\n\n"


def openai_event(item: Json) -> bytes:
    return event(orjson.dumps(item))


@dataclass(frozen=True, slots=True)
class Frame:
    """What every object of one answer repeats."""

    id: str
    created_s: int
    model: str
    fingerprint: str

    def around(self, kind: str, choices: list[Json]) -> Json:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created_s,
            "model": self.model,
            "choices": choices,
            "system_fingerprint": self.fingerprint,
        }


class Writer(Protocol):
    """One request's answer in one API's shape. ``prompt_index`` counts a request's prompts from 0."""

    def events(self, prompt_index: int, chunk: Chunk) -> Iterator[Json]:
        """The chunk as objects of a stream."""

    def collect(self, prompt_index: int, chunk: Chunk) -> None:
        """Keep the chunk for :meth:`whole`."""

    def whole(self, usages: Sequence[Usage]) -> Json:
        """All that was collected, as one object."""

    def usage_event(self, usages: Sequence[Usage]) -> Json:
        """The stream's last object, which has no choices."""


@dataclass(frozen=True, slots=True)
class Work:
    """A request after the border: what to generate, and how to write it down."""

    requests: tuple[GenerationRequest, ...]
    writer: Writer
    is_stream: bool
    include_usage: bool
    cache_answer: bool | None = None
    #: One object of a stream as it is sent, and how a stream ends.
    encode: Callable[[Json], bytes] = openai_event
    closing: bytes = b"data: [DONE]\n\n"
    #: Called in a thread once the whole answer was sent.
    after: Callable[[], None] | None = None


@dataclass(slots=True)
class Collected:
    """One choice of a whole answer, as it grows."""

    text: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    tool_calls: list[ToolCall] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    last: Chunk | None = None

    def add(self, chunk: Chunk) -> None:
        self.text.append(chunk.text)
        if chunk.reasoning:
            self.reasoning.append(chunk.reasoning)
        self.tool_calls.extend(chunk.tool_calls)
        self.logprobs.extend(chunk.logprobs)
        if chunk.finish_reason is not None:
            assert self.last is None, "a choice finished twice"
            self.last = chunk


def usage_object(usages: Sequence[Usage]) -> Json:
    """Token counts under OpenAI's names, summed over a request's prompts."""
    prompt = sum(usage.prompt_tokens for usage in usages)
    completion = sum(usage.completion_tokens for usage in usages)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {
            "cached_tokens": sum(usage.cached_tokens for usage in usages),
            "cache_write_tokens": sum(usage.written_tokens for usage in usages),
        },
    }


def timings_object(usages: Sequence[Usage]) -> Json:
    """Our own addition beside ``usage``: milliseconds as the runtime measured them.

    Of several prompts: the first first token and its queueing, and the longest total.
    """
    first = min(usages, key=lambda usage: usage.ttft_s)
    return {
        "ttft_ms": round(first.ttft_s * 1e3, 3),
        "queue_ms": round(first.queue_s * 1e3, 3),
        "total_ms": round(max(usage.total_s for usage in usages) * 1e3, 3),
    }


def finish_fields(chunk: Chunk) -> Json:
    """``finish_reason``, and vLLM's ``stop_reason`` where a stop string or stop token ended it."""
    fields: Json = {"finish_reason": chunk.finish_reason}
    if chunk.finish_reason is not None and chunk.stop_reason is not None:
        fields["stop_reason"] = chunk.stop_reason
    return fields


def finite(logprob: float) -> float:
    """JSON knows no infinity and no NaN."""
    return max(logprob, UNLIKELY) if logprob == logprob else UNLIKELY


class TokenText:
    """Token ids as strings, remembered: ``logprobs`` ask for the same ones again and again."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.bytes = lru_cache(maxsize=8192)(tokenizer.token_bytes)

    def chat(self, token_id: int) -> str:
        """Part of a character shows as U+FFFD; its bytes stand beside it."""
        return self.bytes(token_id).decode("utf-8", errors="replace")

    def legacy(self, token_id: int) -> str:
        """Part of a character shows as ``bytes:\\xe2\\x82``, as OpenAI wrote it."""
        raw = self.bytes(token_id)
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)
