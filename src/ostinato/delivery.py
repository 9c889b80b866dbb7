"""Pieces of an answer from the thread they come in to whoever waits for them, blocking or in an event
loop."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import suppress
from queue import SimpleQueue
from typing import Protocol

from .types import Chunk


class Cancellable(Protocol):
    def cancel(self) -> None: ...


Start = Callable[[Callable[[Chunk], None]], Cancellable]
"""Begins a request; what it is given gets the chunks, in whatever thread, the last of them with ``usage``."""


def iterate(start: Start) -> Iterator[Chunk]:
    """Starts a request and yields its chunks; closing the iterator cancels it."""
    queue: SimpleQueue[Chunk] = SimpleQueue()
    handle = start(queue.put)
    try:
        while True:
            chunk = queue.get()
            yield chunk
            if chunk.usage is not None:
                return
    finally:
        handle.cancel()


async def stream(start: Start) -> AsyncGenerator[Chunk, None]:
    """The same for asyncio; closing the iterator or cancelling its task cancels the request at once."""
    loop = asyncio.get_running_loop()
    chunks: deque[Chunk] = deque()
    ready = asyncio.Event()

    def deliver(chunk: Chunk) -> None:
        chunks.append(chunk)
        with suppress(RuntimeError):  # the loop may be closed already; then nobody listens
            loop.call_soon_threadsafe(ready.set)

    handle = start(deliver)
    try:
        while True:
            await ready.wait()
            ready.clear()
            while chunks:
                chunk = chunks.popleft()
                yield chunk
                if chunk.usage is not None:
                    return
    finally:
        handle.cancel()
