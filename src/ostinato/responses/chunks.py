"""Answers of the embedded engine: as bytes and back, and which of them may be kept."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import fields, replace
from math import isfinite
from typing import Any, Final

import orjson

from ..errors import OstinatoError
from ..types import Change, Chunk, GenerationRequest, TokenLogprob, ToolCall, Unrendered, Usage

_VERSION: Final = 1
_DONE: Final = frozenset({"stop", "tool_calls"})
_KNOWN_USAGE: Final = frozenset(
    {
        *("prompt_tokens", "cached_tokens", "written_tokens", "completion_tokens"),
        *("ttft_s", "queue_s", "total_s"),
        *("unrendered", "changed", "prompt_name"),
    }
)
"""What usage may say of an answer that computing it anew would give again. Whatever else it says, now or in a
later version, stands for KV that was approximate, moved or partly forgotten, or for a prompt that depended on
others."""
_OF_THE_MOMENT: Final = frozenset({"loaded_tokens", "load_s"})
"""What usage may say, too, and what is not kept: where exact KV came from says nothing of the answer."""


def is_whole(chunks: Sequence[Chunk], request: GenerationRequest) -> bool:
    """Whether this is all of the answer that the request has, whatever the state of the engine.

    An answer that ended for its length is whole only where it has the length that was asked for: a deadline
    ends answers, too, and the room there is.
    """
    ends = {chunk.choice_index: chunk.finish_reason for chunk in chunks if chunk.finish_reason is not None}
    usage = chunks[-1].usage if chunks else None
    if usage is None or set(ends) != set(range(request.num_choices)):
        return False
    if any(
        getattr(usage, item.name) != item.default
        for item in fields(usage)
        if item.name not in _KNOWN_USAGE | _OF_THE_MOMENT
    ):
        return False
    lengths: Counter[int] = Counter()
    for chunk in chunks:
        lengths[chunk.choice_index] += len(chunk.token_ids)
    wanted = request.params.max_tokens
    return all(
        reason in _DONE or (reason == "length" and lengths[index] == wanted) for index, reason in ends.items()
    )


class ChunkForm:
    """:class:`~ostinato.responses.exact.Form` of :class:`~ostinato.types.Chunk`."""

    def ends(self, piece: Chunk) -> bool:
        return piece.usage is not None

    def fails(self, piece: Chunk) -> bool:
        return piece.finish_reason in ("error", "abort")

    def last_of(self, piece: Chunk) -> Chunk:
        return replace(piece, usage=piece.usage or Usage())

    def failure(self, error: OstinatoError) -> Chunk:
        return Chunk(0, "", finish_reason="error", error=error, usage=Usage())

    def is_same(self, one: Chunk, other: Chunk) -> bool:
        return replace(one, usage=None) == replace(other, usage=None)

    def encode(self, pieces: Sequence[Chunk]) -> bytes:
        usage = pieces[-1].usage
        assert usage is not None, "an answer without its end"
        kept = {name: getattr(usage, name) for name in _KNOWN_USAGE}
        try:
            return orjson.dumps([_VERSION, list(map(_chunk, pieces)), kept])
        except orjson.JSONEncodeError as error:
            raise ValueError(f"an answer that is not JSON: {error}") from None

    def decode(self, data: bytes) -> list[Chunk]:
        try:
            version, pieces, usage = orjson.loads(data)
            if version != _VERSION:
                raise ValueError(f"an answer in form {version}")
            chunks = list(map(_chunk_of, pieces))
            chunks[-1] = replace(chunks[-1], usage=_usage_of(usage))
        except (TypeError, KeyError, IndexError) as error:
            raise ValueError(f"no answer: {error}") from None
        return chunks


def _chunk(chunk: Chunk) -> list[Any]:
    calls = [[call.id, call.name, call.arguments] for call in chunk.tool_calls]
    logprobs = [
        [entry.token_id, _number(entry.logprob), [[token, _number(p)] for token, p in entry.top]]
        for entry in chunk.logprobs
    ]
    return [
        chunk.choice_index,
        chunk.text,
        chunk.token_ids,
        logprobs,
        chunk.finish_reason,
        chunk.stop_reason,
        calls,
        chunk.reasoning,
    ]


def _chunk_of(row: list[Any]) -> Chunk:
    index, text, token_ids, logprobs, finish_reason, stop_reason, calls, reasoning = row
    return Chunk(
        index,
        text,
        tuple(token_ids),
        _logprobs_of(logprobs) if logprobs else (),  # mostly there are none, and pieces are many
        finish_reason,
        stop_reason,
        tool_calls=tuple(ToolCall(*call) for call in calls) if calls else (),
        reasoning=reasoning,
    )


def _logprobs_of(rows: list[Any]) -> tuple[TokenLogprob, ...]:
    return tuple(
        TokenLogprob(token, float(p), tuple((other, float(q)) for other, q in top)) for token, p, top in rows
    )


def _usage_of(kept: dict[str, Any]) -> Usage:
    kept["unrendered"] = tuple(
        Unrendered(item["field"], tuple(item["messages"])) for item in kept["unrendered"]
    )
    kept["changed"] = tuple(Change(item["rule"], item["where"]) for item in kept["changed"])
    return Usage(**kept)


def _number(value: float) -> float | str:
    """JSON has neither infinity nor NaN."""
    return value if isfinite(value) else repr(value)
