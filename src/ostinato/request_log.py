"""The request log: one line of JSON a request, without text unless that is asked for.

A line is one of Mooncake's traces (``timestamp`` ms, ``input_length``, ``output_length``, ``hash_ids``) with
more beside it, so that whatever replays those replays these (docs/trace.md). An id names a prompt up to the
end of one block. It is a digest under a secret key: who has the log cannot try out what a prompt was, and who
has another log cannot compare the two unless both were written with the same key.

The engine's thread only puts a reference into a queue. A thread of its own digests and writes; where it
cannot keep up, lines are dropped and the next one says how many.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import deque
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Final

import orjson
from blake3 import blake3

from .errors import ParameterError
from .events import Event, RequestFinished
from .ports import Clock
from .prompt.conversation import message_as_dict
from .types import Conversation, GenerationRequest, SamplingParams, TokenArray

_log = logging.getLogger(__name__)

VERSION: Final = 1
_KEY_CONTEXT: Final = "ostinato request log key v1"
_ID_BITS: Final = 53
"""What every reader of JSON keeps. Among a million prefixes two share an id with a chance of 1 to 18,000."""

_MAX_PENDING: Final = 4096
_MAX_PENDING_TOKENS: Final = 4 << 20


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


def _id(digest: bytes) -> int:
    return int.from_bytes(digest[:8], "little") >> (64 - _ID_BITS)


@dataclass(frozen=True, slots=True)
class _Entry:
    event: RequestFinished
    request: GenerationRequest
    tokens: TokenArray
    arrived_s: float


class RequestLog:
    """An observer (:data:`ostinato.events.Observer`) that writes requests down. It neither raises nor waits.

    A file over ``max_bytes`` becomes ``FILE.1``, in place of an earlier one. A file that is moved away is
    made anew, so that log rotation from outside works too. Its owner alone can read it.
    """

    def __init__(
        self,
        path: Path,
        *,
        key: bytes,
        block_tokens: int,
        clock: Clock,
        with_content: bool = False,
        max_bytes: int = 256 << 20,
    ) -> None:
        """``with_content``: prompts as they were asked, and salts, go into the log as well.

        Raises:
            ParameterError: the file cannot be written.
        """
        assert block_tokens >= 1, f"blocks of {block_tokens} tokens"
        assert len(key) == 32, f"a key of {len(key)} bytes"
        self.path = path
        self.num_dropped = 0
        self._key = key
        self._key_name = blake3(b"name", key=key).hexdigest(length=4)
        self._block_tokens = block_tokens
        self._clock = clock
        self._with_content = with_content
        self._max_bytes = max_bytes
        self._queue: deque[_Entry] = deque()
        self._pending_tokens = 0
        self._num_unsaid = 0  # dropped, and no line has said so yet
        self._is_failing = False
        self._is_closing = False
        self._is_idle = True
        self._changed = threading.Condition()
        try:
            self._fd = self._open()
        except OSError as error:
            raise ParameterError(
                f"cannot write the request log {path}: {error.strerror}; choose another file", param="trace"
            ) from error
        self._thread = threading.Thread(target=self._run, name="ostinato-request-log", daemon=True)
        self._thread.start()

    def __call__(self, event: Event) -> None:
        if not isinstance(event, RequestFinished) or event.request is None or event.tokens is None:
            return
        if event.request.is_warming:
            return  # or the next warming would learn from the last one
        entry = _Entry(event, event.request, event.tokens, self._clock.now() - event.usage.total_s)
        with self._changed:
            is_full = len(self._queue) >= _MAX_PENDING
            if self._is_closing or is_full or self._pending_tokens > _MAX_PENDING_TOKENS:
                self._drop(1)
                return
            self._queue.append(entry)
            self._pending_tokens += len(entry.tokens)
            self._changed.notify_all()

    def flush(self, timeout_s: float) -> bool:
        """Waits until everything so far is written; ``False`` when the time is up first."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._queue and self._is_idle, timeout_s)

    def close(self) -> None:
        """Writes what is pending and lets go of the file; later requests are not logged."""
        with self._changed:
            if self._is_closing:
                return
            self._is_closing = True
            self._changed.notify_all()
        self._thread.join()
        os.close(self._fd)

    # ------------------------------------------------------------ the thread

    def _run(self) -> None:
        while True:
            with self._changed:
                self._is_idle = True
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._queue or self._is_closing)
                if not self._queue:
                    return
                self._is_idle = False
                entries = list(self._queue)
                self._queue.clear()
                self._pending_tokens = 0
            for entry in entries:
                self._write(entry)

    def _write(self, entry: _Entry) -> None:
        with self._changed:
            num_unsaid = self._num_unsaid
        line = self._line(entry, num_unsaid)
        try:
            data = orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE)
            self._follow()
            _write_all(self._fd, data)
        except (OSError, orjson.JSONEncodeError) as error:  # the latter: a salt or an id that is not Unicode
            if not self._is_failing:
                _log.warning("a request cannot be logged: %s", error)
            self._is_failing = True
            with self._changed:
                self._drop(1)
            return
        self._is_failing = False
        with self._changed:
            self._num_unsaid -= num_unsaid

    def _drop(self, num_requests: int) -> None:
        self.num_dropped += num_requests
        self._num_unsaid += num_requests

    def _follow(self) -> None:
        """Goes on in a new file where this one is full, or is no longer there under its name."""
        here = os.fstat(self._fd)
        try:
            there = self.path.stat()
            is_same = (here.st_dev, here.st_ino) == (there.st_dev, there.st_ino)
        except FileNotFoundError:
            is_same = False
        if is_same and here.st_size < self._max_bytes:
            return
        if is_same:
            self.path.replace(self.path.with_name(self.path.name + ".1"))
        fresh = self._open()
        os.close(self._fd)
        self._fd = fresh

    def _open(self) -> int:
        fd = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        size = os.fstat(fd).st_size
        if size and os.pread(fd, 1, size - 1) != b"\n":
            _write_all(fd, b"\n")  # a line that a crash cut short stays a bad line of its own
        return fd

    # ------------------------------------------------------------ the line

    def _line(self, entry: _Entry, num_dropped: int) -> dict[str, Any]:
        usage, request = entry.event.usage, entry.request
        line: dict[str, Any] = {
            "v": VERSION,
            "timestamp": round(entry.arrived_s * 1000),
            "id": request.request_id,
            "key": self._key_name,
            "input_length": len(entry.tokens),
            "output_length": usage.completion_tokens,
            "cached_tokens": usage.cached_tokens,
            "written_tokens": usage.written_tokens,
            "choices": request.num_choices,
            "finish_reason": entry.event.finish_reason,
            "queue_s": round(usage.queue_s, 6),
            "ttft_s": round(usage.ttft_s, 6),
            "total_s": round(usage.total_s, 6),
            "block_tokens": self._block_tokens,
            "hash_ids": block_ids(self._key, entry.event.namespace, entry.tokens, self._block_tokens),
        }
        if usage.approximate_tokens:
            line["approximate_tokens"] = usage.approximate_tokens
        if usage.retention:
            line["retention"], line["kv_dropped_tokens"] = usage.retention, usage.dropped_tokens
        if usage.prompt_name:
            line["prompt_name"] = usage.prompt_name
        if request.session is not None:
            space = entry.event.namespace.encode()
            name = request.session.id.encode("utf-8", "surrogatepass")
            line["session"] = _id(blake3(b"session" + space + name, key=self._key).digest())
        if num_dropped:
            line["dropped"] = num_dropped
        if self._with_content:
            line["request"] = _content(request)
            line["salt"] = request.salt
        return line


def _content(request: GenerationRequest) -> dict[str, Any]:
    """The prompt as the body of a request has it, and how it was asked to be answered where that was said."""
    prompt = request.prompt
    given = {item.name: getattr(request.params, item.name) for item in fields(request.params)}
    body: dict[str, Any] = {
        name: value for name, value in given.items() if value != getattr(SamplingParams(), name)
    }
    if "logit_bias" in body:
        body["logit_bias"] = {str(token): bias for token, bias in body["logit_bias"].items()}
    if not isinstance(prompt, Conversation):
        return body | {"prompt": prompt}
    body["messages"] = [message_as_dict(message) for message in prompt.messages]
    if prompt.tools:
        body["tools"] = list(prompt.tools)
    if request.continue_final_message:
        body["continue_final_message"] = True
    return body


def _write_all(fd: int, data: bytes) -> None:
    """A line in one call where the system takes it so, which it does on files."""
    while data:
        data = data[os.write(fd, data) :]
