"""One request's answer while it is generated: tokens to text, tool calls out of the text, usage at the end.

All of it lives in the engine's thread.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace

from blake3 import blake3

from .assembly import Assembled
from .engines.sequence import SequenceStats
from .ports import Tokenizer
from .prompt.calls import CallReader, CallSyntax, Piece
from .prompt.detokenize import Detokenizer
from .types import Chunk, FinishReason, Reused, TokenLogprob, ToolCall, Usage

_CALL_ID_CONTEXT = "ostinato tool call id v1"


class Answer:
    """Collects the choices of one request; ``done`` is called once, with how the last of them ended."""

    def __init__(
        self,
        assembled: Assembled,
        num_choices: int,
        deliver: Callable[[Chunk], None],
        done: Callable[[FinishReason, Usage], None],
        retention: str = "",
        reused: Callable[[SequenceStats], Reused | None] = lambda stats: None,
    ) -> None:
        """``reused``: what usage says of moved KV, by the sequence that began first."""
        self._assembled = assembled
        self._deliver = deliver
        self._done = done
        self._retention = retention
        self._reused = reused
        self._left = num_choices
        self._stats: list[SequenceStats] = []

    def piece(self, chunk: Chunk) -> None:
        self._deliver(chunk)

    def last_piece(self, chunk: Chunk, stats: SequenceStats) -> None:
        self._stats.append(stats)
        self._left -= 1
        if self._left > 0:
            self._deliver(chunk)
            return
        usage = self._usage()
        self._deliver(replace(chunk, usage=usage))
        assert chunk.finish_reason is not None
        self._done(chunk.finish_reason, usage)

    def _usage(self) -> Usage:
        arrived = self._stats[0].arrived_s
        first = min((s.first_token_s for s in self._stats if s.first_token_s is not None), default=arrived)
        started = min((s.started_s for s in self._stats if s.started_s is not None), default=arrived)
        # The choices share one prompt: what the first to start found in the cache is what was found.
        earliest = min(self._stats, key=lambda s: math.inf if s.started_s is None else s.started_s)
        usage = Usage(
            prompt_tokens=earliest.prompt_tokens,
            cached_tokens=earliest.cached_tokens,
            approximate_tokens=max(s.approximate_tokens for s in self._stats),
            written_tokens=sum(s.written_tokens for s in self._stats),
            completion_tokens=sum(s.output_tokens for s in self._stats),
            ttft_s=first - arrived,
            queue_s=started - arrived,
            total_s=max(s.finished_s for s in self._stats) - arrived,
            dropped_tokens=sum(s.dropped_tokens for s in self._stats),
            recalled_tokens=max(s.recalled_tokens for s in self._stats),
            retention=self._retention,
            loaded_tokens=earliest.loaded_tokens,
            load_s=earliest.load_s,
            reuse=self._reused(earliest),
        )
        return self._assembled.annotate(usage)


class Choice:
    """One choice's sink: tokens become text; a stop string ends it; calls are read out of it."""

    def __init__(
        self,
        index: int,
        answer: Answer,
        detokenizer: Detokenizer,
        calls: Calls | None,
        keep: Callable[[list[int]], object] | None = None,
    ) -> None:
        """``keep`` gets all ids of the answer, before its last piece is delivered."""
        self._keep = keep
        self._ids: list[int] = []
        self._index = index
        self._answer = answer
        self._detokenizer = detokenizer
        self._calls = calls

    def on_token(self, token_id: int, logprob: TokenLogprob | None) -> bool:
        if self._keep is not None:
            self._ids.append(token_id)
        text = self._detokenizer.push(token_id)
        logprobs = () if logprob is None else (logprob,)
        chunk = Chunk(self._index, text, (token_id,), logprobs)
        if self._calls is not None:
            chunk = self._calls.push(chunk, self._detokenizer)
        self._answer.piece(chunk)
        return self._detokenizer.stopped is not None

    def on_finish(
        self, reason: FinishReason, stop_token: int | None, stats: SequenceStats, error: Exception | None
    ) -> FinishReason:
        text = self._detokenizer.finish()
        stop_reason: str | int | None = self._detokenizer.stopped
        if stop_reason is None:
            stop_reason = stop_token
        elif reason == "length":
            reason = "stop"  # what was held back until the end completed a stop string
        chunk = Chunk(self._index, text, finish_reason=reason, stop_reason=stop_reason, error=error)
        if self._calls is not None:
            chunk = self._calls.finish(chunk)
        if self._keep is not None:
            self._keep(self._ids)
        self._answer.last_piece(chunk, stats)
        assert chunk.finish_reason is not None
        return chunk.finish_reason


class Calls:
    """Takes the tool calls out of one choice's text, and gives each an id.

    Ids are digests of the prompt and of where in the answer a call stands: the same request has the same
    answer again, ids included, and two calls of one conversation never share one.
    """

    def __init__(
        self, syntax: CallSyntax, assembled: Assembled, special_tokens: Mapping[str, int], index: int
    ) -> None:
        self._prompt, self._index, self._syntax = assembled.tokens, index, syntax
        self._reader: CallReader = syntax.read(assembled.tool_names, special_tokens)
        self._markers = {special_tokens[text]: text for text in syntax.markers if text in special_tokens}
        self._ids: list[str] = []
        self._num_tokens = 0

    @classmethod
    def of(cls, assembled: Assembled, tokenizer: Tokenizer, index: int) -> Calls | None:
        """For choice ``index`` of a request; ``None`` where no calls can come."""
        syntax = assembled.syntax
        return None if syntax is None else cls(syntax, assembled, tokenizer.special_tokens, index)

    def push(self, chunk: Chunk, detokenizer: Detokenizer) -> Chunk:
        (token_id,) = chunk.token_ids
        marker = self._markers.get(token_id, "")
        text = chunk.text + detokenizer.flush() if marker else chunk.text
        self._num_tokens += 1
        return self._with(chunk, self._reader.push(text, marker))

    def finish(self, chunk: Chunk) -> Chunk:
        pushed = self._reader.push(chunk.text)
        is_whole = chunk.finish_reason == "stop" and not isinstance(chunk.stop_reason, str)
        last = self._reader.finish(is_whole=is_whole)
        piece = Piece(
            pushed.content + last.content, pushed.reasoning + last.reasoning, pushed.calls + last.calls
        )
        chunk = self._with(chunk, piece)
        return replace(chunk, finish_reason="tool_calls") if is_whole and self._ids else chunk

    def _with(self, chunk: Chunk, piece: Piece) -> Chunk:
        calls = tuple(ToolCall(self._id(call.id), call.name, call.arguments) for call in piece.calls)
        return replace(chunk, text=piece.content, reasoning=piece.reasoning, tool_calls=calls)

    def _id(self, written: str) -> str:
        """The id that the model wrote, where its format has one; else one of our own."""
        num_chars = self._syntax.id_chars
        if not (num_chars and len(written) == num_chars and written.isalnum() and written.isascii()):
            written = ""
        if not written or written in self._ids:
            place = f"{self._index} {self._num_tokens} {len(self._ids)}"
            digest = blake3(self._prompt.tobytes() + place.encode(), derive_key_context=_CALL_ID_CONTEXT)
            written = digest.hexdigest()[:num_chars] if num_chars else f"call_{digest.hexdigest()[:24]}"
        self._ids.append(written)
        return written
