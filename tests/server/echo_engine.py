"""A small real engine for the server's tests: it answers with the last message, one byte at a time.

It has the shape of :class:`ostinato.runtime.Runtime`: a thread of its own that runs all requests in turn
(one token of each in a step), a bounded queue, cancellation, draining, a prefix cache with salted
namespaces (of whole prompts), log-probabilities (a fixed function of the token) and events. What it does
not have is a model, so a test knows every answer in advance.

A few messages make it misbehave in ways that a real engine can; see ``FAULTS``.
"""

from __future__ import annotations

import asyncio
import codecs
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from ostinato.errors import (
    EngineError,
    ParameterError,
    PromptTooLongError,
    QueueFullError,
    ShuttingDownError,
)
from ostinato.events import BlocksStored, Event, Observer, PrefixLookedUp, RequestFinished, StepFinished
from ostinato.kv.transfer import TierReport
from ostinato.prompt.conversation import validate
from ostinato.types import (
    Chunk,
    Conversation,
    FinishReason,
    GenerationRequest,
    Rendered,
    Session,
    TokenArray,
    TokenLogprob,
    Usage,
)

EOS = 256
TURN = 257
VOCAB_SIZE = 258
SECRET = "tensor at 0xDEADBEEF of shape (3, 7)"

FAULTS = {
    "!prepare-bug": "prepare raises what is nobody's plan",
    "!fail-early": "the engine fails before the first token",
    "!fail-late": "the engine fails after four tokens",
    "!stall": "no token ever comes",
}


