"""Run the generations of one HTTP request and send their answer, whole or as a stream of events."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, Final

import orjson
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ..errors import EngineError, ShuttingDownError
from ..types import Chunk, Usage
from .backend import Backend, Handle
from .caching import cache_headers
from .mailbox import Mailbox
from .wire import Json, Work, timings_object

EVENT_STREAM: Final = b"text/event-stream; charset=utf-8"
_HEARTBEAT: Final = b": waiting\n\n"
_STREAM_HEADERS: Final = [
    (b"content-type", EVENT_STREAM),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


class Answer(Response):
    """A response that exists once the runtime has accepted its prompts.

    Headers wait for the first chunk (or the first heartbeat), so that an early failure still has its own
    status. However it ends - done, failed, client gone, task cancelled - its requests are cancelled then.
    """

    def __init__(self, backend: Backend, work: Work, prepared: Sequence[Any], *, heartbeat_s: float) -> None:
        super().__init__()
        self._handles: list[Handle] = []
        self._backend = backend
        self._work = work
        self._prepared = prepared
        self._heartbeat_s = heartbeat_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        loop = asyncio.get_running_loop()
        mailbox = Mailbox(loop)
        watcher = loop.create_task(_watch(receive, mailbox.abandon))
        handles = self._handles
        try:
            for index, prepared in enumerate(self._prepared):
                handles.append(self._backend.start(prepared, mailbox.sink(index)))
            if self._work.is_stream:
                await self._send_stream(send, mailbox)
            else:
                await self._send_whole(send, mailbox)
            if self._work.after is not None:
                loop.run_in_executor(None, self._work.after)
        finally:
            mailbox.abandon()
            watcher.cancel()
            for handle in handles:
                handle.cancel()

    async def _send_whole(self, send: Send, mailbox: Mailbox) -> None:
        usages: list[Usage] = []
        while len(usages) < len(self._prepared):
            for prompt_index, chunk in await self._take(mailbox):
                _raise_failure(chunk)
                self._work.writer.collect(prompt_index, chunk)
                if chunk.usage is not None:
                    usages.append(chunk.usage)
        body = orjson.dumps(self._work.writer.whole(usages))
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            *_timing_headers(usages),
            *cache_headers(self._handles),
        ]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    async def _send_stream(self, send: Send, mailbox: Mailbox) -> None:
        writer = self._work.writer
        usages: list[Usage] = []
        is_started = False
        while len(usages) < len(self._prepared):
            taken = await self._take(mailbox)
            objects: list[Json] = []
            failed: Chunk | None = None
            for prompt_index, chunk in taken:
                if chunk.finish_reason in ("error", "abort"):
                    failed = chunk
                    break
                objects.extend(writer.events(prompt_index, chunk))
                if chunk.usage is not None:
                    usages.append(chunk.usage)
            body = b"".join(map(self._work.encode, objects)) if taken else _HEARTBEAT
            is_last = failed is None and len(usages) == len(self._prepared)
            if is_last:
                if self._work.include_usage:
                    body += self._work.encode(writer.usage_event(usages))
                body += self._work.closing
            if body:
                if not is_started:
                    is_started = True
                    headers = [*_STREAM_HEADERS, *cache_headers(self._handles)]
                    await send({"type": "http.response.start", "status": 200, "headers": headers})
                await send({"type": "http.response.body", "body": body, "more_body": not is_last})
            if failed is not None:
                _raise_failure(failed)

    async def _take(self, mailbox: Mailbox) -> list[tuple[int, Chunk]]:
        taken = await mailbox.take(self._heartbeat_s)
        if mailbox.is_abandoned:
            raise ClientDisconnect
        return taken


def _raise_failure(chunk: Chunk) -> None:
    """An unfinished choice fails the whole request: half of ``n`` answers is not what was asked for."""
    if chunk.finish_reason == "error":
        raise chunk.error or EngineError("The engine gave no reason.")
    if chunk.finish_reason == "abort":
        raise ShuttingDownError("The server is shutting down and ended this request. Please try again.")


def _timing_headers(usages: Sequence[Usage]) -> list[tuple[bytes, bytes]]:
    timings = timings_object(usages)
    return [
        (b"x-ostinato-ttft-ms", f"{timings['ttft_ms']:.3f}".encode()),
        (b"x-ostinato-queue-ms", f"{timings['queue_ms']:.3f}".encode()),
    ]


async def _watch(receive: Receive, abandon: Callable[[], None]) -> None:
    """Until the client goes away. Its body was read to the end, so nothing else can come."""
    while (await receive())["type"] != "http.disconnect":
        pass
    abandon()
