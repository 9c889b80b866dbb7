"""The request log: one line of JSON a request, without text unless that is asked for.

A line is one of Mooncake's traces (``timestamp`` ms, ``input_length``, ``output_length``, ``hash_ids``) with
more beside it, so that whatever replays those replays these (docs/trace.md). It is a
:class:`~ostinato.events.RequestRecord` written down.

The engine's thread only puts a reference into a queue. A thread of its own digests and writes; where it
cannot keep up, lines are dropped and the next one says how many.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Final

import orjson

from .errors import ParameterError
from .events import (
    BlocksEvicted,
    Event,
    EvictionReason,
    RequestFinished,
    RequestRecord,
    RequestServed,
    reuse_of,
)
from .ports import Clock
from .prompt.conversation import message_as_dict
from .records import EvictionTally, RecordMaker
from .types import Conversation, GenerationRequest, SamplingParams

_log = logging.getLogger(__name__)

VERSION: Final = 1
_MAX_PENDING: Final = 4096
_MAX_PENDING_TOKENS: Final = 4 << 20


@dataclass(frozen=True, slots=True)
class _Entry:
    event: RequestFinished | RequestServed
    arrived_s: float
    num_tokens: int
    evicted: Mapping[EvictionReason, int]


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
        marker_ids: Iterable[int] = (),
        with_content: bool = False,
        max_bytes: int = 256 << 20,
    ) -> None:
        """``marker_ids``: the model's special tokens, at which prompts are parted into segments.

        ``with_content``: prompts as they were asked, and salts, go into the log as well.

        Raises:
            ParameterError: the file cannot be written.
        """
        self.path = path
        self.num_dropped = 0
        self._maker = RecordMaker(key, block_tokens, marker_ids)
        self._evicted = EvictionTally()
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
        if isinstance(event, BlocksEvicted):
            with self._changed:
                self._evicted.add(event)
        if not isinstance(event, RequestFinished | RequestServed) or event.request is None:
            return
        num_tokens = 0
        if isinstance(event, RequestFinished):
            if event.tokens is None or event.request.is_warming:
                return  # of warming, or the next one would learn from the last one
            num_tokens = len(event.tokens)
        arrived_s = self._clock.now() - event.usage.total_s
        with self._changed:
            is_full = len(self._queue) >= _MAX_PENDING
            if self._is_closing or is_full or self._pending_tokens > _MAX_PENDING_TOKENS:
                self._drop(1)
                return
            self._queue.append(_Entry(event, arrived_s, num_tokens, self._evicted.take()))
            self._pending_tokens += num_tokens
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
        record = self._maker.make(
            entry.event, entry.arrived_s, evicted=entry.evicted, num_unrecorded=num_unsaid
        )
        assert record is not None, "an event of which nothing can be said was put into the queue"
        line = line_of(record, self._maker.key_name, with_content=self._with_content)
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


def line_of(record: RequestRecord, key_name: str, *, with_content: bool) -> dict[str, Any]:
    """A record as it is written: docs/trace.md says what each field means."""
    usage, request = record.usage, record.request
    hits = {str(layer): num_tokens for layer, num_tokens in reuse_of(usage).items()}
    stop: dict[str, Any] = {"at": record.stop.num_tokens, "why": record.stop.reason}
    if record.stop.num_known_tokens > record.stop.num_tokens:
        stop |= {"known": record.stop.num_known_tokens, "age_s": record.stop.age_s}
    line: dict[str, Any] = {
        "v": VERSION,
        "timestamp": round(record.arrived_s * 1000),
        "id": record.id,
        "key": key_name,
        "input_length": usage.prompt_tokens if record.tokens is None else len(record.tokens),
        "output_length": usage.completion_tokens,
        "cached_tokens": usage.cached_tokens,
        "written_tokens": usage.written_tokens,
        "hits": hits,
        "choices": 1 if request is None else request.num_choices,
        "finish_reason": record.finish_reason,
        "pattern": record.pattern,
        "queue_s": round(usage.queue_s, 6),
        "ttft_s": round(usage.ttft_s, 6),
        "total_s": round(usage.total_s, 6),
        "block_tokens": record.block_tokens,
        "hash_ids": record.block_ids,
        "stop": stop,
    }
    given: dict[str, Any] = {
        "load_s": round(usage.load_s, 6),
        "segments": [[segment.num_tokens, segment.digest] for segment in record.segments],
        "evicted": dict(record.evicted),
        "approximate_tokens": usage.approximate_tokens,
        "prompt_name": usage.prompt_name,
        "session": record.session,
        "dropped": record.num_unrecorded,
    }
    line |= {name: value for name, value in given.items() if value}
    if usage.served is not None:
        line["served"] = usage.served.layer
        line["age_s"] = round(usage.served.age_s, 3)
    if usage.retention:
        line["retention"], line["kv_dropped_tokens"] = usage.retention, usage.dropped_tokens
    if usage.reuse is not None:
        line["reuse"], line["moved_tokens"] = usage.reuse.mode, usage.reuse.moved_tokens
    if with_content and request is not None:
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