class ByteStream:
    """Bytes to text as it comes; special tokens say nothing."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> str:
        return self._decoder.decode(bytes([token_id])) if token_id < EOS else ""

    def finish(self) -> str:
        return self._decoder.decode(b"", final=True)


class ByteTokenizer:
    """A token is a byte; two more are special."""

    identity = "b3:bytes"
    vocab_size = VOCAB_SIZE

    def __init__(self) -> None:
        self.special_tokens = {"<|end|>": EOS, "<|turn|>": TURN}

    def encode(self, text: str, *, scope: str = "") -> TokenArray:
        return np.frombuffer(text.encode(), dtype=np.uint8).astype(np.int32)

    encode_prompt = encode

    def encode_rendered(self, rendered: Rendered, *, scope: str = "") -> TokenArray:
        return np.concatenate([self._segment(s.text, s.is_marker) for s in rendered.segments])

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        kept = [token for token in token_ids if token < EOS or not skip_special_tokens]
        return b"".join(map(self.token_bytes, kept)).decode(errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        names = {token: text for text, token in self.special_tokens.items()}
        return names[token_id].encode() if token_id >= EOS else bytes([token_id])

    def text_stream(self) -> ByteStream:
        return ByteStream()

    def _segment(self, text: str, is_marker: bool) -> TokenArray:
        return np.array([self.special_tokens[text]], dtype=np.int32) if is_marker else self.encode(text)


@dataclass(frozen=True, slots=True)
class EchoPrepared:
    request: GenerationRequest
    tokens: tuple[int, ...]
    answer: tuple[int, ...]
    fault: str
    stop_reason: str | int | None


@dataclass(frozen=True, slots=True)
class EchoHealth:
    ok: bool
    detail: str
    num_running: int
    num_waiting: int
    num_blocks: int = 100
    num_held_blocks: int = 0
    num_evictable_blocks: int = 25
    num_free_blocks: int = 75
    num_pinned_blocks: int = 0
    tier: TierReport | None = None


@dataclass(slots=True)
class _Choice:
    index: int
    position: int = 0
    text: ByteStream = field(default_factory=ByteStream)


@dataclass(slots=True, eq=False)
class EchoRequest:
    """A request under way; also its handle."""

    engine: EchoEngine
    prepared: EchoPrepared
    sink: Callable[[Chunk], None]
    arrived_s: float
    choices: list[_Choice]
    cached_tokens: int = 0
    num_tokens: int = 0
    started_s: float = 0.0
    first_token_s: float = 0.0
    is_cancelled: bool = False
    outcome: None = None
    served: None = None

    def cancel(self) -> None:
        self.engine.cancel(self)


class EchoEngine:
    """Answers with what it was told. ``step_s``: seconds that a step takes."""

    def __init__(
        self,
        *,
        step_s: float = 0.0,
        max_running: int = 128,
        max_waiting: int = 128,
        max_model_len: int = 8192,
    ) -> None:
        self.model_name = "echo"
        self.revision = "1"
        self.created_s = 1_700_000_000
        self.max_model_len = max_model_len
        self.tokenizer = ByteTokenizer()
        self.observers: list[Observer] = []
        self.num_cancelled = 0
        self.requests: list[GenerationRequest] = []
        self.words: list[tuple[Session, str]] = []
        self._step_s = step_s
        self._max_running = max_running
        self._max_waiting = max_waiting
        self._waiting: list[EchoRequest] = []
        self._running: list[EchoRequest] = []
        self._stored: dict[str, set[tuple[int, ...]]] = {}
        self._is_accepting = True
        self._is_closed = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="echo-engine", daemon=True)
        self._thread.start()

    # ------------------------------------------------------------ the runtime's methods

    def prepare(self, request: GenerationRequest) -> EchoPrepared:
        self.requests.append(request)
        prompt = request.prompt
        if isinstance(prompt, Conversation):
            validate(prompt)
            if any(message.content == "!prepare-bug" for message in prompt.messages):
                raise RuntimeError(SECRET)
            tokens = tuple(
                token for message in prompt.messages for token in (TURN, *message.content.encode())
            )
            said = prompt.messages[-1].content
        elif isinstance(prompt, str):
            tokens, said = tuple(prompt.encode()), prompt
        else:
            if any(token >= VOCAB_SIZE for token in prompt):
                raise ParameterError("a token id is out of range", param="prompt")
            tokens, said = prompt, self.tokenizer.decode(prompt)
        if len(tokens) >= self.max_model_len:
            raise PromptTooLongError(
                f"the prompt has {len(tokens)} tokens, the model takes {self.max_model_len}",
                num_tokens=len(tokens),
                max_tokens=self.max_model_len,
            )
        answer, stop_reason = self._answer(said, request)
        return EchoPrepared(request, tokens, answer, said if said in FAULTS else "", stop_reason)

    def num_prompt_tokens(self, request: GenerationRequest) -> int:
        return len(self.prepare(request).tokens)

    def start(self, prepared: EchoPrepared, sink: Callable[[Chunk], None]) -> EchoRequest:
        choices = [_Choice(index) for index in range(prepared.request.num_choices)]
        request = EchoRequest(self, prepared, sink, time.perf_counter(), choices)
        with self._changed:
            if not self._is_accepting:
                raise ShuttingDownError("the server is shutting down")
            if len(self._waiting) >= self._max_waiting:
                raise QueueFullError("too many requests wait", retry_after_s=1.5)
            self._waiting.append(request)
            self._changed.notify_all()
        return request

    def tell_session(self, session: Session, salt: str = "") -> bool:
        self.words.append((session, salt))
        return any(
            each.session is not None and (each.session.id, each.salt) == (session.id, salt)
            for each in self.requests
        )

    def health(self) -> EchoHealth:
        detail = "ok" if self._is_accepting else "shutting down"
        return EchoHealth(self._is_accepting, detail, len(self._running), len(self._waiting))

    async def drain(self, timeout_s: float) -> None:
        with self._changed:
            self._is_accepting = False
        await asyncio.to_thread(self.wait_idle, timeout_s)
        for request in self._active():
            request.cancel()
        await asyncio.to_thread(self.wait_idle, None)

    def close(self) -> None:
        with self._changed:
            self._is_accepting = False
            self._is_closed = True
            self._changed.notify_all()
        self._thread.join()

    # ------------------------------------------------------------ for tests

    def wait_idle(self, timeout_s: float | None) -> bool:
        """Wait until nothing runs or waits."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._active(), timeout_s)

    def wait_running(self, num_running: int, timeout_s: float) -> bool:
        """Wait until that many requests have had their first token."""

        def enough() -> bool:
            return sum(request.num_tokens > 0 for request in self._running) >= num_running

        with self._changed:
            return self._changed.wait_for(enough, timeout_s)

    def cancel(self, request: EchoRequest) -> None:
        with self._changed:
            if request in self._running or request in self._waiting:
                request.is_cancelled = True
                self._changed.notify_all()

    # ------------------------------------------------------------ the engine's thread

    def _active(self) -> list[EchoRequest]:
        return [*self._running, *self._waiting]

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._is_closed or self._has_work())
                if self._is_closed:
                    return
                while self._waiting and len(self._running) < self._max_running:
                    self._admit(self._waiting.pop(0))
                running = list(self._running)
                waiting = [request for request in self._waiting if request.is_cancelled]
            began_s = time.perf_counter()
            if self._step_s:
                time.sleep(self._step_s)
            num_rows = 0
            for request in [*running, *waiting]:
                num_rows += self._step(request)
            self._say(StepFinished(num_rows, num_rows, time.perf_counter() - began_s))
            with self._changed:
                self._changed.notify_all()

    def _has_work(self) -> bool:
        return bool(self._waiting) or any(
            request.prepared.fault != "!stall" or request.is_cancelled for request in self._running
        )

    def _admit(self, request: EchoRequest) -> None:
        tokens, salt = request.prepared.tokens, request.prepared.request.salt
        stored = self._stored.setdefault(salt, set())
        request.cached_tokens = max((_common(tokens, other) for other in stored), default=0)
        request.started_s = time.perf_counter()
        self._running.append(request)
        self._say(PrefixLookedUp(len(tokens), request.cached_tokens))
        stored.add(tokens)
        self._say(BlocksStored(len(tokens) - request.cached_tokens, 1))

    def _step(self, request: EchoRequest) -> int:
        if request.is_cancelled:
            self.num_cancelled += 1
            self._end(request, "abort", None)
            return 0
        fault = request.prepared.fault
        if fault == "!stall":
            return 0
        if fault == "!fail-early" or (fault == "!fail-late" and request.num_tokens >= 4):
            self._end(request, "error", EngineError(SECRET))
            return 0
        if not request.first_token_s:
            request.first_token_s = time.perf_counter()
        for choice in list(request.choices):
            self._advance(request, choice)
        return 1

    def _advance(self, request: EchoRequest, choice: _Choice) -> None:
        params, answer = request.prepared.request.params, request.prepared.answer
        limit = self.max_model_len - len(request.prepared.tokens)
        if params.max_tokens is not None:
            limit = min(limit, params.max_tokens)
        if choice.position >= limit:
            self._finish(request, choice, "length", None)
        elif choice.position >= len(answer) and not params.ignore_eos:
            self._finish(request, choice, "stop", request.prepared.stop_reason)
        else:
            token = answer[choice.position % len(answer)] if answer else 0x20
            choice.position += 1
            request.num_tokens += 1
            logprobs = () if params.logprobs is None else (_logprob(token, params.logprobs),)
            text = choice.text.push(token)
            request.sink(Chunk(choice.index, text, (token,), logprobs))

    def _end(self, request: EchoRequest, reason: FinishReason, error: Exception | None) -> None:
        for choice in list(request.choices):
            self._finish(request, choice, reason, None, error)

    def _finish(
        self,
        request: EchoRequest,
        choice: _Choice,
        reason: FinishReason,
        stop_reason: str | int | None,
        error: Exception | None = None,
    ) -> None:
        request.choices.remove(choice)
        text = choice.text.finish()
        last = Chunk(choice.index, text, finish_reason=reason, stop_reason=stop_reason, error=error)
        if request.choices:
            request.sink(last)
            return
        now_s = time.perf_counter()
        usage = Usage(
            prompt_tokens=len(request.prepared.tokens),
            cached_tokens=request.cached_tokens,
            written_tokens=len(request.prepared.tokens) - request.cached_tokens,
            completion_tokens=request.num_tokens,
            ttft_s=max(0.0, request.first_token_s - request.arrived_s),
            queue_s=max(0.0, request.started_s - request.arrived_s),
            total_s=now_s - request.arrived_s,
        )
        request.sink(replace(last, usage=usage))
        with self._changed:
            for queue in (self._running, self._waiting):
                if request in queue:
                    queue.remove(request)
        self._say(RequestFinished(reason, usage))

    def _answer(self, said: str, request: GenerationRequest) -> tuple[tuple[int, ...], str | int | None]:
        """What will be said, cut at the first stop string or stop token, and which that was."""
        params = request.params
        cuts: list[tuple[int, str | int]] = [
            (place, stop) for stop in params.stop if (place := said.find(stop)) >= 0
        ]
        place, stop_reason = min(cuts, default=(len(said), None), key=lambda cut: cut[0])
        answer = tuple(said[:place].encode())
        for index, token in enumerate(answer):
            if token in params.stop_token_ids:
                return answer[:index], token
        return answer, stop_reason

    def _say(self, event: Event) -> None:
        for observer in self.observers:
            observer(event)


def _common(a: tuple[int, ...], b: tuple[int, ...]) -> int:
    """Common prefix, but never the last token: its logits are needed."""
    pairs: Iterator[tuple[int, int]] = zip(a[:-1], b, strict=False)
    for index, (left, right) in enumerate(pairs):
        if left != right:
            return index
    return min(len(a) - 1, len(b))


def _logprob(token: int, num_top: int) -> TokenLogprob:
    top = tuple(((token + index) % 256, -0.25 * (index + 1)) for index in range(num_top))
    return TokenLogprob(token, -0.25, top)
